"""Receives: how many messages, for how long, and the fields of each."""

from typing import Any

from veilmq.client.messages import Template
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, sent, unrefused


class TestReceives:
    """Receives."""

    def test_an_empty_queue_gives_nothing(self, stage: Stage) -> None:
        assert stage.create().receive() == []

    def test_never_more_than_asked_for_and_nobody_else_gets_them(self, stage: Stage) -> None:
        queue = stage.create()
        ids = {sent(result).id for result in queue.send_batch([f"m{number}" for number in range(8)])}
        first = queue.receive(3, lease=LONG)
        assert 1 <= len(first) <= 3
        rest = stage.empty(queue)
        assert len(first) + len(rest) == 8
        assert {message.id for message in first + rest} == ids

    def test_what_no_adapter_can_do_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        fields: list[dict[str, Any]] = [{"count_max": 0}, {"count_max": -1}, {"lease": -1}, {"wait": -1}]
        assert unrefused(lambda given: queue.receive(**given), fields, parameter=lambda given: next(iter(given))) == []
        (message,) = stage.empty(queue)
        assert message.receive_count == 1

    def test_more_than_its_capabilities_say_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        able = queue.capabilities
        most = {"count_max": able.receive_messages_max, "lease": able.lease_max, "wait": able.wait_max}
        queue.send("x")

        def receive(field: str) -> Any:
            return queue.receive(**{field: most[field] + 1})  # type: ignore[arg-type]

        assert unrefused(receive, most, parameter=lambda field: field) == []
        (received,) = queue.receive(able.receive_messages_max, lease=able.lease_max)
        assert received.receive_count == 1
        queue.delete(received.handle)

    def test_a_lease_is_as_long_as_the_receive_says(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        assert queue.receive() == []
        stage.pass_time(stage.brief + SECOND)
        again = stage.take(queue)
        assert (again.id, again.receive_count) == (message.id, 2)

    def test_without_one_it_is_the_queues(self, stage: Stage) -> None:
        queue = stage.create(Template(visibility_timeout=2 * SECOND))
        queue.send("x")
        before = stage.clock.monotonic()
        (message,) = queue.receive()
        assert before <= message.lease_end - 2 * SECOND <= stage.clock.monotonic()
        stage.pass_time(3 * SECOND)
        assert stage.take(queue).id == message.id

    def test_the_end_of_a_lease_is_told_on_the_monotonic_clock(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        before = stage.clock.monotonic()
        (message,) = queue.receive(lease=LONG)
        assert before <= message.lease_end - LONG <= stage.clock.monotonic()

    def test_the_count_of_receives_grows_and_the_first_stays(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        first = message.first_received
        for count in (2, 3):
            queue.release(message.handle)
            stage.back(queue)
            message = stage.take(queue)
            assert (message.receive_count, message.first_received) == (count, first)
