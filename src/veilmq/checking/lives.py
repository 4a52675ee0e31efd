"""The log sorted by message: who sent it, who was granted it, what was done with each lease.

Strategy: one pass over the log. A send whose answer never came has no id. A message with an id that no acknowledged
send has is then matched with such sends by queue and body. `born_low` and `born_high` bound the instant of a message's
send, `gone_low` the instant from which it may be gone; a rule that needs a certain answer takes the bound that excuses
the queue.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from veilmq.checking.log import FOREVER, Grant, Kind, LogInvalid, Operation, Outcome, end_of
from veilmq.checking.report import Promises
from veilmq.model.settings.queue import FIFO_SUFFIX


class Granted(NamedTuple):
    """One grant, with the receive that returned it."""

    operation: Operation
    grant: Grant

    @property
    def invoked(self) -> int:
        """The message was granted at or after this."""
        return self.operation.invoked

    @property
    def returned(self) -> int:
        """The message was granted at or before this."""
        return self.operation.returned or self.operation.invoked


class Life:
    """One message."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.queue = ""
        """Where it was sent; for a message that nobody sent, where it was seen first."""
        self.sends: list[Operation] = []
        """Acknowledged; more than one if duplicates were dropped."""
        self.maybe_sent: list[Operation] = []
        """Sends without an answer, one of which may have sent it: the first of them for a message without acknowledged
        sends; for another each that differs, since its sends may be duplicates of one."""
        self.maybe_count = 0
        """How many sends without an answer may have sent it, if no acknowledged one did."""
        self.grants: list[Granted] = []
        self.uses: dict[int, list[Operation]] = defaultdict(list)
        """By lease: extends, releases and deletes that were not refused."""
        self.born_low = self.born_high = 0
        self.gone_low = FOREVER
        self.stale: list[Operation] = []
        """Uses that were answered ok though their handle was stale. They are no deletes for the other rules."""

    @property
    def sequence(self) -> int | None:
        """As the first answer or grant had it."""
        for each in self.sends:
            if each.sequence is not None:
                return each.sequence
        return next((each.grant.sequence for each in self.at_home if each.grant.sequence is not None), None)

    @property
    def at_home(self) -> list[Granted]:
        """The grants from its queue, and not from its dead-letter queue."""
        return [each for each in self.grants if each.operation.queue == self.queue]

    @property
    def written(self) -> list[Operation]:
        """The sends of which one sent it."""
        return [*self.sends, *self.maybe_sent]


class Purges:
    """The purges of one queue."""

    def __init__(self, operations: list[Operation], purge_us: int) -> None:
        self._all = sorted(operations, key=lambda each: each.invoked)
        ends = (min(end_of(each) + purge_us, FOREVER) for each in self._all)
        self._latest_ends = list(accumulate(ends, max))
        """Of each and those before it."""
        done = [each for each in self._all if each.outcome is Outcome.OK]
        self._done_invoked = [each.invoked for each in done]
        self._first_done: list[Operation] = list(accumulate(reversed(done), _earlier))[::-1]
        """Of each and those behind it, the one that was answered first."""

    def may_take(self, born_low: int) -> int:
        """From when on a message may have been purged that was sent at or after this."""
        at = bisect_left(self._latest_ends, born_low)
        return self._all[at].invoked if at < len(self._all) else FOREVER

    def first_after(self, born_high: int) -> Operation | None:
        """The purge that surely took a message sent before this, and was answered first."""
        at = bisect_left(self._done_invoked, born_high)
        return self._first_done[at] if at < len(self._first_done) else None


def _earlier(a: Operation, b: Operation) -> Operation:
    return b if end_of(b) <= end_of(a) else a


