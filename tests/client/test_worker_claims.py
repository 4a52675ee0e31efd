"""What a worker asks of its guard: when a claim begins, how long it lasts, and what is no poison because of it."""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.guards import KINDS, guard_of
from tests.client.test_worker_clock import HOUR, WAIT_S, eventually, worker
from tests.client.worker_stage import Stage
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Received, Template
from veilmq.client.queue import Queue
from veilmq.client.worker import (
    Begun,
    Busy,
    Claim,
    DirectoryGuard,
    Done,
    Guard,
    Prolonging,
    Superseded,
)
from veilmq.client.worker.guard import Answer
from veilmq.model.errors import LeaseTaken

FAR = float(2**40)


@pytest.fixture(params=KINDS)
def guard(request: pytest.FixtureRequest, embedded: EmbeddedClient, tmp_path: Path) -> Iterator[Guard]:
    """By the test's clock; the table's database is five hours ahead."""
    with guard_of(request.param, tmp_path, lambda: embedded.clock.wall() + 5 * HOUR) as made:
        yield made


@pytest.fixture
def queue(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("work", Template(visibility_timeout=30))
    return embedded.account.queue("work")


def order(message: Received) -> str:
    return message.body


class Extending:
    """A handler that moves its lease's end when it is told, and ends when it may."""

    def __init__(self, seconds: float | None, *, by_checkpoint: bool = False) -> None:
        self.seconds = seconds
        self.by_checkpoint = by_checkpoint
        self.jobs: list[Any] = []
        self.go_on = threading.Event()
        self.extended = threading.Event()
        self.may = threading.Event()
        self.raised: list[Exception] = []

    def __call__(self, job: Any) -> str:
        self.jobs.append(job)
        assert self.go_on.wait(WAIT_S)
        try:
            if self.seconds is not None and self.by_checkpoint:
                job.checkpoint("half", self.seconds)
            elif self.seconds is not None:
                job.extend(self.seconds)
        except Exception as error:
            self.raised.append(error)
            raise
        finally:
            self.extended.set()
        assert self.may.wait(WAIT_S)
        return "charged"


def other(embedded: EmbeddedClient) -> Claim:
    """Of another message for the same work, now."""
    wall = embedded.clock.wall()
    return Claim("work/other", 1, wall, wall + HOUR)


@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_a_lease_that_its_handler_extends_keeps_the_claim(
    embedded: EmbeddedClient, queue: Queue, guard: Guard, by_checkpoint: bool
) -> None:
    queue.send("order 7")
    handler = Extending(2 * HOUR, by_checkpoint=by_checkpoint)
    with worker(embedded, queue, handler, lease=HOUR, keeper=False, guard=guard, guard_key=order) as working:
        eventually(lambda: handler.jobs)
        embedded.clock.advance(HOUR / 2)
        handler.go_on.set()
        assert handler.extended.wait(WAIT_S)
        embedded.clock.advance(2 * HOUR - 60)
        answer = guard.begin("order 7", other(embedded))
        assert isinstance(answer, Busy)
        assert answer.until == pytest.approx(embedded.clock.wall() + 60, abs=1)
        handler.may.set()
        eventually(lambda: working.counts and working.counts.outcomes == {"done": 1})
    assert guard.begin("order 7", other(embedded)) == Done("charged")


def test_a_handler_that_says_nothing_keeps_it_to_the_end_of_its_lease(
    embedded: EmbeddedClient, queue: Queue, guard: Guard
) -> None:
    queue.send("order 7")
    handler = Extending(None)
    with worker(embedded, queue, handler, lease=HOUR, keeper=False, guard=guard, guard_key=order):
        eventually(lambda: handler.jobs)
        embedded.clock.advance(HOUR - 60)
        assert isinstance(guard.begin("order 7", other(embedded)), Busy)
        embedded.clock.advance(61)
        assert guard.begin("order 7", other(embedded)) == Begun(2)
        handler.go_on.set()
        handler.may.set()


def test_a_shorter_lease_leaves_the_claim(embedded: EmbeddedClient, queue: Queue, guard: Guard) -> None:
    """An extension whose answer is lost may not have shortened anything."""
    queue.send("order 7")
    handler = Extending(600)
    with worker(embedded, queue, handler, lease=HOUR, keeper=False, guard=guard, guard_key=order):
        eventually(lambda: handler.jobs)
        handler.go_on.set()
        assert handler.extended.wait(WAIT_S)
        embedded.clock.advance(601)
        assert isinstance(guard.begin("order 7", other(embedded)), Busy)
        handler.may.set()


def test_a_claim_that_was_taken_over_stops_the_handler(embedded: EmbeddedClient, queue: Queue, guard: Guard) -> None:
    queue.send("order 7")
    handler = Extending(2 * HOUR)
    with worker(embedded, queue, handler, lease=HOUR, keeper=False, guard=guard, guard_key=order) as working:
        eventually(lambda: handler.jobs)
        # A machine whose clock is ahead believes it over.
        ahead = embedded.clock.wall() + 9 * HOUR
        fence = guard.begin("order 7", Claim("work/other", 1, ahead, ahead + HOUR))
        if fence != Begun(2):  # a table goes by its own clock: it cannot happen there
            assert isinstance(fence, Busy)
            handler.go_on.set()
            handler.may.set()
            return
        handler.go_on.set()
        assert handler.extended.wait(WAIT_S)
        eventually(lambda: working.counts and working.counts.outcomes == {"lost": 1})
    assert [type(error) for error in handler.raised] == [LeaseTaken]
    assert handler.jobs[0].cancelled.is_set()
    guard.finish("order 7", 2, "theirs")


def test_a_result_that_came_too_late_leaves_its_message_to_its_lease(embedded: EmbeddedClient, queue: Queue) -> None:
    class Late:
        """Its key is always taken over before the work is done."""

        def begin(self, key: str, claim: Claim) -> Answer:
            return Begun(1)

        def finish(self, key: str, fence: int, result: Any) -> None:
            raise Superseded(key)

        def abandon(self, key: str, fence: int) -> None: ...

    queue.send("order 7")
    with worker(embedded, queue, lambda job: None, lease=HOUR, guard=Late()) as working:
        eventually(lambda: working.counts and working.counts.outcomes == {"lost": 1})
        assert working._run is not None
        assert working._run.keeper is not None
        assert working._run.keeper.leases == 0


@pytest.mark.parametrize("kept", [True, False])
def test_prolonging_is_fenced(guard: Guard, embedded: EmbeddedClient, kept: bool) -> None:
    assert isinstance(guard, Prolonging)
    now = embedded.clock.wall()
    assert guard.begin("k", Claim("m1", 1, now, now + 100)) == Begun(1)
    if kept:
        guard.prolong("k", 1, now, now + 50)
        answer = guard.begin("k", other(embedded))
        assert isinstance(answer, Busy)
        assert answer.until == pytest.approx(now + 100, abs=0.1)
    assert guard.begin("k", Claim("m1", 2, now, now + 100)) == Begun(2)
    with pytest.raises(Superseded):
        guard.prolong("k", 1, now, now + 500)
    guard.finish("k", 2, "done")
    with pytest.raises(Superseded):
        guard.prolong("k", 2, now, now + 500)
    with pytest.raises(Superseded) as late:
        guard.prolong("unknown", 1, now, now + 500)
    again = pickle.loads(pickle.dumps(late.value))
    assert (again.key, str(again)) == ("unknown", "unknown was taken over by a newer delivery")


def test_a_guard_of_ones_own_need_not_prolong(embedded: EmbeddedClient, queue: Queue) -> None:
    class Own:
        results: list[Any]

        def __init__(self) -> None:
            self.results = []

        def begin(self, key: str, claim: Claim) -> Answer:
            return Begun(1)

        def finish(self, key: str, fence: int, result: Any) -> None:
            self.results.append(result)

        def abandon(self, key: str, fence: int) -> None: ...

    queue.send("order 7")
    handler, own = Extending(2 * HOUR), Own()
    handler.go_on.set()
    handler.may.set()
    with worker(embedded, queue, handler, lease=HOUR, keeper=False, guard=own) as working:
        eventually(lambda: working.counts and working.counts.outcomes == {"done": 1})
    assert (handler.raised, own.results) == ([], ["charged"])


class TestPoison:
    """By the real clock."""

    @pytest.fixture
    def held(self, tmp_path: Path) -> DirectoryGuard:
        return DirectoryGuard(tmp_path / "held")

    def test_what_another_works_on_is_no_poison(self, stage: Stage, held: DirectoryGuard) -> None:
        dead = stage.make("dead")
        stage.send("k")
        held.begin("k", Claim("m", 1, 0.0, FAR))

        def key(message: Received) -> str:
            if message.receive_count == 5:
                held.finish("k", 1, "theirs")
            return message.body

        counts = stage.work(stage.note, guard=held, guard_key=key, poison_after=1, dead_letter_queue=dead)
        assert (stage.seen, counts.outcomes) == ([], {"busy": 4, "repeated": 1})
        assert dead.receive() == []

    def test_what_was_done_before_its_worker_died_is_deleted(self, stage: Stage, held: DirectoryGuard) -> None:
        dead = stage.make("dead")
        stage.send("a")
        for _ in range(2):
            (received,) = stage.queue.receive()
            stage.queue.release(received.handle)
        held.begin(f"work/{received.id}", Claim("m", 1, 0.0, FAR))
        held.finish(f"work/{received.id}", 1, "result")
        counts = stage.work(stage.note, guard=held, poison_after=1, dead_letter_queue=dead)
        assert (stage.seen, counts.outcomes) == ([], {"repeated": 1})
        assert dead.receive() == []

    def test_what_killed_its_workers_is_still_poison_and_gives_up_its_claim(
        self, stage: Stage, held: DirectoryGuard
    ) -> None:
        dead = stage.make("dead")
        stage.send("killer")
        for _ in range(2):
            (received,) = stage.queue.receive()
            stage.queue.release(received.handle)
        counts = stage.work(stage.note, guard=held, guard_key=order, poison_after=2, dead_letter_queue=dead)
        assert (stage.seen, counts.outcomes) == ([], {"dead_lettered": 1})
        assert [each.body for each in dead.receive()] == ["killer"]
        assert held.begin("killer", Claim("m", 1, 0.0, FAR)) == Begun(2)
