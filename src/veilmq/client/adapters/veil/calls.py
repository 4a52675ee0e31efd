"""Calls to the server, each with its answer or one of our errors.

Strategy: each queue and the account have their own calls over a shared pool of connections, so that each can be closed
alone. A request is repeated, once and on a new connection, only if nothing of it can have happened, or if it is
idempotent. A close aborts the calls in progress, except calls that bring leases: their answers may still arrive for a
while.

Signing: three headers are signed (host, x-amz-date, x-amz-target). What stays the same is computed once: the signing
key for a day (as two prepared states, veilmq.protocols.keyed); everything but the payload's hash and the signature for
a second and operation. A request then costs two SHA-256 and one HMAC. Source: AWS IAM User Guide, "Signature Version 4
for API requests".
"""

import threading
import time
from email.utils import parsedate_to_datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from veilmq.client.adapters.cloud import client_name
from veilmq.client.adapters.service_errors import Said, error_of
from veilmq.client.adapters.veil.connections import Answer, Connection, Pool
from veilmq.client.adapters.veil.messages import failure_of
from veilmq.client.clock import Clock
from veilmq.client.errors import ServiceError, TransportError
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.reports import REPORT_HEADER, Report, write_header
from veilmq.protocols.keyed import Keyed
from veilmq.protocols.sqs.operations.veil_shapes import Failure

_SERVICE: Final = b"sqs"
_TERMINATOR: Final = b"aws4_request"


class _Day:
    """Values shared by all requests of a day."""

    def __init__(self, secret: bytes, day: bytes, region: bytes) -> None:
        self.day = day
        self.scope = b"/".join((day, region, _SERVICE, _TERMINATOR))
        key = b"AWS4" + secret
        for part in (day, region, _SERVICE, _TERMINATOR):
            key = Keyed(key).digest(part)
        self.mac = Keyed(key)


class _Second:
    """Values shared by all requests of a second."""

    def __init__(self, second: int, stamp: bytes, day: _Day) -> None:
        self.second = second
        self.stamp = stamp
        self.day = day
        self.to_sign = b"AWS4-HMAC-SHA256\n%b\n%b\n" % (stamp, day.scope)
        self.operations: dict[bytes, tuple[Any, bytes]] = {}
        """Target -> (SHA-256 state of the canonical request without the payload's hash, head up to the signature)."""


class Signer:
    """Builds requests to one server with one key. Thread-safe: cached values are replaced as a whole."""

    def __init__(self, host: str, key: str, secret: str, region: str, token: str | None, clock: Clock) -> None:
        """`host`: the Host header. `token`: of temporary credentials. Raises UnicodeEncodeError, ValueError."""
        for name, value in (("host", host), ("key", key), ("region", region), ("token", token or "")):
            if not value.isascii() or not (value.isprintable() or not value) or " " in value:
                raise ValueError(f"{name} must be printable ASCII without blanks")
        self._host = host.encode()
        self._key = key.encode()
        self._secret = secret.encode()
        self._region = region.encode()
        self._token = None if token is None else token.encode()
        self._clock = clock
        self._current: _Second | None = None
        self.ahead_s = 0
        """How far the server's clock is ahead of ours; set when it refused a request for that reason."""

    def request(self, target: bytes, body: bytes, report: bytes = b"") -> bytes:
        """A whole request: POST / with that X-Amz-Target and JSON body; `report` is the header of that kind, if any."""
        second = int(self._clock.wall()) + self.ahead_s
        current = self._current
        if current is None or current.second != second:
            current = self._begin(second, current)
        known = current.operations.get(target)
        if known is None:
            known = current.operations[target] = self._prepare(current, target)
        canonical = known[0].copy()
        canonical.update(sha256(body).hexdigest().encode())
        signature = current.day.mac.digest(current.to_sign + canonical.hexdigest().encode()).hex().encode()
        if report:
            signature += b"\r\n%b: %b" % (REPORT_HEADER, report)
        return b"%b%b\r\nContent-Length: %d\r\n\r\n%b" % (known[1], signature, len(body), body)

    def correct(self, theirs: float) -> None:
        """From now on, stamp requests by the server's clock, which shows `theirs` (Unix seconds) now."""
        self.ahead_s = int(theirs) - int(self._clock.wall())

    def _begin(self, second: int, last: _Second | None) -> _Second:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second)).encode()
        if last is not None and last.day.day == stamp[:8]:
            day = last.day
        else:
            day = _Day(self._secret, stamp[:8], self._region)
        self._current = current = _Second(second, stamp, day)
        return current

    def _prepare(self, current: _Second, target: bytes) -> tuple[Any, bytes]:
        names = b"host;x-amz-date"
        signed = b"host:%b\nx-amz-date:%b\n" % (self._host, current.stamp)
        sent = b"Host: %b\r\nX-Amz-Date: %b\r\n" % (self._host, current.stamp)
        more = [(b"x-amz-target", target)]
        if self._token is not None:
            more.insert(0, (b"x-amz-security-token", self._token))
        for name, value in more:
            names += b";" + name
            signed += b"%b:%b\n" % (name, value)
            sent += b"%b: %b\r\n" % (name, value)
        canonical = sha256(b"POST\n/\n\n%b\n%b\n" % (signed, names))
        head = (
            b"POST / HTTP/1.1\r\n%bUser-Agent: %b\r\nContent-Type: application/x-amz-json-1.0\r\n"
            b"Authorization: AWS4-HMAC-SHA256 Credential=%b/%b, SignedHeaders=%b, Signature="
        ) % (sent, client_name().encode(), self._key, current.day.scope, names)
        return canonical, head


