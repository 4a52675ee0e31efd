"""Authorizes a request before it goes to the engine, by the queue's policy and the state of its KMS key.

Strategy: most requests need no check. One is needed if the queue belongs to another account, its policy may deny
something, the operator named KMS keys that fail, or all entries of a batch were refused. Then a DescribeQueue, in the
server's own right, comes first, and its outcome decides between the call itself and a refusal. Source: "Overview of
managing access in Amazon SQS" (cross-account permissions) in the SQS Developer Guide; "Policy evaluation logic" in the
IAM User Guide.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.model.commands import ChangeQueue, DescribeQueue, StartMove
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.model.settings.access import EVERYTHING, Action
from veilmq.model.settings.queue import QueueInfo, QueueKey
from veilmq.protocols import is_secure, source_address
from veilmq.protocols.sqs import errors
from veilmq.protocols.sqs.addresses import Endpoint, arn, user_arn
from veilmq.protocols.sqs.auth.policy import AccessRequest, Decision, PolicyInvalid, evaluate, may_deny, read_policy
from veilmq.protocols.sqs.call import Asked, Call, Operation
from veilmq.protocols.sqs.errors import LABEL_PREFIX, Fault, Refusal, fault_of
from veilmq.protocols.sqs.forms import AnyInput

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
_ACTIONS: Final = {
    "Send": "SendMessage",
    "Receive": "ReceiveMessage",
    "Peek": "ReceiveMessage",
    "Extend": "ChangeMessageVisibility",
    "Delete": "DeleteMessage",
    "DescribeQueue": "GetQueueAttributes",
}
"""VeilMQ operations -> the action that a policy checks."""
_GRANTS: Final = {
    "SendMessage": Action.SEND,
    "DeleteMessage": Action.DELETE,
    "ChangeMessageVisibility": Action.EXTEND,
}
"""Action of a batch -> the grant that its commands need."""
_POLICY: Final = LABEL_PREFIX + "Policy"
_ENCRYPTED: Final = frozenset({"SendMessage", "SendMessageBatch", "ReceiveMessage"})


class _Question(NamedTuple):
    """The question whether an action is allowed on a queue."""

    queue: QueueKey
    action: str
    dead_letters: QueueKey | None = None
    """Asked only if the queue's dead letters go there."""


class _Held(NamedTuple):
    """The call that waits for the decision."""

    call: Call
    asked: Asked
    questions: tuple[_Question, ...]
    wall: Instant
    """A policy's times are of the calendar."""


def authorized(asked: Asked, call: Call, wall: Instant) -> Call:
    """The call, or a call that reads what must be checked first. Raises Refusal: AccessDenied."""
    foreign = asked.foreign
    if foreign is not None:
        questions: tuple[_Question, ...] = (_Question(foreign, _action(call.operation)),)
        if call.operation not in ACROSS_ACCOUNTS:
            raise _denied(call, questions[0])
    elif asked.refused_batch is not None:
        questions = (_Question(asked.refused_batch, _action(call.operation)),)
    else:
        guarded = asked.endpoint.guarded if asked.caller.verified else ()
        failing = asked.endpoint.kms_faults and call.operation in _ENCRYPTED
        questions = tuple(each for each in _questions(call, guarded) if failing or each.queue in guarded)
        if not questions or _unlocks(call):
            return call
    commands = tuple(DescribeQueue(queue=each.queue, origin=asked.caller.origin) for each in questions)
    return reads_first(call, commands, _answer, _Held(call, asked, questions, wall))


def reads_first(
    call: Call, commands: tuple[DescribeQueue, ...], answer: Callable[[Call, Sequence[Outcome]], Call], memo: Any
) -> Call:
    """A call that reads, in the server's own right, what this one depends on. answer: makes the call that follows."""
    row = Operation("ReadsFirst", AnyInput, lambda asked, given: ((), None), answer)
    key = msgspec.structs.replace(call.key, grants=EVERYTHING)
    return msgspec.structs.replace(call, key=key, commands=commands, row=row, memo=memo)


def _questions(call: Call, guarded: Iterable[QueueKey]) -> Iterator[_Question]:
    """The actions of the call on each queue. A move task receives, deletes and sends: "Configuring queue permissions
    for dead-letter queue redrive" in the Developer Guide. Without a destination it sends to the queues whose dead
    letters the source has; which these are, only the store knows."""
    command = call.commands[0] if call.commands else None
    queue = getattr(command, "queue", None)
    if queue is None:
        return
    yield _Question(queue, _action(call.operation))
    if type(command) is StartMove:
        yield _Question(queue, "ReceiveMessage")
        yield _Question(queue, "DeleteMessage")
        if command.destination is not None:
            yield _Question(command.destination, "SendMessage")
            return
        for other in sorted(guarded):
            if (other.account, other.region) == (queue.account, queue.region):
                yield _Question(other, "SendMessage", queue)


def note(endpoint: Endpoint, info: QueueInfo) -> None:
    """Note whether a queue's policy may deny something; called when it is set, and at the start."""
    policy = _policy(info)
    if policy is not None and may_deny(policy):
        endpoint.guarded.add(info.key)
    else:
        endpoint.guarded.discard(info.key)


def _unlocks(call: Call) -> bool:
    """Whether a key that may do everything removes the policy: the way out of a policy that locks out its owner."""
    (command, *more) = call.commands
    only = {"labels": {_POLICY: ""}}
    return call.key.grants is EVERYTHING and type(command) is ChangeQueue and not more and command.change == only


