"""Inputs of the operations: the service model's input shapes as typed structs.

Strategy: both wire forms are decoded to these, so that every operation is written once. All members are optional here,
because AWS refuses a missing one with its own code and not with a parser's; unknown members are ignored, as on AWS.
Integers are checked for their type here, and for their range by the operation.
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
