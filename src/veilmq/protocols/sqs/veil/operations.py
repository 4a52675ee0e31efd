"""The VeilMQ operations: what our own clients need and SQS does not offer.

Strategy: the same port, signature and JSON form as SQS, with `X-Amz-Target: VeilMQ.<Operation>`; no Query form. Send,
Extend and Delete exist only as batches. An error of an entry fails that entry, with our own error and its data; an
error of the request refuses it in SQS's form. None of SQS's own limits apply (12 h in total, 120,000 in flight). A
stale handle gets an error, on standard queues too. Source: docs/veil-protocol.md.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    Peek,
    PurgeQueue,
    Receive,
    Send,
)
from veilmq.model.errors import ParameterInvalid, QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import REPORT_HEADER, WORKING, Delivery, id_text, read_header
from veilmq.model.outcomes import Outcome, Purged, QueueCreated, QueueDeleted, QueueDescribed, Received, Sent
from veilmq.model.settings.queue import PlanState, QueueKey
from veilmq.protocols.sqs import errors, veil
from veilmq.protocols.sqs.addresses import is_fifo, is_queue_name
from veilmq.protocols.sqs.auth.authorize import note
from veilmq.protocols.sqs.call import Asked, Call, Operation, Plan, sole
from veilmq.protocols.sqs.errors import Refusal, fault_of, invalid_value, missing
from veilmq.protocols.sqs.forms import AttributeValue, CreateQueueInput
from veilmq.protocols.sqs.operations import queues
from veilmq.protocols.sqs.operations.queues import compared
from veilmq.protocols.sqs.veil.messages import checked_body, failure_of, message_of

Input = TypeVar("Input")


def _queue(asked: Asked, text: str | None) -> QueueKey:
    """The queue `name` of the key's own account, or `account/name`. Raises Refusal."""
    if not text:
        raise missing("Queue")
    if "/" in text:
        return asked.queue("/" + text)
    if not is_queue_name(text):
        raise Refusal(errors.QUEUE_DOES_NOT_EXIST, errors.NO_QUEUE)
    return QueueKey(asked.caller.key.account, asked.caller.region, text)


def _microseconds(name: str, seconds: float | None, seconds_max: int) -> int | None:
    """Raises Refusal naming the member."""
    if seconds is None:
        return None
    if not 0 <= seconds <= seconds_max:
        raise invalid_value(name, seconds, f"Must be from 0 to {seconds_max} seconds.")
    return round(seconds * SECOND_US)


def _after_expiry(queue: QueueKey) -> AfterExpiry:
    return AfterExpiry.REFUSE if is_fifo(queue.name) else AfterExpiry.ALLOW


# Batches.

Planned = list[int | VeilError]
"""For each entry the number of its command, or its error."""


def _entries(
    asked: Asked, queue: QueueKey, given: list[Input] | None, member: str, command_of: Callable[[Input], AnyCommand]
) -> tuple[tuple[AnyCommand, ...], Planned]:
    if not given:
        raise missing(member)
    if len(given) > veil.ENTRIES_MAX:
        raise invalid_value(member, f"of {len(given)} entries", f"Must be at most {veil.ENTRIES_MAX}.")
    commands: list[AnyCommand] = []
    planned: Planned = []
    for entry in given:
        try:
            commands.append(command_of(entry))
        except VeilError as error:
            planned.append(error)
        else:
            planned.append(len(commands) - 1)
    if not commands:
        asked.refused_batch = queue
    return tuple(commands), planned


