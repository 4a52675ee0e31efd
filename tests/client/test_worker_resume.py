"""Progress that outlives its worker, and work that is done once: checkpoints and the idempotency guard."""

import math
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.client.guards import KINDS, guard_of
from tests.client.too_deep import TOO_DEEP
from tests.client.worker_stage import Stage

from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities
from veilmq.client.records import ObjectStore
from veilmq.client.worker import (
    Begun,
    Busy,
    Checkpoints,
    Claim,
    DirectoryGuard,
    Done,
    FileCheckpoints,
    Guard,
    ObjectCheckpoints,
    Saved,
    Superseded,
    TableGuard,
)
from veilmq.client.worker.job import Hand
from veilmq.client.worker.job.checkpoints import unwrap, wrap
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, LeaseError, LeaseTaken, MessageTooLarge, ParameterInvalid
from veilmq.testing.for_each import for_each


class Fixed(Wrapping):
    """A queue whose bodies cannot be replaced, as those of SQS."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, body_replaceable=False)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        assert body is None
        return self.inner.extend(handle, lease)


class TestEnvelope:
    @for_each("state", [1, "text", [1, {"a": None}], {"at": 3.5}, False])
    def test_body_and_state_come_back(self, state: Any) -> None:
        assert unwrap(wrap('a "body"\nwith é', state)) == ('a "body"\nwith é', state)

    def test_it_is_as_documented(self) -> None:
        assert wrap("b", 1) == '{"veilmq":"checkpoint/1","body":"b","state":1}'

    @for_each("body", ["", "text", "{}", '{"veilmq":"checkpoint/1",', '{"veilmq":"checkpoint/1","x":1}'])
    def test_any_other_body_is_itself(self, body: str) -> None:
        assert unwrap(body) == (body, None)

    @pytest.mark.parametrize("inside", [TOO_DEEP, '"' + chr(0xD800) + '"'], ids=["deep", "surrogate"])
    def test_one_that_nobody_can_read_stops_no_worker(self, stage: Stage, inside: str) -> None:
        body = wrap("x", None).replace("null", inside)
        assert unwrap(body) == (body, None)
        if body.isascii():
            stage.send(body, "y")
            stage.work(stage.note)
            assert stage.seen == [body, "y"]


def steps(stage: Stage, states: list[Any]) -> Callable[[Any], None]:
    """Fails after each checkpoint until the third."""

    def handler(job: Any) -> None:
        stage.note(job)
        states.append(job.state)
        at = (job.state or {"at": 0})["at"]
        if at < 3:
            job.checkpoint({"at": at + 1})
            assert job.state == {"at": at + 1}
            raise RuntimeError("died")

    return handler


EXPECTED = [None, {"at": 1}, {"at": 2}, {"at": 3}]


class TestCheckpoints:
    def test_in_the_body_it_travels_with_the_message(self, stage: Stage) -> None:
        stage.send("work")
        states: list[Any] = []
        counts = stage.work(steps(stage, states))
        assert states == EXPECTED
        assert stage.seen == ["work"] * 4
        assert counts.outcomes == {"failed": 3, "done": 1}

    @pytest.mark.parametrize("kind", ["files", "objects", "memory"])
    def test_elsewhere_a_side_record_does(self, stage: Stage, tmp_path: Path, kind: str) -> None:
        places: dict[str, Callable[[], Checkpoints]] = {
            "files": lambda: FileCheckpoints(tmp_path / "records"),
            "objects": lambda: ObjectCheckpoints(f"file://{tmp_path / 'records'}"),
            "memory": lambda: ObjectCheckpoints(ObjectStore(f"memory://{tmp_path.name}/records")),
        }
        stage.send("work")
        states: list[Any] = []
        counts = stage.work(steps(stage, states), Fixed(stage.queue), checkpoints=places[kind]())
        assert states == EXPECTED
        assert stage.seen == ["work"] * 4
        assert counts.outcomes == {"failed": 3, "done": 1}
        records = tmp_path / "records"
        assert not records.exists() or list(records.iterdir()) == [], "what is done leaves nothing behind"

    def test_without_a_place_it_is_refused_before_any_call(self, stage: Stage) -> None:
        stage.send("work")
        raised: list[Exception] = []

        def handler(job: Any) -> None:
            with pytest.raises(CapabilityMissing) as refused:
                job.checkpoint(1)
            raised.append(refused.value)
            assert job.state is None

        stage.work(handler, Fixed(stage.queue))
        assert "checkpoints" in str(raised[0])

    @pytest.mark.parametrize("place", ["body", "record"])
    def test_a_state_that_cannot_be_said_changes_nothing(self, stage: Stage, tmp_path: Path, place: str) -> None:
        stage.send("work")

        def handler(job: Any) -> None:
            if job.receive_count == 1:
                job.checkpoint(1)
                for state in (object(), {"at": [math.nan]}):
                    with pytest.raises(ParameterInvalid, match="state"):
                        job.checkpoint(state)
                raise RuntimeError("again")
            assert job.state == 1

        records = FileCheckpoints(tmp_path / "records") if place == "record" else None
        assert stage.work(handler, checkpoints=records).outcomes == {"failed": 1, "done": 1}

    def test_a_state_that_does_not_fit_is_refused(self, stage: Stage) -> None:
        stage.send("work")

        def handler(job: Any) -> None:
            with pytest.raises(MessageTooLarge):
                job.checkpoint("x" * stage.queue.capabilities.body_bytes_max)

        assert stage.work(handler).outcomes == {"done": 1}

    @pytest.mark.parametrize("place", ["body", "record"])
    def test_who_lost_the_lease_saves_nothing(self, stage: Stage, tmp_path: Path, place: str) -> None:
        stage.send("work")
        second = threading.Event()
        states: list[Any] = []

        def handler(job: Any) -> None:
            if job.receive_count == 1:
                job.checkpoint("first", 0.3)
                assert second.wait(30)
                with pytest.raises(LeaseError):
                    job.checkpoint("too late")
                return
            states.append(job.state)
            second.set()
            if job.receive_count == 2:
                raise RuntimeError("again")

        records = FileCheckpoints(tmp_path / "records") if place == "record" else None
        stage.work(handler, concurrency=2, lease=3, wait=1.0, keeper=False, checkpoints=records)
        assert states == ["first", "first"]

    @pytest.mark.parametrize("place", ["body", "record"])
    def test_nothing_is_saved_for_a_message_that_is_gone(self, stage: Stage, tmp_path: Path, place: str) -> None:
        stage.send("work")

        def handler(job: Any) -> None:
            stage.queue.delete(job.message.handle)
            with pytest.raises(LeaseError):
                job.checkpoint(1)
            assert job.state is None

        records = FileCheckpoints(tmp_path / "records")
        stage.work(handler, checkpoints=records if place == "record" else None)
        assert list((tmp_path / "records").iterdir()) == []

    def test_a_message_that_is_counted_anew_goes_on_too(self, stage: Stage, tmp_path: Path) -> None:
        """As after a redrive from the dead letters, which may set the receive count back."""
        records = FileCheckpoints(tmp_path / "records")
        stage.send("work")
        (received,) = stage.queue.receive()
        stage.queue.release(received.handle)
        records.save(f"work/{received.id}", Saved(50, "before"))
        states: list[Any] = []

        def handler(job: Any) -> None:
            states.append(job.state)
            if len(states) == 1:
                job.checkpoint("after")
                raise RuntimeError("again")

        assert stage.work(handler, checkpoints=records).outcomes == {"failed": 1, "done": 1}
        assert states == ["before", "after"]

    def test_a_dead_letter_has_the_body_that_was_sent(self, stage: Stage) -> None:
        dead = stage.make("dead")
        stage.send("work")

        def handler(job: Any) -> None:
            job.checkpoint(1)
            raise RuntimeError("never")

        stage.work(handler, poison_after=2, dead_letter_queue="dead")
        assert [each.body for each in dead.receive(10)] == ["work"]


@pytest.fixture(params=["files", "objects"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoints:
    if request.param == "files":
        return FileCheckpoints(tmp_path)
    return ObjectCheckpoints(f"file://{tmp_path}")


class TestSideRecords:
    def test_the_newest_counts(self, records: Checkpoints) -> None:
        assert records.load("key") is None
        records.save("key", Saved(2, "a"))
        records.save("key", Saved(10, "b"))
        records.save("other", Saved(11, "c"))
        assert records.load("key") == Saved(10, "b")
        records.save("key", Saved(10, "d"))
        assert records.load("key") == Saved(10, "d")

    def test_an_older_one_is_refused(self, records: Checkpoints) -> None:
        records.save("key", Saved(3, "new"))
        with pytest.raises(LeaseTaken):
            records.save("key", Saved(2, "old"))
        assert records.load("key") == Saved(3, "new")

    def test_dropped_is_forgotten(self, records: Checkpoints) -> None:
        records.drop("key")
        records.save("key", Saved(1, "a"))
        records.drop("key")
        assert records.load("key") is None
        records.save("key", Saved(1, "a"))
        assert records.load("key") == Saved(1, "a")

    def test_any_key_will_do(self, records: Checkpoints) -> None:
        records.save("../../etc/passwd\x00" + "é" * 500, Saved(1, [1]))
        assert records.load("../../etc/passwd\x00" + "é" * 500) == Saved(1, [1])


class Now:
    """What the claims and the database say that it is."""

    seconds = 100.0


@pytest.fixture(params=KINDS)
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guard]:
    with guard_of(request.param, tmp_path, lambda: Now.seconds) as made:
        yield made


def claim(owner: str = "m1", attempt: int = 1, now: float = 100.0, until: float = 200.0) -> Claim:
    Now.seconds = now
    return Claim(owner, attempt, now, until)


class TestGuard:
    def test_done_is_done(self, guard: Guard) -> None:
        assert guard.begin("k", claim()) == Begun(1)
        guard.finish("k", 1, {"total": [1, 2.5, None]})
        assert guard.begin("k", claim("m2", 1)) == Done({"total": [1, 2.5, None]})
        assert guard.begin("k", claim("m1", 7, now=10_000)) == Done({"total": [1, 2.5, None]})
        with pytest.raises(Superseded):
            guard.finish("k", 1, "again")

    def test_another_message_waits_until_the_first_cannot_go_on(self, guard: Guard) -> None:
        guard.begin("k", claim("m1"))
        assert guard.begin("k", claim("m2", 5)) == Busy(200.0)
        assert guard.begin("k", claim("m2", 5, now=200.0, until=300.0)) == Begun(2)

    def test_the_same_message_takes_over_when_it_is_received_again(self, guard: Guard) -> None:
        guard.begin("k", claim("m1", 1))
        assert guard.begin("k", claim("m1", 1)) == Busy(200.0)
        assert guard.begin("k", claim("m1", 2)) == Begun(2)
        with pytest.raises(Superseded):
            guard.finish("k", 1, "stale")
        guard.abandon("k", 1)
        assert guard.begin("k", claim("m2", 1)) == Busy(200.0)
        guard.finish("k", 2, "fresh")
        assert guard.begin("k", claim("m2", 1)) == Done("fresh")

    def test_abandoned_is_free(self, guard: Guard) -> None:
        guard.begin("k", claim("m1"))
        guard.abandon("k", 1)
        guard.abandon("unknown", 1)
        assert guard.begin("k", claim("m2")) == Begun(2)

    def test_one_of_many_begins(self, guard: Guard) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: guard.begin("k", claim(f"m{number}")), range(40)))
        assert Counter(type(answer) for answer in answers) == {Begun: 1, Busy: 39}

    def test_one_of_many_takes_over(self, guard: Guard) -> None:
        guard.begin("k", claim("dead"))
        with ThreadPoolExecutor(8) as pool:
            late = [claim(f"m{number}", now=300, until=400) for number in range(40)]
            answers = list(pool.map(lambda one: guard.begin("k", one), late))
        assert Counter(type(answer) for answer in answers) == {Begun: 1, Busy: 39}

    def test_a_result_that_cannot_be_said_leaves_it_open(self, guard: Guard) -> None:
        guard.begin("k", claim())
        with pytest.raises(TypeError):
            guard.finish("k", 1, object())
        guard.finish("k", 1, None)
        assert guard.begin("k", claim()) == Done(None)

    def test_the_directory_sweeps(self, tmp_path: Path) -> None:
        guard = DirectoryGuard(tmp_path)
        guard.begin("done", claim())
        guard.finish("done", 1, 1)
        guard.begin("open", claim(until=float(2**40)))
        assert guard.sweep(before=0) == 0
        assert guard.sweep(before=float(2**39)) == 1
        assert guard.begin("done", claim()) == Begun(1)
        assert isinstance(guard.begin("open", claim("other")), Busy)

    def test_a_table_is_named_plainly(self) -> None:
        with pytest.raises(ParameterInvalid, match="table"):
            TableGuard(lambda: sqlite3.connect(":memory:"), table="a; drop table b")


@pytest.mark.parametrize(("there", "receive_count", "fence"), [(5, 2, 6), (4, 4, 5), (1, 4, 4)])
def test_a_hand_writes_above_all_that_was_there(
    stage: Stage, tmp_path: Path, there: int, receive_count: int, fence: int
) -> None:
    """Also above the one of its own receive count: a message that was moved may count anew."""
    stage.send("a")
    (came,) = stage.queue.receive()
    message = msgspec.structs.replace(came, receive_count=receive_count)
    records = FileCheckpoints(tmp_path / "records")
    records.save(f"work/{message.id}", Saved(there, "earlier"))
    lease = LeaseKeeper.passive(stage.queue).register(message)
    hand = Hand("work", message, lease, capabilities=stage.queue.capabilities, lane=None,
                seconds=30, stop_before=0, checkpoints=records)  # fmt: skip
    hand.load()
    assert (hand.state, hand.fence) == ("earlier", fence)
    hand.checkpoint("mine", None)
    with pytest.raises(LeaseTaken):
        records.save(hand.key, Saved(fence - 1, "theirs"))


class TestGuardedWork:
    def test_a_second_delivery_gets_the_result_and_deletes(self, stage: Stage, guard: Guard) -> None:
        stage.send("order 7", "order 7")
        results: list[Any] = []

        def handler(job: Any) -> dict[str, int]:
            stage.note(job)
            return {"sum": 42}

        counts = stage.work(
            handler,
            guard=guard,
            guard_key=lambda message: message.body,
            on_result=lambda _, value: results.append(value),
        )
        assert stage.seen == ["order 7"]
        assert results == [{"sum": 42}] * 2
        assert counts.outcomes == {"done": 1, "repeated": 1}
        assert stage.nothing_left()

    def test_a_delete_that_never_arrived_costs_no_second_run(self, stage: Stage, guard: Guard) -> None:
        stage.send("a")
        (received,) = stage.queue.receive(lease=0.2)
        key = f"work/{received.id}"
        assert guard.begin(key, claim(key, 1)) == Begun(1)
        guard.finish(key, 1, "result")
        counts = stage.work(stage.note, receives=1, guard=guard, wait=2.0)
        assert (stage.seen, counts.outcomes) == ([], {"repeated": 1})

    def test_a_failure_may_be_repeated(self, stage: Stage, guard: Guard) -> None:
        stage.send("a")

        def handler(job: Any) -> None:
            stage.note(job)
            if job.receive_count < 3:
                raise RuntimeError("not yet")

        counts = stage.work(handler, guard=guard, guard_key=lambda message: message.body)
        assert stage.seen == ["a"] * 3
        assert counts.outcomes == {"failed": 2, "done": 1}

    def test_what_another_one_does_is_left_to_it(self, stage: Stage, guard: Guard) -> None:
        stage.send("k")
        far = float(2**40)
        guard.begin("k", claim("m", 1, until=far))

        def finish(message: Received) -> str:
            if message.receive_count == 3:
                guard.finish("k", 1, "theirs")
            return message.body

        counts = stage.work(stage.note, guard=guard, guard_key=finish)
        assert (stage.seen, counts.outcomes) == ([], {"busy": 2, "repeated": 1})

    def test_a_result_that_cannot_be_stored_fails_its_message(self, stage: Stage, guard: Guard) -> None:
        stage.send("a")
        counts = stage.work(lambda job: object() if job.receive_count == 1 else "fine", guard=guard)
        assert counts.outcomes == {"failed": 1, "done": 1}

    def test_a_guard_that_fails_keeps_the_message(self, stage: Stage) -> None:
        class Broken:
            tries = 0

            def begin(self, key: str, wanted: Claim) -> Begun:
                self.tries += 1
                if self.tries < 3:
                    raise OSError("disk")
                return Begun(1)

            def finish(self, key: str, fence: int, result: Any) -> None: ...

            def abandon(self, key: str, fence: int) -> None: ...

        stage.send("a")
        assert stage.work(stage.note, guard=Broken()).outcomes == {"failed": 2, "done": 1}
        assert stage.seen == ["a"]
