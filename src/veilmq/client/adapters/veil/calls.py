"""Calls to the server: the port's messages in the form of VeilMQ.Send, the wire's messages as the port's, and our
errors.

Strategy: each queue and the account have their own calls over a shared pool of connections, so that each can be closed
alone. A request is repeated, once and on a new connection, only if nothing of it can have happened, or if it is
idempotent; where there are several servers, at each of them, and also after an answer that says that it was not carried
out. A close aborts the calls in progress, except calls that bring leases: their answers may still arrive for a
while.

Messages: pure functions, with a fast path first: most messages have only a body. Our server checks the values; only
what has no form on the wire is refused here. Source: docs/veil-protocol.md.
"""

import math
import threading
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from veilmq.client.adapters.foreign import foreign_answer
from veilmq.client.adapters.service_errors import Refusal, error_of, port_name
from veilmq.client.adapters.veil.connections import Answer, Connection, Pool, Signer
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import AttributeValue, Message, Peeked, Received, Sent, size_bytes, typed, untyped
from veilmq.client.shared import checks
from veilmq.model.errors import ParameterInvalid, VeilError, from_fields
from veilmq.model.messages import Report, write_header
from veilmq.model.settings.queue import PRIORITY_MAX, PRIORITY_MIN
from veilmq.protocols.sqs import veil
from veilmq.protocols.sqs.forms import AttributeValue as WireValue
from veilmq.protocols.sqs.veil import Failure, MessageIn, MessageOut, SentEntry

Result = TypeVar("Result")
LATE_SECONDS: Final = 2.0
"""After a close, how long to wait for answers that bring leases, and for the answer to giving these back."""
_OF_CLOCKS: Final = ("Signature expired", "Signature not yet current")
"""The server's texts when the two clocks differ too much, whatever the error code."""
_SERVER_ERROR: Final = 500
_UNAVAILABLE: Final = 503
_NOT_CARRIED_OUT: Final = b"The request was not carried out"
"""In our server's text, where it is certain."""
_TOO_LARGE: Final = 413
_UNKNOWN_KEY: Final = frozenset({"InvalidClientTokenId", "UnrecognizedClientException"})
_OTHER_PORT: Final = "veil:// goes to a server's --sqs port, 9324 unless told, and another one answers here"
_NO_KEY: Final = "the URL names no key, and this server has credentials: say veil://KEY:SECRET@HOST:PORT/NAME"
_REQUEST_ID: Final = b"x-amzn-requestid"
"""Our server's answers have it, whatever their status."""
_ENCODE: Final = msgspec.json.Encoder(enc_hook=checks.plain).encode


class Operation(NamedTuple):
    """One operation of the server."""

    target: bytes
    decoder: Any
    """msgspec's, of the result."""
    repeatable: bool
    """Idempotent."""
    brings_leases: bool
    """If nobody reads the answer, its messages stay hidden until their leases end."""
    seconds_max: float
    """How long an answer may take, if that is shorter than the account's timeout."""


def operation(
    target: str,
    result: type[msgspec.Struct],
    *,
    repeatable: bool,
    brings_leases: bool = False,
    seconds_max: float = math.inf,
) -> Operation:
    """`target`: as in X-Amz-Target."""
    return Operation(target.encode(), msgspec.json.Decoder(result), repeatable, brings_leases, seconds_max)


class Done(NamedTuple):
    """The result of a call."""

    result: Any
    again: bool
    """The request was sent twice."""
    answer: Answer

    def failure_of(self, failure: Failure) -> VeilError:
        """The error of one entry, with the request's id."""
        error = failure_of(failure)
        error.request_id = _request_id(self.answer)
        return error


def _request_id(answer: Answer) -> str:
    return answer.header(_REQUEST_ID).decode("latin-1")


class _Error(msgspec.Struct):
    type: str = msgspec.field(default="", name="__type")
    message: str = ""


_ERROR: Final = msgspec.json.Decoder(_Error)


