"""Deduplication on FIFO queues: five minutes from the send, to the microsecond."""

from hashlib import sha256

import pytest
from tests.support.contract.fifo import fifo
from tests.support.contract.stage import Stage, bodies, expect, refused, sending

from veilmq.model.errors import MessageTooLarge, ParameterInvalid
from veilmq.model.instant import MINUTE_US
from veilmq.model.messages import Extras, id_text
from veilmq.model.outcomes import Deleted, Sent
from veilmq.model.settings.queue import DeduplicationScope, QueueKey
from veilmq.testing.for_each import for_each

WINDOW_US = 5 * MINUTE_US


def give(stage: Stage, queue: QueueKey, body: str, identity: str | None, group: str = "a") -> Sent:
    """Send with a deduplication id."""
    return stage.send(queue, body, extras=Extras(group=group, deduplication_id=identity))


class TestFifoDeduplication:
    """Deduplication."""

    def test_a_duplicate_is_absorbed_and_gets_the_answer_of_the_first(self, stage: Stage) -> None:
        queue = fifo(stage)
        first = give(stage, queue, "one", "x")
        stage.later(1)
        again = give(stage, queue, "two", "x")
        assert again.duplicate
        assert not first.duplicate
        assert (again.id, again.sequence, again.sent) == (first.id, first.sequence, first.sent)
        assert bodies(stage.receive(queue, 10)) == ["one"]

    def test_it_is_an_event_that_says_whether_the_body_was_the_same(self, stage: Stage) -> None:
        queue = fifo(stage)
        first = give(stage, queue, "one", "x")
        start = stage.following()
        give(stage, queue, "one", "x")
        give(stage, queue, "another", "x")
        events = stage.events(start)
        assert [event.kind for event in events] == ["duplicate_absorbed"] * 2
        assert {(event.message, event.sequence, event.group) for event in events} == {
            (id_text(first.id), first.sequence, "a")
        }
        assert [event.detail for event in events] == [{"same_body": True}, {"same_body": False}]
        assert [event.body_bytes for event in events] == [3, 7]

    @pytest.mark.parametrize("kill", [None, False, True])
    @for_each("sweep", [False, True], fresh="stage")
    def test_the_window_ends_exactly_five_minutes_after_the_send(
        self, stage: Stage, sweep: bool, kill: bool | None
    ) -> None:
        queue = fifo(stage)
        give(stage, queue, "one", "x")
        stage.later(WINDOW_US // 2)
        assert give(stage, queue, "again", "x").duplicate, "and a duplicate does not begin a window of its own"
        stage.later(WINDOW_US // 2 - 1)
        if sweep:
            stage.sweep()
        if kill is not None:
            stage.reopen(kill=kill)
        assert give(stage, queue, "before", "x").duplicate
        stage.later(1)
        if sweep:
            stage.sweep()
        assert not give(stage, queue, "after", "x").duplicate
        assert give(stage, queue, "after it", "x").duplicate, "a new window"
        assert bodies(stage.receive(queue, 10)) == ["one", "after"]

    def test_it_outlives_the_message(self, stage: Stage) -> None:
        queue = fifo(stage)
        first = give(stage, queue, "one", "x")
        expect(stage.delete(queue, stage.take(queue).handle), Deleted)
        assert give(stage, queue, "two", "x").id == first.id
        assert stage.counts(queue) == (0, 0, 0)

    @for_each("by_group", [False, True], fresh="stage")
    def test_a_purge_forgets_it(self, stage: Stage, by_group: bool) -> None:
        queue = fifo(stage, **({"deduplication_scope": DeduplicationScope.GROUP} if by_group else {}))
        give(stage, queue, "one", "x")
        stage.purge(queue)
        second = give(stage, queue, "two", "x")
        assert not second.duplicate
        stage.reopen(kill=True)
        assert give(stage, queue, "three", "x").id == second.id
        assert bodies(stage.receive(queue, 10)) == ["two"]

    def test_it_does_not_outlive_the_queue(self, stage: Stage) -> None:
        queue = fifo(stage)
        give(stage, queue, "one", "x")
        stage.drop(queue)
        assert fifo(stage) == queue
        assert not give(stage, queue, "two", "x").duplicate

    def test_it_holds_within_one_batch(self, stage: Stage) -> None:
        queue = fifo(stage)
        commands = [
            sending(queue, body, extras=Extras(group="a", deduplication_id=identity))
            for body, identity in (("1", "x"), ("2", "y"), ("3", "x"), ("4", "y"), ("5", "z"))
        ]
        sent = [expect(outcome, Sent) for outcome in stage.batch(commands).outcomes]
        assert [one.duplicate for one in sent] == [False, False, True, True, False]
        assert (sent[2].id, sent[3].id) == (sent[0].id, sent[1].id)
        assert bodies(stage.receive(queue, 10)) == ["1", "2", "5"]

    def test_a_batch_that_is_rolled_back_opens_no_window(self, stage: Stage) -> None:
        queue = fifo(stage)
        stage.store.apply([sending(queue, "never", extras=Extras(group="a", deduplication_id="x"))], stage.now)
        stage.factory.abandon(stage.store)
        assert not give(stage, queue, "one", "x").duplicate

    def test_by_content_the_body_is_the_id(self, stage: Stage) -> None:
        queue = fifo(stage)
        first = give(stage, queue, "one", None)
        assert give(stage, queue, "one", None).id == first.id
        assert give(stage, queue, "one", sha256(b"one").hexdigest()).id == first.id
        assert not give(stage, queue, "One", None).duplicate
        assert stage.take(queue).extras.deduplication_id == sha256(b"one").hexdigest()

    def test_an_explicit_id_wins_over_the_content(self, stage: Stage) -> None:
        queue = fifo(stage)
        give(stage, queue, "one", "x")
        assert not give(stage, queue, "one", "y").duplicate
        assert not give(stage, queue, "one", None).duplicate
        assert [message.extras.deduplication_id for message in stage.receive(queue, 2)] == ["x", "y"]

    def test_without_either_the_send_is_refused(self, stage: Stage) -> None:
        queue = fifo(stage, content_deduplication=False)
        error = refused(stage.do(sending(queue, extras=Extras(group="a"))), ParameterInvalid)
        assert error.parameter == "deduplication_id"  # type: ignore[attr-defined]
        assert stage.counts(queue) == (0, 0, 0)
        assert not give(stage, queue, "one", "x").duplicate

    def test_the_scope_is_the_queue(self, stage: Stage) -> None:
        queue, other = fifo(stage), fifo(stage, "other.fifo")
        first = give(stage, queue, "one", "x", "a")
        assert give(stage, queue, "two", "x", "b").id == first.id
        assert not give(stage, other, "one", "x").duplicate

    def test_the_scope_can_be_the_group(self, stage: Stage) -> None:
        queue = fifo(stage, deduplication_scope=DeduplicationScope.GROUP)
        give(stage, queue, "one", "x", "a")
        assert not give(stage, queue, "one", "x", "b").duplicate
        assert give(stage, queue, "two", "x", "a").duplicate

    @for_each("kill", [False, True], fresh="stage")
    def test_a_change_of_the_scope_forgets_nothing(self, stage: Stage, kill: bool) -> None:
        queue = fifo(stage)
        first = give(stage, queue, "one", "x", "a")
        stage.change(queue, deduplication_scope=DeduplicationScope.GROUP)
        if kill:
            stage.reopen(kill=True)
        assert give(stage, queue, "again", "x", "a").id == first.id
        other = give(stage, queue, "two", "y", "b")
        stage.change(queue, deduplication_scope=DeduplicationScope.QUEUE)
        assert give(stage, queue, "again", "x", "b").id == first.id
        assert give(stage, queue, "again", "y", "a").id == other.id
        assert bodies(stage.receive(queue, 10)) == ["one", "two"]
        stage.later(WINDOW_US)
        assert not give(stage, queue, "anew", "x", "b").duplicate

    def test_scope_and_id_cannot_be_taken_for_each_other(self, stage: Stage) -> None:
        queue = fifo(stage, deduplication_scope=DeduplicationScope.GROUP)
        give(stage, queue, "one", "bc", "a")
        assert not give(stage, queue, "one", "c", "ab").duplicate

    def test_what_was_refused_opens_no_window(self, stage: Stage) -> None:
        queue = fifo(stage, message_bytes_max=3)
        refused(stage.do(sending(queue, "long", extras=Extras(group="a", deduplication_id="x"))), MessageTooLarge)
        assert not give(stage, queue, "one", "x").duplicate

    def test_old_rows_are_swept(self, stage: Stage) -> None:
        queue = fifo(stage)
        for number in range(600):
            give(stage, queue, str(number), str(number))
        stage.later(WINDOW_US)
        stage.sweep()
        assert stage.sweep_once().steps == 0, "it said that there was more until all were gone"
        assert not give(stage, queue, "again", "0").duplicate
