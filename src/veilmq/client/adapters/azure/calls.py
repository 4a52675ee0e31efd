"""Calls of azure-storage-queue's clients: the port's messages as arguments, the service's answers as messages, and our
errors.

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

Sending: what Queue Storage cannot carry, and what exceeds its limits, is refused here before any I/O. The SDK writes a
carriage return into its XML unescaped, and every XML reader turns it into a line feed; our request hook writes the
character reference instead. Source: "Put Message"; XML 1.0, section 2.11.

Reading: a handle joins the message's id and its pop receipt, because later calls need both. Instants are whole seconds,
as the service writes them. Source: "Get Messages", "Peek Messages".
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, TypeVar
from xml.etree.ElementTree import ParseError

import msgspec
from azure.core.exceptions import AzureError, DecodeError, HttpResponseError, ServiceRequestError

from veilmq.client.adapters.cloud import ACCOUNT_CLOSED, encode_base64
from veilmq.client.adapters.foreign import RequestIds, foreign_answer
from veilmq.client.adapters.service_errors import Refusal, error_in
from veilmq.client.errors import STRANGE, TransportError, advised, strange_answer
from veilmq.client.messages import Message, Peeked, Received
from veilmq.client.queue import Capabilities
from veilmq.client.shared import checks
from veilmq.client.shared.checks import sendable, text_bytes
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
LEASE_MAX: Final = 604_800
DELAY_MAX: Final = 604_799
"""Less than the time to live, which is 7 days unless the message names another."""
TTL_MAX: Final = 2_147_483_647
NEVER: Final = -1
"""The time to live of a message that never expires; math.inf in the port."""
_BEING_DELETED_US: Final = 30_000_000
"""How long a deleted queue's name stays unavailable, at least ("Delete Queue")."""
_HANDLE_PARAMETERS: Final = frozenset({"popreceipt", "messageid"})


class AzureRefusal(Refusal, frozen=True, kw_only=True):
    """What Queue Storage reports, and about which call."""

    extra: Mapping[str, str]
    """The other elements of its answer, by their names in lower case."""
    names: Mapping[str, str]
    """Query parameter -> the port's name for it in this call."""
    creating: bool
    """Whether the call creates the queue. A queue that is being deleted blocks the creation; for all other calls it no
    longer exists."""


def error_of(refusal: AzureRefusal) -> VeilError:
    """The error for a code. Never raises."""
    return error_in(_TABLE, refusal)


def _parameter(refusal: AzureRefusal) -> VeilError:
    name = refusal.extra.get("queryparametername", "").lower()
    reason = refusal.extra.get("reason") or refusal.message
    if name in _HANDLE_PARAMETERS:
        return ReceiptInvalid(reason=reason)
    if "minimumallowed" in refusal.extra:
        reason = f"must be from {refusal.extra['minimumallowed']} to {refusal.extra.get('maximumallowed')}"
    return ParameterInvalid(parameter=refusal.names.get(name, name or "request"), reason=reason)


def _too_large(refusal: AzureRefusal) -> VeilError:
    limit = refusal.extra.get("maxlimit", "")
    return MessageTooLarge(
        size_bytes=refusal.size_bytes, limit_bytes=int(limit) if limit.isdecimal() else MESSAGE_BYTES_MAX
    )


def _being_deleted(refusal: AzureRefusal) -> VeilError:
    if refusal.creating:
        return QueueDeletedRecently(queue=refusal.queue, wait_us=_BEING_DELETED_US)
    return QueueMissing(queue=refusal.queue)


def _invalid(parameter: str) -> Callable[[AzureRefusal], VeilError]:
    return lambda refusal: ParameterInvalid(parameter=parameter, reason=refusal.extra.get("reason") or refusal.message)


