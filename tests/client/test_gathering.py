"""Deletes that go together: who waits for whom, and that each thread gets its own answer."""

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.client.worker_stage import WAIT_S, Stage

from veilmq.client import wrapping
from veilmq.client.errors import TransportError
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.wrapping import UNDER_WAY_MAX, GatheredDeletes, Wrapping, can_gather
from veilmq.model.errors import LeaseTaken, MessageGone, VeilError


class Slow(Wrapping):
    """A queue of small batches, whose first requests wait for `go`: as many as may be under way."""

    def __init__(self, inner: Queue, most: int) -> None:
        super().__init__(inner)
        self.most = most
        self.go = threading.Event()
        self.held = threading.Semaphore(0)
        """Released by each that waits."""
        self.requests: list[int] = []
        self.on_batch: Callable[[], Any] = lambda: None

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, batch_messages_max=self.most)

    def delete(self, handle: str) -> None:
        self.requests.append(1)
        if len(self.requests) <= UNDER_WAY_MAX:
            self.held.release()
            assert self.go.wait(WAIT_S)
        self.inner.delete(handle)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        self.requests.append(len(handles))
        self.on_batch()
        return self.inner.delete_batch(handles)


class Asking:
    """A thread that deletes, and what it was told."""

    def __init__(self, queue: Queue, handle: str) -> None:
        self.told: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(queue, handle), daemon=True)
        self._thread.start()

    def _ask(self, queue: Queue, handle: str) -> None:
        try:
            queue.delete(handle)
        except BaseException as error:  # noqa: BLE001 a thread's end too
            self.told = error

    def end(self) -> BaseException | None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.told


def handles(stage: Stage, count: int) -> list[str]:
    stage.send(*(f"body {number}" for number in range(count)))
    return [each.handle for each in stage.queue.receive(count, lease=300)]


def under_way(gathered: GatheredDeletes, slow: Slow, given: Sequence[str]) -> list[Asking]:
    """As many deletes as may be under way, each held up in its request."""
    asking = []
    for handle in given:
        asking.append(Asking(gathered, handle))
        assert slow.held.acquire(timeout=WAIT_S)
    return asking


def waiting(gathered: GatheredDeletes, given: Sequence[str], before: int = 0) -> list[Asking]:
    """Deletes in line, in this order, behind so many others."""
    asking = []
    for handle in given:
        asking.append(Asking(gathered, handle))
        while len(gathered._line) < before + len(asking):
            threading.Event().wait(0.001)
    return asking


