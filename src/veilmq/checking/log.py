"""The log: one operation for each call that a client made, and its form as JSON lines.

Strategy: append-only. An operation may be written twice under one number: before the call, as unknown, and again with
its answer. The later line counts. So the log of a killed client still holds the calls that it had begun.

Times are microseconds by one monotonic clock for the whole log: `invoked` is read before the call and rounded down,
`returned` after it and rounded up, so that a call that ended when another began did come before it. A batch is one
operation for each of its entries, with the same times; a receive is one operation with a grant for each message.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from veilmq.model.errors import UsageError


class Kind(StrEnum):
    """What the client did."""

    SEND = "send"
    RECEIVE = "receive"
    EXTEND = "extend"
    RELEASE = "release"
    DELETE = "delete"
    PURGE = "purge"
    DRAIN = "drain"
    """Not a call, but a claim: between these times the client received everything that the queue held. It had waited
    until all leases and delays had ended, and received until nothing came."""


class Outcome(StrEnum):
    """What the client knows about its call."""

    OK = "ok"
    FAIL = "fail"
    """The queue refused, and changed nothing."""
    INFO = "info"
    """Unknown: a timeout, a cut connection, a status of 5xx. It may have happened, or may still happen."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that a receive returned."""

    message: str
    """Its id."""
    lease: int
    """A number of this grant's own; the operations with its handle name it."""
    lease_us: int
    body: str
    """A digest of the body as received."""
    count: int = 0
    """The receive count; 0: not reported."""
    group: str | None = None
    deduplication: str | None = None
    sequence: int | None = None


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a client. Which fields it has depends on its kind."""

    number: int
    client: str
    """The thread or process."""
    kind: Kind
    queue: str
    invoked: int
    returned: int | None = None
    """None: no answer came."""
    outcome: Outcome = Outcome.INFO
    why: str = ""
    """The refusal or the fault, in the client's words."""
    message: str = ""
    """Id of the message sent, if the answer came."""
    body: str = ""
    """Digest of the body sent, or of the body that an extend wrote."""
    lease: int | None = None
    """Extend, release, delete: the grant whose handle was used. Send: the number of the handle that it returned."""
    rotation: int = 0
    """Extend, release, delete: how often this lease's handle had been replaced when this one was given out."""
    rotates: bool = False
    """Extend: the answer held a new handle, and the old one is void."""
    lease_us: int = 0
    """Extend and release: the message becomes visible so long after the call."""
    delay_us: int = 0
    """Send."""
    ttl_us: int | None = None
    """Send: the message expires so long after."""
    group: str | None = None
    deduplication: str | None = None
    sequence: int | None = None
    grants: tuple[Grant, ...] = ()


class LogInvalid(UsageError):
    """A log that cannot be read, or that contradicts itself."""

    line: int
    """0: the log as a whole."""
    reason: str
    summary = "line {line} of the log: {reason}"


HEAD: Final = b'{"promises":'
"""How the first line of a log begins that says what the queues promise (`Promises.head`)."""
BROKEN: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading a line raises that is not whole, not JSON, not UTF-8 or nested too deeply."""
FOREVER: Final = 2**62
"""The end of an operation without an answer."""


def end_of(operation: Operation) -> int:
    """When its effect is certain to have happened, if it happens at all."""
    if operation.outcome is Outcome.INFO or operation.returned is None:
        return FOREVER
    return operation.returned


def encoded(operation: Operation) -> bytes:
    """Its line."""
    return msgspec.json.encode(operation) + b"\n"


def decoded(lines: Iterable[bytes]) -> list[Operation]:
    """The operations of a log, by number. A last line that was cut off is left out. Raises LogInvalid, also if it is
    the only line: nothing says that it is of a log."""
    found: dict[int, Operation] = {}
    read = msgspec.json.Decoder(Operation).decode
    for number, line in enumerate(lines, 1):
        try:
            operation = read(line)
        except BROKEN as error:
            if number == 1 and line.startswith(HEAD):
                continue
            if number > 1 and not line.endswith(b"\n"):
                break
            raise LogInvalid(line=number, reason=str(error)) from error
        found[operation.number] = operation
    return [found[number] for number in sorted(found)]
