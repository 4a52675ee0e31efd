"""The 23 operations of the service model, one row each.

Strategy: this is the only list of the operations.
"""

from typing import Final

from veilmq.protocols.sqs import inputs
from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.operations import leases, moves, permissions, queues, receiving, sending, tags
from veilmq.protocols.sqs.operations.editing import answer_edit

_ROWS: Final = (
    Operation("SendMessage", inputs.SendMessageInput, sending.plan_send, sending.answer_send),
    Operation(
        "SendMessageBatch",
        inputs.SendMessageBatchInput,
        sending.plan_send_batch,
        sending.answer_send_batch,
        before=sending.asked_first,
    ),
    Operation("ReceiveMessage", inputs.ReceiveMessageInput, receiving.plan_receive, receiving.answer_receive),
    Operation("DeleteMessage", inputs.DeleteMessageInput, leases.plan_delete, leases.answer_void),
    Operation("DeleteMessageBatch", inputs.DeleteMessageBatchInput, leases.plan_delete_batch, leases.answer_batch),
    Operation("ChangeMessageVisibility", inputs.ChangeMessageVisibilityInput, leases.plan_extend, leases.answer_void),
    Operation(
        "ChangeMessageVisibilityBatch",
        inputs.ChangeMessageVisibilityBatchInput,
        leases.plan_extend_batch,
        leases.answer_batch,
    ),
    Operation("CreateQueue", inputs.CreateQueueInput, queues.plan_create, queues.answer_create),
    Operation("GetQueueUrl", inputs.GetQueueUrlInput, queues.plan_get_url, queues.answer_get_url),
    Operation("ListQueues", inputs.ListQueuesInput, queues.plan_list, queues.answer_list),
    Operation("DeleteQueue", inputs.QueueInput, queues.plan_delete_queue, queues.answer_void),
    Operation("PurgeQueue", inputs.QueueInput, queues.plan_purge, queues.answer_void),
    Operation(
        "GetQueueAttributes", inputs.GetQueueAttributesInput, queues.plan_get_attributes, queues.answer_get_attributes
    ),
    Operation(
        "SetQueueAttributes", inputs.SetQueueAttributesInput, queues.plan_set_attributes, queues.answer_set_attributes
    ),
    Operation("AddPermission", inputs.AddPermissionInput, permissions.plan_add, answer_edit),
    Operation("RemovePermission", inputs.RemovePermissionInput, permissions.plan_remove, answer_edit),
    Operation("TagQueue", inputs.TagQueueInput, tags.plan_tag, answer_edit),
    Operation("UntagQueue", inputs.UntagQueueInput, tags.plan_untag, answer_edit),
    Operation("ListQueueTags", inputs.QueueInput, tags.plan_list_tags, tags.answer_list_tags),
    Operation(
        "ListDeadLetterSourceQueues",
        inputs.ListDeadLetterSourceQueuesInput,
        queues.plan_list_sources,
        queues.answer_list_sources,
    ),
    Operation("StartMessageMoveTask", inputs.StartMessageMoveTaskInput, moves.plan_start, moves.answer_start),
    Operation("CancelMessageMoveTask", inputs.CancelMessageMoveTaskInput, moves.plan_cancel, moves.answer_cancel),
    Operation("ListMessageMoveTasks", inputs.ListMessageMoveTasksInput, moves.plan_list, moves.answer_list),
)
OPERATIONS: Final = {row.name: row for row in _ROWS}
