"""The log sorted by message: who sent it, who was granted it, what was done with each lease.

Strategy: one pass over the log. A send whose answer never came has no id. A message with an id that no acknowledged
send has is then matched with such sends by queue and body. `born_low` and `born_high` bound the instant of a message's
send, `gone_low` the instant from which it may be gone; a rule that needs a certain answer takes the bound that excuses
the queue.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from veilmq.checking.log import FOREVER, Grant, Kind, LogInvalid, Operation, Outcome, end_of
from veilmq.checking.report import Promises
from veilmq.model.settings.queue import FIFO_SUFFIX

T = TypeVar("T")


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
        self.places: tuple[str, ...] = ()
        """Its queue, and the dead-letter queues through which it may go from there."""
        self.entered: list[int] = []
        """By place: from when on it may have been there."""
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

    def place_of(self, queue: str) -> int:
        """Which of its places that is; the last one for a queue to which it never goes."""
        return self.places.index(queue) if queue in self.places else len(self.places) - 1

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
        self._drains: dict[str, list[Operation]] = defaultdict(list)
        """By queue: those that succeeded."""
        self._drained: dict[tuple[str, ...], list[Operation]] = {}
        self._absorbing: dict[tuple[str, str | None, str], dict[Any, Operation]] = defaultdict(dict)
        """By queue and deduplication id, or else body: sends without an answer; of equal ones the first."""
        self._purges: dict[str, list[Operation]] = defaultdict(list)
        self._leases: dict[int, Life] = {}
        self._chains = {queue: _chain(queue, promises.dead_letters) for queue in promises.dead_letters}
        """Each queue that has a dead-letter queue, with those behind it."""
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
                case Kind.DRAIN if operation.outcome is Outcome.OK:
                    self._drains[operation.queue].append(operation)
                case Kind.EXTEND | Kind.RELEASE | Kind.DELETE:
                    uses.append(operation)
        for operation in uses:
            self._used(operation)
        for sends in self.unknown_sends.values():
            sends.sort(key=lambda each: each.invoked)
        for drains in self._drains.values():
            drains.sort(key=lambda each: each.invoked)
        self.purges = {queue: Purges(purges, promises.purge_us) for queue, purges in self._purges.items()}
        for life in self.lives.values():
            life.grants.sort(key=lambda each: (each.invoked, each.returned))
            self._dated(life)
            life.places = self._chains.get(life.queue, (life.queue,))
            life.entered = self._entered(life)

    def _entered(self, life: Life) -> list[int]:
        """A message leaves its own queue only after its last receive there; a dead-letter queue also by a receive that
        gets nothing, because the count of receives goes on."""
        low = life.born_low
        entered = [low]
        for place, queue in enumerate(life.places[:-1]):
            seen = max((each.invoked for each in life.grants if each.operation.queue == queue), default=None)
            if seen is not None or place == 0:
                low = max(low, self.unknown_receives.get(queue, FOREVER) if seen is None else seen)
            later = (each.invoked for each in life.grants if each.operation.queue in life.places[place + 1 :])
            low = min(low, *later, FOREVER)
            entered.append(low)
        return entered

    def purged_low(self, life: Life, first: int = 0) -> int:
        """From when on a purge may have taken it from one of its places; `first`: from that place on."""
        lows = list(zip(life.places, life.entered, strict=True))[first:]
        found = (max(low, self.purges[queue].may_take(low)) for queue, low in lows if queue in self.purges)
        return min(found, default=FOREVER)

    def is_drained(self, queue: str) -> bool:
        """Whether a drain of the queue succeeded, at any time."""
        return queue in self._drains

    def drained(self, places: tuple[str, ...]) -> list[Operation]:
        """The last drains of these queues in this order, each begun when the one before had ended, since a drain may
        move messages to the next queue. Empty if there are none."""
        if places not in self._drained:
            found: list[Operation] = []
            for queue in reversed(places):
                end = found[-1].invoked if found else FOREVER
                ended = [each for each in self._drains.get(queue, ()) if end_of(each) <= end]
                found += ended[-1:]
            self._drained[places] = found[::-1] if len(found) == len(places) else []
        return self._drained[places]

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
        sources = [source for source, chain in self._chains.items() if life.queue in chain[1:]]
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


def _chain(queue: str, dead_letters: Mapping[str, str]) -> tuple[str, ...]:
    chain = [queue]
    while (dead := dead_letters.get(chain[-1])) is not None:
        if dead in chain:
            raise LogInvalid(line=0, reason=f"the dead letters of queue {queue} go round in a circle")
        chain.append(dead)
    return tuple(chain)


def _duplicates_of(send: Operation) -> tuple[str, str | None, str]:
    """Equal for sends of which a FIFO queue may take one as a duplicate of the other."""
    return send.queue, send.deduplication, "" if send.deduplication is not None else send.body


def with_highest_before(
    items: Sequence[T], began: Callable[[T], int], ended: Callable[[T], int], number: Callable[[T], int]
) -> Iterator[tuple[T, T | None]]:
    """Each by its begin, with the one that has the highest number of those that ended before it began."""
    by_end = sorted(items, key=ended)
    highest: T | None = None
    at = 0
    for each in sorted(items, key=began):
        while at < len(by_end) and ended(by_end[at]) <= began(each) and by_end[at] is not each:
            if highest is None or number(by_end[at]) > number(highest):
                highest = by_end[at]
            at += 1
        yield each, highest
