"""What the checker may assume about a queue, and what it reports.

Strategy: a violation is one broken rule with the operations that prove it. Each rule keeps its first stories only:
a lost directory breaks one rule a thousand times, and nobody reads a thousand stories. In a story times are seconds
since its first operation; a line says who did what, and what the answer was.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from veilmq.checking.log import BROKEN, HEAD, Grant, Kind, LogInvalid, Operation, Outcome
from veilmq.model.wording import counted

_LINES_MAX: Final = 12
"""Of a story."""
_SECOND_US: Final = 1_000_000


class Rule(StrEnum):
    """The invariants, by the name of what breaks them."""

    LOST = "acknowledged message lost"
    INVENTED = "message nobody sent"
    CHANGED = "message changed"
    OVERLAP = "two leases at a time"
    STALE = "stale handle accepted"
    RESURRECTED = "deleted message came back"
    COUNT = "receive count did not grow"
    EARLY = "received before its delay ended"
    LATE = "received after its expiry"
    GROUP_ORDER = "group out of order"
    SEQUENCE = "sequence numbers out of order"
    DEDUPLICATION = "duplicate not dropped, or dropped too late"


class Promises(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorded queues promise. The defaults are VeilMQ's."""

    stale_deletes_refused: bool = True
    """False: a delete with a stale handle is answered as if it had worked (SQS, standard queues)."""
    retention_us: int | None = None
    """Messages without a time to live expire so long after their send; None: not while the log ran."""
    deduplication_us: int = 300_000_000
    deduplication_by_group: bool = False
    """Deduplication ids are compared within a group, not within the queue."""
    dead_letters: Mapping[str, str] = {}
    """Queue -> its dead-letter queue. A message that was received may have moved there, under its id."""
    purge_us: int = 0
    """A purge may take so long after its answer (AWS: 60 s)."""
    tolerance_us: int = 10_000
    """How far the queue's clock and the client's may disagree about any duration, beside a thousandth of it."""

    behind_us: int = 0
    """How much time the queue's clock may lose beside the client's: a cluster's does at take-overs."""

    def at_least(self, duration_us: int) -> int:
        """What such a duration of the queue's clock surely lasts by the client's."""
        return max(0, duration_us - self.tolerance_us - duration_us // 1_000) if duration_us else 0

    def at_most(self, duration_us: int) -> int:
        """What such a duration of the queue's clock lasts at most by the client's."""
        return duration_us + self.tolerance_us + duration_us // 1_000 + self.behind_us

    def head(self) -> bytes:
        """The line with which a log may begin (`checking.log.HEAD`)."""
        return HEAD + msgspec.json.encode(self) + b"}\n"


def promises_in(head: bytes) -> Promises | None:
    """What the first line of a log says of the queues, if it is a head. Raises LogInvalid."""
    if not head.startswith(HEAD):
        return None
    try:
        return msgspec.json.decode(head[len(HEAD) :].rstrip()[:-1], type=Promises)
    except BROKEN as error:
        raise LogInvalid(line=1, reason=str(error)) from error


class Violation(msgspec.Struct, frozen=True):
    """A broken rule."""

    rule: Rule
    queue: str
    message: str
    """Its id."""
    what: str
    """One sentence."""
    operations: tuple[Operation, ...]
    """The proof, in the order of time."""

    def __str__(self) -> str:
        return "\n".join([f"{self.rule.value}: {self.what}", *story(self.operations, self.message)])


class Report(msgspec.Struct):
    """The result of a check."""

    operations: int = 0
    messages: int = 0
    not_yet_seen: int = 0
    """Acknowledged messages that nobody received, deleted or purged. They are no violation: no drain followed."""
    counts: Counter[Rule] = msgspec.field(default_factory=Counter)
    """How often each rule was broken."""
    violations: list[Violation] = msgspec.field(default_factory=list)
    """The first of each rule."""

    STORIES_MAX = 10

    @property
    def clean(self) -> bool:
        """Whether no rule was broken."""
        return not self.counts

    def add(self, rule: Rule, queue: str, message: str, what: str, operations: Sequence[Operation]) -> None:
        """Note a violation."""
        self.counts[rule] += 1
        if self.counts[rule] <= self.STORIES_MAX:
            proof = sorted({each.number: each for each in operations}.values(), key=lambda each: each.invoked)
            self.violations.append(Violation(rule, queue, message, what, tuple(proof)))

    def add_report(self, other: "Report") -> None:
        """Take in the report of another part of the same run."""
        self.operations += other.operations
        self.messages += other.messages
        self.not_yet_seen += other.not_yet_seen
        for each in other.violations:
            if sum(mine.rule is each.rule for mine in self.violations) < self.STORIES_MAX:
                self.violations.append(each)
        self.counts.update(other.counts)

    def __str__(self) -> str:
        head = f"{counted(self.operations, 'operation')} on {counted(self.messages, 'message')}"
        if self.not_yet_seen:
            head += f", {self.not_yet_seen} of them acknowledged and not yet seen"
        if self.clean:
            return f"{head}: no violation"
        by_rule = ", ".join(f"{rule.value}: {count}" for rule, count in self.counts.items())
        return "\n\n".join(
            [f"{head}: {counted(self.counts.total(), 'violation')} ({by_rule})", *map(str, self.violations)]
        )


def story(operations: Sequence[Operation], message: str) -> Iterator[str]:
    """The lines about `message`; operations come in the order of time."""
    if not operations:
        return
    start = operations[0].invoked
    shown = operations if len(operations) <= _LINES_MAX else operations[: _LINES_MAX - 1]
    for each in shown:
        yield f"  {_time(each.invoked - start):>12}  {each.client} {_did(each, message)}: {_answer(each, start)}"
    if len(shown) < len(operations):
        yield f"  ... and {counted(len(operations) - len(shown), 'more operation')}"


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