class Calls:
    """Calls of one queue, or of the account. Safe for threads."""

    def __init__(self, pool: Pool, timeout: float, name: str, retries: bool = True, *, has_key: bool = True) -> None:
        """`timeout`: seconds for an answer, in addition to the wait that the request asks for. `name`: for errors.
        `retries`: False repeats nothing that may have happened, idempotent or not. `has_key`: whether somebody's key
        signs."""
        self._pool = pool
        self._timeout = timeout
        self._name = name
        self._retries = retries
        self._has_key = has_key
        self._active: set[Connection] = set()
        self._parked: set[Connection] = set()
        """The active connections whose request waits at the server."""
        self._granting: set[Connection] = set()
        """The active connections whose answer brings leases."""
        self._cut: threading.Timer | None = None
        self.interrupts = 0
        self.closed = False

    def call(
        self, kind: Operation, given: Any, wait: float = 0.0, size_bytes: int = 0, report: Report | None = None
    ) -> Done:
        """The result, and whether the request was repeated. Raises TransportError, ServiceError, the model's errors."""
        try:
            body = _ENCODE(given)
        except UnicodeEncodeError as error:
            raise ParameterInvalid(parameter="body", reason=f"has no UTF-8 form: {error.reason}") from error
        header = b"" if report is None else write_header(report.reported, report.failure).encode()
        answer, again, signer = self._exchange(kind, body, wait, header)
        if answer.status != 200:
            refusal = self._refused(answer, size_bytes)
            if not _corrected(answer, refusal, signer):
                raise refusal
            answer, again, _ = self._exchange(kind, body, wait, header)
            if answer.status != 200:
                raise self._refused(answer, size_bytes)
        return Done(self._decoded(kind, answer), again, answer)

    def _decoded(self, kind: Operation, answer: Answer) -> Any:
        if _REQUEST_ID not in answer.head.lower():  # JSON of a proxy or portal would be a result without members
            raise foreign_answer(answer.status)
        try:
            return kind.decoder.decode(answer.body or b"{}")
        except (ValueError, RecursionError) as error:
            reason = f"the answer does not fit {kind.target.decode()}: {error}"
            raise TransportError(reason=reason, may_have_happened=True) from error

    def interrupt(self) -> None:
        """End the calls that wait at the server. They raise TransportError, unless their answer is already on its
        way."""
        self.interrupts += 1
        for connection in list(self._parked):
            connection.finish()

    def late(self, kind: Operation, given: Any) -> Any:
        """The result of a call that cleans up after a close. Raises as `call` does."""
        connection = self._pool.connect(late=True)
        try:
            request = connection.place.endpoint.signer.request(kind.target, _ENCODE(given))
            answer = connection.exchange(request, LATE_SECONDS)
        finally:
            connection.close()
        if answer.status != 200:
            raise self._refused(answer, 0)
        return self._decoded(kind, answer)

    def close(self) -> None:
        """Abort the calls in progress, and accept no more. Calls that bring leases may still finish, for
        `LATE_SECONDS`."""
        self.closed = True
        granting = list(self._granting)
        for connection in granting:
            connection.finish()
        if granting:
            self._cut_later()
        for connection in self._active.difference(granting):
            connection.abort()

    def _cut_later(self) -> None:
        cut = threading.Timer(LATE_SECONDS, self._abort_all)
        cut.daemon = True
        try:
            cut.start()
        except RuntimeError:  # "can't start new thread"
            self._abort_all()
        else:
            self._cut = cut
            if not self._granting:  # the last one may have ended before the line above
                cut.cancel()

    def _abort_all(self) -> None:
        for connection in list(self._active):
            connection.abort()

    def _exchange(self, kind: Operation, body: bytes, wait: float, report: bytes) -> tuple[Answer, bool, Signer]:
        interrupts, tried, doubt = self.interrupts, 0, False
        if self.closed:
            raise self._is_closed(may_have_happened=False)
        connection = self._pool.take()
        while True:
            tried += 1
            place, fresh = connection.place, not connection.used
            signer = place.endpoint.signer
            try:
                answer = self._over(connection, kind, signer.request(kind.target, body, report), wait)
                if not self._goes_on(kind, answer, tried):
                    return answer, doubt, signer
                doubt = doubt or not _was_refused(answer)
                self._pool.leave(place)
            except TransportError as error:
                if self.closed:
                    raise self._is_closed(may_have_happened=doubt or error.may_have_happened) from error
                timed_out = isinstance(error.__cause__, TimeoutError)
                if fresh or timed_out:
                    self._pool.leave(place)
                interrupted = bool(wait) and self.interrupts != interrupts
                if interrupted or not self._repeats(kind, error, tried, fresh=fresh, timed_out=timed_out):
                    raise _doubted(error, doubt) from error.__cause__
                doubt = doubt or error.may_have_happened
            try:
                connection = self._pool.connect()
            except TransportError as error:
                raise _doubted(error, doubt) from error.__cause__

    def _repeats(self, kind: Operation, error: TransportError, tried: int, *, fresh: bool, timed_out: bool) -> bool:
        """Whether a request that failed is sent again."""
        repeatable = kind.repeatable and self._retries
        if self._pool.places_count > 1:
            return tried <= self._pool.places_count and (repeatable or not error.may_have_happened)
        return tried == 1 and not timed_out and (repeatable or not (error.may_have_happened or fresh))

    def _goes_on(self, kind: Operation, answer: Answer, tried: int) -> bool:
        """Whether another server is asked after this answer."""
        if answer.status < _SERVER_ERROR or not 1 <= tried < self._pool.places_count:
            return False
        return _was_refused(answer) or (kind.repeatable and self._retries)

    def _over(self, connection: Connection, kind: Operation, request: bytes, wait: float) -> Answer:
        active = self._active
        if kind.brings_leases:
            self._granting.add(connection)
        active.add(connection)
        if wait:
            self._parked.add(connection)
        try:
            if self.closed:  # close() may have looked before the line above
                raise self._is_closed(may_have_happened=False)
            answer = connection.exchange(request, min(self._timeout, kind.seconds_max) + wait)
        except BaseException:
            connection.close()
            raise
        finally:
            active.discard(connection)
            if wait:
                self._parked.discard(connection)
            if kind.brings_leases:
                self._granting.discard(connection)
                if self._cut is not None and not self._granting:
                    self._cut.cancel()
        if answer.last or connection.finished:
            connection.close()
        else:
            self._pool.give(connection)
        return answer

    def _is_closed(self, *, may_have_happened: bool) -> TransportError:
        return TransportError(reason=f"{self._name or 'the account'} is closed", may_have_happened=may_have_happened)

    def _refused(self, answer: Answer, size_bytes: int) -> VeilError:
        try:
            error = _ERROR.decode(answer.body)
        except (ValueError, RecursionError):
            error = _Error(message=answer.body[:256].decode("utf-8", "replace"))
        code = answer.header(b"x-amzn-query-error").partition(b";")[0].decode("latin-1")
        code = code or error.type.rpartition("#")[2]
        if not code and answer.status < _SERVER_ERROR and answer.status != _TOO_LARGE:
            error.message = f"{_OTHER_PORT}: {error.message}"
        if code in _UNKNOWN_KEY and not self._has_key:
            error.message = _NO_KEY
        return error_of(
            Refusal(
                code=code or f"HTTP {answer.status}",
                status=answer.status,
                request_id=_request_id(answer),
                message=error.message,
                queue=self._name,
                size_bytes=size_bytes,
            )
        )


