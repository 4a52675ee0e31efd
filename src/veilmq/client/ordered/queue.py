"""Both sides as one `Queue`, so that other patterns can wrap it.

Strategy: a side with a storage works; a side without one raises CapabilityMissing. A peek shows bodies without numbers.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent
from veilmq.client.ordered.marking import marking_of
from veilmq.client.ordered.receiver import OrderedReceiver
from veilmq.client.ordered.sender import OrderedSender
from veilmq.client.ordered.storage import Storage
from veilmq.client.queue import Capabilities, HandleOnSend, Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, VeilError
from veilmq.model.reports import Failure


class OrderedQueue(Wrapping):
    """A queue whose messages are received in the order of the calls that sent them.

    A receive returns one message at a time unless `in_hand_max` is larger. Leases are renewed automatically, so a
    receive without `lease` holds its message while this process lives.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        send_storage: Storage | None = None,
        receive_storage: Storage | None = None,
        marking: str = "auto",
        reset: bool = False,
        clock: Clock = SYSTEM,
        **receiving: Any,
    ) -> None:
        """receiving: the other options of `OrderedReceiver`. Raises like `OrderedSender` and `OrderedReceiver`."""
        super().__init__(queue)
        self._marking = marking_of(marking, queue.capabilities)
        self._sender: OrderedSender | None = None
        self._receiver: OrderedReceiver | None = None
        if receive_storage is not None:
            self._receiver = OrderedReceiver(
                queue, receive_storage, marking=marking, reset=reset, clock=clock, **receiving
            )
        try:
            if send_storage is not None:
                self._sender = OrderedSender(queue, send_storage, marking=marking, reset=reset, clock=clock)
        except BaseException:
            if self._receiver is not None:
                self._receiver.close()
            raise

    @property
    def sender(self) -> OrderedSender:
        """The sending side. Raises CapabilityMissing without a send_storage."""
        if self._sender is None:
            raise CapabilityMissing(capability="sending in order without a send_storage")
        return self._sender

    @property
    def receiver(self) -> OrderedReceiver:
        """The receiving side. Raises CapabilityMissing without a receive_storage."""
        if self._receiver is None:
            raise CapabilityMissing(capability="receiving in order without a receive_storage")
        return self._receiver

    @property
    def capabilities(self) -> Capabilities:
        """The queue's, except those that would break the order."""
        return replace(
            self.inner.capabilities,
            receipts_rotate=False,
            handle_on_send=HandleOnSend.NEVER,
            body_replaceable=False,
            lease_total_max=None,
            lease_hints=False,
            ttl=False,
        )

    def send(self, message: str | Message) -> Sent:
        return replace(self.sender.send(message), handle=None)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        results = self.sender.send_batch(messages)
        return [replace(each, handle=None) if isinstance(each, Sent) else each for each in results]

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return [*self.receiver.receive(count_max, lease=lease, wait=wait)]

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        return self.receiver.extend(handle, lease, body=body)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        results: list[str | VeilError] = []
        for each in extensions:
            try:
                results.append(self.extend(each.handle, each.lease))
            except VeilError as error:
                results.append(error)
        return results

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.receiver.release(handle, delay)

    def delete(self, handle: str) -> None:
        self.receiver.delete(handle)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        return self.receiver.delete_batch(handles)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        shown = self.inner.peek(count_max)
        read = [(each, self._marking.read(each)) for each in shown]
        return [each if found is None else found[1] for each, found in read]

    def interrupt(self) -> None:
        (self._receiver or self.inner).interrupt()

    def close(self) -> None:
        """Close both sides, then the queue."""
        for side in (self._receiver, self._sender):
            if side is not None:
                side.close()
        self.inner.close()