def _check_queue(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Raises Refusal if the queue is missing: that is an error of the whole request."""
    if outcomes and isinstance(outcomes[0], QueueMissing):
        raise fault_of(outcomes[0], call.commands[0])


def plan_send(asked: Asked, given: veil.SendInput) -> Plan:
    """VeilMQ.Send."""
    queue = _queue(asked, given.queue)
    origin, wants_handle = asked.caller.origin, given.want_handles

    def command_of(message: veil.MessageIn) -> Send:
        return message_of(message, queue, origin, wants_handle)

    commands, planned = _entries(asked, queue, given.messages, "Messages", command_of)
    total_bytes = sum(command.size_bytes for command in commands if isinstance(command, Send))
    if total_bytes > veil.REQUEST_BYTES_MAX:
        text = f"Batch requests cannot be longer than {veil.REQUEST_BYTES_MAX} bytes."
        raise Refusal(errors.BATCH_REQUEST_TOO_LONG, f"{text} You have sent {total_bytes} bytes.")
    return commands, planned


def answer_send(call: Call, outcomes: Sequence[Outcome]) -> veil.SendResult:
    """One result per message."""
    _check_queue(call, outcomes)
    lines = []
    for place in call.memo:
        outcome = place if isinstance(place, VeilError) else outcomes[place]
        if isinstance(outcome, VeilError):
            lines.append(veil.SentEntry(error=failure_of(outcome)))
            continue
        assert isinstance(outcome, Sent)
        command = call.commands[place]
        assert isinstance(command, Send)
        lines.append(
            veil.SentEntry(
                id=id_text(outcome.id),
                handle=outcome.handle or None,
                sequence_number=outcome.sequence if is_fifo(command.queue.name) else None,
                duplicate=outcome.duplicate,
            )
        )
    return veil.SendResult(results=lines)


def plan_extend(asked: Asked, given: veil.ExtendInput) -> Plan:
    """VeilMQ.Extend. On a standard queue a late one resumes the lease, as VeilMQ.Delete accepts it. Unless it reports
    that the message is given back, the worker continues, even with a shorter lease."""
    queue = _queue(asked, given.queue)
    after_expiry = _after_expiry(queue)
    report = read_header(asked.request.headers.get(REPORT_HEADER)) or WORKING

    def command_of(entry: veil.ExtendEntry) -> Extend:
        if not entry.handle:
            raise ParameterInvalid(parameter="Handle", reason="must be given")
        if entry.lease is None:
            raise ParameterInvalid(parameter="Lease", reason="must be given")
        if not 0 <= entry.lease <= veil.LEASE_SECONDS_MAX:
            reason = f"must be from 0 to {veil.LEASE_SECONDS_MAX} seconds, not {entry.lease}"
            raise ParameterInvalid(parameter="Lease", reason=reason)
        command = Extend(
            queue=queue,
            origin=asked.caller.origin,
            handle=entry.handle,
            lease_us=round(entry.lease * SECOND_US),
            arrived=asked.arrived,
            after_expiry=after_expiry,
            report=report,
        )
        if entry.body is not None:
            command.body = entry.body
            raw, command.md5 = checked_body(entry.body)
            command.size_bytes = len(raw)
        return command

    return _entries(asked, queue, given.entries, "Entries", command_of)


def plan_delete(asked: Asked, given: veil.DeleteInput) -> Plan:
    """VeilMQ.Delete. On a standard queue an expired handle is valid until the message is granted again."""
    queue = _queue(asked, given.queue)
    after_expiry = _after_expiry(queue)
    origin, arrived = asked.caller.origin, asked.arrived

    def command_of(handle: str) -> Delete:
        if not handle:
            raise ParameterInvalid(parameter="Handles", reason="must not be empty")
        return Delete(queue=queue, origin=origin, handle=handle, arrived=arrived, after_expiry=after_expiry)

    return _entries(asked, queue, given.handles, "Handles", command_of)


def answer_failures(call: Call, outcomes: Sequence[Outcome]) -> veil.FailuresResult:
    """The failed entries of an Extend or Delete."""
    _check_queue(call, outcomes)
    failures = []
    for index, place in enumerate(call.memo):
        outcome = place if isinstance(place, VeilError) else outcomes[place]
        if isinstance(outcome, VeilError):
            failures.append(veil.FailedEntry(index=index, error=failure_of(outcome)))
    return veil.FailuresResult(failures=failures or None)


# Messages out.


def plan_receive(asked: Asked, given: veil.ReceiveInput) -> Plan:
    """VeilMQ.Receive."""
    _check_count(given.count_max)
    command = Receive(
        queue=_queue(asked, given.queue),
        origin=asked.caller.origin,
        count_max=given.count_max,
        lease_us=_microseconds("Lease", given.lease, veil.LEASE_SECONDS_MAX),
        wait_us=_microseconds("Wait", given.wait, veil.WAIT_SECONDS_MAX),
    )
    return (command,), None


def plan_peek(asked: Asked, given: veil.PeekInput) -> Plan:
    """VeilMQ.Peek."""
    _check_count(given.count_max)
    queue = _queue(asked, given.queue)
    return (Peek(queue=queue, origin=asked.caller.origin, count_max=given.count_max),), None


def _check_count(count: int) -> None:
    if not 1 <= count <= veil.RECEIVE_COUNT_MAX:
        raise invalid_value("CountMax", count, f"Must be from 1 to {veil.RECEIVE_COUNT_MAX}.")


def answer_messages(call: Call, outcomes: Sequence[Outcome]) -> veil.MessagesResult:
    """All fields of each message."""
    received: Received = sole(call, outcomes)
    if not received.messages:
        return veil.MessagesResult()
    command = call.commands[0]
    assert isinstance(command, Receive | Peek)
    fifo = is_fifo(command.queue.name)
    return veil.MessagesResult(
        messages=[_message(delivery, fifo) for delivery in received.messages], waited=received.waited_us / SECOND_US
    )


def _message(delivery: Delivery, fifo: bool) -> veil.MessageOut:
    message = veil.MessageOut(
        id=id_text(delivery.id),
        body=delivery.body,
        handle=delivery.handle,
        lease=None if delivery.lease_us is None else delivery.lease_us / SECOND_US,
        receive_count=delivery.receive_count,
        sent=_unix(delivery.sent),
        expires=_unix(delivery.expires),
        first_received=None if delivery.first_received is None else _unix(delivery.first_received),
        priority=delivery.priority,
        sequence_number=delivery.sequence if fifo else None,
    )
    extras = delivery.extras
    if extras.attributes:
        message.attributes = {
            attribute.name: AttributeValue(data_type=attribute.type, string_value=attribute.value)
            if isinstance(attribute.value, str)
            else AttributeValue(data_type=attribute.type, binary_value=attribute.value)
            for attribute in extras.attributes
        }
    message.group, message.deduplication_id = extras.group, extras.deduplication_id
    message.type, message.tag = extras.type, extras.tag
    if extras.dead_letter_source is not None:
        message.dead_letter_source = extras.dead_letter_source.name
        message.dead_letter_receives = extras.dead_receives
    if extras.error_type or extras.error:
        message.last_error = veil.LastError(type=extras.error_type, text=extras.error)
    return message


def _unix(instant: Instant) -> float:
    return instant / SECOND_US


# Queues.


def plan_describe(asked: Asked, given: veil.QueueInput) -> Plan:
    """VeilMQ.DescribeQueue."""
    return (DescribeQueue(queue=_queue(asked, given.queue), origin=asked.caller.origin),), None


def answer_describe(call: Call, outcomes: Sequence[Outcome]) -> veil.DescribeQueueResult:
    """Settings, counts and incarnation."""
    described: QueueDescribed = sole(call, outcomes)
    info = described.info
    settings, redrive = info.settings, info.settings.redrive
    return veil.DescribeQueueResult(
        name=info.key.name,
        account=info.key.account,
        region=info.key.region,
        incarnation=info.incarnation,
        created=_unix(info.created),
        modified=_unix(info.modified),
        visible=info.counts.visible,
        delayed=info.counts.delayed,
        in_flight=info.counts.in_flight,
        visibility_timeout=settings.visibility_timeout_us / SECOND_US,
        delay=settings.delay_us / SECOND_US,
        retention=settings.retention_us / SECOND_US,
        wait=settings.wait_us / SECOND_US,
        message_bytes_max=settings.message_bytes_max,
        fifo=settings.fifo,
        content_deduplication=settings.content_deduplication,
        dead_letter_queue=None if redrive is None else redrive.target.name,
        receive_count_max=None if redrive is None else redrive.receive_count_max,
        tags=settings.tags,
        plan=_plan_shown(info.plan),
    )


def _plan_shown(plans: PlanState) -> veil.PlanShown | None:
    plan = plans.applied or plans.suggested
    if plan is None:
        return None
    return veil.PlanShown(
        lease=None if plan.lease_us is None else plan.lease_us / SECOND_US,
        by_type={kind: lease_us / SECOND_US for kind, lease_us in plan.by_type.items()},
        why=plan.why,
        applied=plans.applied is not None,
    )


def answer_create(call: Call, outcomes: Sequence[Outcome]) -> veil.CreateQueueResult | Call:
    """Whether the queue is new; or a further call, as in SQS's CreateQueue."""
    further = compared(call, outcomes)
    if further is not None:
        return further
    created: QueueCreated = sole(call, outcomes)
    note(call.endpoint, created.info)
    return veil.CreateQueueResult(created=created.created, incarnation=created.info.incarnation)


def plan_delete_queue(asked: Asked, given: veil.QueueInput) -> Plan:
    """VeilMQ.DeleteQueue."""
    return (DeleteQueue(queue=_queue(asked, given.queue), origin=asked.caller.origin),), None


def plan_purge(asked: Asked, given: veil.QueueInput) -> Plan:
    """VeilMQ.PurgeQueue."""
    queue = _queue(asked, given.queue)
    return (PurgeQueue(queue=queue, origin=asked.caller.origin, cooldown_us=queues.cooldown_us(asked)),), None


def answer_count(call: Call, outcomes: Sequence[Outcome]) -> veil.PurgeQueueResult:
    """How many messages were deleted."""
    gone: Purged | QueueDeleted = sole(call, outcomes)
    return veil.PurgeQueueResult(count=gone.count)


_ROWS: Final = (
    Operation("Send", veil.SendInput, plan_send, answer_send),
    Operation("Receive", veil.ReceiveInput, plan_receive, answer_messages),
    Operation("Extend", veil.ExtendInput, plan_extend, answer_failures),
    Operation("Delete", veil.DeleteInput, plan_delete, answer_failures),
    Operation("Peek", veil.PeekInput, plan_peek, answer_messages),
    Operation("DescribeQueue", veil.QueueInput, plan_describe, answer_describe),
    Operation("CreateQueue", CreateQueueInput, queues.plan_create, answer_create),
    Operation("DeleteQueue", veil.QueueInput, plan_delete_queue, answer_count),
    Operation("PurgeQueue", veil.QueueInput, plan_purge, answer_count),
)
VEIL_OPERATIONS: Final = {row.name: row for row in _ROWS}
"""The rows of this module, by name; CreateQueue has the input of SQS's."""
