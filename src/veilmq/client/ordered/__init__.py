"""Strict order over a queue that is only roughly ordered (the document's OrderedQueueWrapper).

Strategy: the sender numbers messages, durably before it sends them (sender.py); the receiver hands out only the next
number (receiving/); each keeps its count in a storage that one process at a time may hold (storage.py, tables.py). Here
are both sides as one `Queue`, so that other patterns can wrap it, and a loop that runs a handler on received messages.
A side with a storage works; a side without one raises CapabilityMissing. A peek shows bodies without numbers.
docs/patterns/ordered-queue.md.

The loop handles one message after the other, each acknowledged after its handler. In an ordered queue a failed handler
affects all later messages, so the user chooses: block (nothing later is handed out before it succeeds), dead-letter
(the order continues without it), or raise to the caller of the loop.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

from msgspec.structs import replace

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Extension, Message, Peeked, Received, Sent
from veilmq.client.ordered.numbering import marking_of
from veilmq.client.ordered.receiving import OrderedReceiver
from veilmq.client.ordered.receiving.reorder import GapPolicy, Ordered
from veilmq.client.ordered.sender import OrderedSender
from veilmq.client.ordered.storage import LocalFile, ObjectStorage, StateLock, Storage
from veilmq.client.ordered.tables import TableStorage
from veilmq.client.queue import Capabilities, HandleOnSend, Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, VeilError
from veilmq.model.messages.reports import Failure

__all__ = [
    "GapPolicy",
    "LocalFile",
    "ObjectStorage",
    "OnFailure",
    "Ordered",
    "OrderedQueue",
    "OrderedReceiver",
    "OrderedSender",
    "StateLock",
    "Storage",
    "TableStorage",
    "run",
]


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


LOOK_SECONDS: Final = 1.0
"""How often the loop checks whether to stop."""

log = logging.getLogger("veilmq.ordered")


class OnFailure(StrEnum):
    """What happens after a handler fails."""

    BLOCK = "block"
    """Hand the message out again after the retry delay, and nothing later before it."""
    DEAD_LETTER = "dead-letter"
    """Send it to the dead letters, acknowledge it, and continue."""
    RAISE = "raise"
    """Release it; the handler's exception ends the loop."""


def run(
    receiver: OrderedReceiver,
    handler: Callable[[Ordered], object],
    *,
    on_failure: OnFailure | str = OnFailure.BLOCK,
    retry_delay: float = 1.0,
    dead_letters: Queue | None = None,
    stop: threading.Event | None = None,
    idle: float | None = None,
) -> int:
    """Call `handler` for each message in order until `stop` is set, the receiver is closed, or nothing came for `idle`
    seconds (None: for ever). Returns how many it handled. Raises ParameterInvalid, the errors of `receive`, `delete`
    and `dead_letters.send`, and with OnFailure.RAISE the handler's.

    If the receiver is closed while a handler works, its message is not acknowledged: the next receiver gets it again.
    """
    policy = _policy(on_failure, dead_letters)
    stop = stop or threading.Event()
    handled = 0
    quiet = 0.0
    while not stop.is_set() and (idle is None or quiet < idle):
        look = LOOK_SECONDS if idle is None else min(LOOK_SECONDS, idle)
        messages = _next(receiver, look)
        if messages is None:
            break
        quiet = 0.0 if messages else quiet + look
        for message in messages:
            handled += _handled(receiver, message, handler, policy, retry_delay, dead_letters)
    return handled


def _next(receiver: OrderedReceiver, wait: float) -> list[Ordered] | None:
    """Messages that come within `wait` seconds; None after the receiver is closed."""
    try:
        return receiver.receive(wait=wait)
    except VeilError:
        if not receiver.closed:
            raise
        return None


def _handled(
    receiver: OrderedReceiver, message: Ordered, handler: Callable[[Ordered], object], policy: OnFailure,
    retry_delay: float, dead_letters: Queue | None,
) -> bool:  # fmt: skip
    """Returns whether the message is acknowledged. If anything raises, it is handed out again, at the latest by the
    next run."""
    done = False
    delay = 0.0
    try:
        try:
            handler(message)
        except Exception:
            if policy is OnFailure.RAISE:
                raise
            log.exception("number %d: its handler failed (%s)", message.number, policy)
            if dead_letters is None or policy is OnFailure.BLOCK:
                delay = retry_delay
                return False
            if receiver.closed:
                return False  # the next receiver gets it
            _send_on(dead_letters, message)
        done = _acknowledged(receiver, message)
    finally:
        if not done:
            with suppress(VeilError):  # it was acknowledged nevertheless, or the receiver is closed
                receiver.release(message.handle, delay)
    return done


def _acknowledged(receiver: OrderedReceiver, message: Ordered) -> bool:
    try:
        receiver.delete(message.handle)
    except VeilError as error:
        if not receiver.closed:
            raise
        log.warning("number %d is handled and not acknowledged: it comes again (%s)", message.number, error)
        return False
    return True


def _send_on(dead_letters: Queue, message: Ordered) -> None:
    can = dead_letters.capabilities
    dead_letters.send(
        Message(
            message.body,
            attributes=message.attributes if can.attributes else {},
            type=message.type if can.attributes else None,
            group=(message.group or message.id) if can.native_fifo else None,
            deduplication_id=message.id if can.native_fifo else None,
        )
    )


def _policy(given: OnFailure | str, dead_letters: Queue | None) -> OnFailure:
    try:
        policy = OnFailure(given)
    except ValueError:
        reason = f"must be one of {', '.join(OnFailure)}, not {given!r}"
        raise ParameterInvalid(parameter="on_failure", reason=reason) from None
    if policy is OnFailure.DEAD_LETTER and dead_letters is None:
        raise ParameterInvalid(parameter="dead_letters", reason="is needed for on_failure=dead-letter")
    return policy
