"""Receives: how many messages, for how long, the fields of each; and receives that wait for a message."""

from typing import Any

from veilmq.client.messages import Message, Template
from veilmq.client.queue import Queue
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


class TestWaiting:
    """Long polls."""

    def test_no_wait_is_no_wait_whatever_the_queue_is_set_to(self, stage: Stage) -> None:
        queue = stage.create(Template(wait=20))
        assert stage.aside(queue.receive)() == []

    def test_a_message_that_is_there_is_not_waited_for(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        (message,) = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))()
        assert message.body == "x"

    def test_a_send_wakes(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(lease=LONG, wait=stage.wait(queue)))
        queue.send("x")
        (message,) = waited()
        assert (message.body, message.receive_count) == ("x", 1)
        assert message.lease_end <= stage.clock.monotonic() + LONG
        queue.delete(message.handle)

    def test_a_release_wakes(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        queue.release(held.handle)
        (message,) = waited()
        assert (message.id, message.receive_count) == (held.id, 2)

    def test_the_end_of_a_delay_wakes(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send(Message("x", delay=SECOND))
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        stage.pass_time(2 * SECOND)
        (message,) = waited()
        assert message.body == "x"

    def test_a_wait_ends(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(wait=SECOND))
        stage.pass_time(2 * SECOND)
        assert waited() == []
        queue.send("x")
        assert len(stage.empty(queue)) == 1

    def test_many_who_wait_share_what_comes(self, stage: Stage) -> None:
        queue = stage.create()
        waits = [stage.aside(lambda: _one(queue, stage)) for _ in range(6)]
        ids = {sent(result).id for result in queue.send_batch([f"m{number}" for number in range(6)])}
        received = [wait() for wait in waits]
        assert set(received) == ids


def _one(queue: Queue, stage: Stage) -> str:
    (message,) = queue.receive(1, lease=LONG, wait=stage.wait(queue))
    return message.id
