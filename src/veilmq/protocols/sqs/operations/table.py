"""The 23 operations of the service model, a row each.

Strategy: the only place that knows which operations there are. Those that are not carried out yet are refused in
words.
"""

from collections.abc import Sequence
from typing import Any, Final

from veilmq.model.outcomes import Outcome
from veilmq.protocols.sqs import inputs, results
from veilmq.protocols.sqs.call import Asked, Call, Operation, Plan
from veilmq.protocols.sqs.errors import UNSUPPORTED_OPERATION, Refusal
from veilmq.protocols.sqs.operations import leases, queues, receiving, sending


def _unsupported(name: str) -> Operation:
    def plan(asked: Asked, given: Any) -> Plan:
        raise Refusal(UNSUPPORTED_OPERATION, f"The operation {name} is not supported by this server yet.")

    def answer(call: Call, outcomes: Sequence[Outcome]) -> results.Result:
        raise AssertionError(f"{name} has no outcome")

    return Operation(name, inputs.AnyInput, plan, answer)


_ROWS: Final = (
    Operation("SendMessage", inputs.SendMessageInput, sending.plan_send, sending.answer_send),
    Operation("SendMessageBatch", inputs.SendMessageBatchInput, sending.plan_send_batch, sending.answer_send_batch),
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
    Operation("SetQueueAttributes", inputs.SetQueueAttributesInput, queues.plan_set_attributes, queues.answer_void),
    *(
        _unsupported(name)
        for name in (
            "AddPermission",
            "RemovePermission",
            "TagQueue",
            "UntagQueue",
            "ListQueueTags",
            "ListDeadLetterSourceQueues",
            "StartMessageMoveTask",
            "CancelMessageMoveTask",
            "ListMessageMoveTasks",
        )
    ),
)
OPERATIONS: Final = {row.name: row for row in _ROWS}
