"""Messages and settings, as the documents' SDKs spell them.

Strategy: a `Message` is mutable, because the documents' code builds it by setters; what a receive gave is behind it.
What takes a message to send also takes plain text and the message objects of aliyun-mns-sdk.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

from veilmq.client.clock import SYSTEM
from veilmq.client.messages import Message as Outgoing
from veilmq.client.messages import Peeked, Received, Template
from veilmq.model.errors import ParameterInvalid


class Message:
    """A message. Java: setMessageBody, getMessageBody, getReceiptHandle; Python: message_body, receipt_handle."""

    def __init__(self, message_body: str = "") -> None:
        self.message_body = message_body
        self.message_id = ""
        self.receipt_handle = ""
        self.dequeue_count = 0
        self.delay_seconds: float | None = None
        self.received: Received | None = None
        """What our port gave, for those who need more."""

    @classmethod
    def of(cls, received: Received) -> Self:
        """The message that a receive brought."""
        message = cls.peeked(received)
        message.receipt_handle = received.handle
        message.received = received
        return message

    @classmethod
    def peeked(cls, shown: Peeked) -> Self:
        """The message that a peek shows."""
        message = cls(shown.body)
        message.message_id = shown.id
        message.dequeue_count = shown.receive_count
        return message

    @classmethod
    def like(cls, message: "Sendable") -> Self:
        """A message of this class with the body and the delay of that one."""
        sent = outgoing(message)
        made = cls(sent.body)
        made.delay_seconds = sent.delay
        return made

    def setMessageBody(self, body: str) -> None:
        """The text to send."""
        self.message_body = body

    def setDelaySeconds(self, seconds: float) -> None:
        """How long it is hidden after the send; without it the queue's own delay counts."""
        self.delay_seconds = seconds

    def getDelaySeconds(self) -> float | None:
        """What setDelaySeconds said."""
        return self.delay_seconds

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


Sendable = Message | str | Any
"""Any: a message of aliyun-mns-sdk, with `message_body` and `delay_seconds`."""
_MISSING: Final = object()


def outgoing(message: Sendable) -> Outgoing:
    """The message to send in our words. Raises ParameterInvalid for what is none."""
    if isinstance(message, str):
        return Outgoing(message)
    body = getattr(message, "message_body", _MISSING)
    if not isinstance(body, str):
        raise ParameterInvalid(parameter="message", reason="must be a Message or text")
    delay = getattr(message, "delay_seconds", None)
    # aliyun-mns-sdk writes -1 for a delay that was not named.
    return Outgoing(body, delay=None if delay == -1 else delay)


def received_of(message: Message | Received | Any) -> Received:
    """What a receive gave, in our words: of ours, of this room, or of an SDK (MNS's, boto3's, Azure's).

    An SDK does not tell how much of the lease is left by this machine's clock: it counts as over, so that a keeper
    extends the message before anything else. Raises ParameterInvalid for a message that nobody received.
    """
    if isinstance(message, Received):
        return message
    received = getattr(message, "received", None)
    if isinstance(received, Received):
        return received
    message_id, handle, body = None, None, None
    if not isinstance(message, Message):
        message_id, handle, body = _parts_of(message)
    if not (isinstance(handle, str) and handle and isinstance(message_id, str)):
        raise ParameterInvalid(parameter="message", reason="must be one that was received")
    return Received(id=message_id, body=str(body or ""), handle=handle, lease_end=SYSTEM.monotonic())


def _parts_of(message: Any) -> tuple[Any, Any, Any]:
    """Id, handle and body of an SDK's message; None for what it lacks."""
    if isinstance(message, Mapping):  # of boto3's client
        return message.get("MessageId"), message.get("ReceiptHandle"), message.get("Body")
    receipt = getattr(message, "pop_receipt", None)
    if receipt:
        from veilmq.client.azure.messages import handle_of  # its package needs the SDK

        return message.id, handle_of(message.id, receipt), message.content
    body = getattr(message, "message_body", None) or getattr(message, "body", None)
    return getattr(message, "message_id", None), getattr(message, "receipt_handle", None), body


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
