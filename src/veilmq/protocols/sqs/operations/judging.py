"""What a request is judged by before it goes to the engine: the queue's policy, and the state of its KMS key.

Strategy: only a request that needs it asks first (the queue is another account's, or the operator named KMS keys that
fail): the question is a DescribeQueue in the server's own right, and its answer is the call itself, or a refusal.
Source: "Overview of managing access in Amazon SQS" (cross-account permissions) in the SQS Developer Guide.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from veilmq.model.access import EVERYTHING
from veilmq.model.commands import DescribeQueue
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.model.queue import QueueInfo, QueueKey
from veilmq.protocols.sqs import errors
from veilmq.protocols.sqs.addresses import Endpoint, arn
from veilmq.protocols.sqs.attributes import LABEL_PREFIX
from veilmq.protocols.sqs.call import Asked, Call, Operation
from veilmq.protocols.sqs.errors import KMS_FAULTS, Fault, Refusal, fault_of
from veilmq.protocols.sqs.inputs import AnyInput
from veilmq.protocols.sqs.policy import Asking, PolicyInvalid, allows, read_policy

ACROSS_ACCOUNTS: Final = {
    "SendMessage": "SendMessage",
    "SendMessageBatch": "SendMessage",
    "ReceiveMessage": "ReceiveMessage",
    "DeleteMessage": "DeleteMessage",
    "DeleteMessageBatch": "DeleteMessage",
    "ChangeMessageVisibility": "ChangeMessageVisibility",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
    "GetQueueAttributes": "GetQueueAttributes",
    "GetQueueUrl": "GetQueueUrl",
    "PurgeQueue": "PurgeQueue",
    "ListDeadLetterSourceQueues": "ListDeadLetterSourceQueues",
}
"""Operation -> the action that a policy must allow; no policy opens any other operation to another account."""
_ENCRYPTED: Final = frozenset({"SendMessage", "SendMessageBatch", "ReceiveMessage"})


class _Held(NamedTuple):
    """The call that waits for the judgement."""

    call: Call
    asked: Asked
    queue: QueueKey


def judged_first(asked: Asked, call: Call) -> Call:
    """The call, or the question that must be answered before it. Raises Refusal: AccessDenied."""
    queue = asked.foreign
    if queue is not None and call.operation not in ACROSS_ACCOUNTS:
        raise _denied(call, queue)
    if queue is None:
        if not asked.endpoint.kms_faults or call.operation not in _ENCRYPTED:
            return call
        queue = getattr(call.commands[0], "queue", None) if call.commands else None
        if queue is None:
            return call
    question = DescribeQueue(queue=queue, origin=asked.caller.origin)
    key = msgspec.structs.replace(call.key, grants=EVERYTHING)
    return msgspec.structs.replace(call, key=key, commands=(question,), row=_JUDGE, memo=_Held(call, asked, queue))


def _answer(call: Call, outcomes: Sequence[Outcome]) -> Call:
    held: _Held = call.memo
    (outcome,) = outcomes
    if isinstance(outcome, QueueDescribed):
        if held.asked.foreign is not None and not _is_allowed(held, outcome.info):
            raise _denied(held.call, held.queue)
        _check_key(held, outcome.info, call.endpoint)
        return held.call
    assert isinstance(outcome, VeilError)
    if isinstance(outcome, QueueMissing) and held.asked.foreign is not None:
        # Whether a queue of somebody else exists is for its policy to tell.
        raise _denied(held.call, held.queue)
    raise fault_of(outcome, call.commands[0])


_JUDGE: Final = Operation("Judge", AnyInput, lambda asked, given: ((), None), _answer)


def _is_allowed(held: _Held, info: QueueInfo) -> bool:
    text = info.settings.labels.get(LABEL_PREFIX + "Policy")
    if not text:
        return False
    try:
        policy = read_policy(text)
    except PolicyInvalid:  # set before its form was checked: it opens nothing
        return False
    key, request = held.asked.caller.key, held.asked.request
    context = {
        "aws:securetransport": "true" if request.secure else "false",
        "aws:sourceip": request.peer,
        "aws:principalaccount": key.account,
        "aws:principalarn": f"arn:aws:iam::{key.account}:user/{key.id}",
    }
    if b"user-agent" in request.headers:
        context["aws:useragent"] = request.headers[b"user-agent"].decode("latin-1")
    return allows(policy, Asking(key.account, key.id, ACROSS_ACCOUNTS[held.call.operation], held.queue, context))


def _denied(call: Call, queue: QueueKey) -> Refusal:
    if call.operation == "GetQueueUrl":
        return Refusal(errors.QUEUE_DOES_NOT_EXIST, errors.NO_QUEUE)
    return Refusal(errors.ACCESS_DENIED, f"Access to the resource {arn(queue)} is denied.")


def _check_key(held: _Held, info: QueueInfo, endpoint: Endpoint) -> None:
    """Raises Refusal if the queue's KMS key is one that the operator let fail."""
    kms_key = info.settings.labels.get(LABEL_PREFIX + "KmsMasterKeyId")
    if kms_key and held.call.operation in _ENCRYPTED:
        for named, state in endpoint.kms_faults:
            if named == kms_key:
                fault: Fault = KMS_FAULTS[state]
                raise Refusal(fault, f"The KMS key {kms_key} of the queue cannot be used: {state}.")
