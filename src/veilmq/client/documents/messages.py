"""Messages and settings, as the documents' SDKs spell them.

Strategy: a `Message` is mutable, because the documents' code builds it by setters; what a receive gave is behind it.
"""

from veilmq.client.messages import Received, Template


class Message:
    """A message. Java: setMessageBody, getMessageBody, getReceiptHandle; Python: message_body, receipt_handle."""

    def __init__(self, message_body: str = "") -> None:
        self.message_body = message_body
        self.message_id = ""
        self.receipt_handle = ""
        self.dequeue_count = 0
        self.received: Received | None = None
        """What our port gave, for those who need more."""

    @classmethod
    def of(cls, received: Received) -> "Message":
        """The message that a receive brought."""
        message = cls(received.body)
        message.message_id = received.id
        message.receipt_handle = received.handle
        message.dequeue_count = received.receive_count
        message.received = received
        return message

    def setMessageBody(self, body: str) -> None:
        """The text to send."""
        self.message_body = body

    def getMessageBody(self) -> str:
        """The text."""
        return self.message_body

    def getMessageBodyAsRawString(self) -> str:
        """The text as it was published: what RawTopicMessage sends."""
        return self.message_body

    def getReceiptHandle(self) -> str:
        """What deleteMessage needs."""
        return self.receipt_handle

    def getMessageId(self) -> str:
        """Its id."""
        return self.message_id

    def getDequeueCount(self) -> int:
        """How often it was received."""
        return self.dequeue_count


class TopicMessage:
    """A message for a topic."""

    def __init__(self, message_body: str = "", message_tag: str | None = None) -> None:
        self.message_body = message_body
        self.message_tag = message_tag

    def setBaseMessageBody(self, body: str) -> None:
        """The text to publish."""
        self.message_body = body

    def setMessageTag(self, tag: str) -> None:
        """The tag that subscriptions filter by."""
        self.message_tag = tag


class RawTopicMessage(TopicMessage):
    """A message whose text goes as it is. Bodies are never encoded here, so that it is the same as its parent."""


class QueueMeta:
    """Settings of a queue to create; what is not set is the protocol's default."""

    def __init__(self) -> None:
        self.queue_name = ""
        self.polling_wait_seconds: float | None = None
        self.visibility_timeout: float | None = None
        self.message_retention_period: float | None = None
        self.delay_seconds: float | None = None
        self.maximum_message_size: int | None = None

    def setQueueName(self, name: str) -> None:
        """The queue's name."""
        self.queue_name = name

    def setPollingWaitSeconds(self, seconds: float) -> None:
        """How long a receive without a wait of its own waits."""
        self.polling_wait_seconds = seconds

    def setVisibilityTimeout(self, seconds: float) -> None:
        """The lease of a receive that names none."""
        self.visibility_timeout = seconds

    def setMessageRetentionPeriod(self, seconds: float) -> None:
        """How long a message is kept."""
        self.message_retention_period = seconds

    def setDelaySeconds(self, seconds: float) -> None:
        """How long a new message is hidden."""
        self.delay_seconds = seconds

    def setMaxMessageSize(self, size_bytes: int) -> None:
        """Largest message."""
        self.maximum_message_size = size_bytes

    def template(self) -> Template:
        """The same in our words."""
        return Template(
            visibility_timeout=self.visibility_timeout,
            delay=self.delay_seconds,
            retention=self.message_retention_period,
            wait=self.polling_wait_seconds,
            message_bytes_max=self.maximum_message_size,
        )


class TopicMeta:
    """Settings of a topic to create."""

    def __init__(self) -> None:
        self.topic_name = ""

    def setTopicName(self, name: str) -> None:
        """The topic's name."""
        self.topic_name = name
