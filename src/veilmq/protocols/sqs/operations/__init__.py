"""The 23 operations of the service model: here one row each; by noun in the files beside this one, which turn inputs
into commands, and outcomes into results.

Strategy: this is the only list of the operations. A new operation is a pair of functions and a row here.
"""

from typing import Final

from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.forms import shapes
from veilmq.protocols.sqs.operations import messages, moves, permissions_and_tags, queues
from veilmq.protocols.sqs.operations.permissions_and_tags import answer_edit

_ROWS: Final = (
    Operation("SendMessage", shapes.SendMessageInput, messages.plan_send, messages.answer_send),
    Operation(
        "SendMessageBatch",
        shapes.SendMessageBatchInput,
        messages.plan_send_batch,
        messages.answer_send_batch,
        before=messages.asked_first,
    ),
    Operation("ReceiveMessage", shapes.ReceiveMessageInput, messages.plan_receive, messages.answer_receive),
    Operation("DeleteMessage", shapes.DeleteMessageInput, messages.plan_delete, messages.answer_void),
    Operation("DeleteMessageBatch", shapes.DeleteMessageBatchInput, messages.plan_delete_batch, messages.answer_batch),
    Operation(
        "ChangeMessageVisibility", shapes.ChangeMessageVisibilityInput, messages.plan_extend, messages.answer_void
    ),
    Operation(
        "ChangeMessageVisibilityBatch",
        shapes.ChangeMessageVisibilityBatchInput,
        messages.plan_extend_batch,
        messages.answer_batch,
    ),
    Operation("CreateQueue", shapes.CreateQueueInput, queues.plan_create, queues.answer_create),
    Operation("GetQueueUrl", shapes.GetQueueUrlInput, queues.plan_get_url, queues.answer_get_url),
    Operation("ListQueues", shapes.ListQueuesInput, queues.plan_list, queues.answer_list),
    Operation("DeleteQueue", shapes.QueueInput, queues.plan_delete_queue, queues.answer_void),
    Operation("PurgeQueue", shapes.QueueInput, queues.plan_purge, queues.answer_void),
    Operation(
        "GetQueueAttributes", shapes.GetQueueAttributesInput, queues.plan_get_attributes, queues.answer_get_attributes
    ),
    Operation(
        "SetQueueAttributes", shapes.SetQueueAttributesInput, queues.plan_set_attributes, queues.answer_set_attributes
    ),
    Operation("AddPermission", shapes.AddPermissionInput, permissions_and_tags.plan_add, answer_edit),
    Operation("RemovePermission", shapes.RemovePermissionInput, permissions_and_tags.plan_remove, answer_edit),
    Operation("TagQueue", shapes.TagQueueInput, permissions_and_tags.plan_tag, answer_edit),
    Operation("UntagQueue", shapes.UntagQueueInput, permissions_and_tags.plan_untag, answer_edit),
    Operation(
        "ListQueueTags", shapes.QueueInput, permissions_and_tags.plan_list_tags, permissions_and_tags.answer_list_tags
    ),
    Operation(
        "ListDeadLetterSourceQueues",
        shapes.ListDeadLetterSourceQueuesInput,
        queues.plan_list_sources,
        queues.answer_list_sources,
    ),
    Operation("StartMessageMoveTask", shapes.StartMessageMoveTaskInput, moves.plan_start, moves.answer_start),
    Operation("CancelMessageMoveTask", shapes.CancelMessageMoveTaskInput, moves.plan_cancel, moves.answer_cancel),
    Operation("ListMessageMoveTasks", shapes.ListMessageMoveTasksInput, moves.plan_list, moves.answer_list),
)
OPERATIONS: Final = {row.name: row for row in _ROWS}
