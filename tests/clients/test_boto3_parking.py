"""Caps on parked receives, through boto3: who finds no room is answered empty, and the operator is told."""

import json
import resource
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
WAIT_SECONDS = 20


def metrics(server: Any) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.admin}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_a_parked_receive_keeps_no_request(start: Any, connect: Any) -> None:
    """Of seven megabytes each, thousands may wait."""
    server = start()
    sqs = connect(server)
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    body = json.dumps({"QueueUrl": url, "WaitTimeSeconds": 20, "Junk": "x" * 7_000_000})
    head = {"x-amz-target": "AmazonSQS.ReceiveMessage", "content-type": "application/x-amz-json-1.0"}
    before = resident_mib(server)

    def receive() -> str:
        return httpx.post(server.sqs, content=body, headers=head, timeout=60).text

    with ThreadPoolExecutor(20) as pool:
        parked = [pool.submit(receive) for _ in range(20)]
        until = time.monotonic() + WAIT_SECONDS
        while metrics(server)["veilmq_waiters"] < 20:
            assert time.monotonic() < until
        assert resident_mib(server) < before + 70
        sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": str(number), "MessageBody": "x"} for number in range(10)])
        sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": str(number), "MessageBody": "x"} for number in range(10)])
        assert all('"MessageId"' in each.result() for each in parked)


def resident_mib(server: Any) -> float:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize() / 2**20


@pytest.mark.parametrize("name", ["parked_per_queue_max", "parked_per_account_max", "parked_max"])
def test_who_finds_no_room_is_answered_empty_and_told_of(start: Any, connect: Any, name: str) -> None:
    server = start(f"--{name.replace('_', '-')}", "1")
    sqs = connect(server)
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(lambda: connect(server).receive_message(QueueUrl=url, WaitTimeSeconds=20))
        until = time.monotonic() + WAIT_SECONDS
        while metrics(server)["veilmq_waiters"] < 1:
            assert time.monotonic() < until
        assert "Messages" not in sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20)
        assert not parked.done(), "whoever waits already goes on waiting"
        sqs.send_message(QueueUrl=url, MessageBody="x")
        assert [message["Body"] for message in parked.result()["Messages"]] == ["x"]
    while metrics(server)[f'veilmq_refused_waits_total{{limit="{name}"}}'] < 1:
        assert time.monotonic() < until
    line = f"000000000000/us-east-1/jobs: answered 1 receive empty instead of letting them wait: {name} is 1"
    assert line in server.log.read_text()
