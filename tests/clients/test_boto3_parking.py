"""Caps on parked receives, through boto3: who finds no room is answered empty, and the operator is told."""

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.slow
WAIT_SECONDS = 20


def metrics(server: Any) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.admin}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


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
    line = f"000000000000/us-east-1/jobs: answered 1 receives empty instead of letting them wait: {name} is 1"
    assert line in server.log.read_text()
