"""Dead letters of FIFO queues: order and group are kept, the group's lock ends when the message leaves."""

from typing import Any
from uuid import UUID

from tests.support.contract.fifo import clear, fifo, put
from tests.support.contract.stage import TESTER, Stage, bodies, refused

from veilmq.model.commands import Receive
from veilmq.model.errors import RedriveRefused
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each

LEASE_US = SECOND_US


def pair(stage: Stage, receive_count_max: int = 1, **target: Any) -> tuple[QueueKey, QueueKey]:
    """A queue and its dead-letter queue."""
    dead = fifo(stage, "dead.fifo", **target)
    return fifo(stage, redrive=RedrivePolicy(dead, receive_count_max)), dead


def fail(stage: Stage, queue: QueueKey, count: int = 1) -> None:
    """Let the leases of the first messages end."""
    assert len(stage.receive(queue, count, lease_us=LEASE_US)) == count
    stage.later(LEASE_US)


class TestFifoDeadLetters:
    """Dead letters of FIFO queues."""

    @for_each("kill", [False, True], fresh="stage")
    def test_the_next_of_the_group_takes_its_place_in_the_same_receive(self, stage: Stage, kill: bool) -> None:
        queue, dead = pair(stage)
        (sent, *_) = put(stage, queue, "a1", "a2", "a3", "b1")
        fail(stage, queue)
        assert bodies(stage.receive(queue, 3)) == ["b1", "a2", "a3"]
        if kill:
            stage.reopen(kill=True)
        assert (stage.counts(queue), stage.counts(dead)) == ((0, 0, 3), (1, 0, 0))
        moved = stage.take(dead)
        assert (moved.id, moved.body, moved.receive_count) == (sent.id, "a1", 1)
        assert (moved.extras.group, moved.extras.dead_letter_source) == ("a", queue)
        assert moved.sequence > sent.sequence

    def test_the_move_begins_a_new_time_to_live(self, stage: Stage) -> None:
        queue, dead = pair(stage, retention_us=2 * HOUR_US)
        put(stage, queue, "a1")
        stage.later(HOUR_US)
        fail(stage, queue)
        assert stage.receive(queue) == []
        moved = stage.now
        stage.later(2 * HOUR_US - 1)
        (message,) = stage.peek(dead)
        assert (message.sent, message.expires) == (moved, moved + 2 * HOUR_US)
        stage.later(1)
        assert stage.receive(dead) == []

    def test_the_order_of_a_group_is_kept(self, stage: Stage) -> None:
        queue, dead = pair(stage)
        put(stage, queue, "a1", "a2", "b1", "a3")
        fail(stage, queue, 4)
        assert stage.receive(queue, 10) == []
        assert bodies(stage.receive(dead, 10)) == ["a1", "a2", "a3", "b1"]

    def test_a_group_of_the_target_that_is_locked_stays_locked(self, stage: Stage) -> None:
        queue, dead = pair(stage)
        put(stage, dead, "a0")
        held = stage.take(dead, lease_us=HOUR_US)
        put(stage, queue, "a1")
        fail(stage, queue)
        receive = Receive(queue=queue, origin=TESTER)
        assert dead not in stage.batch([receive]).visible
        assert stage.receive(dead) == []
        clear(stage, dead, [held])
        assert stage.take(dead).body == "a1"

    def test_who_waits_for_the_target_is_told_once_a_group(self, stage: Stage) -> None:
        queue, dead = pair(stage)
        put(stage, queue, "a1", "a2", "b1")
        fail(stage, queue, 3)
        assert stage.batch([Receive(queue=queue, origin=TESTER, count_max=10)]).visible[dead] == 2

    def test_more_than_one_receive_moves_on_its_way_are_all_moved_in_the_end(self, stage: Stage) -> None:
        queue, dead = pair(stage)
        texts = [f"a{number}" for number in range(200)]
        put(stage, queue, *texts)
        fail(stage, queue, 200)
        put(stage, queue, "a-good", "b-good")
        got: list[str] = []
        for _ in range(20):
            got += bodies(stage.receive(queue, 1, lease_us=HOUR_US))
        assert sorted(got) == ["a-good", "b-good"]
        assert bodies(stage.receive(dead, 200)) == texts

    def test_the_target_takes_it_though_it_had_the_same_deduplication_id(self, stage: Stage) -> None:
        queue, dead = pair(stage)
        put(stage, dead, "a1")
        put(stage, queue, "a1")
        fail(stage, queue)
        assert stage.receive(queue) == []
        assert bodies(stage.receive(dead, 10)) == ["a1", "a1"]

    def test_the_deduplication_id_gives_way_to_the_messages_id(self, stage: Stage) -> None:
        """Developer Guide, "Configure a dead-letter queue redrive": whether it was given, or made of the content."""
        queue, dead = pair(stage)
        stage.change(queue, content_deduplication=True)
        given = stage.send(queue, "given", extras=Extras(group="a", deduplication_id="mine"))
        made = stage.send(queue, "made", extras=Extras(group="b"))
        assert stage.peek(queue)[0].extras.deduplication_id == "mine"
        fail(stage, queue, 2)
        assert stage.receive(queue) == []
        moved = stage.receive(dead, 10)
        assert [got.extras.deduplication_id for got in moved] == [str(UUID(bytes=sent.id)) for sent in (given, made)]
        assert [got.id for got in moved] == [given.id, made.id]

    def test_only_what_was_received_too_often_goes_while_later_ones_are_in_flight(self, stage: Stage) -> None:
        queue, dead = pair(stage)
        put(stage, queue, "a1", "a2", "a3")
        first, second = stage.receive(queue, 2, lease_us=HOUR_US)
        stage.extend(queue, first.handle, 0)
        assert stage.receive(queue, 10) == [], "a1 is gone, a2 is in flight, a3 waits"
        assert (stage.counts(queue), stage.counts(dead)) == ((1, 0, 1), (1, 0, 0))
        clear(stage, queue, [second])
        assert bodies(stage.receive(queue, 10)) == ["a3"]

    @for_each("count", [1, 3, 10], fresh="stage")
    def test_a_queue_may_be_its_own_dead_letter_queue(self, stage: Stage, count: int) -> None:
        queue = fifo(stage)
        stage.change(queue, redrive=RedrivePolicy(queue, 1))
        put(stage, queue, "a1", "a2", "b1", "a3")
        fail(stage, queue, 1)
        got = bodies(stage.receive(queue, count, lease_us=HOUR_US))
        assert got == ["b1", "a2", "a3"][:count], "a1 goes to the end of its group, and comes no more in this receive"
        assert stage.counts(queue) == (4 - len(got), 0, len(got))
        stage.reopen(kill=True)
        assert sum(stage.counts(queue)) == 4
        stage.later(HOUR_US)
        got = []
        for _ in range(4):
            taken = stage.receive(queue, 10)
            got += bodies(taken)
            clear(stage, queue, taken)
        assert sorted(got) == ["a1", "a2", "a3", "b1"]
        assert stage.counts(queue) == (0, 0, 0)

    def test_both_ends_are_of_one_kind(self, stage: Stage) -> None:
        queue, standard = fifo(stage), stage.create("standard")
        refused(stage.change(queue, redrive=RedrivePolicy(standard, 1)), RedriveRefused)
        refused(stage.change(standard, redrive=RedrivePolicy(queue, 1)), RedriveRefused)