class History:
    """A log, by message."""

    def __init__(self, log: Iterable[Operation], promises: Promises) -> None:
        self.promises = promises
        self.operations = 0
        self.lives: dict[str, Life] = {}
        self.unknown_sends: dict[tuple[str, str], list[Operation]] = defaultdict(list)
        """By queue and body: sends without an answer."""
        self.refused_sends: dict[tuple[str, str], list[Operation]] = defaultdict(list)
        self.unknown_receives: dict[str, int] = {}
        """By queue: when the first receive without an answer was begun."""
        self.drains: dict[str, Operation] = {}
        """By queue: the last."""
        self._absorbing: dict[tuple[str, str | None, str], dict[Any, Operation]] = defaultdict(dict)
        """By queue and deduplication id, or else body: sends without an answer; of equal ones the first."""
        self._purges: dict[str, list[Operation]] = defaultdict(list)
        self._leases: dict[int, Life] = {}
        uses: list[Operation] = []
        for operation in log:
            self.operations += 1
            match operation.kind:
                case Kind.SEND:
                    self._sent(operation)
                case Kind.RECEIVE:
                    self._received(operation)
                case Kind.PURGE if operation.outcome is not Outcome.FAIL:
                    self._purges[operation.queue].append(operation)
                case Kind.DRAIN:
                    before = self.drains.get(operation.queue)
                    if before is None or before.invoked <= operation.invoked:
                        self.drains[operation.queue] = operation
                case Kind.EXTEND | Kind.RELEASE | Kind.DELETE:
                    uses.append(operation)
        for operation in uses:
            self._used(operation)
        for sends in self.unknown_sends.values():
            sends.sort(key=lambda each: each.invoked)
        self.purges = {queue: Purges(purges, promises.purge_us) for queue, purges in self._purges.items()}
        for life in self.lives.values():
            life.grants.sort(key=lambda each: (each.invoked, each.returned))
            self._dated(life)

    def places(self, life: Life) -> tuple[str, ...]:
        """The queues in which it may be."""
        dead = self.promises.dead_letters.get(life.queue)
        return (life.queue,) if dead is None else (life.queue, dead)

    def _life(self, message: str) -> Life:
        life = self.lives.get(message)
        if life is None:
            life = self.lives[message] = Life(message)
        return life

    def _sent(self, operation: Operation) -> None:
        if operation.outcome is Outcome.OK:
            life = self._life(operation.message)
            life.sends.append(operation)
            if operation.lease is not None:
                self._leases[operation.lease] = life
        else:
            unknown = operation.outcome is Outcome.INFO
            sends = self.unknown_sends if unknown else self.refused_sends
            sends[operation.queue, operation.body].append(operation)
            if unknown and operation.queue.endswith(FIFO_SUFFIX):
                content = operation.body, operation.group, operation.delay_us, operation.ttl_us
                first = self._absorbing[_duplicates_of(operation)].setdefault(content, operation)
                if operation.invoked < first.invoked:
                    self._absorbing[_duplicates_of(operation)][content] = operation

    def _received(self, operation: Operation) -> None:
        if operation.outcome is Outcome.INFO:
            begun = self.unknown_receives.get(operation.queue, FOREVER)
            self.unknown_receives[operation.queue] = min(begun, operation.invoked)
        for grant in operation.grants:
            if grant.lease in self._leases and self._leases[grant.lease].message != grant.message:
                raise LogInvalid(line=0, reason=f"lease {grant.lease} is of two messages")
            life = self._life(grant.message)
            life.grants.append(Granted(operation, grant))
            self._leases[grant.lease] = life

    def _used(self, operation: Operation) -> None:
        if operation.outcome is Outcome.FAIL:
            return
        if operation.lease is None or operation.lease not in self._leases:
            raise LogInvalid(line=0, reason=f"operation {operation.number} uses a lease that no operation granted")
        self._leases[operation.lease].uses[operation.lease].append(operation)

    def _dated(self, life: Life) -> None:
        seen = min((each.returned for each in life.grants), default=FOREVER)
        if life.sends:
            life.queue = life.sends[0].queue
            life.born_high = min(seen, *(end_of(each) for each in life.sends))
            if life.queue.endswith(FIFO_SUFFIX):
                for key in {_duplicates_of(each) for each in life.sends}:
                    life.maybe_sent += self._absorbing.get(key, {}).values()
            life.born_low = min(each.invoked for each in life.written)
            return
        life.queue = life.grants[0].operation.queue
        sources = [source for source, dead in self.promises.dead_letters.items() if dead == life.queue]
        bodies = {each.grant.body for each in life.grants}
        for queue in (life.queue, *sources):
            for body in bodies:
                sends = self.unknown_sends.get((queue, body), [])
                begun = bisect_right(sends, seen, key=lambda each: each.invoked)
                life.maybe_count += begun
                life.maybe_sent += sends[: min(begun, 1)]
        if life.maybe_sent:
            life.queue = life.maybe_sent[0].queue
        life.born_low = min((each.invoked for each in life.maybe_sent), default=0)
        life.born_high = seen


def _duplicates_of(send: Operation) -> tuple[str, str | None, str]:
    """Equal for sends of which a FIFO queue may take one as a duplicate of the other."""
    return send.queue, send.deduplication, "" if send.deduplication is not None else send.body
