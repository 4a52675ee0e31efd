"""Delays: a message is never visible early, and afterwards behaves like any other."""

from tests.support.contract.stage import Stage, bodies, expect, refused

from veilmq.model.errors import LeaseTaken
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.outcomes import Deleted, Extended
from veilmq.testing.for_each import for_each


class TestDelays:
    """Delays."""

    @for_each("kill", [None, False, True], fresh="stage")
    def test_a_message_comes_at_the_end_of_its_delay_and_not_before(self, stage: Stage, kill: bool | None) -> None:
        queue = stage.create(delay_us=10 * SECOND_US)
        stage.send(queue)
        assert stage.counts(queue) == (0, 1, 0)
        if kill is not None:
            stage.reopen(kill=kill)
            assert stage.counts(queue) == (0, 1, 0)
        stage.later(10 * SECOND_US - 1)
        assert stage.receive(queue) == []
        assert stage.peek(queue) == []
        stage.later(1)
        message = stage.take(queue)
        assert (message.receive_count, message.sent) == (1, stage.now - 10 * SECOND_US)

    def test_a_messages_own_delay_goes_before_the_queues(self, stage: Stage) -> None:
        queue = stage.create(delay_us=10 * SECOND_US)
        stage.send(queue, "now", delay_us=0)
        stage.send(queue, "later", delay_us=MINUTE_US)
        assert bodies(stage.receive(queue, 10)) == ["now"]
        stage.later(MINUTE_US - 1)
        assert bodies(stage.receive(queue, 10)) == ["now"]
        stage.later(1)
        assert bodies(stage.receive(queue, 10)) == ["later"]

    def test_the_queues_delay_of_the_day_of_the_send_counts(self, stage: Stage) -> None:
        queue = stage.create(delay_us=10 * SECOND_US)
        stage.send(queue, "old")
        stage.change(queue, delay_us=0)
        stage.send(queue, "new")
        assert bodies(stage.receive(queue, 10)) == ["new"]

    def test_the_sweeper_makes_it_visible_and_says_so(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, delay_us=SECOND_US)
        stage.later(SECOND_US)
        stage.sweep()
        assert stage.counts(queue) == (1, 0, 0)

    def test_visible_since_is_the_end_of_the_delay(self, stage: Stage) -> None:
        queue = stage.create()
        sent = stage.send(queue, delay_us=SECOND_US)
        stage.later(3 * SECOND_US)
        stage.take(queue)
        (event,) = [event for event in stage.events() if event.kind == "received"]
        assert event.visible_since == sent.visible

    def test_a_handle_from_the_send_moves_the_delay(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.send(queue, delay_us=10 * SECOND_US, wants_handle=True).handle
        moved = expect(stage.extend(queue, handle, 3 * SECOND_US), Extended)
        assert moved.due == stage.now + 3 * SECOND_US
        assert stage.counts(queue) == (0, 1, 0)
        stage.later(3 * SECOND_US)
        assert stage.take(queue).receive_count == 1
        refused(stage.extend(queue, handle, 0), LeaseTaken)

    def test_a_handle_from_the_send_hides_a_message_that_stands_in_line(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "0")
        handle = stage.send(queue, "1", wants_handle=True).handle
        stage.send(queue, "2")
        rotated = expect(stage.extend(queue, handle, 3 * SECOND_US, rotate=True), Extended).handle
        assert rotated != handle
        assert stage.counts(queue) == (2, 1, 0)
        refused(stage.extend(queue, handle, 0, rotate=True), LeaseTaken)
        assert bodies(stage.receive(queue, 10)) == ["0", "2"]
        expect(stage.extend(queue, rotated, 0, rotate=True), Extended)
        assert bodies(stage.receive(queue, 10)) == ["1"]

    @for_each(("delay_us", "later_us"), [(0, 0), (0, SECOND_US), (SECOND_US, 0), (SECOND_US, SECOND_US)], fresh="stage")
    def test_a_handle_from_the_send_deletes(self, stage: Stage, delay_us: int, later_us: int) -> None:
        queue = stage.create()
        handle = stage.send(queue, delay_us=delay_us, wants_handle=True).handle
        stage.later(later_us)
        expect(stage.delete(queue, handle), Deleted)
        stage.later(MINUTE_US)
        assert stage.receive(queue) == []
        assert stage.counts(queue) == (0, 0, 0)

    def test_a_handle_from_the_send_is_void_after_a_receive(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.send(queue, wants_handle=True).handle
        message = stage.take(queue)
        refused(stage.delete(queue, handle), LeaseTaken)
        expect(stage.delete(queue, message.handle), Deleted)
