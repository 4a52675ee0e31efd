"""The delay of FIFO queues: a message's own from its send on, and the queue's current one."""

from tests.support.contract.fifo import clear, fifo, put
from tests.support.contract.stage import TESTER, Stage, bodies, expect

from veilmq.model.commands import Delete
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Extended
from veilmq.testing.for_each import for_each


class TestFifoDelay:
    """The delay of a FIFO queue."""

    def test_a_delayed_first_message_blocks_its_group(self, stage: Stage) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        put(stage, queue, "a1")
        assert stage.counts(queue) == (0, 1, 0)
        stage.later(SECOND_US // 2)
        put(stage, queue, "a2", "b1")
        assert stage.receive(queue, 10) == []
        stage.later(SECOND_US // 2)
        assert bodies(stage.receive(queue, 10)) == ["a1"], "a2 is delayed still"
        assert stage.counts(queue) == (0, 2, 1)
        stage.later(SECOND_US // 2)
        assert bodies(stage.receive(queue, 10)) == ["b1"], "a1 is in flight"

    @for_each("identity", [None, "id"], fresh="stage")
    def test_a_delay_of_0_is_none_of_the_messages_own(self, stage: Stage, identity: str | None) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        stage.send(queue, delay_us=0, extras=Extras(group="a", deduplication_id=identity))
        assert stage.counts(queue) == (0, 1, 0)

    def test_a_group_is_freed_into_the_delay_of_its_next_message(self, stage: Stage) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        put(stage, queue, "a1")
        stage.later(SECOND_US // 2)
        put(stage, queue, "a2")
        stage.later(SECOND_US // 2)
        clear(stage, queue, [stage.take(queue)])
        assert stage.receive(queue) == []
        stage.later(SECOND_US // 2)
        assert stage.take(queue).body == "a2"

    def test_a_group_ends_at_its_first_delayed_message(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        second = stage.send(queue, "a2", extras=Extras(group="a"), wants_handle=True)
        put(stage, queue, "a3")
        expect(stage.extend(queue, second.handle, SECOND_US), Extended)
        assert bodies(stage.peek(queue)) == ["a1"]
        first = stage.receive(queue, 10)
        assert bodies(first) == ["a1"]
        delete = Delete(queue=queue, origin=TESTER, handle=first[0].handle, arrived=stage.now)
        assert stage.batch([delete]).visible == {}, "the next one is delayed"
        assert stage.receive(queue, 10) == []
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a2", "a3"]

    @for_each("kill", [False, True], fresh="stage")
    def test_delays_go_on_over_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        put(stage, queue, "a1", "a2")
        stage.reopen(kill=kill)
        assert stage.counts(queue) == (0, 2, 0)
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a1", "a2"]

    def test_many_delayed_messages_do_not_hide_the_groups_behind(self, stage: Stage) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        put(stage, queue, "a1")
        stage.later(SECOND_US // 4)
        b1 = stage.send(queue, "b1", extras=Extras(group="b"), wants_handle=True)
        late = [stage.send(queue, f"a{n}", extras=Extras(group="a"), wants_handle=True) for n in range(2, 30)]
        for sent in late:
            expect(stage.extend(queue, sent.handle, HOUR_US), Extended)
        assert b1.handle
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a1", "b1"]

    @for_each("sweep", [False, True], fresh="stage")
    def test_a_change_acts_on_what_is_there(self, stage: Stage, sweep: bool) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        put(stage, queue, "a1", "b1")
        stage.later(SECOND_US)
        stage.take(queue, lease_us=HOUR_US)
        put(stage, queue, "c1")
        if sweep:
            stage.sweep()
        stage.change(queue, delay_us=3 * SECOND_US)
        assert stage.counts(queue) == (0, 2, 1), "what was received keeps its lease"
        assert stage.receive(queue, 10) == []
        stage.later(2 * SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["b1"]
        stage.change(queue, delay_us=0)
        assert bodies(stage.receive(queue, 10)) == ["c1"]

    def test_a_raised_delay_hides_what_was_never_delayed(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        stage.later(SECOND_US)
        put(stage, queue, "a3", "b1")
        stage.change(queue, delay_us=2 * SECOND_US)
        assert stage.counts(queue) == (0, 4, 0)
        stage.reopen()
        assert stage.counts(queue) == (0, 4, 0)
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a1", "a2"]
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["b1"]

    def test_a_delay_that_is_over_does_not_keep_a_message_from_the_next(self, stage: Stage) -> None:
        queue = fifo(stage, delay_us=SECOND_US)
        put(stage, queue, "a1")
        stage.later(3 * SECOND_US)
        assert stage.counts(queue) == (1, 0, 0)
        stage.change(queue, delay_us=2 * SECOND_US)
        assert stage.counts(queue) == (1, 0, 0)
        stage.change(queue, delay_us=10 * SECOND_US)
        assert stage.counts(queue) == (0, 1, 0), "as one that was never delayed"
        stage.later(7 * SECOND_US)
        assert stage.take(queue).body == "a1"
