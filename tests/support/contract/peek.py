"""Peeks: show what a receive would return, and change nothing."""

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, refused, sending

from veilmq.model.commands import Peek
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.settings.queue import QueueKey


class TestPeek:
    """Peeks."""

    def test_a_peek_shows_the_message_and_grants_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        sent = stage.send(queue, "hello")
        start = stage.following()
        (seen,) = stage.peek(queue)
        assert (seen.id, seen.sequence, seen.body, seen.sent) == (sent.id, sent.sequence, "hello", stage.now)
        assert (seen.handle, seen.due, seen.receive_count, seen.first_received) == ("", None, 0, None)
        assert stage.events(start) == []
        assert stage.take(queue).receive_count == 1
        assert stage.peek(queue) == []

    def test_a_peek_of_what_came_back_tells_of_its_receives(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        first = stage.take(queue, lease_us=SECOND_US)
        stage.later(SECOND_US)
        (seen,) = stage.peek(queue)
        assert (seen.receive_count, seen.first_received) == (1, first.first_received)

    def test_a_peek_has_the_order_of_a_receive_though_no_sweep_came(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(4):
            stage.send(queue, str(number))
        stage.take(queue, lease_us=3 * SECOND_US)
        stage.take(queue, lease_us=2 * SECOND_US)
        stage.take(queue, lease_us=SECOND_US)
        stage.later(3 * SECOND_US)
        for count in range(1, 5):
            assert bodies(stage.peek(queue, count)) == ["3", "2", "1", "0"][:count]

    def test_a_peek_does_not_show_the_dead_or_the_delayed(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "dead", ttl_us=SECOND_US)
        stage.send(queue, "delayed", delay_us=MINUTE_US)
        stage.send(queue, "alive")
        stage.later(SECOND_US)
        assert bodies(stage.peek(queue)) == ["alive"]

    def test_a_peek_sees_what_is_committed(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "committed")
        stage.store.apply([sending(queue, "open")], stage.now)
        assert bodies(stage.peek(queue)) == ["committed"]
        stage.store.commit()
        assert bodies(stage.peek(queue)) == ["committed", "open"]

    def test_a_peek_into_no_queue_is_refused(self, stage: Stage) -> None:
        missing = QueueKey(ACCOUNT, REGION, "nowhere")
        refused(stage.store.query(Peek(queue=missing, origin=TESTER), stage.now), QueueMissing)
