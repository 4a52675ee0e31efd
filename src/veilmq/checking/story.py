"""A violation's operations in plain English, one line each.

Strategy: times are seconds since the first operation of the story; a line says who did what, and what the answer was.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from veilmq.checking.log import Grant, Kind, Operation, Outcome

_LINES_MAX: Final = 12
_SECOND_US: Final = 1_000_000


def story(operations: Sequence[Operation], message: str) -> Iterator[str]:
    """The lines about `message`; operations come in the order of time."""
    if not operations:
        return
    start = operations[0].invoked
    shown = operations if len(operations) <= _LINES_MAX else operations[: _LINES_MAX - 1]
    for each in shown:
        yield f"  {_time(each.invoked - start):>12}  {each.client} {_did(each, message)}: {_answer(each, start)}"
    if len(shown) < len(operations):
        yield f"  ... and {len(operations) - len(shown)} more operations"


def _time(us: int) -> str:
    return f"{us / _SECOND_US:.6f} s"


def _seconds(us: int) -> str:
    return f"{us / _SECOND_US:g} s"


def _did(operation: Operation, message: str) -> str:
    where = f"queue {operation.queue}"
    match operation.kind:
        case Kind.SEND:
            more = [f"body {operation.body}"]
            if operation.group is not None:
                more.append(f"group {operation.group}")
            if operation.deduplication is not None:
                more.append(f"deduplication id {operation.deduplication}")
            if operation.delay_us:
                more.append(f"delay {_seconds(operation.delay_us)}")
            if operation.ttl_us is not None:
                more.append(f"time to live {_seconds(operation.ttl_us)}")
            return f"sends a message to {where} ({', '.join(more)})"
        case Kind.RECEIVE:
            shown = [each for each in operation.grants if each.message == message] or list(operation.grants[:3])
            got = "; ".join(_granted(each) for each in shown) or "nothing"
            others = len(operation.grants) - len(shown)
            return f"receives {got}{f' and {others} others' if others else ''} from {where}"
        case Kind.EXTEND:
            body = f" and writes the body {operation.body}" if operation.body else ""
            return f"extends lease {operation.lease} to {_seconds(operation.lease_us)}{body}"
        case Kind.RELEASE:
            later = f" for {_seconds(operation.lease_us)} later" if operation.lease_us else ""
            return f"releases lease {operation.lease}{later}"
        case Kind.DELETE:
            return f"deletes the message with the handle of lease {operation.lease}"
        case Kind.PURGE:
            return f"purges {where}"
        case Kind.DRAIN:
            return f"has received everything that {where} held"


def _granted(grant: Grant) -> str:
    more = [f"lease {grant.lease} of {_seconds(grant.lease_us)}", f"body {grant.body}"]
    if grant.count:
        more.append(f"receive count {grant.count}")
    if grant.group is not None:
        more.append(f"group {grant.group}")
    return f"message {grant.message} ({', '.join(more)})"


def _answer(operation: Operation, start: int) -> str:
    if operation.outcome is Outcome.INFO or operation.returned is None:
        return f"outcome unknown{f' ({operation.why})' if operation.why else ''}"
    at = f"at {_time(operation.returned - start)}"
    if operation.outcome is Outcome.FAIL:
        return f"refused {at}{f' ({operation.why})' if operation.why else ''}"
    if operation.kind is Kind.SEND:
        number = "" if operation.sequence is None else f", sequence number {operation.sequence}"
        return f"acknowledged {at} as message {operation.message}{number}"
    return f"done {at}"
