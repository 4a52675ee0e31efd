"""The minimum for an adapter: one message through every call, refusals before any I/O, and a deleted queue."""

from collections.abc import Callable
from typing import Any, Final

from veilmq.client.messages import Extension, Message
from veilmq.client.queue import Queue
from veilmq.model.errors import ParameterInvalid, QueueMissing, ReceiptInvalid
from veilmq.testing.client_contract.stage import LONG, Stage, sent, unrefused

BODY: Final = "žluť 漢 <&>\r\n"

REFUSED: Final[dict[str, Callable[[Queue], Any]]] = {
    "no message": lambda queue: queue.send(3),  # type: ignore[arg-type]
    "a field of another type": lambda queue: queue.send(Message("x", delay="3")),  # type: ignore[arg-type]
    "a body that XML cannot carry": lambda queue: queue.send("\0"),
    "no list": lambda queue: queue.send_batch("abc"),
    "no count": lambda queue: queue.receive(0),
    "no lease": lambda queue: queue.receive(lease=-1),
    "no wait": lambda queue: queue.receive(wait=float("nan")),
    "a handle that is no text": lambda queue: queue.delete(3),  # type: ignore[arg-type]
    "a lease that is no number": lambda queue: queue.extend("0" * 66, "3"),  # type: ignore[arg-type]
}
NEED_THE_QUEUE: Final[dict[str, Callable[[Queue, str], Any]]] = {
    "send": lambda queue, _: queue.send("x"),
    "send_batch": lambda queue, _: queue.send_batch(["x"]),
    "receive": lambda queue, _: queue.receive(),
    "extend": lambda queue, handle: queue.extend(handle, LONG),
    "delete": lambda queue, handle: queue.delete(handle),
    "stats": lambda queue, _: queue.stats(),
}


class TestSmoke:
    """In place of the classes that another form of the adapter has passed."""

    def test_a_message_goes_through_every_call(self, stage: Stage) -> None:
        queue = stage.create()
        sending = [queue.send(BODY), *map(sent, queue.send_batch([BODY, Message(BODY)]))]
        if queue.capabilities.peek:
            assert [message.body for message in queue.peek(3)] == [BODY] * 3
        held = stage.empty(queue)
        assert {(message.id, message.body) for message in held} == {(result.id, BODY) for result in sending}
        replaceable = queue.capabilities.body_replaceable
        handle = queue.extend(held[0].handle, LONG, body=BODY * 2 if replaceable else None)
        (again,) = queue.extend_batch([Extension(handle, LONG)])
        assert isinstance(again, str)
        queue.release(again)
        stage.back(queue)
        message = stage.take(queue)
        assert (message.id, message.body) == (held[0].id, BODY * (1 + replaceable))
        queue.delete(message.handle)
        assert queue.delete_batch([message.handle for message in held[1:]]) == [None, None]
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_what_cannot_be_is_refused_before_any_io(self, stage: Stage) -> None:
        """Tested on a deleted queue."""
        queue = stage.create()
        stage.account.delete(queue.name)
        assert unrefused(lambda what: REFUSED[what](queue), REFUSED, (ParameterInvalid, ReceiptInvalid)) == []

    def test_each_call_tells_that_the_queue_is_gone(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.held(queue).handle
        stage.account.delete(queue.name)
        assert unrefused(lambda call: NEED_THE_QUEUE[call](queue, handle), NEED_THE_QUEUE, QueueMissing) == []
