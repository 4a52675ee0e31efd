"""The worker against real server processes, through the veil and the sqs adapter: groups, kills, a server that goes."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest

from veilmq.client.adapters.connect import connect_account
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Template
from veilmq.client.queue import Account, Queue
from veilmq.client.worker import Backoff, FileCheckpoints, Worker
from veilmq.model.errors import QueueMissing
from veilmq.testing.local import ServerProcess, port_kept

pytestmark = pytest.mark.slow

WAIT_S = 30.0
SOON = Backoff(first=0.01, longest=0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path).start()
    yield server
    if server.process.poll() is None:
        server.kill()


@contextmanager
def veil(server: ServerProcess) -> Iterator[Account]:
    account = connect_account(f"veil://{server.sqs.partition('//')[2].rstrip('/')}/")
    yield account
    account.close()


@contextmanager
def sqs(server: ServerProcess) -> Iterator[Account]:
    client = boto3.client(
        "sqs",
        endpoint_url=server.sqs,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    account = connect_account(client)
    yield account
    account.close()
    # A poll that was given up still holds its connection, until the server ends it.
    server.kill()
    client.close()


@pytest.fixture(params=[veil, sqs], ids=["veil", "sqs"])
def account(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Account]:
    with request.param(server) as account:
        yield account


def queue_of(account: Account, name: str = "work", **settings: Any) -> Queue:
    account.create(name, Template(**settings))
    return account.queue(name)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_is_worked_once_and_deleted(account: Account) -> None:
    queue = queue_of(account)
    queue.send_batch([str(number) for number in range(50)])
    seen: list[str] = []
    worker = Worker(queue, lambda job: seen.append(job.body), concurrency=4, prefetch=10, wait=1)
    assert worker.run(until_empty=True).outcomes == {"done": 50}
    assert sorted(seen) == sorted(map(str, range(50)))
    if queue.capabilities.protocol == "sqs":
        # A lease counts from before the poll, so without a keeper what comes late in a long one would have none left.
        threading.Timer(2.3, queue.send, ["late"]).start()
        assert Worker(queue, print, keeper=False, lease=2).run(messages_max=1).outcomes == {"done": 1}


def test_progress_is_kept(account: Account, tmp_path: Path) -> None:
    queue = queue_of(account)
    queue.send("work")
    states: list[Any] = []

    def handler(job: Any) -> None:
        states.append(job.state)
        if job.receive_count < 3:
            job.checkpoint({"at": job.receive_count})
            raise RuntimeError("again")

    records = None if queue.capabilities.body_replaceable else FileCheckpoints(tmp_path / "records")
    Worker(queue, handler, checkpoints=records, retry=SOON, wait=2, lease=5).run(messages_max=3)
    assert states == [None, {"at": 1}, {"at": 2}]


@pytest.mark.parametrize("options", [{"prefetch": 30}, {"batch": 5, "prefetch": 20}])
def test_groups_stay_in_order_through_failures(account: Account, options: dict[str, Any]) -> None:
    queue = queue_of(account, "work.fifo", fifo=True, content_deduplication=True)
    numbers = {group: [f"{group}{number}" for number in range(12)] for group in "abc"}
    queue.send_batch([Message(numbers[group][number], group=group) for number in range(12) for group in "abc"])
    done: dict[str, list[str]] = defaultdict(list)
    running: set[str] = set()
    tripped: set[str] = set()
    lock = threading.Lock()

    def one(job: Any) -> bool:
        """False where it fails: each group at its 3rd and 7th message, once."""
        assert job.group is not None
        if job.body[1:] in {"3", "7"} and job.body not in tripped:
            tripped.add(job.body)
            return False
        with lock:
            done[job.group].append(job.body)
        return True

    def handler(given: Any) -> Any:
        jobs = given if isinstance(given, list) else [given]
        groups = {job.group for job in jobs}
        with lock:
            assert not groups & running, "two of a group at the same time"
            running.update(groups)
        failed: list[Any] = []
        stopped: set[str] = set()
        for job in jobs:
            if job.group in stopped:
                continue
            if not one(job):
                stopped.add(job.group)
                failed.append(job)
        time.sleep(0.005)
        with lock:
            running.difference_update(groups)
        if isinstance(given, list):
            return failed
        if failed:
            raise RuntimeError("tripped")
        return None

    worker = Worker(queue, handler, concurrency=4, retry=SOON, wait=5, **options)
    worker.start()
    wait_for(lambda: sum(map(len, done.values())) == 36)
    worker.stop()
    assert worker.join(WAIT_S)
    counts = worker.counts
    assert counts is not None
    assert done == numbers
    assert counts.outcomes["done"] == 36
    assert counts.outcomes["failed"] == 6


def test_a_batch_that_went_on_after_a_failure_is_held_to_the_order(account: Account) -> None:
    queue = queue_of(account, "work.fifo", fifo=True, content_deduplication=True)
    queue.send_batch([Message(str(number), group="g") for number in range(6)])
    seen: list[list[str]] = []

    def handler(jobs: list[Any]) -> list[Any]:
        seen.append([job.body for job in jobs])
        return [job for job in jobs if job.body == "2" and job.receive_count == 1]

    counts = Worker(queue, handler, batch=10, retry=SOON, wait=3).run(messages_max=10)
    assert seen == [["0", "1", "2", "3", "4", "5"], ["2", "3", "4", "5"]]
    assert counts.outcomes == {"done": 6, "failed": 1, "stopped": 3}


def test_a_server_that_goes_and_comes_back(server: ServerProcess) -> None:
    account = connect_account(f"veil://{server.sqs.partition('//')[2].rstrip('/')}/")
    queue = queue_of(account)
    errors: list[Exception] = []
    seen: list[str] = []
    address = server.sqs.partition("//")[2].rstrip("/")
    queue.send("before")
    worker = Worker(queue, lambda job: seen.append(job.body), wait=1, on_error=errors.append)
    worker.start()
    wait_for(lambda: seen == ["before"])
    server.kill()
    again = ServerProcess(server.data.parent, "--sqs", address)
    try:
        with port_kept(int(address.rpartition(":")[2])):
            wait_for(lambda: len(errors) > 2)
            again.start()
        queue.send("after")
        wait_for(lambda: seen == ["before", "after"])
        worker.stop()
        assert worker.join(WAIT_S)
    finally:
        account.close()
        again.kill()
    assert all(isinstance(error, TransportError | ServiceError) for error in errors)
    assert len(errors) < 60


def test_a_queue_that_is_deleted_is_reported(account: Account, caplog: pytest.LogCaptureFixture) -> None:
    queue = queue_of(account)
    errors: list[Exception] = []
    worker = Worker(queue, lambda job: None, wait=1, give_up_after=0.5, on_error=errors.append)
    worker.start()
    time.sleep(0.2)
    account.delete("work")
    with pytest.raises(QueueMissing):
        worker.join(WAIT_S)
    assert len(errors) > 1
    assert len([each for each in caplog.records if "receive failed" in each.getMessage()]) == 1, "not one for each try"


def test_an_open_poll_is_ended_and_what_it_brings_is_not_kept(account: Account) -> None:
    queue = queue_of(account)
    seen: list[str] = []
    worker = Worker(queue, lambda job: seen.append(job.body), wait=20)
    worker.start()
    time.sleep(0.5)
    worker.stop()
    assert worker.join(15)
    queue.send("late")
    received = queue.receive(wait=5)
    assert [each.body for each in received] == ["late"]
    assert seen == []