_TABLE: Final[dict[str, Callable[[AzureRefusal], VeilError]]] = {
    "QueueNotFound": lambda refusal: QueueMissing(queue=refusal.queue),
    "QueueBeingDeleted": _being_deleted,
    "QueueAlreadyExists": lambda refusal: QueueExists(queue=refusal.queue, setting="metadata"),
    # Deleted, expired, or the receipt is stale after another delivery or update: the service does not say which.
    "MessageNotFound": lambda refusal: MessageGone(sequence=0, attempt=0),
    "PopReceiptMismatch": lambda refusal: LeaseTaken(sequence=0, attempt=0),
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
ResponseHook = Callable[[Any], None]

_REQUEST_ID: Final = "x-ms-request-id"
"""Each of the service's answers has it ("Common REST API response headers")."""
_LISTS: Final = (b"<QueueMessagesList", b"<EnumerationResults")
"""The roots of its results."""
_CODE: Final = "x-ms-error-code"
_CLOSED: Final = "HTTP transport has already been closed"
"""How azure.core's error begins when the client was closed."""


def call(
    operation: Callable[..., T], queue: str, *, names: Mapping[str, str] | None = None, size_bytes: int = 0,
    creating: bool = False, ids: RequestIds, hook: ResponseHook | None = None, **given: Any,
) -> T:  # fmt: skip
    """The result of an SDK's method. `queue`, `names`, `size_bytes` and `creating` are for errors: see `AzureRefusal`.
    ids: the account's. hook: the client's own, which the one of a call replaces.

    Raises QueueMissing, TransportError, ServiceError and what `error_of` makes of a code.
    """
    reached = False
    foreign: TransportError | None = None

    def retried(*, error: AzureError | None = None, **_: Any) -> None:
        nonlocal reached
        reached |= not isinstance(error, ServiceRequestError)

    def answered(response: Any) -> None:
        nonlocal foreign
        answer = response.http_response
        known = ids.known(answer.headers, lambda: _is_result(answer.body())) or answer.status_code >= 400
        foreign = None if known else _foreign(answer, ids)
        if hook is not None:
            hook(response)

    try:
        found = operation(retry_hook=retried, raw_response_hook=answered, permit_redirects=False, **given)
    except (DecodeError, ParseError, *STRANGE) as error:
        if isinstance(error, ValueError) and str(error).startswith(_CLOSED):
            raise TransportError(reason="the client is closed", may_have_happened=reached) from error
        raise (strange_answer(error) if foreign is None else foreign) from error
    except HttpResponseError as error:
        if foreign is not None:
            raise foreign from error
        refused = error_of(_refusal(error, queue, names or {}, size_bytes, creating))
        if reached and isinstance(refused, LeaseError):
            reason = f"the answer of an earlier attempt was lost, and then: {refused}"
            raise TransportError(reason=reason, may_have_happened=True) from error
        raise refused from error
    except ServiceRequestError as error:
        raise TransportError(reason=advised(_short(error)), may_have_happened=reached) from error
    except AzureError as error:
        raise TransportError(reason=_short(error), may_have_happened=True) from error
    if foreign is not None:  # the SDK reads a well-formed web page as an empty list
        raise foreign
    return found


def new_ids() -> RequestIds:
    """Of an account's answers."""
    return RequestIds(_REQUEST_ID)


def _is_result(content: bytes) -> bool:
    """Whether the body of an answer can be the service's."""
    return not content or any(root in content for root in _LISTS)


def _foreign(answer: Any, ids: RequestIds) -> TransportError:
    return foreign_answer(answer.status_code, answer.request.url, answer.headers, ids.lacking(answer.headers))


def response_hook(client: Any) -> ResponseHook | None:
    """The `raw_response_hook` that a client was made with; the client exposes it nowhere else."""
    policies = getattr(getattr(client, "_pipeline", None), "_impl_policies", ())
    return next((hook for each in policies if (hook := getattr(each, "_response_callback", None)) is not None), None)


def _refusal(
    error: HttpResponseError, queue: str, names: Mapping[str, str], size_bytes: int, creating: bool
) -> AzureRefusal:
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    code = (
        getattr(error, "error_code", None)
        or headers.get(_CODE)
        or ("" if error.response is not None else type(error).__name__)
    )
    extra = getattr(error, "additional_info", None) or {}
    return AzureRefusal(
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
                raise TransportError(reason=ACCOUNT_CLOSED, may_have_happened=False)
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


class Entry(msgspec.Struct, gc=False):
    """A message ready to be sent."""

    given: dict[str, Any]
    """Arguments of `QueueClient.send_message`."""
    size_bytes: int


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message, raw, _, size_bytes = sendable(given, capabilities)
    content = encode_base64(raw) if capabilities.base64_body else message.body
    arguments: dict[str, Any] = {"content": content, "raw_request_hook": keep_line_ends}
    if message.delay is not None:
        arguments["visibility_timeout"] = checks.whole_seconds(message.delay, "delay", 0, DELAY_MAX)
    if message.ttl is not None:
        never = message.ttl == math.inf
        arguments["time_to_live"] = NEVER if never else checks.whole_seconds(message.ttl, "ttl", 1, TTL_MAX)
    return Entry(arguments, size_bytes)


def content_of(body: str, base64: bool) -> tuple[str, int]:
    """The body on the wire, and its bytes. Raises ParameterInvalid, MessageTooLarge."""
    raw = text_bytes(body)
    if not body:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    content = encode_base64(raw) if base64 else body
    size_bytes = len(content) if base64 else len(raw)
    if size_bytes > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=MESSAGE_BYTES_MAX)
    return content, size_bytes


def lease_of(parameter: str, seconds: float, least: int) -> int:
    """A lease in whole seconds. Raises ParameterInvalid."""
    return checks.whole_seconds(seconds, parameter, least, LEASE_MAX)


def keep_line_ends(request: Any) -> None:
    """Hook on the SDK's request, before it is signed."""
    body = request.http_request.content
    if isinstance(body, bytes) and b"\r" in body:
        body = body.replace(b"\r", b"&#13;")
    elif isinstance(body, str) and "\r" in body:
        body = body.replace("\r", "&#13;").encode()
    else:
        return
    request.http_request.set_bytes_body(body)


_SEPARATOR: Final = ":"
_NEVER_YEAR: Final = 9999


def handle_of(message_id: str, receipt: str) -> str:
    """The handle for both."""
    return f"{message_id}{_SEPARATOR}{receipt}"


def parts_of(handle: str) -> tuple[str, str]:
    """Message id and pop receipt. Raises ReceiptInvalid."""
    text = checks.handle(handle)
    if text.isascii() and text.isprintable():
        message_id, _, receipt = text.partition(_SEPARATOR)
        if message_id and receipt and message_id.replace("-", "").isalnum():
            return message_id, receipt
    raise ReceiptInvalid(reason="it is not a message's id, a colon and a pop receipt")


def received_of(message: Any, lease_end: float) -> Received:
    """The message in an SDK's QueueMessage from a receive."""
    return Received(
        id=message.id,
        body=message.content or "",
        receive_count=message.dequeue_count,
        sent=_seconds(message.inserted_on),
        expires=_expiry(message.expires_on),
        handle=handle_of(message.id, message.pop_receipt),
        lease_end=lease_end,
    )


def peeked_of(message: Any) -> Peeked:
    """The message in an SDK's QueueMessage from a peek."""
    return Peeked(
        id=message.id,
        body=message.content or "",
        receive_count=message.dequeue_count,
        sent=_seconds(message.inserted_on),
        expires=_expiry(message.expires_on),
    )


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()


def _expiry(instant: datetime | None) -> float | None:
    """None also for a message that never expires: the service gives it the last representable day."""
    return None if instant is None or instant.year == _NEVER_YEAR else instant.timestamp()
