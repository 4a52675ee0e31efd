"""Message move tasks: one row holds a task through all its steps, and a message is always in exactly one queue."""

from itertools import pairwise
from typing import Any

import pytest
from tests.support.conservation import ledgers
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, expect, refused, sending

from veilmq.model.commands import CancelMove, CreateQueue, ListMoves, Receive, StartMove, Sweep
from veilmq.model.errors import MovesFull, ParameterInvalid, QueueMissing
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Attribute, Extras, id_text
from veilmq.model.moves import (
    MOVES_PER_SECOND_MAX,
    TASK_US_MAX,
    TASKS_ACTIVE_MAX,
    TASKS_KEPT,
    MoveFailure,
    MoveInfo,
    MoveStatus,
)
from veilmq.model.outcomes import MoveCancelled, MovesListed, MoveStarted
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each

LEASE_US = SECOND_US


def _dead_letters(stage: Stage, count: int, name: str = "jobs", **extras: Any) -> tuple[QueueKey, QueueKey]:
    """A queue and its dead-letter queue, which holds so many messages: `0`, `1`, ..."""
    suffix = FIFO_SUFFIX if name.endswith(FIFO_SUFFIX) else ""
    dead = stage.create("dead" + suffix)
    queue = stage.create(name, redrive=RedrivePolicy(dead, 1))
    for number in range(count):
        _dead_letter(stage, queue, str(number), **extras)
    return queue, dead


def _dead_letter(stage: Stage, queue: QueueKey, body: str, **extras: Any) -> None:
    if queue.name.endswith(FIFO_SUFFIX):
        extras = {"group": "one", "deduplication_id": body} | extras
    stage.send(queue, body, extras=Extras(**extras))
    stage.take(queue, lease_us=LEASE_US)
    stage.later(LEASE_US)
    assert stage.receive(queue) == []


def _start(stage: Stage, source: QueueKey, **fields: Any) -> MoveInfo:
    return expect(stage.do(StartMove(queue=source, origin=TESTER, **fields)), MoveStarted).info


def _tasks(stage: Stage, source: QueueKey, count_max: int = TASKS_KEPT) -> list[MoveInfo]:
    return expect(stage.do(ListMoves(queue=source, origin=TESTER, count_max=count_max)), MovesListed).tasks


def latest_move(stage: Stage, source: QueueKey) -> MoveInfo:
    """The latest task of a source."""
    return _tasks(stage, source, 1)[0]


def _finish(stage: Stage, source: QueueKey) -> MoveInfo:
    """Sweep as time goes by until the task has ended."""
    for _ in range(1_000):
        stage.sweep()
        if latest_move(stage, source).status not in {MoveStatus.RUNNING, MoveStatus.CANCELLING}:
            return latest_move(stage, source)
        stage.later(SECOND_US)
    raise AssertionError("the task finds no end")


def _balanced(stage: Stage) -> None:
    """Every queue holds what its history says."""
    for incarnation, book in ledgers(stage.events()).items():
        names = {event.queue for event in stage.events() if event.incarnation == incarnation and event.queue}
        for name in names:
            assert sum(stage.counts(QueueKey(ACCOUNT, REGION, name))) == book.live, name