def signal_when_in_line(gathered: GatheredDeletes) -> None:
    """SIGUSR1 to the main thread, once it has let go of the lock."""
    in_line = False
    while not in_line:
        threading.Event().wait(0.001)
        with gathered._lock:
            in_line = bool(gathered._line)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine as on a quiet one."""
    monkeypatch.setattr(wrapping, "PATIENCE_S", 2 * WAIT_S)


class TestGatheredDeletes:
    def test_one_alone_goes_at_once_and_by_itself(self, stage: Stage) -> None:
        slow = Slow(stage.queue, 10)
        slow.go.set()
        gathered = GatheredDeletes(slow)
        for handle in handles(stage, 3):
            gathered.delete(handle)
        assert slow.requests == [1, 1, 1]
        assert stage.nothing_left()

    def test_those_that_come_meanwhile_go_together_and_each_hears_its_own(self, stage: Stage) -> None:
        slow = Slow(stage.queue, 10)
        gathered = GatheredDeletes(slow)
        first, rest = (given := handles(stage, UNDER_WAY_MAX + 5))[:UNDER_WAY_MAX], given[UNDER_WAY_MAX:]
        stage.queue.release(rest[1])
        (again,) = stage.queue.receive(1, lease=300)
        stage.queue.delete(rest[3])
        asking = under_way(gathered, slow, first) + waiting(gathered, rest)
        slow.go.set()
        told = [each.end() for each in asking]
        assert slow.requests == [1] * UNDER_WAY_MAX + [5]
        assert [type(each) for each in told[UNDER_WAY_MAX:]] == [
            type(None), LeaseTaken, type(None), MessageGone, type(None),
        ]  # fmt: skip
        assert told[:UNDER_WAY_MAX] == [None] * UNDER_WAY_MAX
        stage.queue.delete(again.handle)
        assert stage.nothing_left()

    def test_a_requests_worth_waits_for_nobody(self, stage: Stage) -> None:
        slow = Slow(stage.queue, 3)
        gathered = GatheredDeletes(slow)
        given = handles(stage, UNDER_WAY_MAX + 3)
        held = under_way(gathered, slow, given[:UNDER_WAY_MAX])
        full = waiting(gathered, given[UNDER_WAY_MAX:-1])
        full.append(Asking(gathered, given[-1]))
        assert [each.end() for each in full] == [None] * 3
        assert slow.requests == [1] * UNDER_WAY_MAX + [3]
        slow.go.set()
        assert [each.end() for each in held] == [None] * UNDER_WAY_MAX
        assert stage.nothing_left()

    def test_nobody_waits_long_for_requests_that_are_stuck(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = Slow(stage.queue, 10)
        gathered = GatheredDeletes(slow)
        given = handles(stage, UNDER_WAY_MAX + 2)
        held = under_way(gathered, slow, given[:UNDER_WAY_MAX])
        monkeypatch.setattr(wrapping, "PATIENCE_S", 0.2)
        waits = [Asking(gathered, handle) for handle in given[UNDER_WAY_MAX:]]
        assert [each.end() for each in waits] == [None] * 2
        slow.go.set()
        assert [each.end() for each in held] == [None] * UNDER_WAY_MAX
        assert stage.nothing_left()

    def test_a_request_that_fails_fails_for_all_in_it_and_for_none_after_it(self, stage: Stage) -> None:
        slow = Slow(stage.queue, 10)
        gathered = GatheredDeletes(slow)
        given = handles(stage, UNDER_WAY_MAX + 3)

        def fail() -> None:
            slow.on_batch = lambda: None
            raise TransportError(reason="cut", may_have_happened=False)

        slow.on_batch = fail
        asking = under_way(gathered, slow, given[:UNDER_WAY_MAX]) + waiting(gathered, given[UNDER_WAY_MAX:])
        slow.go.set()
        told = [each.end() for each in asking]
        assert [type(each) for each in told] == [type(None)] * UNDER_WAY_MAX + [TransportError] * 3
        for handle in given[UNDER_WAY_MAX:]:
            gathered.delete(handle)
        assert stage.nothing_left()

    def test_a_thread_that_is_ended_leaves_nobody_behind(self, stage: Stage) -> None:
        slow = Slow(stage.queue, 10)
        gathered = GatheredDeletes(slow)
        given = handles(stage, UNDER_WAY_MAX + 3)

        def end() -> None:
            raise KeyboardInterrupt

        slow.on_batch = end
        held = under_way(gathered, slow, given[:UNDER_WAY_MAX])
        asking = waiting(gathered, given[UNDER_WAY_MAX:])
        slow.go.set()
        told = [each.end() for each in asking]
        assert [type(each) for each in told] == [KeyboardInterrupt, TransportError, TransportError]
        assert all(each.may_have_happened for each in told if isinstance(each, TransportError))
        assert [each.end() for each in held] == [None] * UNDER_WAY_MAX

    @pytest.mark.parametrize("its_turn", [False, True])
    def test_ctrl_c_while_it_waits_leaves_nobody_behind(self, stage: Stage, its_turn: bool) -> None:
        slow = Slow(stage.queue, 10)
        gathered = GatheredDeletes(slow)
        given = handles(stage, UNDER_WAY_MAX + 3)
        asking = under_way(gathered, slow, given[:UNDER_WAY_MAX])

        def interrupt(*_: object) -> None:
            (mine,) = gathered._line
            asking.extend(waiting(gathered, given[UNDER_WAY_MAX + 1 :], before=1))
            if its_turn:
                slow.go.set()
                while not mine.batch:
                    threading.Event().wait(0.001)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            threading.Thread(target=signal_when_in_line, args=(gathered,), daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                gathered.delete(given[UNDER_WAY_MAX])
        finally:
            signal.signal(signal.SIGUSR1, before)
        slow.go.set()
        assert [each.end() for each in asking] == [None] * (UNDER_WAY_MAX + 2)
        assert stage.queue.stats().in_flight == 1


class TestCanGather:
    def test_not_where_a_request_deletes_one(self, stage: Stage) -> None:
        assert can_gather(stage.queue)
        assert not can_gather(Slow(stage.queue, 1))

    def test_patterns_that_change_both_or_none(self, stage: Stage) -> None:
        assert can_gather(Slow(stage.queue, 2))
        assert can_gather(Wrapping(stage.queue))

    def test_not_over_a_pattern_that_changes_one(self, stage: Stage) -> None:
        class Counting(Wrapping):
            def delete(self, handle: str) -> None:
                self.inner.delete(handle)

        class Vetoing(Slow):
            def delete(self, handle: str) -> None:
                raise NotImplementedError

        assert not can_gather(Counting(stage.queue))
        assert not can_gather(Wrapping(Counting(stage.queue)))
        assert not can_gather(Vetoing(stage.queue, 10))


@pytest.mark.parametrize("keeper", [True, False])
def test_the_handlers_of_a_worker_share_requests(stage: Stage, keeper: bool) -> None:
    """The single deletes are held up until a full batch has come: without it the worker would stand still."""
    slow = Slow(stage.queue, 4)
    slow.on_batch = slow.go.set
    stage.send(*(f"body {number}" for number in range(UNDER_WAY_MAX + 4)))
    counts = stage.work(stage.note, slow, concurrency=UNDER_WAY_MAX + 4, keeper=keeper)
    assert counts.outcomes["done"] == UNDER_WAY_MAX + 4
    assert max(slow.requests) == 4
    assert stage.nothing_left()
