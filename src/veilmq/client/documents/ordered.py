"""OrderedQueueWrapper and LocalDiskStorage of the document's Python listings (document 002).

Strategy: ours is OrderedQueue with the document's own marking, `#num#`. The sample deletes a message before it hands
it out and loses it in a crash; here a message is acknowledged by the next ReceiveMessageInOrder, by DeleteMessage, or
never: then it comes again.
"""

from collections.abc import Mapping

from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.messages import Message, Sendable, outgoing
from veilmq.client.documents.queues import AnyQueue, OverQueue, queue_of
from veilmq.client.ordered.queue import OrderedQueue
from veilmq.client.ordered.storage import LocalFile, Storage
from veilmq.model.errors import LeaseError, ReceiptInvalid


class LocalDiskStorage(LocalFile):
    """Sequence numbers in a local file: `{"localFileName": path}`."""

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__(config["localFileName"])


@documented
class OrderedQueueWrapper(OverQueue):
    """Strict order over a queue that is only roughly ordered: one sending process, one receiving process."""

    queue: OrderedQueue

    def __init__(
        self,
        queue: AnyQueue,
        sendSeqIdPersistStorage: Storage | None = None,
        receiveSeqIdPersistStorage: Storage | None = None,
    ) -> None:
        """Raises what `OrderedQueue` raises: a second process on the same storage, a queue that was created anew."""
        self.queue = OrderedQueue(
            queue_of(queue),
            send_storage=sendSeqIdPersistStorage,
            receive_storage=receiveSeqIdPersistStorage,
            marking="#num#",
        )
        self._handed: str | None = None

    def SendMessageInOrder(self, message: Sendable) -> Message:
        """Send it after all that was sent before."""
        sent = self.queue.send(outgoing(message))
        put = message if isinstance(message, Message) else Message.like(message)
        put.message_id = sent.id
        return put

    def ReceiveMessageInOrder(self, wait_seconds: float = 0) -> Message | None:
        """The next message in order, waiting up to so long; None if it did not come. Acknowledges the one before."""
        self._acknowledge()
        found = self.queue.receive(wait=wait_seconds)
        if not found:
            return None
        self._handed = found[0].handle
        return Message.of(found[0])

    def DeleteMessage(self, message: Message) -> None:
        """Acknowledge it now, and not with the next receive."""
        self.queue.delete(message.receipt_handle)
        if self._handed == message.receipt_handle:
            self._handed = None

    def close(self) -> None:
        """Let the storages go. The message handed out last is not acknowledged: delete it first, if it is done."""
        self.queue.close()

    def _acknowledge(self) -> None:
        """What fails is tried again with the next call: until it is acknowledged nothing else comes."""
        if self._handed is None:
            return
        try:
            self.queue.delete(self._handed)
        except (LeaseError, ReceiptInvalid):
            self._handed = None
            raise
        self._handed = None
