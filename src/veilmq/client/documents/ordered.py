"""OrderedQueueWrapper and LocalDiskStorage of the document's Python listings (document 002).

Strategy: our class is OrderedQueue with the document's own marking, `#num#`. The sample deletes a message before it
returns it, and a crash loses the message. Here a message is acknowledged when the program goes on without an error: by
the next ReceiveMessageInOrder, by DeleteMessage, by `close`, or by the normal end of the program. A program that ends
by an exception or is killed has not acknowledged the message, and gets it again.
"""

import atexit
import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.messages import Message, Sendable, outgoing
from veilmq.client.documents.queues import AnyQueue, OverQueue, queue_of
from veilmq.client.ordered.queue import OrderedQueue
from veilmq.client.ordered.storage import LocalFile, Storage
from veilmq.model.errors import LeaseError, ReceiptInvalid, VeilError

log = logging.getLogger("veilmq.documents")


class LocalDiskStorage(LocalFile):
    """Sequence numbers in a local file: `{"localFileName": path}`."""

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__(config["localFileName"])


@documented
class OrderedQueueWrapper(OverQueue):
    """Strict order over a queue that is only roughly ordered: one sending and one receiving process."""

    queue: OrderedQueue

    def __init__(
        self,
        queue: AnyQueue,
        sendSeqIdPersistStorage: Storage | None = None,
        receiveSeqIdPersistStorage: Storage | None = None,
    ) -> None:
        """Raises what `OrderedQueue` raises: a second process on the same storage, a queue that was created again."""
        with ExitStack() as undo:
            self.queue = OrderedQueue(
                undo.enter_context(queue_of(queue)),
                send_storage=sendSeqIdPersistStorage,
                receive_storage=receiveSeqIdPersistStorage,
                marking="#num#",
            )
            undo.pop_all()
        self._handed: str | None = None
        """Handle of the message that was returned last, until it is acknowledged."""
        self._by: threading.Thread | None = None
        """The thread that received it."""

    def SendMessageInOrder(self, message: Sendable) -> Message:
        """Send it after everything that was sent before."""
        sent = self.queue.send(outgoing(message))
        put = message if isinstance(message, Message) else Message.like(message)
        put.message_id = sent.id
        return put

    def ReceiveMessageInOrder(self, wait_seconds: float = 0) -> Message | None:
        """The next message in order, within the wait; None if none came. Acknowledges the previous one."""
        self._acknowledge()
        _AT_EXIT.add(self)
        found = self.queue.receive(wait=wait_seconds)
        if not found:
            return None
        self._handed, self._by = found[0].handle, threading.current_thread()
        return Message.of(found[0])

    def DeleteMessage(self, message: Message) -> None:
        """Acknowledge it now instead of at the next receive."""
        self.queue.delete(message.receipt_handle)
        if self._handed == message.receipt_handle:
            self._handed = None

    def close(self) -> None:
        """Acknowledge the message that was returned last, and close the storages; the caller's queue stays open.

        While an exception is being handled (in its `except` or `finally`, or at the end of a `with` that it leaves) the
        message is not acknowledged, and comes again.
        """
        try:
            if sys.exc_info()[0] is None:
                self._acknowledge()
        finally:
            self._handed = None
            _AT_EXIT.discard(self)
            self.queue.close()

    def _acknowledge(self) -> None:
        """A failed acknowledgement is retried at the next call; nothing else is returned until it succeeds."""
        if self._handed is None:
            return
        try:
            self.queue.delete(self._handed)
        except (LeaseError, ReceiptInvalid):
            self._handed = None
            raise
        self._handed = None

    def _end(self, failed: bool) -> None:
        """The program ends. A message that another thread received may still be in work, so it is not acknowledged."""
        try:
            if not failed and self._by is threading.main_thread():
                self._acknowledge()
        finally:
            self.queue.receiver.close()


class _AtExit:
    """Closes the receiving wrappers when the interpreter ends, so that the next program need not wait."""

    def __init__(self) -> None:
        self._wrappers: dict[int, OrderedQueueWrapper] = {}

    def add(self, wrapper: OrderedQueueWrapper) -> None:
        """Close it at the end, before objects that were opened earlier."""
        if id(wrapper) not in self._wrappers:
            self._wrappers[id(wrapper)] = wrapper
            atexit.unregister(self.run)
            atexit.register(self.run)

    def discard(self, wrapper: OrderedQueueWrapper) -> None:
        """Forget a wrapper that was closed."""
        self._wrappers.pop(id(wrapper), None)

    def run(self) -> None:
        """Called when the interpreter ends; `sys.last_value` holds an exception that ended the program."""
        for wrapper in list(self._wrappers.values()):
            if wrapper.queue.receiver.inherited:
                continue  # belongs to the process from which this one was forked
            try:
                wrapper._end(failed=hasattr(sys, "last_value"))
            except (VeilError, OSError) as error:
                log.warning("the message received last may come again: %s", error)


_AT_EXIT: Final = _AtExit()
