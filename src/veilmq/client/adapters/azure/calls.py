"""Calls of azure-storage-queue's clients that raise our errors.

Strategy: all calls go through here; what azure.core raises becomes a TransportError, a ServiceError or an error of the
model. The SDK retries by itself, and its final exception describes the last attempt only. Our retry hook records
whether an earlier attempt may have reached the service, because then "no such message" may be our own doing. Source:
azure.core's exceptions, and the transport's choice between request and response errors.

Closing: an immediate close would break the transport of a receive that must still give its messages back. So calls are
counted: after a close, the calls in progress finish, together with the further calls that they make; once none is in
progress, new calls are refused.

Errors: one total table from code to error; a code that is not in it becomes a ServiceError with the service's text. The
service names a refused query parameter; the call maps it to the port's name. Sequence and attempt of a LeaseError are
0, because the service does not report them. Source: "Queue Storage error codes" and "Common REST API error codes".
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar
from xml.etree.ElementTree import ParseError

from azure.core.exceptions import AzureError, DecodeError, HttpResponseError, ServiceRequestError

from veilmq.client.adapters.service_errors import error_in
from veilmq.client.errors import STRANGE, TransportError, advised, strange_answer
from veilmq.model.errors import (
    LeaseError,
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
"""How long a deleted queue's name stays unavailable, at least ("Delete Queue")."""
_HANDLE_PARAMETERS: Final = frozenset({"popreceipt", "messageid"})


class Said(NamedTuple):
    """The service's refusal, and the queue it is about."""

    code: str
    status: int
    request_id: str
    message: str
    extra: Mapping[str, str]
    """The other elements of its answer, by their names in lower case."""
    queue: str
    names: Mapping[str, str]
    """Query parameter -> the port's name for it in this call."""
    size_bytes: int
    """Of the message that was sent, if one was."""
    creating: bool
    """Whether the call creates the queue. A queue that is being deleted blocks the creation; for all other calls it no
    longer exists."""


def error_of(said: Said) -> VeilError:
    """The error for a code. Never raises."""
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
    # Deleted, expired, or the receipt is stale after another delivery or update: the service does not say which.
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


T = TypeVar("T")

_REQUEST_ID: Final = "x-ms-request-id"
_CODE: Final = "x-ms-error-code"
_CLOSED: Final = "HTTP transport has already been closed"
"""How azure.core's error begins when the client was closed."""


def call(
    operation: Callable[..., T], queue: str, *, names: Mapping[str, str] | None = None, size_bytes: int = 0,
    creating: bool = False, **given: Any,
) -> T:  # fmt: skip
    """The result of an SDK's method. `queue`, `names`, `size_bytes` and `creating` are for errors: see `Said`.

    Raises QueueMissing, TransportError, ServiceError and what `error_of` makes of a code.
    """
    reached = False

    def retried(*, error: AzureError | None = None, **_: Any) -> None:
        nonlocal reached
        reached |= not isinstance(error, ServiceRequestError)

    try:
        return operation(retry_hook=retried, **given)
    except (DecodeError, ParseError, *STRANGE) as error:
        if isinstance(error, ValueError) and str(error).startswith(_CLOSED):
            raise TransportError(reason="the client is closed", may_have_happened=reached) from error
        raise strange_answer(error) from error
    except HttpResponseError as error:
        found = error_of(_said(error, queue, names or {}, size_bytes, creating))
        if reached and isinstance(found, LeaseError):
            reason = f"the answer of an earlier attempt was lost, and then: {found}"
            raise TransportError(reason=reason, may_have_happened=True) from error
        raise found from error
    except ServiceRequestError as error:
        raise TransportError(reason=advised(_short(error)), may_have_happened=reached) from error
    except AzureError as error:
        raise TransportError(reason=_short(error), may_have_happened=True) from error


def _said(error: HttpResponseError, queue: str, names: Mapping[str, str], size_bytes: int, creating: bool) -> Said:
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    code = getattr(error, "error_code", None) or headers.get(_CODE) or type(error).__name__
    extra = getattr(error, "additional_info", None) or {}
    return Said(
        code=str(getattr(code, "value", code)),
        status=error.status_code or 0,
        request_id=headers.get(_REQUEST_ID, ""),
        message=str(error.message).partition("\n")[0],
        extra={name: str(text) for name, text in extra.items()},
        queue=queue,
        names=names,
        size_bytes=size_bytes,
        creating=creating,
    )


def _short(error: AzureError) -> str:
    return f"{type(error).__name__}: {error.message}"


CLOSED: Final = "the account is closed"


class UnderWay:
    """The calls in progress of one account. Any thread."""

    def __init__(self, end: Callable[[], None]) -> None:
        """end: called once, when the account is closed and no call is in progress."""
        self._end = end
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wrap a call, or several of which the last must not be refused. Raises TransportError."""
        with self._lock:
            if self._closed and not self._calls:
                raise TransportError(reason=CLOSED, may_have_happened=False)
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closed and not self._calls
            if last:
                self._end()

    def close(self) -> None:
        """End it now, or when the last call in progress ends. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            idle = first and not self._calls
        if idle:
            self._end()
