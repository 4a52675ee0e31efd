"""What docs/operations.md says of a growing queue, tried: what a cause shows is what the page says that it is.

Strategy: causes are made on a real server whose clock moves, a queue each. What an operator would look at, events and
counts, must be the left side of a row of the table "A queue grows", whose right side names that cause.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from veilmq.client.messages import Message, Template
from veilmq.client.worker import Worker
from veilmq.testing import LocalServer

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
TABLE = PAGE.partition("### A queue grows")[2].partition("\n### ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")]
WAIT_S = 20


def fail(job: object) -> None:
    raise RuntimeError(f"no {job}")


class Operator:
    """Someone who looks at a server."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        token = (server.process.data / "admin-token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=server.admin_url, headers=headers, timeout=30)

    def events(self, queue: str) -> list[dict[str, Any]]:
        lines = self.http.get("/api/v1/events", params={"from": "first"}).text.splitlines()
        return [event for event in map(json.loads, lines) if event.get("queue") == queue]

    def kinds(self, queue: str) -> Counter[str]:
        return Counter(event["kind"] for event in self.events(queue))

    def minutes_pass(self, minutes: float) -> None:
        """Until the polls of that time are events: those of a queue that was polled at its end."""
        self.server.advance(minutes=minutes)
        last = self.server.connect("last")
        before = self.kinds("last")["polled"]
        last.receive()
        self.server.advance(minutes=2)
        deadline = time.monotonic() + WAIT_S
        while self.kinds("last")["polled"] == before:
            assert time.monotonic() < deadline, "no event of polls came"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def operator() -> Iterator[Operator]:
    with LocalServer.temporary() as server:
        someone = Operator(server)
        yield someone
        someone.http.close()


def said_of(shown: str) -> str:
    """What the page says to the row that begins so."""
    (found,) = [meaning for first, meaning in ROWS if first.startswith(shown)]
    return found


def test_a_row_has_two_cells() -> None:
    assert [row for row in ROWS if len(row) != 2] == []
    assert len(ROWS) > 12


def test_workers_that_are_busy_for_long_are_not_taken_for_dead(operator: Operator) -> None:
    busy, nobody = operator.server.connect("busy"), operator.server.connect("nobody")
    nobody.send("a")
    busy.send_batch(["a", "b"])
    (message,) = busy.receive(lease=3_600)
    operator.minutes_pass(10)
    before = operator.kinds("busy")["polled"]
    busy.extend(message.handle, 3_600)
    operator.minutes_pass(10)
    assert operator.kinds("busy")["polled"] == before
    assert (busy.stats().in_flight, operator.kinds("busy")["extended"]) == (1, 1)
    assert "busy" in said_of("no `polled` events, some in flight")
    assert (operator.kinds("nobody")["polled"], nobody.stats().in_flight) == (0, 0)
    assert "nobody consumes" in said_of("no `polled` events, nothing in flight")


def test_what_handlers_failed_at_is_in_flight_and_not_delayed(operator: Operator) -> None:
    failing, late = operator.server.connect("failing"), operator.server.connect("late")
    failing.send("a")
    Worker(failing, fail, wait=0.1).run(until_empty=True)
    stats = failing.stats()
    assert (stats.visible, stats.in_flight, stats.delayed) == (0, 1, 0)
    operator.minutes_pass(2)
    assert operator.kinds("failing")["released_for_retry"] == 1
    assert "handlers raise" in said_of("many in flight, few deletes, many `released_for_retry`")
    back = operator.server.connect("back")
    back.send("a")
    back.release(back.receive()[0].handle)
    assert operator.kinds("back")["released"] == 1
    assert "visibility timeout of 0" in said_of("many `released`, rising receive counts")
    late.send(Message("a", delay=60))
    assert late.stats().delayed == 1
    assert "producers" in said_of("many delayed")


def test_a_delete_that_is_sent_twice_is_no_late_worker(operator: Operator) -> None:
    twice, stale = operator.server.connect("twice"), operator.server.connect("stale")
    sqs = boto3.client(
        "sqs", endpoint_url=operator.server.sqs_url, region_name="us-east-1", aws_access_key_id="any",
        aws_secret_access_key="any",
    )  # fmt: skip
    twice.send("a")
    url = sqs.get_queue_url(QueueName="twice")["QueueUrl"]
    handle = sqs.receive_message(QueueUrl=url)["Messages"][0]["ReceiptHandle"]
    for _ in range(2):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=handle)
    stale.send("a")
    url = sqs.get_queue_url(QueueName="stale")["QueueUrl"]
    first = sqs.receive_message(QueueUrl=url, VisibilityTimeout=10)["Messages"][0]["ReceiptHandle"]
    operator.server.advance(seconds=11)
    assert sqs.receive_message(QueueUrl=url)["Messages"]
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first)
    reasons = {
        queue: [event["detail"]["reason"] for event in operator.events(queue) if event["kind"] == "delete_refused"]
        for queue in ("twice", "stale")
    }
    assert reasons == {"twice": ["gone"], "stale": ["stale"]}
    assert "again. Harmless" in said_of("`delete_refused` with reason `gone`")
    assert "ended after its lease" in said_of("`delete_refused` with reason `stale`")


def test_a_fifo_queue_whose_groups_are_taken_answers_empty(operator: Operator) -> None:
    operator.server.account().create("line.fifo", Template(fifo=True, content_deduplication=True))
    line = operator.server.connect("line.fifo")
    for body in "abc":
        line.send(Message(body, group="g"))
    assert len(line.receive(lease=3_600)) == 1
    assert line.receive() == []
    operator.minutes_pass(2)
    (polled,) = [event for event in operator.events("line.fifo") if event["kind"] == "polled"]
    assert (polled["detail"]["empty"], line.stats().visible) == (1, 2)
    assert "FIFO queue" in said_of("`polled` with `empty`, many visible")
