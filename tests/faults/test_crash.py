"""A server under clients that log each answer, killed again and again: what they were told holds.

Strategy: rounds on one data directory. In each a server starts, clients send, receive and delete, and the server dies:
by SIGKILL at a random moment, or by its own hand at a named point of the store. A command whose answer did not come is
open: either outcome is right. In the end the directory is opened and held against all logs.
"""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.acknowledged import Log
from tests.support.sqlite import SMALL

from veilmq.model.settings.queue import QueueKey
from veilmq.store.directory import read_holder
from veilmq.store.sqlite.store import CRASH_POINTS, SqliteStore
from veilmq.testing import chance
from veilmq.testing.local import VEILMQ

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")
CLIENTS = 3
ROOT = Path(__file__).parents[2]
START_S = 30
ANSWERS_MAX = 100
"""After at most so many a server is killed."""


class Client(threading.Thread):
    """Sends, receives and deletes until the server is gone."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.log = Log()
        self.answers = 0
        self._url = url
        self._chance = chance(seed)

    def run(self) -> None:
        address = urlsplit(self._url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        try:
            self._work()
        except (OSError, http.client.HTTPException):
            pass  # the server died
        finally:
            self._connection.close()

    def _call(self, action: str, **values: object) -> dict[str, object]:
        text = json.dumps({"QueueUrl": f"{self._url}/000000000000/jobs"} | values)
        headers = {
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Target": f"AmazonSQS.{action}",
            "Authorization": "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/sqs/aws4_request, "
            "SignedHeaders=host, Signature=none",
        }
        self._connection.request("POST", "/", text, headers)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        self.answers += 1
        return json.loads(answer) if answer else {}

    def _work(self) -> None:
        self._call("CreateQueue", QueueName="jobs")
        number = 0
        while True:
            number += 1
            body = f"{self.name}-{number}"
            self.log.sending.add(body)
            self._call("SendMessage", MessageBody=body)
            self.log.sent.add(body)
            if self._chance.random() < 0.5:
                continue
            received = self._call(
                "ReceiveMessage",
                MaxNumberOfMessages=2,
                VisibilityTimeout=3_600,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
            for message in received.get("Messages", []):  # type: ignore[attr-defined]
                taken = message["Body"]
                self.log.counts[taken] = int(message["Attributes"]["ApproximateReceiveCount"])
                if self._chance.random() < 0.7:
                    self.log.deleting.add(taken)
                    self._call("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
                    self.log.deleted.add(taken)


def _listening(process: subprocess.Popen[bytes], data: Path) -> str | None:
    """The URL that the server announced; None if it died before."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        holder = read_holder(data)
        if holder is not None and holder.pid == process.pid and "sqs" in holder.listeners:
            return holder.listeners["sqs"]
        if process.poll() is not None:
            return None
        time.sleep(0.005)
    raise AssertionError("the server does not start")


def _answered(clients: list[Client], count: int) -> None:
    """Returns once they got so many answers: on a slow machine it takes longer."""
    deadline = time.monotonic() + START_S
    while sum(client.answers for client in clients) < count:
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.001)


def one_round(data: Path, name: str, seed: int, point: str | None) -> tuple[Log, int]:
    """One life of a server; what its clients were told, and how many answers that was."""
    if point is None:
        command = [*VEILMQ, "serve", "--data", str(data), "--sqs", "127.0.0.1:0", "--admin", "127.0.0.1:0",
                   "--azure", "127.0.0.1:0", "--mns", "127.0.0.1:0"]  # fmt: skip
    else:
        command = [sys.executable, "-m", "tests.support.crashing", point, str(chance(seed).randint(1, 40)), str(data)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    clients: list[Client] = []
    try:
        url = _listening(process, data)
        if url is not None:
            clients = [Client(url, f"{name}-{place}", seed + place) for place in range(CLIENTS)]
            for client in clients:
                client.start()
        if point is None:
            draws = chance(seed)
            _answered(clients, draws.randint(0, ANSWERS_MAX))
            time.sleep(draws.random() * 0.005)
            process.kill()
        assert process.wait(timeout=START_S) == -signal.SIGKILL
        for client in clients:
            client.join(timeout=START_S)
            assert not client.is_alive()
    finally:
        process.kill()
        process.wait()
    told = Log()
    for client in clients:
        told.sent |= client.log.sent
        told.sending |= client.log.sending
        told.deleted |= client.log.deleted
        told.deleting |= client.log.deleting
        for body, count in client.log.counts.items():
            told.counts[body] = max(count, told.counts.get(body, 0))
    return told, sum(client.answers for client in clients)


def _live_through(data: Path, rounds: list[str | None]) -> None:
    total = Log()
    answers = 0
    for number, point in enumerate(rounds):
        told, count = one_round(data, f"r{number}", 1_000 * number, point)
        answers += count
        total.sent |= told.sent
        total.sending |= told.sending
        total.deleted |= told.deleted
        total.deleting |= told.deleting
        for body, received in told.counts.items():
            assert received > total.counts.get(body, 0), f"the receive count of {body} did not grow"
            total.counts[body] = received
    store = SqliteStore(data, SMALL)
    try:
        total.deleting -= total.deleted
        assert total.losses(store, QUEUE, store.mark) == []
    finally:
        store.close()
    assert answers > 10 * len(rounds), "the clients hardly did anything"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_death_at_each_point_loses_nothing_acknowledged(tmp_path: Path) -> None:
    _live_through(tmp_path / "data", [point for point in CRASH_POINTS for _ in range(4)])


@pytest.mark.parametrize("point", [None, "after commit"])
def test_a_few_deaths_lose_nothing_acknowledged(tmp_path: Path, point: str | None) -> None:
    _live_through(tmp_path / "data", [point] * 2)
