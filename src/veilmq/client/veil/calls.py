"""A way to the server: one call after another, each with its answer or one of the house's errors.

Strategy: a queue and an account have a line each over the same pool, so that each can be closed alone. A request goes
out again, once and on a new connection, only if nothing of it can have happened, or if to do it twice is to do it once.
A close cuts off what is under way, but for calls that bring leases: what the server granted comes still, for a while.
"""

import threading
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.service_errors import Said, error_of
from veilmq.client.veil.connections import Answer, Connection, Pool
from veilmq.client.veil.messages import failure_of
from veilmq.client.veil.signing import Signer
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.reports import Report, write_header
from veilmq.protocols.sqs.operations.veil_shapes import Failure

Result = TypeVar("Result")
LATE_SECONDS: Final = 2.0
"""How long a closed line waits for the answers that bring leases, and for the one that gives them back."""
_OF_CLOCKS: Final = ("Signature expired", "Signature not yet current")
"""How the server tells that the two clocks differ too much, whatever the code."""
_ENCODE: Final = msgspec.json.Encoder().encode


class Operation(NamedTuple):
    """One operation of the server."""

    target: bytes
    decoder: Any
    """msgspec's, of the result."""
    repeatable: bool
    """Twice is as good as once."""
    brings_leases: bool
    """An answer that nobody reads hides messages for as long as their leases run."""


def operation(target: str, result: type[msgspec.Struct], *, repeatable: bool, brings_leases: bool = False) -> Operation:
    """`target`: as X-Amz-Target has it."""
    return Operation(target.encode(), msgspec.json.Decoder(result), repeatable, brings_leases)


class Done(NamedTuple):
    """What a call gave."""

    result: Any
    again: bool
    """The request went out twice."""
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
        """`timeout`: seconds for an answer, beyond what the request itself waits. `name`: for errors."""
        self._pool = pool
        self._signer = signer
        self._timeout = timeout
        self._name = name
        self._active: set[Connection] = set()
        self._parked: set[Connection] = set()
        """Those of the active ones whose request waits at the server."""
        self._granting: set[Connection] = set()
        """Those of the active ones whose answer brings leases."""
        self._cut: threading.Timer | None = None
        self.interrupts = 0
        self.closed = False

    def call(
        self, kind: Operation, given: Any, wait: float = 0.0, size_bytes: int = 0, report: Report | None = None
    ) -> Done:
        """The result, and how it came. Raises TransportError, ServiceError, the model's errors."""
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
        """End the calls that wait at the server. They raise TransportError, unless their answer is on its way."""
        self.interrupts += 1
        for connection in list(self._parked):
            connection.finish()

    def late(self, kind: Operation, given: Any) -> Any:
        """The result of a call that closes what a closed line left behind. Raises as `call` does."""
        connection = self._pool.connect(late=True)
        try:
            answer = connection.exchange(self._signer.request(kind.target, _ENCODE(given)), LATE_SECONDS)
        finally:
            connection.close()
        if answer.status != 200:
            raise self._refused(answer, 0)
        return self._decoded(kind, answer)

    def close(self) -> None:
        """End the calls under way, and take no more. Those that bring leases may bring them, for `LATE_SECONDS`."""
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
            if not self._granting:  # the last may have ended before the line above
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
        """Refused because our wall clock is wrong: from now on requests are stamped by the server's."""
        if not isinstance(refusal, ServiceError) or not refusal.message.startswith(_OF_CLOCKS):
            return False
        try:
            theirs = parsedate_to_datetime(answer.header(b"date").decode("latin-1")).timestamp()
        except (ValueError, TypeError):
            return False
        self._signer.correct(theirs)
        return True
