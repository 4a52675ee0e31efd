"""Waiting receives: a message wakes them, and a receive waits only on request."""

from veilmq.client.messages import Message, Template
from veilmq.client.queue import Queue
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, sent


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
