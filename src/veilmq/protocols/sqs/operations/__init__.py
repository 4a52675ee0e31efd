"""The 23 operations of the service model: here one row each; by noun in the files beside this one, which turn inputs
into commands, and outcomes into results.

Strategy: this is the only list of the operations. A new operation is a pair of functions and a row here.
"""

from typing import Final

from veilmq.protocols.sqs import forms, plain
from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.operations import messages, moves, permissions_and_tags, queues
from veilmq.protocols.sqs.operations.permissions_and_tags import answer_edit

_ROWS: Final = (
    Operation("SendMessage", forms.SendMessageInput, messages.plan_send, messages.answer_send, json=plain.sent_json),
    Operation(
        "SendMessageBatch",
        forms.SendMessageBatchInput,
        messages.plan_send_batch,
        messages.answer_send_batch,
        before=messages.asked_first,
        json=plain.sends_json,
    ),
    Operation(
        "ReceiveMessage",
        forms.ReceiveMessageInput,
        messages.plan_receive,
        messages.answer_receive,
        json=plain.received_json,
    ),
    Operation(
        "DeleteMessage", forms.DeleteMessageInput, messages.plan_delete, messages.answer_void, json=plain.deleted_json
    ),
    Operation(
        "DeleteMessageBatch",
        forms.DeleteMessageBatchInput,
        messages.plan_delete_batch,
        messages.answer_batch,
        json=plain.deletes_json,
    ),
    Operation(
        "ChangeMessageVisibility", forms.ChangeMessageVisibilityInput, messages.plan_extend, messages.answer_void
    ),
    Operation(
        "ChangeMessageVisibilityBatch",
        forms.ChangeMessageVisibilityBatchInput,
        messages.plan_extend_batch,
        messages.answer_batch,
    ),
    Operation("CreateQueue", forms.CreateQueueInput, queues.plan_create, queues.answer_create),
    Operation("GetQueueUrl", forms.GetQueueUrlInput, queues.plan_get_url, queues.answer_get_url),
    Operation("ListQueues", forms.ListQueuesInput, queues.plan_list, queues.answer_list),
    Operation("DeleteQueue", forms.QueueInput, queues.plan_delete_queue, queues.answer_void),
    Operation("PurgeQueue", forms.QueueInput, queues.plan_purge, queues.answer_void),
    Operation(
        "GetQueueAttributes", forms.GetQueueAttributesInput, queues.plan_get_attributes, queues.answer_get_attributes
    ),
    Operation(
        "SetQueueAttributes", forms.SetQueueAttributesInput, queues.plan_set_attributes, queues.answer_set_attributes
    ),
    Operation("AddPermission", forms.AddPermissionInput, permissions_and_tags.plan_add, answer_edit),
    Operation("RemovePermission", forms.RemovePermissionInput, permissions_and_tags.plan_remove, answer_edit),
    Operation("TagQueue", forms.TagQueueInput, permissions_and_tags.plan_tag, answer_edit),
    Operation("UntagQueue", forms.UntagQueueInput, permissions_and_tags.plan_untag, answer_edit),
    Operation(
        "ListQueueTags", forms.QueueInput, permissions_and_tags.plan_list_tags, permissions_and_tags.answer_list_tags
    ),
    Operation(
        "ListDeadLetterSourceQueues",
        forms.ListDeadLetterSourceQueuesInput,
        queues.plan_list_sources,
        queues.answer_list_sources,
    ),
    Operation("StartMessageMoveTask", forms.StartMessageMoveTaskInput, moves.plan_start, moves.answer_start),
    Operation("CancelMessageMoveTask", forms.CancelMessageMoveTaskInput, moves.plan_cancel, moves.answer_cancel),
    Operation("ListMessageMoveTasks", forms.ListMessageMoveTasksInput, moves.plan_list, moves.answer_list),
)
OPERATIONS: Final = {row.name: row for row in _ROWS}
