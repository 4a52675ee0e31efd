"""What the two wire forms of SQS, JSON and Query, carry: the service model's shapes as typed structs.

Strategy: both forms (json_form.py, query_form.py) are decoded to the inputs and written from the results, so that every
operation is written once. All members of an input are optional here, because AWS refuses a missing one with its own
code and not with a parser's; unknown members are ignored, as on AWS. Integers are checked for their type here, and for
their range by the operation. Members of a result that are None are not written.

The client's adapter uses these structs, too, so this imports nothing of the codec.
"""

import msgspec


class _Input(msgspec.Struct, rename="pascal", kw_only=True, gc=False):
    """A shape of the service model: its members by their names there."""


class AttributeValue(_Input, omit_defaults=True):
    """MessageAttributeValue and MessageSystemAttributeValue."""

    data_type: str | None = None
    string_value: str | None = None
    binary_value: bytes | None = None
    string_list_values: list[str] | None = None
    binary_list_values: list[bytes] | None = None


class MessageInput(_Input):
    """The common members of SendMessage and an entry of SendMessageBatch."""

    message_body: str | None = None
    delay_seconds: int | None = None
    message_attributes: dict[str, AttributeValue] | None = None
    message_system_attributes: dict[str, AttributeValue] | None = None
    message_deduplication_id: str | None = None
    message_group_id: str | None = None


class SendMessageInput(MessageInput):
    """SendMessageRequest."""

    queue_url: str | None = None


class SendEntry(MessageInput):
    """SendMessageBatchRequestEntry."""

    id: str | None = None


class SendMessageBatchInput(_Input):
    """SendMessageBatchRequest."""

    queue_url: str | None = None
    entries: list[SendEntry] | None = None


class ReceiveMessageInput(_Input):
    """ReceiveMessageRequest."""

    queue_url: str | None = None
    attribute_names: list[str] | None = None
    message_system_attribute_names: list[str] | None = None
    message_attribute_names: list[str] | None = None
    max_number_of_messages: int | None = None
    visibility_timeout: int | None = None
    wait_time_seconds: int | None = None
    receive_request_attempt_id: str | None = None


class DeleteMessageInput(_Input):
    """DeleteMessageRequest."""

    queue_url: str | None = None
    receipt_handle: str | None = None


class DeleteEntry(_Input):
    """DeleteMessageBatchRequestEntry."""

    id: str | None = None
    receipt_handle: str | None = None


class DeleteMessageBatchInput(_Input):
    """DeleteMessageBatchRequest."""

    queue_url: str | None = None
    entries: list[DeleteEntry] | None = None


class ChangeMessageVisibilityInput(_Input):
    """ChangeMessageVisibilityRequest."""

    queue_url: str | None = None
    receipt_handle: str | None = None
    visibility_timeout: int | None = None


class VisibilityEntry(_Input):
    """ChangeMessageVisibilityBatchRequestEntry."""

    id: str | None = None
    receipt_handle: str | None = None
    visibility_timeout: int | None = None


class ChangeMessageVisibilityBatchInput(_Input):
    """ChangeMessageVisibilityBatchRequest."""

    queue_url: str | None = None
    entries: list[VisibilityEntry] | None = None


class CreateQueueInput(_Input):
    """CreateQueueRequest."""

    queue_name: str | None = None
    attributes: dict[str, str] | None = None
    tags: dict[str, str] | None = msgspec.field(default=None, name="tags")


class GetQueueUrlInput(_Input):
    """GetQueueUrlRequest."""

    queue_name: str | None = None
    queue_owner_aws_account_id: str | None = msgspec.field(default=None, name="QueueOwnerAWSAccountId")


class ListQueuesInput(_Input):
    """ListQueuesRequest."""

    queue_name_prefix: str | None = None
    next_token: str | None = None
    max_results: int | None = None


class QueueInput(_Input):
    """DeleteQueueRequest, PurgeQueueRequest and ListQueueTagsRequest."""

    queue_url: str | None = None


class GetQueueAttributesInput(_Input):
    """GetQueueAttributesRequest."""

    queue_url: str | None = None
    attribute_names: list[str] | None = None


class SetQueueAttributesInput(_Input):
    """SetQueueAttributesRequest."""

    queue_url: str | None = None
    attributes: dict[str, str] | None = None


class AddPermissionInput(_Input):
    """AddPermissionRequest."""

    queue_url: str | None = None
    label: str | None = None
    aws_account_ids: list[str] | None = msgspec.field(default=None, name="AWSAccountIds")
    actions: list[str] | None = None


class RemovePermissionInput(_Input):
    """RemovePermissionRequest."""

    queue_url: str | None = None
    label: str | None = None


class TagQueueInput(_Input):
    """TagQueueRequest; the Query form calls the map as CreateQueue does."""

    queue_url: str | None = None
    tags: dict[str, str] | None = None
    query_tags: dict[str, str] | None = msgspec.field(default=None, name="tags")


class UntagQueueInput(_Input):
    """UntagQueueRequest."""

    queue_url: str | None = None
    tag_keys: list[str] | None = None


class ListDeadLetterSourceQueuesInput(_Input):
    """ListDeadLetterSourceQueuesRequest."""

    queue_url: str | None = None
    next_token: str | None = None
    max_results: int | None = None


class StartMessageMoveTaskInput(_Input):
    """StartMessageMoveTaskRequest."""

    source_arn: str | None = None
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None


class CancelMessageMoveTaskInput(_Input):
    """CancelMessageMoveTaskRequest."""

    task_handle: str | None = None


class ListMessageMoveTasksInput(_Input):
    """ListMessageMoveTasksRequest."""

    source_arn: str | None = None
    max_results: int | None = None


class AnyInput(_Input):
    """The input of an internal call, which is no client's operation."""


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
    """ListDeadLetterSourceQueuesResult. Its list is the only one in lower case.

    It is omitted if it is empty, although the service model requires it (AWS, as recorded in yavosh/pail,
    test/diff: sqs-dead-letter).
    """

    queue_urls: list[str] = msgspec.field(default_factory=list, name="queueUrls")
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


SqsResult = (
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
)
EMPTY = Empty()
