"""SendMessage, ReceiveMessage, DeleteMessage, ChangeMessageVisibility, and their batches.

Send: one function makes the `Send` of a message and of a batch's entry. A plain message (no attributes, group or trace
header) takes a short path without `Extras`.

Receive: which system and message attributes to return is decided once, from the request. Most requests want none, and
then a message is five fields.

Delete and extend: on a standard queue a handle stays valid after its lease, until the message is granted to another
receiver: it deletes the message, or resumes its lease. A stale handle deletes nothing and the delete reports success;
an extend with it is refused. On a FIFO queue an expired or stale handle is refused.

Source: the operations in the SQS API Reference, and recorded replies of AWS for a late ChangeMessageVisibility.
"""

from collections.abc import Sequence
from itertools import count
from typing import Final, NamedTuple, cast

from veilmq.model.commands import AfterExpiry, AnyCommand, Delete, DescribeQueue, Extend, Origin, Receive, Send
from veilmq.model.errors import LeaseError, LeaseExpired, MessageGone, MessageTooLarge, ParameterInvalid, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import NO_EXTRAS, REPORT_HEADER, Attribute, Extras, Report, id_text, is_plain, read_header
from veilmq.model.outcomes import Outcome, QueueDescribed, Received, Sent
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs import errors, forms, limits
from veilmq.protocols.sqs.addresses import is_fifo
from veilmq.protocols.sqs.auth.authorize import reads_first
from veilmq.protocols.sqs.call import Asked, Call, Entry, Plan, check_whole, failed, plan_entries, sole
from veilmq.protocols.sqs.errors import Refusal, fault_of, invalid_value, missing
from veilmq.protocols.sqs.forms import (
    ChangeMessageVisibilityBatchInput,
    ChangeMessageVisibilityInput,
    DeleteEntry,
    DeleteMessageBatchInput,
    DeleteMessageInput,
    MessageInput,
    ReceiveMessageInput,
    SendEntry,
    SendMessageBatchInput,
    SendMessageInput,
    VisibilityEntry,
)
from veilmq.protocols.sqs.operations.message_attributes import (
    TRACE_HEADER,
    Wanted,
    attributes_md5,
    body_md5,
    lists_refused,
    message_attributes,
    show_more,
    trace_header,
    wanted_of,
)
from veilmq.protocols.sqs.plain import PLAIN_DELETES, PLAIN_SEND, PLAIN_SENDS

_ENTRY = "SendMessageBatchRequestEntry"
_TRACE = b"x-amzn-trace-id"
_OTHER_TYPE = "The request include parameter that is not valid for this queue type"
_TOKEN = "can only include alphanumeric and punctuation characters. 1 to 128 in length."


class _Batch(NamedTuple):
    """What the response to a batch needs."""

    entries: list[Entry]
    system_md5s: dict[str | None, str | None]
    mixed: bool
    """The queue is FIFO and only some messages have a deduplication id."""


def plan_send(asked: Asked, given: SendMessageInput) -> Plan:
    """SendMessage."""
    queue = asked.queue(given.queue_url)
    fifo, origin, trace = is_fifo(queue.name), asked.caller.origin, asked.request.headers.get(_TRACE)
    if PLAIN_SEND is not None and not fifo and trace is None:
        command = PLAIN_SEND(given, queue, origin)
        if command is not None:
            return (command,), None
    command = _send(given, queue, fifo, origin, trace)
    return (command,), _system_md5(given) if given.message_system_attributes else None


