"""A worker by a clock that the test moves: hours of leases, holds and pauses, without a sleep."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.transaction import Outcome, Times, TransactionQueue, Verdict
from veilmq.client.worker import Backoff, Cause, Worker
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError

HOUR = 3_600.0
WAIT_S = 30.0
SOON = Backoff(first=0.001, longest=0.001)
UNREACHABLE = TransportError(reason="connection refused", may_have_happened=False)


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(3_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


@pytest.fixture
def queue(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("work", Template(visibility_timeout=30))
    return embedded.account.queue("work")


class Held:
    """A handler that says that it began, and goes on when it may or must stop."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.may = threading.Event()

    def __call__(self, job: Any) -> None:
        self.jobs.append(job)
        if len(self.jobs) == 1:
            job.cancelled.on_set(self.may.set)
            assert self.may.wait(WAIT_S)
            job.cancelled.check()

    def begun(self) -> Any:
        eventually(lambda: self.jobs)
        return self.jobs[0]


def worker(embedded: EmbeddedClient, queue: Queue, handler: Callable[[Any], Any], **options: Any) -> Worker:
    return Worker(queue, handler, clock=embedded.clock, **{"retry": SOON, "wait": 20, **options})


def pass_by(embedded: EmbeddedClient, working: Worker, seconds: float, step: float) -> None:
    """Let time pass with all extensions that are due in between."""
    assert working._run is not None
    assert working._run.keeper is not None
    for _ in range(int(seconds / step)):
        embedded.clock.advance(step)
        working._run.keeper.extend_due()
        embedded.account.apply_due()


def test_work_of_ten_timeouts_is_seen_once(embedded: EmbeddedClient, queue: Queue) -> None:
    queue.send("long")
    handler = Held()
    with worker(embedded, queue, handler, concurrency=2, lease=HOUR) as working:
        handler.begun()
        pass_by(embedded, working, 10 * HOUR / 3, HOUR / 6)
        assert queue.stats().in_flight == 1
        handler.may.set()
    assert len(handler.jobs) == 1
    assert handler.jobs[0].cancelled.cause is None
    assert (queue.stats().visible, queue.stats().in_flight) == (0, 0)


def test_a_stuck_handler_lets_go_after_max_hold(embedded: EmbeddedClient, queue: Queue) -> None:
    queue.send("stuck")
    handler = Held()
    with worker(embedded, queue, handler, lease=HOUR, keeper={"max_hold": 5 * HOUR}) as working:
        job = handler.begun()
        assert 5 * HOUR - 60 < job.remaining() <= 5 * HOUR
        pass_by(embedded, working, 5 * HOUR - 600, 300)
        assert job.cancelled.cause is None
        assert queue.stats().in_flight == 1
        pass_by(embedded, working, 900, 300)
        eventually(lambda: len(handler.jobs) == 2)
        assert job.cancelled.cause is Cause.LOST
        assert handler.jobs[1].receive_count == 2


def test_without_a_keeper_the_handler_is_told_before_the_end(embedded: EmbeddedClient, queue: Queue) -> None:
    queue.send("a")
    left: list[int | None] = []

    def handler(job: Any) -> None:
        if job.receive_count == 1:
            job.checkpoint("half", 6 * HOUR)
            began.set()
            assert job.cancelled.wait(WAIT_S)
            left.append(queue.stats().in_flight)
            assert job.cancelled.cause is Cause.EXPIRING
            job.cancelled.check()
        assert job.state == "half"

    began = threading.Event()
    with worker(embedded, queue, handler, lease=600, keeper=False, stop_before_expiry=60) as working:
        assert began.wait(WAIT_S)
        embedded.clock.advance(6 * HOUR - 61)
        assert working.counts is not None
        assert working.counts.outcomes == {}
        embedded.clock.advance(30)
        eventually(lambda: working.counts and working.counts.outcomes.get("done"))
    assert left == [1], "it is still leased when its handler is told"
    assert working.counts.outcomes == {"stopped": 1, "done": 1}


def test_a_prefetched_message_whose_time_is_over_does_not_start(embedded: EmbeddedClient, queue: Queue) -> None:
    queue.send_batch(["first", "second"])
    bodies: list[str] = []

    def handler(job: Any) -> None:
        bodies.append(job.body)
        if len(bodies) == 1:
            eventually(lambda: queue.stats().in_flight == 2)
            embedded.clock.advance(601)

    with worker(embedded, queue, handler, prefetch=1, lease=600, keeper=False) as working:
        eventually(lambda: working.counts and working.counts.outcomes.get("expired", 0))
        embedded.account.apply_due()
        eventually(lambda: queue.stats().visible == queue.stats().in_flight == 0)
    assert working.counts is not None
    assert sorted(set(bodies)) == ["first", "second"]


def test_the_pauses_after_failed_receives_go_by_the_clock(embedded: EmbeddedClient, queue: Queue) -> None:
    receives = threading.Semaphore(0)
    faults = iter([UNREACHABLE] * 8)

    class Faulty(Wrapping):
        def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> Sequence[Received]:  # type: ignore[override]
            receives.release()
            fault: VeilError | None = next(faults, None)
            if fault is not None:
                raise fault
            return self.inner.receive(count_max, lease=lease, wait=wait)

    queue.send("at last")
    done = threading.Event()
    with worker(embedded, Faulty(queue), lambda job: done.set()):
        # 0.2 s, 0.4 s ... up to 30 s: half a minute of pauses and more.
        for _ in range(9):
            assert receives.acquire(timeout=WAIT_S)
            for _ in range(100):
                if receives.acquire(timeout=0.01):
                    receives.release()
                    break
                embedded.clock.advance(31)
        assert done.wait(WAIT_S)


def test_a_checker_looks_by_the_clock(embedded: EmbeddedClient, queue: Queue) -> None:
    embedded.account.create("log", Template(retention=7 * 24 * HOUR))
    transactions = TransactionQueue(
        queue,
        embedded.account.queue("log"),
        lambda prepared: Verdict.COMMIT,
        times=Times(check_every=300),
        clock=embedded.clock,
    )
    with transactions.checker:
        told = transactions.send_transaction(Message("order"), lambda prepared: Verdict.UNKNOWN)
        assert told.outcome is Outcome.PENDING
        embedded.pass_time(601)
        (message,) = queue.receive(wait=20)
        assert message.body == "order"