def _corrected(answer: Answer, refusal: VeilError, signer: Signer) -> bool:
    """Whether the request was refused because our wall clock is wrong; then stamp by the server's clock from now on."""
    if not isinstance(refusal, ServiceError) or not refusal.message.startswith(_OF_CLOCKS):
        return False
    try:
        theirs = parsedate_to_datetime(answer.header(b"date").decode("latin-1")).timestamp()
    except (ValueError, TypeError):
        return False
    signer.correct(theirs)
    return True


def _was_refused(answer: Answer) -> bool:
    """Whether an answer from 500 on says that the request was not carried out: 503 is what a server or proxy says that
    could not begin."""
    return answer.status == _UNAVAILABLE or _NOT_CARRIED_OUT in answer.body


def _doubted(error: TransportError, doubt: bool) -> TransportError:
    """The error, of a request that an attempt before may have carried out."""
    if doubt and not error.may_have_happened:
        return TransportError(reason=error.reason, may_have_happened=True)
    return error


_DURATIONS: Final = (
    ("delay", veil.DELAY_SECONDS_MAX),
    ("ttl", veil.TIME_TO_LIVE_SECONDS_MAX),
    ("lease_hint", veil.LEASE_SECONDS_MAX),
)
_NONE: Final[Mapping[str, AttributeValue]] = {}