Result = TypeVar("Result")
LATE_SECONDS: Final = 2.0
"""After a close, how long to wait for answers that bring leases, and for the answer to giving these back."""
_OF_CLOCKS: Final = ("Signature expired", "Signature not yet current")
"""The server's texts when the two clocks differ too much, whatever the error code."""
_ENCODE: Final = msgspec.json.Encoder().encode


class Operation(NamedTuple):
    """One operation of the server."""

    target: bytes
    decoder: Any
    """msgspec's, of the result."""
    repeatable: bool
    """Idempotent."""
    brings_leases: bool
    """If nobody reads the answer, its messages stay hidden until their leases end."""


def operation(target: str, result: type[msgspec.Struct], *, repeatable: bool, brings_leases: bool = False) -> Operation:
    """`target`: as in X-Amz-Target."""
    return Operation(target.encode(), msgspec.json.Decoder(result), repeatable, brings_leases)


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
    return answer.header(b"x-amzn-requestid").decode("latin-1")


class _Error(msgspec.Struct):
    type: str = msgspec.field(default="", name="__type")
    message: str = ""


_ERROR: Final = msgspec.json.Decoder(_Error)


class Calls:
    """Calls of one queue, or of the account. Safe for threads."""

    def __init__(self, pool: Pool, signer: Signer, timeout: float, name: str) -> None:
        """`timeout`: seconds for an answer, in addition to the wait that the request asks for. `name`: for errors."""
        self._pool = pool
        self._signer = signer
        self._timeout = timeout
        self._name = name
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
        answer, again = self._exchange(kind, body, wait, header)
        if answer.status != 200:
            refusal = self._refused(answer, size_bytes)
            if not self._corrected(answer, refusal):
                raise refusal
            answer, again = self._exchange(kind, body, wait, header)
            if answer.status != 200:
                raise self._refused(answer, size_bytes)
        return Done(self._decoded(kind, answer), again, answer)

    def _decoded(self, kind: Operation, answer: Answer) -> Any:
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
            answer = connection.exchange(self._signer.request(kind.target, _ENCODE(given)), LATE_SECONDS)
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

    def _exchange(self, kind: Operation, body: bytes, wait: float, report: bytes) -> tuple[Answer, bool]:
        request = self._signer.request(kind.target, body, report)
        interrupts = self.interrupts
        if self.closed:
            raise self._is_closed(False)
        connection = self._pool.take()
        fresh = not connection.used
        try:
            return self._over(connection, kind, request, wait), False
        except TransportError as error:
            if self.closed:
                raise self._is_closed(error.may_have_happened) from error
            doubt = error.may_have_happened
            if isinstance(error.__cause__, TimeoutError) or ((doubt or fresh) and not kind.repeatable):
                raise
            if wait and self.interrupts != interrupts:
                raise
        try:
            return self._over(self._pool.connect(), kind, request, wait), doubt
        except TransportError as error:
            if self.closed:
                raise self._is_closed(doubt or error.may_have_happened) from error
            if doubt and not error.may_have_happened:
                raise TransportError(reason=error.reason, may_have_happened=True) from error
            raise

    def _over(self, connection: Connection, kind: Operation, request: bytes, wait: float) -> Answer:
        active = self._active
        if kind.brings_leases:
            self._granting.add(connection)
        active.add(connection)
        if wait:
            self._parked.add(connection)
        try:
            if self.closed:  # close() may have looked before the line above
                raise self._is_closed(False)
            answer = connection.exchange(request, self._timeout + wait)
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

    def _is_closed(self, may_have_happened: bool) -> TransportError:
        return TransportError(reason=f"{self._name or 'the account'} is closed", may_have_happened=may_have_happened)

    def _refused(self, answer: Answer, size_bytes: int) -> VeilError:
        try:
            said = _ERROR.decode(answer.body)
        except (ValueError, RecursionError):
            said = _Error(message=answer.body[:256].decode("utf-8", "replace"))
        code = answer.header(b"x-amzn-query-error").partition(b";")[0].decode("latin-1")
        return error_of(
            Said(
                code=code or said.type.rpartition("#")[2] or f"HTTP {answer.status}",
                status=answer.status,
                request_id=_request_id(answer),
                message=said.message,
                queue=self._name,
                size_bytes=size_bytes,
            )
        )

    def _corrected(self, answer: Answer, refusal: VeilError) -> bool:
        """Whether the request was refused because our wall clock is wrong; then stamp by the server's clock from now
        on."""
        if not isinstance(refusal, ServiceError) or not refusal.message.startswith(_OF_CLOCKS):
            return False
        try:
            theirs = parsedate_to_datetime(answer.header(b"date").decode("latin-1")).timestamp()
        except (ValueError, TypeError):
            return False
        self._signer.correct(theirs)
        return True
