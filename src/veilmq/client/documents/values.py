"""Messages, settings and exceptions with the names of the documents' SDKs.

Strategy: a `Message` is mutable, because the documents' code builds it by setters; `received` holds our own value. A
method that takes a message to send also takes plain text and the message objects of aliyun-mns-sdk.

ClientException and ServiceException are as the documents' listings catch them: an error raised by a method of this
package has two parents, our class and one of theirs: both `except QueueMissing` and `except ServiceException` catch it.
A network error is a ClientException, a refusal of the service is a ServiceException. An error about this machine (a
storage, a key file) keeps our class only.
"""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Self, TypeVar

from veilmq.client import errors as client
from veilmq.client.clock import SYSTEM
from veilmq.client.messages import Message as Outgoing
from veilmq.client.messages import Peeked, Received, Template
from veilmq.model import errors as model
from veilmq.model.errors import ParameterInvalid, VeilError, as_fields


class Message:
    """A message. Java: setMessageBody, getMessageBody, getReceiptHandle; Python: message_body, receipt_handle."""

    def __init__(self, message_body: str = "") -> None:
        self.message_body = message_body
        self.message_id = ""
        self.receipt_handle = ""
        self.dequeue_count = 0
        self.delay_seconds: float | None = None
        self.received: Received | None = None
        """Our port's message, for callers who need more."""

    @classmethod
    def of(cls, received: Received) -> Self:
        """The message from a receive."""
        message = cls.peeked(received)
        message.receipt_handle = received.handle
        message.received = received
        return message

    @classmethod
    def peeked(cls, shown: Peeked) -> Self:
        """The message from a peek."""
        message = cls(shown.body)
        message.message_id = shown.id
        message.dequeue_count = shown.receive_count
        return message

    @classmethod
    def like(cls, message: "Sendable") -> Self:
        """A message of this class with the body and the delay of `message`."""
        sent = outgoing(message)
        made = cls(sent.body)
        made.delay_seconds = sent.delay
        return made

    def setMessageBody(self, body: str) -> None:
        """The text to send."""
        self.message_body = body

    def setDelaySeconds(self, seconds: float) -> None:
        """How long it is hidden after the send; by default the queue's own delay."""
        self.delay_seconds = seconds

    def getDelaySeconds(self) -> float | None:
        """The value set by setDelaySeconds."""
        return self.delay_seconds

    def getMessageBody(self) -> str:
        """The text."""
        return self.message_body

    def getMessageBodyAsRawString(self) -> str:
        """The text as it was published, by RawTopicMessage for instance."""
        return self.message_body

    def getReceiptHandle(self) -> str:
        """The argument for deleteMessage."""
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
    """Our value of the message to send. Raises ParameterInvalid if it is not a message."""
    if isinstance(message, str):
        return Outgoing(message)
    body = getattr(message, "message_body", _MISSING)
    if not isinstance(body, str):
        raise ParameterInvalid(parameter="message", reason="must be a Message or text")
    delay = getattr(message, "delay_seconds", None)
    # aliyun-mns-sdk stores -1 if no delay was set.
    return Outgoing(body, delay=None if delay == -1 else delay)


def received_of(message: Message | Received | Any) -> Received:
    """Our value of a received message: one of ours, of this package, or of an SDK (MNS's, boto3's, Azure's).

    An SDK does not report how much of the lease is left by this machine's clock. So the lease counts as over, and a
    keeper extends the message first. Raises ParameterInvalid for a message that was not received.
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
    """Id, handle and body of an SDK's message; None for each that is missing."""
    if isinstance(message, Mapping):  # from boto3's client
        return message.get("MessageId"), message.get("ReceiptHandle"), message.get("Body")
    receipt = getattr(message, "pop_receipt", None)
    if receipt:
        from veilmq.client.adapters.azure.calls import handle_of  # the azure package needs the SDK

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
    """A message whose text is sent unchanged. Bodies are never encoded here, so it behaves like its parent."""


