"""DeleteMessage, BatchDeleteMessage and ChangeMessageVisibility.

Strategy: a handle is valid for one state of its message: an extension returns a new one, and a handle whose lease has
ended is refused. A batch deletes what it can and returns the failures. Source: the pages of these operations.
"""

from collections.abc import Sequence

from veilmq.model.commands import AfterExpiry, Delete, Extend
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, milliseconds
from veilmq.model.outcomes import Extended, Outcome
from veilmq.model.reports import REPORT_HEADER, read_header
from veilmq.protocols.http import Response
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.content import read_root
from veilmq.protocols.mns.errors import (
    MISSING_RECEIPT_HANDLE,
    MISSING_VISIBILITY_TIMEOUT,
    RECEIPT_HANDLE_ERROR,
    Refusal,
    bad,
    fault_of,
    malformed,
)
from veilmq.protocols.mns.parameters import whole_number
from veilmq.protocols.mns.writing import document
from veilmq.protocols.xml import clean, escape

BATCH_FAILED_STATUS = 404
"""Status of a batch with failures."""


def _handle(asked: Asked) -> str:
    handle = asked.parameters.get("receipthandle")
    if not handle:
        raise Refusal(MISSING_RECEIPT_HANDLE)
    return _checked(handle)


def _checked(handle: str) -> str:
    if len(handle) > limits.HANDLE_CHARACTERS_MAX:
        raise Refusal(RECEIPT_HANDLE_ERROR)
    return handle


def plan_delete(asked: Asked) -> Plan:
    """DeleteMessage."""
    return (_delete(asked, _handle(asked)),), None


def _delete(asked: Asked, handle: str) -> Delete:
    return Delete(
        queue=asked.queue(),
        origin=asked.caller.origin,
        handle=handle,
        arrived=asked.arrived,
        after_expiry=AfterExpiry.REFUSE,
    )


def plan_batch_delete(asked: Asked) -> Plan:
    """BatchDeleteMessage."""
    asked.queue()
    root = read_root(asked.request.body)
    if root.name != "ReceiptHandles":
        raise malformed("the document must be ReceiptHandles")
    # npm's aliyun-mns writes receiptHandle.
    elements = [child for child in root.children if child.name.lower() == "receipthandle"]
    if not 1 <= len(elements) <= limits.BATCH_MAX:
        raise bad("ReceiptHandles", f"a batch has 1 to {limits.BATCH_MAX} handles.")
    for element in elements:
        if element.children:
            raise malformed("a ReceiptHandle holds text alone")
        if not element.text:
            raise Refusal(MISSING_RECEIPT_HANDLE)
    return tuple(_delete(asked, _checked(element.text)) for element in elements), None


def answer_batch_delete(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """204, or 404 with an entry for each failure."""
    failed: list[str] = []
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if not isinstance(outcome, VeilError):
            continue
        refusal = fault_of(outcome, command)
        if isinstance(outcome, QueueMissing):
            raise refusal
        assert isinstance(command, Delete)
        failed.append(
            f"<Error><ErrorCode>{refusal.fault.code}</ErrorCode><ErrorMessage>{clean(refusal.message)}</ErrorMessage>"
            f"<ReceiptHandle>{escape(command.handle)}</ReceiptHandle></Error>"
        )
    if not failed:
        return Response(204, None, b"")
    return document("Errors", "".join(failed), BATCH_FAILED_STATUS)


def plan_change_visibility(asked: Asked) -> Plan:
    """ChangeMessageVisibility."""
    queue, handle = asked.queue(), _handle(asked)
    lease_s = whole_number(asked.parameters, "VisibilityTimeout", 1, limits.VISIBILITY_SECONDS_MAX, "seconds")
    if lease_s is None:
        raise Refusal(MISSING_VISIBILITY_TIMEOUT)
    command = Extend(
        queue=queue,
        origin=asked.caller.origin,
        handle=handle,
        lease_us=lease_s * SECOND_US,
        arrived=asked.arrived,
        after_expiry=AfterExpiry.REFUSE,
        rotate=True,
        report=read_header(asked.request.headers.get(REPORT_HEADER)),
    )
    return (command,), None


def answer_change_visibility(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with the new handle."""
    extended: Extended = sole(call, outcomes)
    return document(
        "ChangeVisibility",
        f"<ReceiptHandle>{extended.handle}</ReceiptHandle>"
        f"<NextVisibleTime>{milliseconds(extended.due)}</NextVisibleTime>",
    )
