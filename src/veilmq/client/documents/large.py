"""BigMessageSizeQueue (document 002, messages beyond 64 KiB).

Strategy: ours is LargeMessageQueue. `ossClient` is a URL up to the bucket (`s3://`, `oss://`, `file:///directory`),
since the object store comes through fsspec; `ossBucketName` is appended.
"""

from veilmq.client.closing import Closing
from veilmq.client.documents.messages import Message
from veilmq.client.large.queue import LargeMessageQueue
from veilmq.client.queue import Queue
from veilmq.client.unreadable import DeadLetters


class BigMessageSizeQueue(Closing):
    """Large bodies go to the object store, small ones through the queue as they are."""

    def __init__(self, cq: Queue, ossClient: str, ossBucketName: str, deadLetterQueue: Queue) -> None:
        """deadLetterQueue: where a message goes whose object is missing or damaged."""
        self._cq = cq
        self._store = f"{ossClient.rstrip('/')}/{ossBucketName}"
        self._dead = deadLetterQueue
        self._threshold_bytes = 65_536
        self._delete_object = True
        self._make()

    def setBigMessageSize(self, bigMessageSize: int) -> None:
        """Bytes above which a body goes to the object store; 64 KiB unless told."""
        self._threshold_bytes = bigMessageSize
        self._make()

    def setNeedDeleteMessageObjectOnOSSFlag(self, flag: bool) -> None:
        """Whether a delete takes the object along; yes unless told."""
        self._delete_object = flag
        self._make()

    def putMessage(self, message: Message) -> Message:
        """Send."""
        message.message_id = self.queue.send(message.message_body).id
        return message

    def popMessage(self, waitSeconds: float = 0) -> Message | None:
        """Receive one with its whole body; None if nothing came."""
        found = self.queue.receive(wait=waitSeconds)
        return Message.of(found[0]) if found else None

    def deleteMessage(self, receiptHandle: str) -> None:
        """Done with it. In any process: the handle knows the object."""
        self.queue.delete(receiptHandle)

    def close(self) -> None:
        """Let the queue go."""
        self.queue.close()

    def _make(self) -> None:
        self.queue = LargeMessageQueue(
            self._cq,
            self._store,
            unreadable=DeadLetters(self._dead),
            threshold_bytes=self._threshold_bytes,
            delete_object=self._delete_object,
        )