class QueueMeta:
    """Settings of a queue to create; those not set get the protocol's default."""

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
        """How long a receive waits if it names no wait."""
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
        """The settings as our Template."""
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


Documented = TypeVar("Documented", bound=type)


class _Theirs(VeilError):
    """The methods of the Java SDK's exceptions."""

    ours: ClassVar[type[VeilError]] = VeilError
    """Our class of the error."""

    def getErrorCode(self) -> str:
        """MNS's code, or another service's."""
        return str(getattr(self, "code", None) or _code_of(type(self)))

    def getMessage(self) -> str:
        """A sentence that says what happened."""
        return str(self)

    def getRequestId(self) -> str:
        """The service's request id; empty if it gave none."""
        return self.request_id

    def printStackTrace(self) -> None:
        """Print to standard error."""
        traceback.print_exception(self, file=sys.stderr)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.ours, as_fields(self)), {"request_id": self.request_id} if self.request_id else None


class ClientException(_Theirs):
    """Something is wrong with the network between the client and the service."""


class ServiceException(_Theirs):
    """The service refused; `getErrorCode` says why."""


_OF_NETWORK: Final = (client.TransportError, client.ObjectStoreFailed)
_OF_THIS_MACHINE: Final = (
    client.EncodingMismatch,
    client.GapFound,
    client.KeyFileInvalid,
    client.QueueRecreated,
    client.StateInvalid,
    client.StorageHeld,
    client.StorageLost,
    client.Unreadable,
    model.CapabilityMissing,
)

_CODES: Final[dict[type[VeilError], str]] = {
    model.QueueMissing: "QueueNotExist",
    model.QueueExists: "QueueAlreadyExist",
    model.QueueDeletedRecently: "QueueDeletedRecently",
    model.ReceiptInvalid: "ReceiptHandleError",
    model.LeaseError: "MessageNotExist",
    model.TopicMissing: "TopicNotExist",
    model.TopicExists: "TopicAlreadyExist",
    model.SubscriptionExists: "SubscriptionAlreadyExist",
    model.CapacityError: "TooManyRequests",
    model.StoreError: "InternalError",
    model.UsageError: "InvalidArgument",
    client.TransportError: "NetworkError",
    client.ObjectStoreFailed: "NetworkError",
}
"""Class of error -> code; the nearest base class applies."""


def in_their_words(error: VeilError) -> VeilError:
    """The same error in a class that also has the documents' exception as a base."""
    if isinstance(error, (_Theirs, *_OF_THIS_MACHINE)):
        return error
    family = ClientException if isinstance(error, _OF_NETWORK) else ServiceException
    theirs = _both(family, type(error))(**as_fields(error))
    theirs.request_id = error.request_id
    return theirs


_made: Final[dict[type[VeilError], type[VeilError]]] = {}


def _both(family: type[_Theirs], ours: type[VeilError]) -> type[VeilError]:
    """The class with both bases, created once."""
    made = _made.get(ours)
    if made is None:
        made = type(ours.__name__, (family, ours), {"ours": ours, "__module__": __name__})
        made.fields = ours.fields
        made = _made.setdefault(ours, made)
    return made


def _again(ours: type[VeilError], values: dict[str, Any]) -> VeilError:
    return in_their_words(ours(**values))


def _code_of(kind: type[VeilError]) -> str:
    return next((_CODES[each] for each in kind.__mro__ if each in _CODES), "InternalError")


def documented(kind: Documented) -> Documented:
    """Decorates a class: its public methods and its constructor raise errors that the documents' names also catch."""
    for name, each in list(vars(kind).items()):
        if inspect.isfunction(each) and (not name.startswith("_") or name == "__init__"):
            setattr(kind, name, _translating(each))
    return kind


def _translating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def translated(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except VeilError as error:
            theirs = in_their_words(error)
            if theirs is error:
                raise
            raise theirs.with_traceback(error.__traceback__) from error.__cause__

    return translated