class TestMoves:
    """Message move tasks."""

    def test_messages_go_back_to_where_they_came_from_as_new_ones(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 3, attributes=(Attribute("colour", "String", "blue"),))
        other = stage.create("other", redrive=RedrivePolicy(dead, 1))
        _dead_letter(stage, other, "elsewhere")
        before = {message.body: message for message in stage.peek(dead)}
        started = _start(stage, dead)
        assert (started.status, started.moved, started.to_move) == (MoveStatus.RUNNING, 0, 4)
        assert (started.source, started.destination, started.started) == (dead, None, stage.now)
        ended = _finish(stage, dead)
        assert (ended.status, ended.moved, ended.id) == (MoveStatus.COMPLETED, 4, started.id)
        assert stage.counts(dead) == (0, 0, 0)
        assert bodies(stage.peek(other)) == ["elsewhere"]
        moved = stage.receive(queue, 10)
        assert bodies(moved) == ["0", "1", "2"]
        for message in moved:
            old = before[message.body]
            assert message.id != old.id
            assert message.sent > old.sent
            assert message.receive_count == 1
            assert message.extras.attributes == old.extras.attributes
            assert message.extras.dead_letter_source is None
        _balanced(stage)

    def test_messages_go_to_the_destination_whatever_their_source(self, stage: Stage) -> None:
        _, dead = _dead_letters(stage, 2)
        stage.send(dead, "sent here")
        destination = stage.create("third")
        _start(stage, dead, destination=destination)
        assert _finish(stage, dead).status is MoveStatus.COMPLETED
        assert bodies(stage.receive(destination, 10)) == ["0", "1", "sent here"]

    def test_a_move_is_one_event_that_names_both_ends(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 1)
        (old,) = stage.peek(dead)
        _start(stage, dead)
        start = stage.following()
        _finish(stage, dead)
        (event,) = stage.events(start)
        new = stage.take(queue)
        assert (event.kind, event.queue) == ("moved", "dead")
        assert (event.sequence, event.message) == (old.sequence, id_text(old.id))
        assert (event.protocol, event.principal) == (TESTER.protocol, TESTER.principal)
        assert event.detail == {
            "target": stage.describe(queue).incarnation,
            "target_sequence": new.sequence,
            "target_message": id_text(new.id),
        }

    def test_a_waiting_receiver_of_the_destination_is_told(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 1)
        _start(stage, dead)
        assert stage.batch([Sweep()]).visible[queue] == 1
        assert stage.batch([Receive(queue=queue, origin=TESTER)]).outcomes[0].messages  # type: ignore[union-attr]

    @for_each("rate", [1, 7, MOVES_PER_SECOND_MAX], fresh="stage")
    def test_the_rate_is_kept_by_the_lease_clock(self, stage: Stage, rate: int) -> None:
        dead = stage.create("dead")
        stage.create("jobs", redrive=RedrivePolicy(dead, 1))
        stage.batch([sending(dead, str(number)) for number in range(3 * rate + 5)])
        destination = stage.create("third")
        _start(stage, dead, destination=destination, rate_max=rate)
        moved = []
        for _ in range(4):
            stage.sweep()
            moved.append(latest_move(stage, dead).moved)
            assert stage.counts(destination)[0] == moved[-1]
            stage.later(SECOND_US)
        assert moved[0] == 1
        for before, after in pairwise(moved):
            assert rate - 1 <= after - before <= rate
        assert latest_move(stage, dead).rate_max == rate

    def test_after_a_pause_no_more_than_a_second_is_made_up_for(self, stage: Stage) -> None:
        dead = stage.create("dead")
        stage.create("jobs", redrive=RedrivePolicy(dead, 1))
        for number in range(100):
            stage.send(dead, str(number))
        _start(stage, dead, destination=stage.create("third"), rate_max=10)
        stage.later(HOUR_US)
        stage.sweep()
        assert latest_move(stage, dead).moved <= 11

    @pytest.mark.parametrize("kill", [False, True])
    def test_a_task_goes_on_after_a_restart(self, stage: Stage, kill: bool) -> None:
        queue, dead = _dead_letters(stage, 12)
        started = _start(stage, dead, rate_max=3)
        while latest_move(stage, dead).status is MoveStatus.RUNNING:
            stage.sweep()
            stage.reopen(kill=kill)
            stage.later(SECOND_US)
            visible = stage.counts(queue)[0] + stage.counts(dead)[0]
            assert visible == 12
        ended = latest_move(stage, dead)
        assert (ended.id, ended.moved, ended.status) == (started.id, 12, MoveStatus.COMPLETED)
        assert sorted(bodies(stage.receive(queue, 20)), key=int) == [str(number) for number in range(12)]
        _balanced(stage)

    def test_a_step_that_was_not_committed_never_was(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 5)
        _start(stage, dead)
        stage.later(SECOND_US)
        assert stage.store.apply([Sweep()], stage.now).wrote
        stage.factory.abandon(stage.store)
        assert (stage.counts(queue)[0], stage.counts(dead)[0], latest_move(stage, dead).moved) == (0, 5, 0)
        assert _finish(stage, dead).moved == 5
        assert len(stage.receive(queue, 10)) == 5

    def test_a_cancelled_task_moves_nothing_more(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 10)
        started = _start(stage, dead, rate_max=2)
        stage.sweep()
        stage.later(SECOND_US)
        stage.sweep()
        moved = latest_move(stage, dead).moved
        outcome = expect(stage.do(CancelMove(queue=dead, origin=TESTER, task=started.id)), MoveCancelled)
        assert outcome.cancelled
        assert outcome.info is not None
        assert (outcome.info.status, outcome.info.moved) == (MoveStatus.CANCELLING, moved)
        assert 0 < moved < 10
        stage.reopen(kill=True)
        stage.later(HOUR_US)
        ended = _finish(stage, dead)
        assert (ended.status, ended.moved) == (MoveStatus.CANCELLED, moved)
        assert (stage.counts(queue)[0], stage.counts(dead)[0]) == (moved, 10 - moved)
        again = expect(stage.do(CancelMove(queue=dead, origin=TESTER, task=started.id)), MoveCancelled)
        assert not again.cancelled
        unknown = expect(stage.do(CancelMove(queue=dead, origin=TESTER, task=bytes(16))), MoveCancelled)
        assert (unknown.info, unknown.cancelled) == (None, False)

    def test_a_message_that_was_sent_to_the_source_has_nowhere_to_go_back_to(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 2)
        stage.send(dead, "sent here")
        _start(stage, dead)
        ended = _finish(stage, dead)
        assert (ended.status, ended.failure, ended.moved) == (MoveStatus.FAILED, MoveFailure.SOURCE_UNKNOWN, 2)
        assert bodies(stage.peek(dead)) == ["sent here"]
        assert bodies(stage.peek(queue)) == ["0", "1"]

    def test_a_task_fails_if_the_queue_to_go_to_is_deleted(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 2)
        stage.create("other", redrive=RedrivePolicy(dead, 1))
        _start(stage, dead)
        stage.drop(queue)
        ended = _finish(stage, dead)
        assert (ended.status, ended.failure, ended.moved) == (MoveStatus.FAILED, MoveFailure.QUEUE_MISSING, 0)
        assert stage.counts(dead)[0] == 2

    @for_each("attributes", [(), (Attribute("a", "String", "x" * 600),)], fresh="stage")
    def test_a_task_fails_at_a_message_that_is_too_large_for_its_destination(
        self, stage: Stage, attributes: tuple[Attribute, ...]
    ) -> None:
        _, dead = _dead_letters(stage, 1)
        stage.send(dead, "x" * (600 if attributes else 2_000), extras=Extras(attributes=attributes))
        destination = stage.create("third", message_bytes_max=1_024)
        _start(stage, dead, destination=destination)
        ended = _finish(stage, dead)
        assert (ended.status, ended.failure, ended.moved) == (MoveStatus.FAILED, MoveFailure.MESSAGE_TOO_LARGE, 1)

    def test_what_comes_later_or_is_in_flight_stays(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 2)
        assert stage.take(dead, lease_us=HOUR_US).body == "0"
        _start(stage, dead)
        _dead_letter(stage, queue, "later")
        assert _finish(stage, dead).moved == 1
        assert bodies(stage.peek(dead)) == ["later"]
        assert stage.counts(dead) == (1, 0, 1)
        assert bodies(stage.receive(queue, 10)) == ["1"]

    def test_released_and_expired_messages_are_met_too(self, stage: Stage) -> None:
        dead = stage.create("dead", retention_us=HOUR_US)
        queue = stage.create("jobs", redrive=RedrivePolicy(dead, 1))
        _dead_letter(stage, queue, "old")
        stage.later(HOUR_US - 10 * SECOND_US)
        for body in ("released", "plain"):
            _dead_letter(stage, queue, body)
        handles = [message.handle for message in stage.receive(dead, 2, lease_us=HOUR_US)]
        for handle in handles:
            stage.extend(dead, handle, 0)
        stage.later(20 * SECOND_US)
        _start(stage, dead)
        assert _finish(stage, dead).moved == 2
        assert sorted(bodies(stage.receive(queue, 10))) == ["plain", "released"]
        _balanced(stage)

    def test_one_task_a_source_at_a_time(self, stage: Stage) -> None:
        _, dead = _dead_letters(stage, 3)
        _start(stage, dead, rate_max=1)
        error = refused(stage.do(StartMove(queue=dead, origin=TESTER)), ParameterInvalid)
        assert "already a task running" in str(error)
        _finish(stage, dead)
        _start(stage, dead)

    def test_what_cannot_begin_is_refused_and_leaves_nothing(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 1)
        fifo = stage.create("other" + FIFO_SUFFIX)
        nowhere = QueueKey(ACCOUNT, REGION, "nowhere")
        for source, fields, kind, named in (
            (nowhere, {}, QueueMissing, "nowhere"),
            (queue, {}, ParameterInvalid, "source"),
            (dead, {"destination": nowhere}, QueueMissing, "nowhere"),
            (dead, {"destination": dead}, ParameterInvalid, "destination"),
            (dead, {"destination": fifo}, ParameterInvalid, "destination"),
            (dead, {"rate_max": 0}, ParameterInvalid, "rate_max"),
            (dead, {"rate_max": MOVES_PER_SECOND_MAX + 1}, ParameterInvalid, "rate_max"),
        ):
            assert named in str(refused(stage.do(StartMove(queue=source, origin=TESTER, **fields)), kind))
        assert _tasks(stage, dead) == []
        refused(stage.do(ListMoves(queue=nowhere, origin=TESTER)), QueueMissing)
        refused(stage.do(CancelMove(queue=nowhere, origin=TESTER, task=bytes(16))), QueueMissing)

    def test_a_task_runs_for_36_hours(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 6)
        _start(stage, dead, rate_max=1)
        stage.later(TASK_US_MAX - 1)
        stage.sweep()
        running = latest_move(stage, dead)
        assert (running.status, 0 < running.moved < 6) == (MoveStatus.RUNNING, True)
        stage.later(1)
        stage.sweep()
        ended = latest_move(stage, dead)
        assert (ended.status, ended.failure, ended.moved) == (MoveStatus.FAILED, MoveFailure.TOO_LONG, running.moved)
        assert (stage.counts(queue)[0], stage.counts(dead)[0]) == (ended.moved, 6 - ended.moved)
        _start(stage, dead)
        assert _finish(stage, dead).moved == 6 - ended.moved
        _balanced(stage)

    def test_an_account_has_100_tasks_under_way_in_a_region(self, stage: Stage) -> None:
        dead = [stage.create(f"dead-{number}") for number in range(TASKS_ACTIVE_MAX + 1)]
        for number, queue in enumerate(dead):
            stage.create(f"jobs-{number}", redrive=RedrivePolicy(queue, 1))
            stage.send(queue, "stays until the first step")
        for queue in dead[:-1]:
            _start(stage, queue)
        full = refused(stage.do(StartMove(queue=dead[-1], origin=TESTER)), MovesFull)
        assert full == MovesFull(account=ACCOUNT, limit=100)
        assert _tasks(stage, dead[-1]) == []
        elsewhere = QueueKey(ACCOUNT, "eu-west-1", "dead")
        for key, change in (
            (elsewhere, {}),
            (QueueKey(ACCOUNT, "eu-west-1", "jobs"), {"redrive": RedrivePolicy(elsewhere, 1)}),
        ):
            stage.do(CreateQueue(queue=key, origin=TESTER, change=change))
        _start(stage, elsewhere)
        stage.do(CancelMove(queue=dead[0], origin=TESTER, task=latest_move(stage, dead[0]).id))
        refused(stage.do(StartMove(queue=dead[-1], origin=TESTER)), MovesFull)
        stage.drop(dead[1])
        _start(stage, dead[-1])

    def test_the_latest_tasks_are_remembered_until_the_queue_is_gone(self, stage: Stage) -> None:
        _, dead = _dead_letters(stage, 0)
        ids = []
        for _ in range(TASKS_KEPT + 2):
            ids.append(_start(stage, dead).id)
            _finish(stage, dead)
            stage.later(SECOND_US)
        assert [task.id for task in _tasks(stage, dead)] == ids[:1:-1]
        _start(stage, dead)
        stage.drop(dead)
        stage.sweep()
        stage.create("dead")
        assert _tasks(stage, dead) == []

    def test_fifo_messages_keep_the_order_of_their_group(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 0, "jobs" + FIFO_SUFFIX)
        for number in range(12):
            _dead_letter(stage, queue, str(number), group="ab"[number % 2])
        before = stage.following()
        _start(stage, dead)
        assert _finish(stage, dead).moved == 12
        assert "sent" not in stage.kinds(before)
        got: dict[str, list[int]] = {"a": [], "b": []}
        while messages := stage.receive(queue, 5):
            for message in messages:
                assert message.extras.group is not None
                got[message.extras.group].append(int(message.body))
                stage.delete(queue, message.handle)
        assert got == {"a": [0, 2, 4, 6, 8, 10], "b": [1, 3, 5, 7, 9, 11]}

    def test_a_fifo_group_in_flight_stays_whole(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 3, "jobs" + FIFO_SUFFIX)
        _dead_letter(stage, queue, "b", group="two")
        assert stage.take(dead, lease_us=HOUR_US).body == "0"
        _start(stage, dead)
        assert _finish(stage, dead).moved == 1
        assert bodies(stage.receive(queue, 10)) == ["b"]
        assert stage.counts(dead) == (2, 0, 1)

    def test_messages_of_tenants_and_priorities_are_all_moved(self, stage: Stage) -> None:
        dead = stage.create("dead")
        stage.create("jobs", redrive=RedrivePolicy(dead, 1))
        for number in range(9):
            extras = Extras(group=("x", "y", None)[number % 3])
            stage.send(dead, str(number), extras=extras, priority=8 if number < 7 else 3)
        destination = stage.create("third")
        _start(stage, dead, destination=destination)
        assert _finish(stage, dead).moved == 9
        assert sorted(bodies(stage.receive(destination, 10))) == [str(number) for number in range(9)]
        assert stage.counts(dead) == (0, 0, 0)
        _balanced(stage)

    def test_a_damaged_message_is_quarantined_and_the_others_move(self, stage: Stage) -> None:
        queue, dead = _dead_letters(stage, 3)
        damaged = stage.peek(dead)[1].sequence
        stage.store.close()
        stage.factory.damage(damaged)
        stage.store = stage.factory.open()
        start = stage.following()
        _start(stage, dead)
        assert _finish(stage, dead).moved == 2
        assert stage.kinds(start).count("quarantined") == 1
        assert bodies(stage.receive(queue, 10)) == ["0", "2"]
