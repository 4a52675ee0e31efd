"""BigMessageSizeQueue (document 002, messages beyond 64 KiB).

Strategy: ours is LargeMessageQueue. `ossClient` is a URL up to the bucket (`s3://`, `oss://`, `file:///directory`),
since the object store comes through fsspec; `ossBucketName` is appended.
"""

from veilmq.client import checked
from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.queues import AnyQueue, MessageQueue, queue_of
from veilmq.client.large.queue import LargeMessageQueue
from veilmq.client.unreadable import DeadLetters, keep


@documented
class BigMessageSizeQueue(MessageQueue):
    """Large bodies go to the object store, small ones through the queue as they are."""

    queue: LargeMessageQueue

    def __init__(
        self, cq: AnyQueue, ossClient: str, ossBucketName: str, deadLetterQueue: AnyQueue | None = None
    ) -> None:
        """deadLetterQueue: where a message goes whose object is missing or damaged; without one it stays in the queue
        and comes again."""
        self.queue = LargeMessageQueue(
            queue_of(cq),
            f"{ossClient.rstrip('/')}/{ossBucketName}",
            unreadable=keep if deadLetterQueue is None else DeadLetters(queue_of(deadLetterQueue)),
        )

    def setBigMessageSize(self, bigMessageSize: int) -> None:
        """Bytes above which a body goes to the object store; 64 KiB without this."""
        self.queue.threshold_bytes = checked.at_least(bigMessageSize, "bigMessageSize", 0)

    def setNeedDeleteMessageObjectOnOSSFlag(self, flag: bool) -> None:
        """Whether a delete takes the object along; yes without this."""
        self.queue.delete_object = flag
