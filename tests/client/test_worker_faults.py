"""What breaks beside the handler, or in ways that nobody expects: each costs its message a receive, and never more."""

import asyncio
import datetime
import errno
import functools
import logging
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.client.test_worker_clock import HOUR, UNREACHABLE, eventually, worker
from tests.client.worker_stage import WAIT_S, Gate, Stage
from tests.support.embedded import EmbeddedClient

from veilmq.client.encrypted import EncryptedQueue, Keys, new_key
from veilmq.client.large import LargeMessageQueue
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.routed import RoutedQueue
from veilmq.client.unreadable import keep
from veilmq.client.worker import Backoff, DirectoryGuard, Reject, Retry, Worker, run
from veilmq.client.worker.options import lane_of
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid
from veilmq.model.messages import Failure
from veilmq.testing.client_contract import for_each

LATE = Backoff(first=3_000, longest=3_000, jitter=0)


@pytest.fixture
def queue(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("work", Template(visibility_timeout=30))
    return embedded.account.queue("work")


class Down(Wrapping):
    """Receives and extends, but neither deletes nor releases while it is down."""

    down = True

    def delete(self, handle: str) -> None:
        if self.down:
            raise UNREACHABLE
        self.inner.delete(handle)

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        if self.down:
            raise UNREACHABLE
        self.inner.release(handle, delay, failure=failure)


@pytest.mark.parametrize("fails", [False, True], ids=["delete", "release"])
def test_what_is_given_up_comes_back_when_its_lease_ends(
    embedded: EmbeddedClient, queue: Queue, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send("a")
    receives: list[int] = []
    down = Down(queue)

    def handler(job: Any) -> None:
        receives.append(job.receive_count)
        if fails and job.receive_count == 1:
            raise RuntimeError("once")

    def given_up() -> bool:
        embedded.clock.advance(5)
        return working.counts is not None and working.counts.outcomes == {"unsettled": 1}

    with worker(embedded, down, handler, lease=HOUR) as working:
        eventually(given_up)
        assert working._run is not None
        keeper = working._run.keeper
        assert keeper is not None
        assert keeper.leases == 0
        down.down = False
        assert queue.stats().in_flight == 1
        embedded.clock.advance(HOUR / 2)
        keeper.extend_due()
        embedded.pass_time(HOUR / 2)
        eventually(lambda: working.counts and working.counts.outcomes.get("done"))
    assert receives == [1, 2]
    call, said = "release" if fails else "delete", [record.getMessage() for record in caplog.records]
    assert working.counts is not None
    assert working.counts.failures == {call: 20}
    assert said.count(f"queue work: {call} failed: {UNREACHABLE}") == 1
    assert len([line for line in said if f"{call} failed" in line]) < 5, "not one line for each try"
    assert any(line.startswith("queue work: delete works again") for line in said) is not fails
    assert ("HandlerFailed: where it failed:\nTraceback" in caplog.text) is fails
    assert (queue.stats().visible, queue.stats().in_flight) == (0, 0)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("nothing")


class Empty(Retry):
    def __init__(self) -> None:
        """Without its parent's."""


class TestStrangeExceptions:
    @pytest.mark.parametrize("kind", ["threads", "async"])
    @pytest.mark.parametrize("raised", [Unprintable, Empty])
    def test_one_that_cannot_say_what_it_is_has_failed(self, stage: Stage, raised: type[Exception], kind: str) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            if job.receive_count < 4:
                raise raised

        async def coroutine(job: Any) -> None:
            handler(job)

        counts = stage.work(coroutine if kind == "async" else handler, kind=kind, retry=LATE)
        assert (counts.received, counts.outcomes) == (1, {"failed": 1})
        assert stage.queue.stats().in_flight == 1

    def test_its_kind_is_the_reason_in_the_dead_letter_queue(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send("a")

        def handler(job: Any) -> None:
            raise Unprintable

        assert stage.work(handler, poison_after=1, dead_letter_queue=dead).outcomes == {"dead_lettered": 1}
        assert dead.receive()[0].attributes["veilmq.dead_letter.reason"] == "Unprintable"

    @for_each("delay", [datetime.timedelta(seconds=30), "30", float("nan"), float("inf"), True, [1]], ids=repr)
    def test_a_retry_without_a_usable_delay_has_failed(self, stage: Stage, delay: Any) -> None:
        stage.send("a")
        with pytest.raises(ParameterInvalid, match="not a number of seconds"):
            Retry(delay)

        def handler(job: Any) -> None:
            if job.receive_count < 4:
                raise Retry(delay)

        counts = stage.work(handler, retry=LATE)
        assert (counts.received, counts.outcomes) == (1, {"failed": 1})

    def test_an_instant_that_has_passed_is_now(self) -> None:
        assert [Retry(delay).delay for delay in (-0.5, 0, 2, None)] == [0.0, 0.0, 2.0, None]

    def test_nor_has_one_whose_delay_was_changed(self, stage: Stage) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            error = Retry(1)
            error.delay = float("nan")
            if job.receive_count < 4:
                raise error

        assert stage.work(handler, retry=LATE).outcomes == {"failed": 1}


class Tracer:
    """One that is broken, outside of every handler."""

    def start_as_current_span(self, *given: Any, **named: Any) -> None:
        raise SystemExit("no exporter")


@pytest.mark.parametrize("kind", ["threads", "async"])
@pytest.mark.parametrize("batch", [None, 2])
def test_a_fault_outside_the_handler_counts_as_failed_and_ends_as_poison(
    stage: Stage, kind: str, batch: int | None
) -> None:
    dead = stage.make("dead")
    stage.send("a", "b")

    async def coroutine(job: Any) -> None: ...

    counts = stage.work(
        coroutine if kind == "async" else stage.note,
        kind=kind,
        batch=batch,
        tracer=Tracer(),
        poison_after=3,
        dead_letter_queue=dead,
    )
    assert counts.outcomes == {"failed": 4, "dead_lettered": 2}
    assert stage.seen == []
    assert {each.body for each in dead.receive(10)} == {"a", "b"}


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_and_it_waits_for_its_backoff(stage: Stage, kind: str) -> None:
    stage.send("a")

    async def coroutine(job: Any) -> None: ...

    handler = coroutine if kind == "async" else stage.note
    counts = stage.work(handler, kind=kind, tracer=Tracer(), retry=LATE)
    assert (counts.received, counts.outcomes) == (1, {"failed": 1})


KEYS = Keys(new_key())


class TestDeadLettersOfPatterns:
    """A name is a bare queue: behind it nothing is encrypted, and nothing large has room."""

    def test_a_name_is_refused(self, stage: Stage, tmp_path: Path) -> None:
        stage.make("dead")
        encrypted = EncryptedQueue(stage.queue, KEYS, unreadable=keep)
        large = LargeMessageQueue(stage.queue, f"file://{tmp_path}/objects", unreadable=keep)
        for queue, named in (encrypted, "EncryptedQueue"), (large, "LargeMessageQueue"), (Wrapping(large), "Large"):
            with pytest.raises(ParameterInvalid, match=f"{named}.*pass the queue object") as refused:
                Worker(queue, stage.note, dead_letter_queue="dead")
            assert refused.value.parameter == "dead_letter_queue"
        Worker(Wrapping(stage.queue), stage.note, dead_letter_queue="dead")

    def test_a_queue_in_the_same_pattern_keeps_the_secret(self, stage: Stage) -> None:
        dead = stage.make("dead")
        queue = EncryptedQueue(stage.queue, KEYS, unreadable=keep)
        letters = EncryptedQueue(dead, KEYS, unreadable=keep)
        queue.send("card 4111")

        def handler(job: Any) -> None:
            raise Reject("no such card")

        assert stage.work(handler, queue, dead_letter_queue=letters).outcomes == {"dead_lettered": 1}
        assert "4111" not in dead.peek()[0].body
        assert letters.receive()[0].body == "card 4111"

    def test_and_takes_what_is_large(self, stage: Stage, tmp_path: Path) -> None:
        dead = stage.make("dead")
        queue, letters = (
            LargeMessageQueue(each, f"file://{tmp_path}/objects", unreadable=keep) for each in (stage.queue, dead)
        )
        queue.send("x" * 3_000_000)

        def handler(job: Any) -> None:
            raise Reject("too long to read")

        assert stage.work(handler, queue, dead_letter_queue=letters).outcomes == {"dead_lettered": 1}
        assert letters.receive()[0].body == "x" * 3_000_000


def leave(*given: Any) -> None:
    sys.exit("as a script would")


class LeavingMeter:
    ended = failed = in_hand = staticmethod(leave)


class TestCallbacksThatExit:
    """sys.exit() in what is called from the worker's threads is logged, and ends none of them."""

    @pytest.mark.parametrize("kind", ["threads", "async"])
    @for_each(
        "options",
        [{"on_result": leave}, {"metrics": LeavingMeter()}, {"lease": leave}, {"batch": 2, "metrics": LeavingMeter()}],
        ids=["on_result", "meter", "lease", "batch"],
    )
    def test_all_is_done(self, stage: Stage, options: dict[str, Any], kind: str) -> None:
        stage.send(*map(str, range(20)))

        async def coroutine(job: Any) -> None: ...

        handler = coroutine if kind == "async" else lambda job: None
        counts = stage.work(handler, kind=kind, concurrency=2, **options)
        assert counts.outcomes == {"done": 20}
        assert stage.nothing_left()

    def test_on_error(self, stage: Stage) -> None:
        class Hiccup(Wrapping):
            received = False

            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                if not self.received:
                    self.received = True
                    raise UNREACHABLE
                return self.inner.receive(count_max, lease=lease, wait=wait)

        stage.send("a")
        assert stage.work(stage.note, Hiccup(stage.queue), on_error=leave).outcomes == {"done": 1}

    def test_a_loop_that_a_handler_ends_goes_on(self, stage: Stage) -> None:
        """No handler can be meant by the end of the loop: all messages would be kept and never worked."""
        stage.send("stops the loop", "exits in a callback", "works")

        async def coroutine(job: Any) -> None:
            stage.note(job)
            if job.body == "stops the loop":
                asyncio.get_running_loop().stop()
            elif job.body == "exits in a callback":
                asyncio.get_running_loop().call_soon(leave)
                await asyncio.sleep(0)

        with stage.worker(coroutine, kind="async") as working:
            eventually(lambda: working.counts and working.counts.outcomes.get("done") == 3)
        assert len(stage.seen) == 3

    def test_a_policy_is_asked_again_until_the_run_gives_up(self, stage: Stage) -> None:
        stage.send("no secret at all")
        queue = EncryptedQueue(stage.queue, KEYS, unreadable=leave)
        # Each try costs the message a receive, and the next one comes when its lease is over.
        working = stage.worker(stage.note, queue, give_up_after=0.1, lease=0.05)
        with pytest.raises(SystemExit, match="as a script would"):
            working.run()
        assert working.counts is not None
        assert working.counts.failures["receive"] >= 1

    @pytest.mark.parametrize("kind", ["threads", "async"])
    def test_a_guard(self, stage: Stage, kind: str) -> None:
        class Leaving:
            begin = finish = abandon = staticmethod(leave)

        stage.send("a", "b")

        async def coroutine(job: Any) -> None: ...

        given: Any = Leaving()
        counts = stage.work(coroutine if kind == "async" else stage.note, kind=kind, guard=given, retry=LATE)
        assert (counts.outcomes, stage.seen) == ({"failed": 2}, [])

    def test_a_cancellation_callback(self, stage: Stage) -> None:
        stage.send("a")
        gate = Gate(stage)

        def handler(job: Any) -> None:
            job.cancelled.on_set(leave)
            job.cancelled.on_set(gate.may.set)
            gate(job)
            job.cancelled.check()

        working = stage.worker(handler, drain=0.1)
        working.start()
        gate.wait_begun()
        working.stop()
        assert working.join(WAIT_S)
        assert working.counts is not None
        assert working.counts.outcomes == {"stopped": 1}
        assert stage.visible() == ["a"]


class FullDisk(DirectoryGuard):
    """Has no room for results."""

    def finish(self, key: str, fence: int, result: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")


def test_a_message_whose_result_is_not_stored_is_worked_again(stage: Stage, tmp_path: Path) -> None:
    stage.send("a")
    counts = stage.work(stage.note, guard=FullDisk(tmp_path / "guard"), retry=LATE)
    assert (counts.outcomes, stage.seen) == ({"failed": 1}, ["a"])
    assert not stage.nothing_left()


class Counting(Wrapping):
    """Notes how many messages are in flight when one is given back because its handler failed."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.in_flight: list[int | None] = []

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        if failure is not None:
            self.in_flight.append(self.inner.stats().in_flight)
        self.inner.release(handle, delay, failure=failure)


@pytest.mark.parametrize("options", [{"prefetch": 4}, {"batch": 2, "prefetch": 4}], ids=["waiting", "in one batch"])
def test_the_rest_of_a_group_goes_back_before_the_message_that_failed(stage: Stage, options: dict[str, Any]) -> None:
    """A message that is given back can be received at once: nobody may get it while we hold what follows it."""
    queue = Counting(stage.make("work.fifo", fifo=True, content_deduplication=True))
    answers = queue.send_batch([Message(body, group="g") for body in "abcd"])
    assert not [each for each in answers if isinstance(each, Exception)]
    failed: list[str] = []

    def handler(given: Any) -> Any:
        jobs = given if isinstance(given, list) else [given]
        if not failed:
            failed.append(jobs[0].body)
            raise RuntimeError("once")
        for job in jobs:
            stage.note(job)

    stage.work(handler, queue, **options)
    assert (failed, stage.seen) == (["a"], ["a", "b", "c", "d"])
    assert queue.in_flight[0] == 1


class Slow(Wrapping):
    """The answer to the release of a failed message takes until the worker has received it again."""

    worker: Worker

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.inner.release(handle, delay, failure=failure)
        if failure is not None:
            run = self.worker._run
            assert run is not None
            eventually(lambda: run.ready.holds("g"))


def test_a_message_that_comes_again_at_once_is_worked_again(stage: Stage) -> None:
    queue = Slow(stage.make("work.fifo", fifo=True, content_deduplication=True))
    queue.send_batch([Message(body, group="g") for body in "abcd"])
    counts: list[int] = []

    def handler(job: Any) -> None:
        if job.body == "a":
            counts.append(job.receive_count)
            if len(counts) < 4:
                raise Retry(delay=0)

    queue.worker = stage.worker(handler, queue, prefetch=4)
    queue.worker.run(until_empty=True)
    assert counts == [1, 2, 3, 4]


class Cut(Wrapping):
    """Its first extension fails."""

    cut = False

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.bodies: dict[str, str] = {}
        self.released: list[str] = []

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        came = self.inner.receive(count_max, lease=lease, wait=wait)
        self.bodies |= {message.handle: message.body for message in came}
        return came

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.released.append(self.bodies[handle])
        self.inner.release(handle, delay, failure=failure)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        if not self.cut:
            self.cut = True
            raise UNREACHABLE
        return self.inner.extend(handle, lease, body=body)


def test_a_group_waits_for_its_message_that_cannot_be_held(embedded: EmbeddedClient) -> None:
    embedded.account.create("work.fifo", Template(fifo=True, content_deduplication=True))
    queue = Cut(embedded.account.queue("work.fifo"))
    queue.send_batch([Message(body, group="g") for body in "abc"])
    seen: list[str] = []
    options: dict[str, Any] = {"keeper": False, "lease": lambda _: HOUR, "prefetch": 4}
    with worker(embedded, queue, lambda job: seen.append(job.body), **options) as working:
        eventually(lambda: working.counts and working.counts.outcomes == {"unsettled": 1, "stopped": 2})
        embedded.pass_time(31)
        eventually(lambda: len(seen) == 3)
    assert seen == ["a", "b", "c"]
    assert queue.released == ["c", "b"], "one that is given back may be received at once"


class CutTwice(Wrapping):
    """The first two extensions and the first two releases fail."""

    extends = releases = 2

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.releases -= 1
        if self.releases >= 0:
            raise UNREACHABLE
        self.inner.release(handle, delay, failure=failure)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        self.extends -= 1
        if self.extends >= 0:
            raise UNREACHABLE
        return self.inner.extend(handle, lease, body=body)


def test_calls_before_the_handler_that_work_again_are_in_the_log(
    embedded: EmbeddedClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "veilmq.worker")
    embedded.account.create("work.fifo", Template(fifo=True, content_deduplication=True))
    queue = CutTwice(embedded.account.queue("work.fifo"))
    groups = {"a": "g", "b": "h", "c": "g", "d": "g", "e": "g", "f": "i"}
    queue.send_batch([Message(body, group=group) for body, group in groups.items()])
    options: dict[str, Any] = {"keeper": False, "lease": lambda _: HOUR, "prefetch": 6}
    with worker(embedded, queue, lambda job: None, **options) as working:
        eventually(lambda: working.counts and working.counts.outcomes == {"unsettled": 2, "stopped": 3, "done": 1})
    again = "queue work.fifo: {} works again (failures since the last line: 1)"
    said = [record.getMessage() for record in caplog.records]
    assert {again.format("extend"), again.format("release")} <= set(said)
    assert "queue work.fifo: stopped: 1 done, 3 stopped, 2 unsettled" in said


def test_a_routed_queue_with_a_name_of_its_own_is_worked_off(stage: Stage) -> None:
    routed = RoutedQueue({"film": stage.make("films")}, stage.queue, name="all jobs")
    routed.send_batch(["a", Message("b", type="film")])
    assert stage.work(stage.note, routed).outcomes == {"done": 2}
    assert sorted(stage.seen) == ["a", "b"]


def test_only_groups_of_a_fifo_queue_are_lanes_beside_other_queues(stage: Stage) -> None:
    """Each queue's own; a standard queue's groups share its messages fairly, and have no order."""
    fifo, more = stage.make("work.fifo", fifo=True), stage.make("more.fifo", fifo=True)
    routed = RoutedQueue({"f": fifo, "m": more}, stage.queue)
    for kind, deduplication in (("f", "1"), ("m", "1"), ("x", None)):
        routed.send(Message("a", type=kind, group="g", deduplication_id=deduplication))
    came = [message for _ in range(3) for message in routed.receive(1)]
    assert {lane_of(routed, message) for message in came} == {"work.fifo g", "more.fifo g", None}
    outer = RoutedQueue({}, routed)
    for message in came:
        routed.release(message.handle)
    nested = {lane_of(outer, message) for _ in range(3) for message in outer.receive(1)}
    assert {lane and lane.rpartition(" ")[2] for lane in nested} == {"g", None}
    working: list[int] = []

    def handler(job: Any) -> None:
        working.append(1)
        together.append(len(working))
        time.sleep(0.05)
        working.pop()

    together: list[int] = []
    for number in range(4):
        routed.send(Message("b", type="f", group="h", deduplication_id=f"h{number}"))
    stage.work(handler, routed, receives=4, concurrency=4, prefetch=4)
    assert together == [1] * 4


class Hanging(Wrapping):
    """Releases get no answer."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.asked = threading.Semaphore(0)
        self.answer = threading.Event()

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.asked.release()
        assert self.answer.wait(WAIT_S)


def test_a_stop_waits_for_a_queue_that_hangs_once_and_not_for_each_message(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_POLL_SLACK", 0.2)
    queue, gate = Hanging(stage.queue), Gate(stage)
    stage.send("a", "b", "c")
    working = stage.worker(gate, queue, concurrency=3, drain=0)
    working.start()
    gate.wait_begun(3)
    working.stop()
    assert working.join(WAIT_S)
    for _ in range(3):
        assert queue.asked.acquire(blocking=False)
    queue.answer.set()
    gate.may.set()


def test_a_lease_longer_than_max_hold_is_held_to_its_end(embedded: EmbeddedClient, queue: Queue) -> None:
    """Else the handler was stopped after five hours, and the message was hidden for three more."""
    queue.send("a")
    with worker(embedded, queue, lambda job: left.append(job.remaining()), lease=8 * HOUR):
        left: list[float] = []
        eventually(lambda: left)
    assert left[0] > 7 * HOUR


async def _coroutine(job: Any) -> None:
    job.delete()


def _generator(job: Any) -> Any:
    yield job


async def _asynchronous(job: Any) -> Any:
    yield job


def _future(job: Any) -> Any:
    return Future[None]()


class _Awaitable:
    """As Twisted's Deferred is one."""

    def __init__(self, job: Any) -> None: ...

    def __await__(self) -> Any:
        yield


_HIDDEN = [functools.partial(lambda run, job: run(job), each) for each in (_coroutine, _generator, _asynchronous)]


@for_each("handler", [*_HIDDEN, _future, _Awaitable])
def test_work_that_was_not_begun_is_not_done(stage: Stage, handler: Any) -> None:
    """A decorator that hides an async handler, say, or a handler that submits to a pool: its message was deleted."""
    stage.send("a")
    counts = stage.work(handler, receives=1, kind="threads", retry=LATE)
    assert counts.outcomes == {"failed": 1}
    assert stage.queue.stats().in_flight == 1
    stage.account.delete("work")
    stage.queue = stage.make("work")
