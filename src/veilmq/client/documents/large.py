"""BigMessageSizeQueue (document 002, messages beyond 64 KiB).

Strategy: ours is LargeMessageQueue. `ossClient` is a URL up to the bucket (`s3://`, `oss://`, `file:///directory`),
since the object store comes through fsspec; `ossBucketName` is appended.
"""

from contextlib import ExitStack

from veilmq.client import checked
from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.queues import AnyQueue, MessageQueue, queue_of
from veilmq.client.large.queue import LargeMessageQueue


@documented
class BigMessageSizeQueue(MessageQueue):
    """Large bodies go to the object store, small ones through the queue as they are."""

    queue: LargeMessageQueue

    def __init__(
        self, cq: AnyQueue, ossClient: str, ossBucketName: str, deadLetterQueue: AnyQueue | None = None
    ) -> None:
        """deadLetterQueue: where a message goes whose object is missing or damaged; without one it stays in the queue
        and comes again."""
        with ExitStack() as undo:
            inner = undo.enter_context(queue_of(cq))
            if deadLetterQueue is not None:
                self._dead_letters = undo.enter_context(queue_of(deadLetterQueue))
            place = f"{ossClient.rstrip('/')}/{ossBucketName}"
            self.queue = LargeMessageQueue(inner, place, unreadable=self._set_aside())
            undo.pop_all()

    def setBigMessageSize(self, bigMessageSize: int) -> None:
        """Bytes above which a body goes to the object store; 64 KiB without this."""
        self.queue.threshold_bytes = checked.at_least(bigMessageSize, "bigMessageSize", 0)

    def setNeedDeleteMessageObjectOnOSSFlag(self, flag: bool) -> None:
        """Whether a delete takes the object along; yes without this."""
        self.queue.delete_object = flag