def wire_of(message: str | Message) -> MessageIn:
    """Raises ParameterInvalid for an attribute whose type does not exist on the wire, and for a number out of range:
    JSON has no NaN or infinity."""
    if isinstance(message, str):
        return MessageIn(body=message)
    for field, seconds_max in _DURATIONS:
        seconds = getattr(message, field)
        if seconds is not None:
            checks.seconds(seconds, field, 0, seconds_max)
    if message.priority is not None:
        checks.whole(message.priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    return MessageIn(
        body=message.body,
        attributes=_wire_values(message.attributes) if message.attributes else None,
        delay=message.delay,
        time_to_live=message.ttl,
        priority=message.priority,
        group=message.group,
        deduplication_id=message.deduplication_id,
        type=message.type,
        lease_hint=message.lease_hint,
        tag=message.tag,
    )


def _wire_values(attributes: Mapping[str, AttributeValue]) -> dict[str, WireValue]:
    values = {}
    for name, value in attributes.items():
        kind, content = typed(name, value)
        if isinstance(content, str):
            values[name] = WireValue(data_type=kind, string_value=content)
        else:
            values[name] = WireValue(data_type=kind, binary_value=content)
    return values


def wire_bytes(message: MessageIn) -> int:
    """The message's share of a request's size."""
    body = message.body or ""
    body_bytes = len(body) if body.isascii() else len(body.encode(errors="replace"))
    if not message.attributes:
        return body_bytes
    return body_bytes + size_bytes(
        {
            name: (value.data_type or "", value.string_value or value.binary_value or "")
            for name, value in message.attributes.items()
        }
    )


def sent_of(line: SentEntry) -> Sent:
    """The entry of a message that was sent, in a Send's answer."""
    return Sent(line.id, line.handle, line.sequence_number, line.duplicate)


def failure_of(failure: Failure) -> VeilError:
    """The error that the server named; a ServiceError if this version does not know it."""
    fields = dict(failure.fields)
    try:
        if failure.name == ParameterInvalid.__name__:
            fields["parameter"] = port_name(str(fields["parameter"]))
        return from_fields(failure.name, fields)
    except (KeyError, TypeError):
        return ServiceError(code=failure.name, status=400, request_id="", message=failure.message)


def _values(message: MessageOut) -> Mapping[str, AttributeValue]:
    if not message.attributes:
        return _NONE
    return {
        name: untyped(
            value.data_type or "", value.string_value if value.string_value is not None else value.binary_value or b""
        )
        for name, value in message.attributes.items()
    }


def received_of(message: MessageOut, granted_by: float, asked_lease: float | None) -> Received:
    """`granted_by`: an instant not after the grant, on our monotonic clock."""
    lease = message.lease if message.lease is not None else asked_lease or 0.0
    return Received(
        message.id,
        message.body,
        _values(message),
        message.receive_count,
        message.sent,
        message.group,
        message.sequence_number,
        message.priority,
        message.type,
        message.expires,
        handle=message.handle,
        lease_end=granted_by + lease,
        first_received=message.first_received,
        deduplication_id=message.deduplication_id,
    )


def peeked_of(message: MessageOut) -> Peeked:
    """A message of a Peek."""
    return Peeked(
        message.id,
        message.body,
        _values(message),
        message.receive_count,
        message.sent,
        message.group,
        message.sequence_number,
        message.priority,
        message.type,
        message.expires,
    )
