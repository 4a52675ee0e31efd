"""The lease keeper in real time: a slow line, handlers that burn the CPU, a killed worker."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from veilmq.client.adapters.connect import connect
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.keeper import LeaseKeeper, State
from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.wrapping import Wrapping
from veilmq.testing.local import ServerProcess

pytestmark = pytest.mark.slow


class Distant(Wrapping):
    """Each extend takes a round trip of 50 ms, and there are no batches."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, batch_extend=False)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        time.sleep(0.05)
        return self.inner.extend(handle, lease, body=body)

    def extend_batch(self, extensions: Any) -> Any:
        raise AssertionError("there are no batches here")


def all_of(queue: Queue, count: int, lease: float, taken: Callable[[Received], object]) -> None:
    """Send and receive `count` messages, each handed to `taken` when it comes."""
    queue.send_batch([f"body {number}" for number in range(count)])
    left = count
    while left:
        messages = queue.receive(min(left, queue.capabilities.receive_messages_max), lease=lease)
        for message in messages:
            taken(message)
        left -= len(messages)


def test_two_thousand_messages_over_a_slow_line(tmp_path: Path) -> None:
    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("jobs")
        queue = account.queue("jobs")
        with LeaseKeeper(Distant(queue), visibility_timeout=40, interval=12, minimal_life=10) as keeper:
            all_of(queue, 2_000, 40, keeper.register)
            for _ in range(45):
                assert queue.receive(1, wait=1) == [], "a message was seen twice"
            stats = keeper.stats
            assert stats.losses == {}
            assert stats.leases == queue.stats().in_flight == 2_000
            assert stats.extensions >= 2_000


@pytest.mark.alone
def test_handlers_that_burn_the_cpu(tmp_path: Path) -> None:
    stop = threading.Event()

    def burn() -> None:
        number = 0
        while not stop.is_set():
            number = (number * 31 + 7) % 1_000_003

    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("jobs")
        queue = account.queue("jobs")
        with LeaseKeeper(queue, visibility_timeout=6, interval=2, minimal_life=2) as keeper:
            all_of(queue, 200, 6, keeper.register)
            burners = [threading.Thread(target=burn) for _ in range(8)]
            for burner in burners:
                burner.start()
            try:
                for _ in range(8):  # longer than a lease
                    assert queue.receive(1, wait=1) == [], "a message was seen twice"
                assert keeper.stats.losses == {}
                assert keeper.leases == 200
            finally:
                stop.set()
                for burner in burners:
                    burner.join()


WORKER = """
import sys, time
from veilmq.client.adapters.connect import connect
from veilmq.client.keeper import LeaseKeeper

queue = connect(sys.argv[1])
keeper = LeaseKeeper(queue, visibility_timeout=3, interval=0.5, minimal_life=0.5)
keeper.register(queue.receive(1, lease=3, wait=10)[0])
while not keeper.stats.extensions:
    time.sleep(0.01)
print("extended", flush=True)
time.sleep(600)
"""


def test_a_killed_workers_message_is_back_within_its_timeout(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    try:
        url = server.sqs.replace("http://", "veil://") + "/jobs?create=1"
        with connect(url) as queue:
            queue.send("work")
            worker = subprocess.Popen([sys.executable, "-c", WORKER, url], stdout=subprocess.PIPE, text=True)
            assert worker.stdout is not None
            assert worker.stdout.readline() == "extended\n"
            assert queue.receive(1) == []
            worker.kill()
            worker.wait()
            worker.stdout.close()
            # The whole timeout and the time it takes to ask; a lease that outlived its worker would not be over.
            (message,) = queue.receive(1, wait=5)
            assert message.receive_count == 2
            with LeaseKeeper(queue) as keeper:
                lease = keeper.register(message)
                lease.delete()
                assert lease.state is State.DONE
    finally:
        server.kill()