def _answer(call: Call, outcomes: Sequence[Outcome]) -> Call:
    held: _Held = call.memo
    _check_questions(call, held, outcomes)
    if held.asked.refused_batch is not None:
        _check_refused_batch(held, outcomes[0])
    return held.call


def _check_questions(call: Call, held: _Held, outcomes: Sequence[Outcome]) -> None:
    """Raises Refusal if an outcome denies the call."""
    for question, outcome in zip(held.questions, outcomes, strict=True):
        if isinstance(outcome, QueueDescribed):
            _check(held, question, outcome.info)
            continue
        if not isinstance(outcome, QueueMissing):
            assert isinstance(outcome, VeilError)
            raise fault_of(outcome, call.commands[0])
        call.endpoint.guarded.discard(question.queue)  # deleted since it was noted
        if held.asked.foreign is not None:
            # Do not reveal whether another account's queue exists. A missing queue of the caller's own: the call itself
            # reports or creates it.
            raise _denied(held.call, question)


def _check_refused_batch(held: _Held, outcome: Outcome) -> None:
    """Raises Refusal if the key lacks the grant or the queue is missing; the call has no command that would report
    it."""
    (question,) = held.questions
    grant = _GRANTS[question.action]
    if not held.call.key.allows(grant, question.queue.name):
        raise not_granted(held.call, question.queue, grant)
    if isinstance(outcome, QueueMissing):
        raise Refusal(errors.QUEUE_DOES_NOT_EXIST, errors.NO_QUEUE)


def _check(held: _Held, question: _Question, info: QueueInfo) -> None:
    """Raises Refusal if the queue's policy denies the call, or its KMS key fails."""
    redrive = info.settings.redrive
    if question.dead_letters is not None and (redrive is None or redrive.target != question.dead_letters):
        return
    decision = _decision(held, question, info)
    if decision is Decision.DENIED or (held.asked.foreign is not None and decision is Decision.SILENT):
        raise _denied(held.call, question, decision)
    _check_key(held, info)


def _policy(info: QueueInfo) -> dict[str, Any] | None:
    text = info.settings.labels.get(_POLICY)
    if not text:
        return None
    try:
        return read_policy(text)
    except PolicyInvalid:  # stored before the form was checked: it has no effect
        return None


def _decision(held: _Held, question: _Question, info: QueueInfo) -> Decision:
    """Evaluate the queue's policy. Development mode has no identities and evaluates no policy."""
    policy = _policy(info)
    if policy is None or not held.asked.caller.verified:
        return Decision.SILENT
    key, request = held.asked.caller.key, held.asked.request
    trusted_proxy = held.asked.endpoint.trusted_proxy
    now_s = str(held.wall / SECOND_US)
    context = {
        "aws:currenttime": now_s,
        "aws:epochtime": now_s,
        "aws:securetransport": "true" if is_secure(request, trusted_proxy) else "false",
        "aws:sourceip": source_address(request, trusted_proxy),
        "aws:principalaccount": key.account,
        "aws:principalarn": user_arn(question.queue.region, key.account, key.id),
    }
    if b"user-agent" in request.headers:
        context["aws:useragent"] = request.headers[b"user-agent"].decode("latin-1")
    return evaluate(policy, AccessRequest(key.account, key.id, question.action, question.queue, context))


def _action(operation: str) -> str:
    return _ACTIONS.get(operation) or ACROSS_ACCOUNTS.get(operation) or operation.removesuffix("Batch")


def not_granted(call: Call, queue: QueueKey | None, grant: Action) -> Refusal:
    """The refusal if a key was not granted the action on the queue (None: on no particular queue)."""
    action = f"sqs:{_action(call.operation).lower()}"
    why = f"because no identity-based policy allows the {action} action (grant {grant.value})"
    return _not_authorized(call, queue, action, why)


def _not_authorized(call: Call, queue: QueueKey | None, action: str, why: str) -> Refusal:
    """AWS's text; the action of a batch is that of its entries: microsoft/aspire #3333,
    aws/serverless-application-model #3633."""
    key, region, resource = call.key, "*", f"arn:aws:sqs:*:{call.key.account}:*"
    if queue is not None:
        region, resource = queue.region, arn(queue)
    user = user_arn(region, key.account, key.id)
    text = f"User: {user} is not authorized to perform: {action} on resource: {resource} {why}"
    return Refusal(errors.ACCESS_DENIED, text)


def _denied(call: Call, question: _Question, decision: Decision = Decision.SILENT) -> Refusal:
    """Refusal by the queue's policy: it does not allow another account the action, or denies it explicitly."""
    if call.operation == "GetQueueUrl" and question.queue.account != call.key.account:
        return Refusal(errors.QUEUE_DOES_NOT_EXIST, errors.NO_QUEUE_TO_SEE)
    action = f"sqs:{question.action.lower()}"
    why = f"because no resource-based policy allows the {action} action"
    if decision is Decision.DENIED:
        why = "with an explicit deny in a resource-based policy"
    return _not_authorized(call, question.queue, action, why)


def _check_key(held: _Held, info: QueueInfo) -> None:
    """Raises Refusal if the operator configured the queue's KMS key to fail."""
    kms_key = info.settings.labels.get(LABEL_PREFIX + "KmsMasterKeyId")
    if kms_key and held.call.operation in _ENCRYPTED:
        for named, state in held.call.endpoint.kms_faults:
            if named == kms_key:
                fault: Fault = errors.KMS_FAULTS[state]
                raise Refusal(fault, f"The KMS key {kms_key} of the queue cannot be used: {state}.")
