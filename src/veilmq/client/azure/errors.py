"""What Queue Storage says in its codes -> the house's errors.

Strategy: one total table from code to error; a code that is not in it is a ServiceError as it stands. A refused query
parameter is named by the service, and the call says what the port calls it. Sequence and attempt of a LeaseError are 0:
the service does not tell them. Source: "Queue Storage error codes" and "Common REST API error codes".
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from veilmq.client.service_errors import error_in
from veilmq.model.errors import (
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)

MESSAGE_BYTES_MAX: Final = 65_536
_BEING_DELETED_US: Final = 30_000_000
"""At least so long is a deleted queue's name taken ("Delete Queue")."""
_HANDLE_PARAMETERS: Final = frozenset({"popreceipt", "messageid"})


class Said(NamedTuple):
    """What the service said, and about which queue."""

    code: str
    status: int
    request_id: str
    message: str
    extra: Mapping[str, str]
    """The further elements of its answer, by their names in lower case."""
    queue: str
    names: Mapping[str, str]
    """Query parameter -> what the port calls it in this call."""
    size_bytes: int
    """Of the message that was sent, if one was."""
    creating: bool
    """The call makes the queue: one that is being deleted is in its way; to all others it is no queue any more."""


def error_of(said: Said) -> VeilError:
    """The error that the code stands for. Never raises."""
    return error_in(_TABLE, said)


def _parameter(said: Said) -> VeilError:
    name = said.extra.get("queryparametername", "").lower()
    reason = said.extra.get("reason") or said.message
    if name in _HANDLE_PARAMETERS:
        return ReceiptInvalid(reason=reason)
    if "minimumallowed" in said.extra:
        reason = f"must be from {said.extra['minimumallowed']} to {said.extra.get('maximumallowed')}"
    return ParameterInvalid(parameter=said.names.get(name, name or "request"), reason=reason)


def _too_large(said: Said) -> VeilError:
    limit = said.extra.get("maxlimit", "")
    return MessageTooLarge(
        size_bytes=said.size_bytes, limit_bytes=int(limit) if limit.isdecimal() else MESSAGE_BYTES_MAX
    )


def _being_deleted(said: Said) -> VeilError:
    if said.creating:
        return QueueDeletedRecently(queue=said.queue, wait_us=_BEING_DELETED_US)
    return QueueMissing(queue=said.queue)


def _invalid(parameter: str) -> Callable[[Said], VeilError]:
    return lambda said: ParameterInvalid(parameter=parameter, reason=said.extra.get("reason") or said.message)


_TABLE: Final[dict[str, Callable[[Said], VeilError]]] = {
    "QueueNotFound": lambda said: QueueMissing(queue=said.queue),
    "QueueBeingDeleted": _being_deleted,
    "QueueAlreadyExists": lambda said: QueueExists(queue=said.queue, setting="metadata"),
    # Deleted, expired, or of a receipt that another delivery or update made stale: the service does not tell which.
    "MessageNotFound": lambda said: MessageGone(sequence=0, attempt=0),
    "PopReceiptMismatch": lambda said: LeaseTaken(sequence=0, attempt=0),
    "MessageTooLarge": _too_large,
    "RequestBodyTooLarge": _too_large,
    "InvalidQueryParameterValue": _parameter,
    "OutOfRangeQueryParameterValue": _parameter,
    "MissingRequiredQueryParameter": _parameter,
    "InvalidResourceName": _invalid("name"),
    "OutOfRangeInput": _invalid("name"),
    "InvalidMarker": _invalid("prefix"),
    "InvalidXmlDocument": _invalid("body"),
    "InvalidXmlNodeValue": _invalid("body"),
    "MissingRequiredXmlNode": _invalid("body"),
    "InvalidMetadata": _invalid("template"),
    "EmptyMetadataKey": _invalid("template"),
    "MetadataTooLarge": _invalid("template"),
    "InvalidInput": _invalid("request"),
}
