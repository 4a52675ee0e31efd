"""Results of the operations: the service model's output shapes as typed structs.

Strategy: an operation returns one of these, and either wire form encodes it. Members that are None are not written.
"""

import msgspec

from veilmq.protocols.sqs.operations.veil_shapes import VeilResult


class _Result(msgspec.Struct, rename="pascal", omit_defaults=True, gc=False):
    """A shape of the service model: its members by their names there."""


class Empty(_Result):
    """For operations without an output shape."""


class SendMessageResult(_Result):
    """SendMessageResult."""

    md5_of_message_body: str = msgspec.field(name="MD5OfMessageBody")
    message_id: str
    md5_of_message_attributes: str | None = msgspec.field(default=None, name="MD5OfMessageAttributes")
    md5_of_message_system_attributes: str | None = msgspec.field(default=None, name="MD5OfMessageSystemAttributes")
    sequence_number: str | None = None


class SendMessageBatchResultEntry(_Result):
    """SendMessageBatchResultEntry."""

    id: str
    message_id: str
    md5_of_message_body: str = msgspec.field(name="MD5OfMessageBody")
    md5_of_message_attributes: str | None = msgspec.field(default=None, name="MD5OfMessageAttributes")
    md5_of_message_system_attributes: str | None = msgspec.field(default=None, name="MD5OfMessageSystemAttributes")
    sequence_number: str | None = None


class IdEntry(_Result):
    """DeleteMessageBatchResultEntry and ChangeMessageVisibilityBatchResultEntry."""

    id: str


class BatchResultErrorEntry(_Result):
    """BatchResultErrorEntry."""

    id: str
    sender_fault: bool
    code: str
    message: str


class BatchResult(_Result):
    """SendMessageBatchResult, DeleteMessageBatchResult, ChangeMessageVisibilityBatchResult.

    An empty list is omitted, although the service model requires both: AWS omits it, and `hasFailed()` of the SDK for
    Java 2 is true for an empty one (aws/aws-sdk-java-v2 #4713).
    """

    successful: list[SendMessageBatchResultEntry] | list[IdEntry] = msgspec.field(default_factory=list)
    failed: list[BatchResultErrorEntry] = msgspec.field(default_factory=list)


class AttributeValueOut(_Result):
    """MessageAttributeValue."""

    data_type: str
    string_value: str | None = None
    binary_value: bytes | None = None


class Message(_Result):
    """Message."""

    message_id: str
    receipt_handle: str
    md5_of_body: str = msgspec.field(name="MD5OfBody")
    body: str
    attributes: dict[str, str] | None = None
    md5_of_message_attributes: str | None = msgspec.field(default=None, name="MD5OfMessageAttributes")
    message_attributes: dict[str, AttributeValueOut] | None = None


class ReceiveMessageResult(_Result):
    """ReceiveMessageResult: without members if there was no message."""

    messages: list[Message] | None = None


class QueueUrlResult(_Result):
    """CreateQueueResult and GetQueueUrlResult."""

    queue_url: str


class ListQueuesResult(_Result):
    """ListQueuesResult."""

    queue_urls: list[str] | None = None
    next_token: str | None = None


class GetQueueAttributesResult(_Result):
    """GetQueueAttributesResult."""

    attributes: dict[str, str] | None = None


class ListQueueTagsResult(_Result):
    """ListQueueTagsResult."""

    tags: dict[str, str] | None = None


class ListDeadLetterSourceQueuesResult(_Result, rename=None):
    """ListDeadLetterSourceQueuesResult, whose list is the only one in lower case; it is written even if empty."""

    queue_urls: list[str] = msgspec.field(name="queueUrls")
    next_token: str | None = msgspec.field(default=None, name="NextToken")


class StartMessageMoveTaskResult(_Result):
    """StartMessageMoveTaskResult."""

    task_handle: str


class CancelMessageMoveTaskResult(_Result):
    """CancelMessageMoveTaskResult."""

    approximate_number_of_messages_moved: int


class MoveTaskEntry(_Result):
    """ListMessageMoveTasksResultEntry."""

    status: str
    source_arn: str
    approximate_number_of_messages_moved: int
    approximate_number_of_messages_to_move: int
    started_timestamp: int
    task_handle: str | None = None
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None
    failure_reason: str | None = None


class ListMessageMoveTasksResult(_Result):
    """ListMessageMoveTasksResult."""

    results: list[MoveTaskEntry]


Result = (
    Empty
    | SendMessageResult
    | BatchResult
    | ReceiveMessageResult
    | QueueUrlResult
    | ListQueuesResult
    | GetQueueAttributesResult
    | ListQueueTagsResult
    | ListDeadLetterSourceQueuesResult
    | StartMessageMoveTaskResult
    | CancelMessageMoveTaskResult
    | ListMessageMoveTasksResult
    | VeilResult
)
EMPTY = Empty()