def plan_send_batch(asked: Asked, given: SendMessageBatchInput) -> Plan:
    """SendMessageBatch; all messages together may not exceed the limit of one."""
    queue = asked.queue(given.queue_url)
    fifo, origin, trace = is_fifo(queue.name), asked.caller.origin, asked.request.headers.get(_TRACE)
    if PLAIN_SENDS is not None and not fifo and trace is None:
        plan = PLAIN_SENDS(given.entries, queue, origin)
        if plan is not None:
            return plan[0], _Batch(plan[1], {}, False)

    def command_of(entry: SendEntry) -> Send:
        return _send(entry, queue, fifo, origin, trace)

    commands, entries = plan_entries(asked, queue, given.entries, _ENTRY, command_of)
    total_bytes = sum(command.size_bytes for command in commands if isinstance(command, Send))
    if len(commands) < len(entries):
        if fifo and not all(entry.message_group_id for entry in given.entries or ()):
            # AWS refuses such a batch as a whole, and with another code than a single message (aws/aws-sdk-java #1316,
            # ruby-shoryuken/shoryuken #470).
            raise Refusal(errors.INVALID_PARAMETER_VALUE, missing("MessageGroupId").message)
        if any(entry.refusal and entry.refusal.fault is errors.UNSUPPORTED_OPERATION for entry in entries):
            raise lists_refused("SendMessageBatch")  # AWS refuses this batch as a whole, too (lumigo-io/lumigo-CLI #94)
        # Refused entries count towards the size of the batch.
        lengths = {entry.id: _length_bytes(entry) for entry in given.entries or ()}
        total_bytes += sum(lengths[entry.id] for entry in entries if entry.refusal is not None)
    if total_bytes > limits.MESSAGE_BYTES_MAX:
        text = f"Batch requests cannot be longer than {limits.MESSAGE_BYTES_MAX} bytes."
        raise Refusal(errors.BATCH_REQUEST_TOO_LONG, f"{text} You have sent {total_bytes} bytes.")
    system_md5s = {entry.id: _system_md5(entry) for entry in given.entries or () if entry.message_system_attributes}
    mixed = fifo and len({bool(entry.message_deduplication_id) for entry in given.entries or ()}) > 1
    return commands, _Batch(entries, system_md5s, mixed)


def answer_send(call: Call, outcomes: Sequence[Outcome]) -> forms.SendMessageResult:
    """SendMessageResult."""
    sent: Sent = sole(call, outcomes)
    command = call.commands[0]
    assert isinstance(command, Send)
    attributes = command.extras.attributes
    return forms.SendMessageResult(
        command.md5.hex(),
        id_text(sent.id),
        attributes_md5(attributes) if attributes else None,
        call.memo,
        f"{sent.sequence:020d}" if is_fifo(command.queue.name) else None,
    )


def answer_send_batch(call: Call, outcomes: Sequence[Outcome]) -> forms.BatchResult:
    """SendMessageBatchResult."""
    check_whole(call, outcomes)
    batch: _Batch = call.memo
    commands = cast("tuple[Send, ...]", call.commands)
    successful, failures = [], []
    for entry in batch.entries:
        if entry.refusal is not None:
            failures.append(failed(entry, entry.refusal))
            continue
        command, outcome = commands[entry.command], outcomes[entry.command]
        if type(outcome) is not Sent:
            assert isinstance(outcome, VeilError)
            failures.append(failed(entry, _refusal_of_entry(outcome, command)))
            continue
        line = forms.SendMessageBatchResultEntry(entry.id, id_text(outcome.id), command.md5.hex())
        if command.extras is not NO_EXTRAS:
            if command.extras.attributes:
                line.md5_of_message_attributes = attributes_md5(command.extras.attributes)
            line.md5_of_message_system_attributes = batch.system_md5s.get(entry.id)
            if is_fifo(command.queue.name):
                line.sequence_number = f"{outcome.sequence:020d}"
        successful.append(line)
    if not successful:
        _check_identities(call, outcomes)
    return forms.BatchResult(successful, failures)


def _refusal_of_entry(error: VeilError, command: AnyCommand) -> Refusal:
    """For a message that is too long a batch has another text than a single send."""
    if isinstance(error, MessageTooLarge):
        return errors.too_long(error.limit_bytes, of_batch=True)
    return fault_of(error, command)


