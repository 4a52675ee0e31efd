"""DeleteMessage, ChangeMessageVisibility, and their batches.

Strategy: on a standard queue a handle stays valid after its lease, until the message is granted to another receiver: it
deletes the message, or resumes its lease. A stale handle deletes nothing and the delete reports success; an extend with
it is refused. On a FIFO queue an expired or stale handle is refused. Source: DeleteMessage and ChangeMessageVisibility
in the SQS API Reference, and recorded replies of AWS for a late ChangeMessageVisibility.
"""

from collections.abc import Sequence
from itertools import count
from typing import Final

from veilmq.model.commands import AfterExpiry, AnyCommand, Delete, Extend
from veilmq.model.errors import LeaseError, LeaseExpired, LeaseTaken, MessageGone, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Outcome
from veilmq.model.queue import QueueKey
from veilmq.model.reports import REPORT_HEADER, Report, read_header
from veilmq.protocols.sqs import limits, results
from veilmq.protocols.sqs.addresses import is_fifo
from veilmq.protocols.sqs.call import Asked, Call, Plan
from veilmq.protocols.sqs.errors import RECEIPT_HANDLE_IS_INVALID, Refusal, fault_of, invalid_value, missing
from veilmq.protocols.sqs.inputs import (
    ChangeMessageVisibilityBatchInput,
    ChangeMessageVisibilityInput,
    DeleteEntry,
    DeleteMessageBatchInput,
    DeleteMessageInput,
    VisibilityEntry,
)
from veilmq.protocols.sqs.operations.batches import check_whole, failed, plan_entries

_ENTRY: Final = "ChangeMessageVisibilityBatchRequestEntry"
_LEASE_TOTAL_US_MAX: Final = limits.LEASE_TOTAL_SECONDS_MAX * SECOND_US


def plan_delete(asked: Asked, given: DeleteMessageInput) -> Plan:
    """DeleteMessage."""
    return (_delete(asked, asked.queue(given.queue_url), given),), None


def plan_delete_batch(asked: Asked, given: DeleteMessageBatchInput) -> Plan:
    """DeleteMessageBatch."""
    queue = asked.queue(given.queue_url)
    name = "DeleteMessageBatchRequestEntry"
    return plan_entries(asked, queue, given.entries, name, lambda entry: _delete(asked, queue, entry))


def plan_extend(asked: Asked, given: ChangeMessageVisibilityInput) -> Plan:
    """ChangeMessageVisibility."""
    return (_extend(asked, asked.queue(given.queue_url), given, _report(asked)),), None


def plan_extend_batch(asked: Asked, given: ChangeMessageVisibilityBatchInput) -> Plan:
    """ChangeMessageVisibilityBatch."""
    queue = asked.queue(given.queue_url)
    numbers, report = count(1), _report(asked)

    def command_of(entry: VisibilityEntry) -> Extend:
        return _extend(asked, queue, entry, report, next(numbers))

    return plan_entries(asked, queue, given.entries, _ENTRY, command_of)


def _delete(asked: Asked, queue: QueueKey, given: DeleteMessageInput | DeleteEntry) -> Delete:
    if not given.receipt_handle:
        # AWS reports a missing parameter of a batch under this name (aws/aws-sdk-js-v3 #5478).
        raise missing("ReceiptHandle" if isinstance(given, DeleteEntry) else "MessageHandle")
    return Delete(
        queue=queue,
        origin=asked.caller.origin,
        handle=given.receipt_handle,
        arrived=asked.arrived,
        after_expiry=_after_expiry(queue),
    )


def _after_expiry(queue: QueueKey) -> AfterExpiry:
    """AWS accepts a handle after its lease until the message is granted again, also to extend it; not on a FIFO
    queue."""
    return AfterExpiry.REFUSE if is_fifo(queue.name) else AfterExpiry.ALLOW


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
        raise missing(f"{_ENTRY}.{number}.VisibilityTimeout" if number else "VisibilityTimeout")
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


def _refusal(command: AnyCommand, outcome: Outcome) -> Refusal | None:
    """The refusal for an outcome; None for a success."""
    if not isinstance(outcome, VeilError):
        return None
    if isinstance(command, Delete):
        # On FIFO too, a delete that is repeated because its response was lost succeeds: the message is gone.
        harmless = MessageGone if is_fifo(command.queue.name) else LeaseError
        if isinstance(outcome, harmless):
            return None
    return fault_of(outcome, command)


def _refusal_of_entry(command: AnyCommand, outcome: Outcome) -> Refusal | None:
    """For an ended lease a batch has another text than a single delete (FIFO; smaskalik/sqsmover #54)."""
    refusal = _refusal(command, outcome)
    if refusal is not None and isinstance(command, Delete) and isinstance(outcome, LeaseExpired | LeaseTaken):
        return Refusal(RECEIPT_HANDLE_IS_INVALID, "The receipt handle has expired")
    return refusal


def answer_void(call: Call, outcomes: Sequence[Outcome]) -> results.Empty:
    """The empty result of DeleteMessage and ChangeMessageVisibility."""
    refusal = _refusal(call.commands[0], outcomes[0])
    if refusal is not None:
        raise refusal
    return results.EMPTY


def answer_batch(call: Call, outcomes: Sequence[Outcome]) -> results.BatchResult:
    """DeleteMessageBatchResult and ChangeMessageVisibilityBatchResult."""
    check_whole(call, outcomes)
    successful, failures = [], []
    for entry in call.memo:
        refusal = entry.refusal or _refusal_of_entry(call.commands[entry.command], outcomes[entry.command])
        if refusal is None:
            successful.append(results.IdEntry(entry.id))
        else:
            failures.append(failed(entry, refusal))
    return results.BatchResult(successful, failures)