def _check_identities(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Raises Refusal if a message has no deduplication id and the queue makes none: AWS refuses such a batch as a whole
    (localstack/localstack #8596). If only some messages of a batch have an id, `asked_first` handles that."""
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if isinstance(outcome, ParameterInvalid) and outcome.parameter == "deduplication_id":
            raise fault_of(outcome, command)


def asked_first(call: Call) -> Call:
    """The call; or, if only some messages of a batch have a deduplication id, a call that reads whether the queue makes
    them.

    The batch is refused as a whole if it makes none, so nothing may be sent before the answer is known.
    """
    if not call.memo.mixed or not call.commands:
        return call
    command = call.commands[0]
    assert isinstance(command, Send)
    described = DescribeQueue(queue=command.queue, origin=command.origin)
    return reads_first(call, (described,), _answer_identities, call)


def _answer_identities(call: Call, outcomes: Sequence[Outcome]) -> Call:
    """The batch itself. If the queue is missing or the key may not send, the batch reports that."""
    (outcome,), batch = outcomes, call.memo
    assert isinstance(batch, Call)
    if (
        isinstance(outcome, QueueDescribed)
        and not outcome.info.settings.content_deduplication
        and batch.key.allows(Action.SEND, outcome.info.key.name)
    ):
        raise Refusal(errors.INVALID_PARAMETER_VALUE, errors.NO_IDENTITY)
    return batch


def _send(given: MessageInput, queue: QueueKey, fifo: bool, origin: Origin, trace: bytes | None) -> Send:
    body = given.message_body
    if not body:
        raise missing("MessageBody")
    raw = body.encode()
    if not is_plain(raw):
        errors.check_text(body, "message body", errors.INVALID_MESSAGE_CONTENTS)
    size_bytes = len(raw)
    extras = NO_EXTRAS
    if (
        trace is not None
        or given.message_attributes
        or given.message_system_attributes
        or given.message_group_id is not None
        or given.message_deduplication_id is not None
        or fifo
    ):
        extras, attributes_bytes = _extras(given, trace, fifo)
        size_bytes += attributes_bytes
    if size_bytes > limits.MESSAGE_BYTES_MAX:
        raise errors.too_long(limits.MESSAGE_BYTES_MAX)
    delay_us = None if given.delay_seconds is None else _delay_us(given, given.delay_seconds, fifo)
    return Send(
        queue=queue,
        origin=origin,
        body=body,
        md5=body_md5(raw),
        size_bytes=size_bytes,
        delay_us=delay_us,
        extras=extras,
    )


def _length_bytes(given: MessageInput) -> int:
    """The size of an entry that may be invalid: body, and names, types and values of its attributes."""
    size_bytes = len((given.message_body or "").encode())
    for name, value in (given.message_attributes or {}).items():
        texts = (name, value.data_type or "", value.string_value or "")
        size_bytes += sum(len(text.encode()) for text in texts) + len(value.binary_value or b"")
    return size_bytes


def _other_type(given: MessageInput, parameter: str, value: object) -> Refusal:
    """A parameter that the other type of queue has. An entry of a batch has a shorter text (aws/aws-sdk-js #3187)."""
    if isinstance(given, SendEntry):
        return Refusal(errors.INVALID_PARAMETER_VALUE, _OTHER_TYPE)
    return invalid_value(parameter, value, f"{_OTHER_TYPE}.")


def _delay_us(given: MessageInput, delay_s: int, fifo: bool) -> int | None:
    if not 0 <= delay_s <= limits.DELAY_SECONDS_MAX:
        reason = f"DelaySeconds must be >= 0 and <= {limits.DELAY_SECONDS_MAX}."
        raise invalid_value("DelaySeconds", delay_s, reason)
    if fifo:
        if delay_s:
            raise _other_type(given, "DelaySeconds", delay_s)
        return None
    return delay_s * SECOND_US


def _extras(given: MessageInput, header: bytes | None, fifo: bool) -> tuple[Extras, int]:
    """The message's fields beyond its body, and their size in bytes."""
    group, deduplication_id = given.message_group_id, given.message_deduplication_id
    if fifo and not group:
        raise missing("MessageGroupId")
    if group is not None and not limits.TOKEN.match(group):
        raise invalid_value("MessageGroupId", group, f"MessageGroupId {_TOKEN}")
    if deduplication_id is not None:
        if not fifo:
            raise _other_type(given, "MessageDeduplicationId", deduplication_id)
        if not limits.TOKEN.match(deduplication_id):
            raise invalid_value("MessageDeduplicationId", deduplication_id, f"MessageDeduplicationId {_TOKEN}")
    attributes, size_bytes = message_attributes(given.message_attributes or {})
    trace = trace_header(given.message_system_attributes or {})
    if trace is None and header is not None and len(header) <= limits.TRACE_BYTES_MAX:
        text = header.decode("latin-1")
        trace = text if text.isascii() and text.isprintable() else None
    return Extras(attributes, group, deduplication_id, trace), size_bytes


def _system_md5(given: MessageInput) -> str | None:
    """MD5OfMessageSystemAttributes: of the sender's attribute, not of the HTTP header."""
    value = (given.message_system_attributes or {}).get(TRACE_HEADER)
    if value is None:
        return None
    return attributes_md5([Attribute(TRACE_HEADER, value.data_type or "", value.string_value or "")])


def plan_receive(asked: Asked, given: ReceiveMessageInput) -> Plan:
    """ReceiveMessage."""
    queue = asked.queue(given.queue_url)
    count, lease_s, wait_s = given.max_number_of_messages, given.visibility_timeout, given.wait_time_seconds
    if count is None:
        count = 1
    elif not 1 <= count <= limits.RECEIVE_COUNT_MAX:
        reason = f"Must be between 1 and {limits.RECEIVE_COUNT_MAX}, if provided."
        raise invalid_value("MaxNumberOfMessages", count, reason)
    if lease_s is not None and not 0 <= lease_s <= limits.VISIBILITY_SECONDS_MAX:
        reason = f"Must be between 0 and {limits.VISIBILITY_SECONDS_MAX}, if provided."
        raise invalid_value("VisibilityTimeout", lease_s, reason)
    if wait_s is not None and not 0 <= wait_s <= limits.WAIT_SECONDS_MAX:
        raise invalid_value("WaitTimeSeconds", wait_s, f"Must be >= 0 and <= {limits.WAIT_SECONDS_MAX}, if provided.")
    command = Receive(
        queue=queue,
        origin=asked.caller.origin,
        count_max=count,
        lease_us=None if lease_s is None else lease_s * SECOND_US,
        wait_us=None if wait_s is None else wait_s * SECOND_US,
        in_flight_max=limits.IN_FLIGHT_MAX,
        attempt_id=_attempt_id(given.receive_request_attempt_id, queue),
    )
    if given.attribute_names or given.message_system_attribute_names or given.message_attribute_names:
        return (command,), wanted_of(given, is_fifo(queue.name))
    return (command,), None


def _attempt_id(attempt_id: str | None, queue: QueueKey) -> str | None:
    """The id for retries. AWS ignores it on a standard queue (awspring/spring-cloud-aws #529)."""
    if attempt_id is None or not is_fifo(queue.name):
        return None
    if not limits.TOKEN.match(attempt_id):
        reason = "ReceiveRequestAttemptId can only include alphanumeric and punctuation characters. 1 to 128 in length."
        raise invalid_value("ReceiveRequestAttemptId", attempt_id, reason)
    return attempt_id


def answer_receive(call: Call, outcomes: Sequence[Outcome]) -> forms.ReceiveMessageResult:
    """ReceiveMessageResult."""
    received: Received = sole(call, outcomes)
    if not received.messages:
        return forms.ReceiveMessageResult()
    wanted: Wanted | None = call.memo
    messages = [
        forms.Message(id_text(delivery.id), delivery.handle, delivery.md5.hex(), delivery.body)
        for delivery in received.messages
    ]
    if wanted is not None:
        for message, delivery in zip(messages, received.messages, strict=True):
            show_more(message, delivery, wanted)
    return forms.ReceiveMessageResult(messages)


_VISIBILITY_ENTRY: Final = "ChangeMessageVisibilityBatchRequestEntry"
_LEASE_TOTAL_US_MAX: Final = limits.LEASE_TOTAL_SECONDS_MAX * SECOND_US


def plan_delete(asked: Asked, given: DeleteMessageInput) -> Plan:
    """DeleteMessage."""
    queue = asked.queue(given.queue_url)
    return (_delete(asked, queue, _after_expiry(queue), given),), None


def plan_delete_batch(asked: Asked, given: DeleteMessageBatchInput) -> Plan:
    """DeleteMessageBatch."""
    queue = asked.queue(given.queue_url)
    name, late = "DeleteMessageBatchRequestEntry", _after_expiry(queue)
    if PLAIN_DELETES is not None:
        plan: Plan | None = PLAIN_DELETES(given.entries, queue, asked.caller.origin, asked.arrived, late)
        if plan is not None:
            return plan
    return plan_entries(asked, queue, given.entries, name, lambda entry: _delete(asked, queue, late, entry))


def plan_extend(asked: Asked, given: ChangeMessageVisibilityInput) -> Plan:
    """ChangeMessageVisibility."""
    return (_extend(asked, asked.queue(given.queue_url), given, _report(asked)),), None


def plan_extend_batch(asked: Asked, given: ChangeMessageVisibilityBatchInput) -> Plan:
    """ChangeMessageVisibilityBatch."""
    queue = asked.queue(given.queue_url)
    numbers, report = count(1), _report(asked)

    def command_of(entry: VisibilityEntry) -> Extend:
        return _extend(asked, queue, entry, report, next(numbers))

    return plan_entries(asked, queue, given.entries, _VISIBILITY_ENTRY, command_of)


def _delete(asked: Asked, queue: QueueKey, late: AfterExpiry, given: DeleteMessageInput | DeleteEntry) -> Delete:
    if not given.receipt_handle:
        # AWS reports a missing parameter of a batch under this name (aws/aws-sdk-js-v3 #5478).
        raise missing("ReceiptHandle" if isinstance(given, DeleteEntry) else "MessageHandle")
    return Delete(
        queue=queue, origin=asked.caller.origin, handle=given.receipt_handle, arrived=asked.arrived, after_expiry=late
    )


_ALLOW: Final = AfterExpiry.ALLOW
_REFUSE: Final = AfterExpiry.REFUSE


def _after_expiry(queue: QueueKey) -> AfterExpiry:
    """AWS accepts a handle after its lease until the message is granted again, also to extend it; not on a FIFO
    queue."""
    return _REFUSE if is_fifo(queue.name) else _ALLOW


def _report(asked: Asked) -> Report | None:
    return read_header(asked.request.headers.get(REPORT_HEADER))


def _extend(
    asked: Asked,
    queue: QueueKey,
    given: ChangeMessageVisibilityInput | VisibilityEntry,
    report: Report | None,
    number: int = 0,
) -> Extend:
    """`number`: of a batch entry, from 1."""
    if not given.receipt_handle:
        raise missing("ReceiptHandle")
    lease_s = given.visibility_timeout
    if lease_s is None:
        raise missing(f"{_VISIBILITY_ENTRY}.{number}.VisibilityTimeout" if number else "VisibilityTimeout")
    if not 0 <= lease_s <= limits.VISIBILITY_SECONDS_MAX:
        reason = f"VisibilityTimeout must be an integer between 0 and {limits.VISIBILITY_SECONDS_MAX}."
        raise invalid_value("VisibilityTimeout", lease_s, reason)
    return Extend(
        queue=queue,
        origin=asked.caller.origin,
        handle=given.receipt_handle,
        lease_us=lease_s * SECOND_US,
        arrived=asked.arrived,
        after_expiry=_after_expiry(queue),
        lease_total_us_max=_LEASE_TOTAL_US_MAX,
        report=report,
    )


def _lease_refusal(command: AnyCommand, error: VeilError) -> Refusal | None:
    """The refusal for an error; None if the client gets a success."""
    if isinstance(command, Delete):
        # On FIFO too, a delete that is repeated because its response was lost succeeds: the message is gone.
        harmless = MessageGone if is_fifo(command.queue.name) else LeaseError
        if isinstance(error, harmless):
            return None
    return fault_of(error, command)


def _lease_refusal_of_entry(command: AnyCommand, error: VeilError) -> Refusal | None:
    """A batch has another code and shorter texts (smaskalik/sqsmover #54, aws/aws-dotnet-messaging)."""
    refusal = _lease_refusal(command, error)
    if refusal is None or not isinstance(error, LeaseError):
        return refusal
    gone = isinstance(command, Extend) and not isinstance(error, LeaseExpired)
    return Refusal(errors.RECEIPT_HANDLE_IS_INVALID, errors.NOT_AVAILABLE if gone else errors.HANDLE_EXPIRED)


def answer_void(call: Call, outcomes: Sequence[Outcome]) -> forms.Empty:
    """The empty result of DeleteMessage and ChangeMessageVisibility."""
    outcome = outcomes[0]
    refusal = _lease_refusal(call.commands[0], outcome) if isinstance(outcome, VeilError) else None
    if refusal is not None:
        raise refusal
    return forms.EMPTY


def answer_batch(call: Call, outcomes: Sequence[Outcome]) -> forms.BatchResult:
    """DeleteMessageBatchResult and ChangeMessageVisibilityBatchResult."""
    check_whole(call, outcomes)
    successful, failures = [], []
    for entry in call.memo:
        refusal = entry.refusal
        if refusal is None:
            outcome = outcomes[entry.command]
            if isinstance(outcome, VeilError):
                refusal = _lease_refusal_of_entry(call.commands[entry.command], outcome)
        if refusal is None:
            successful.append(forms.IdEntry(entry.id))
        else:
            failures.append(failed(entry, refusal))
    return forms.BatchResult(successful, failures)
