"""The queues that are worst by some measure, kept while events are added, so that nobody has to look at all queues.

Strategy: of each account and measure the ranking keeps a few thousand queues, its members, and a floor: no other queue
is above it. A queue whose value rises above the floor becomes a member; when there are too many, the lower half leaves
and the floor rises. Values fall by themselves, so they are read when somebody asks. If too few members are left at the
floor or above it, all queues are walked once, in a thread, and the ranking is renewed.

The age of the oldest message is ranked by a bound: no message of the queue was sent before it. The bound is exact when
a queue's minute is stored. After that it can only become too early, so it is at most a minute or two off. FIFO queues
are also ranked by how long their groups have been blocked (messages/groups.py), by a bound, too. After a look that
found nothing blocked, the next events set it; it is looked up when a minute is stored and when somebody asks. A queue
that stands still has no events, so its bound stays right.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from typing import Final

from veilmq.model.events import Event, Kind
from veilmq.model.instant import FOREVER
from veilmq.model.settings.topic import is_hidden
from veilmq.store.rollups import DEAD_LETTERED, FAILED, LEASE_EXPIRED, Rollup
from veilmq.store.sqlite.batch.queues import LiveQueue, Queues

MEMBERS_MAX: Final = 4_096
"""Of a ranking."""
MEMBERS_KEPT: Final = 2_048
COUNTED: Final = {"dead_lettered": DEAD_LETTERED, "lease_expired": LEASE_EXPIRED, "failed": FAILED}
"""Measures that are counts of the present hour and the one before."""
_SENT: Final = int(Kind.SENT)
_UNKNOWN: Final = 2 * FOREVER
"""A floor above every value."""
Ranked = list[tuple[int, int]]
"""(value, incarnation), the worst first."""


class Ranking:
    """See `veilmq.store.reader.Ranking`."""

    __slots__ = ("floor", "members", "renewals", "value_of")

    def __init__(self, value_of: Callable[[int], int]) -> None:
        self.value_of = value_of
        """By incarnation; 0: not ranked."""
        self.members: set[int] = set()
        self.floor = 0
        """No queue that is not a member has a greater value."""
        self.renewals = 0
        """Renewals in progress, each a walk through all queues; meanwhile there may be too few members."""

    def note(self, incarnation: int, value: int) -> None:
        """The queue has this value now."""
        if value > self.floor:
            self.members.add(incarnation)
            if len(self.members) > MEMBERS_MAX and not self.renewals:
                self._cut()

    def _cut(self) -> None:
        ranked = nlargest(MEMBERS_KEPT, self._ranked(self.members))
        self.members = {incarnation for _, incarnation in ranked}
        if len(ranked) == MEMBERS_KEPT:  # else only those have left that have no value any more
            self.floor = max(self.floor, ranked[-1][0])

    def _ranked(self, incarnations: Iterable[int]) -> Iterator[tuple[int, int]]:
        value_of = self.value_of
        return ((value, each) for each in incarnations if (value := value_of(each)) > 0)

    def top(self) -> tuple[Ranked, bool]:
        if self.renewals:
            return [], False
        ranked = sorted(self._ranked(self.members), reverse=True)
        if not self.floor:
            self.members = {incarnation for _, incarnation in ranked}
        return [each for each in ranked if each[0] >= self.floor], not self.floor

    def begin_renewal(self) -> None:
        """See `Ranking.begin_renewal`: until the end each queue that is noted becomes a member."""
        self.renewals += 1
        self.floor = 0

    def walk(self, incarnations: Iterable[int]) -> Ranked:
        return nlargest(MEMBERS_KEPT, self._ranked(incarnations))

    def end_renewal(self, ranked: Ranked | None) -> None:
        self.renewals -= 1
        if ranked is None:
            self.members.clear()
            self.floor = _UNKNOWN
        elif not self.renewals:
            self.members.update(incarnation for _, incarnation in ranked)
            self.floor = ranked[-1][0] if len(ranked) == MEMBERS_KEPT else 0


class Worst:
    """The rankings of all accounts, and what they rank by."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._oldest: dict[int, int] = {}
        """By incarnation of queues with messages: an instant before which none of them was sent."""
        self._blocked: dict[int, int] = {}
        """By incarnation of FIFO queues in which messages may be blocked: an instant before which none of them was."""
        self._recent: dict[int, tuple[int, list[int], list[int]]] = {}
        """By incarnation: an hour, the counts of it and of the hour before."""
        self.hour = 0
        """The present one, by number since 1970."""
        self._rankings: dict[str, dict[str, Ranking]] = {}
        self.unseen: list[int] = []
        """Queues that had messages at the start, whose oldest one was not looked up yet."""

    def start(self) -> None:
        """The queues and their counts are loaded."""
        for queue in self._queues.by_incarnation.values():
            self._note_counts(queue)
            if queue.visible or queue.in_flight:
                self.unseen.append(queue.incarnation)
                if queue.settings.fifo and queue.visible and (queue.in_flight or queue.delayed):
                    self.note_blocked(queue, 0)

    def queue(self, incarnation: int) -> LiveQueue | None:
        """The queue, if it still exists."""
        return self._queues.by_incarnation.get(incarnation)

    def ranking(self, account: str, by: str) -> Ranking:
        """The ranking of an account by a measure: `oldest`, `blocked`, `depth`, `in_flight` or one of `COUNTED`."""
        return self._of(account)[by]

    def _of(self, account: str) -> dict[str, Ranking]:
        found = self._rankings.get(account)
        if found is None:
            found = {"depth": Ranking(self._depth), "in_flight": Ranking(self._in_flight)}
            found |= {"oldest": Ranking(self._age), "blocked": Ranking(self._blocked_for)}
            found |= {name: Ranking(self._count_of(column)) for column, name in enumerate(COUNTED)}
            self._rankings[account] = found
        return found

    @property
    def accounts(self) -> list[str]:
        """All that have a ranking."""
        return list(self._rankings)

    def _depth(self, incarnation: int) -> int:
        queue = self._queues.by_incarnation.get(incarnation)
        return 0 if queue is None else queue.visible + queue.delayed + queue.in_flight

    def _in_flight(self, incarnation: int) -> int:
        queue = self._queues.by_incarnation.get(incarnation)
        return 0 if queue is None else queue.in_flight

    def _age(self, incarnation: int) -> int:
        """FOREVER minus the time of the oldest message: greater is older."""
        sent = self._oldest.get(incarnation)
        return 0 if sent is None or incarnation not in self._queues.by_incarnation else FOREVER - sent

    def _blocked_for(self, incarnation: int) -> int:
        """FOREVER minus the time since which something may be blocked: greater is longer."""
        since = self._blocked.get(incarnation)
        return 0 if since is None or incarnation not in self._queues.by_incarnation else FOREVER - since

    def _count_of(self, column: int) -> Callable[[int], int]:
        def count(incarnation: int) -> int:
            found = self._recent.get(incarnation)
            if found is None or incarnation not in self._queues.by_incarnation:
                return 0
            hour, present, before = found
            if hour == self.hour:
                return present[column] + before[column]
            return present[column] if hour == self.hour - 1 else 0

        return count

    def touch(self, incarnation: int, events: list[Event], kinds: bytes) -> None:
        """These events of the queue were added."""
        queue = self._queues.by_incarnation.get(incarnation)
        if queue is None:
            return
        self._note_counts(queue)
        if queue.settings.fifo and incarnation not in self._blocked:
            self.note_blocked(queue, events[0].at)
        if incarnation not in self._oldest:
            at = kinds.find(_SENT)
            if at >= 0:
                self.note_oldest(queue, events[at].sent)

    def _note_counts(self, queue: LiveQueue) -> None:
        rankings = self._of(queue.key.account)
        in_flight = queue.in_flight
        depth = queue.visible + queue.delayed + in_flight
        for ranking, value in ((rankings["depth"], depth), (rankings["in_flight"], in_flight)):
            if value > ranking.floor and not is_hidden(queue.key.name):
                ranking.note(queue.incarnation, value)

    def arrive(self, incarnation: int, sent: int | None) -> None:
        """A message that was sent then came from another queue."""
        queue = self._queues.by_incarnation.get(incarnation)
        if queue is not None:
            self._note_counts(queue)
            if queue.settings.fifo and incarnation not in self._blocked:
                self.note_blocked(queue, sent or 0)
            if sent is not None and sent < self._oldest.get(incarnation, FOREVER):
                self.note_oldest(queue, sent)

    def note_oldest(self, queue: LiveQueue, sent: int | None) -> None:
        """No message of the queue was sent before; None: it is empty."""
        if sent is None:
            self._oldest.pop(queue.incarnation, None)
        elif not is_hidden(queue.key.name):
            self._oldest[queue.incarnation] = sent
            self._of(queue.key.account)["oldest"].note(queue.incarnation, FOREVER - sent)

    def note_blocked(self, queue: LiveQueue, since: int | None) -> None:
        """No message of the FIFO queue has been blocked since before that instant; None: none is blocked now, and all
        of its events were added."""
        if since is None:
            self._blocked.pop(queue.incarnation, None)
        elif not is_hidden(queue.key.name):
            self._blocked[queue.incarnation] = since
            self._of(queue.key.account)["blocked"].note(queue.incarnation, FOREVER - since)

    def may_be_blocked_since(self, incarnation: int) -> int | None:
        """What `note_blocked` noted last."""
        return self._blocked.get(incarnation)

    def set_blocked_bound(self, incarnation: int, since: int) -> None:
        queue = self._queues.by_incarnation.get(incarnation)
        if queue is not None:
            self.note_blocked(queue, since)

    def count(self, incarnation: int, hour: int, added: list[int]) -> None:
        """Add to the counts of that hour, in the order of `COUNTED`."""
        queue = self._queues.by_incarnation.get(incarnation)
        if queue is None or not any(added) or is_hidden(queue.key.name):
            return
        known, present, last = self._recent.get(incarnation, (hour, [0, 0, 0], [0, 0, 0]))
        if hour > known:
            last = present if hour == known + 1 else [0, 0, 0]
            known, present = hour, [0, 0, 0]
        if hour >= known - 1:
            into = present if hour == known else last
            for column, count in enumerate(added):
                into[column] += count
        self._recent[incarnation] = (known, present, last)
        rankings = self._of(queue.key.account)
        for name in COUNTED:
            rankings[name].note(incarnation, rankings[name].value_of(incarnation))

    def turn(self, hour: int) -> None:
        """Another hour begins: counts before the last one are forgotten."""
        if hour != self.hour:
            self.hour = hour
            alive = self._queues.by_incarnation
            self._recent = {
                each: found for each, found in self._recent.items() if found[0] >= hour - 1 and each in alive
            }
            self._oldest = {each: sent for each, sent in self._oldest.items() if each in alive}
            self._blocked = {each: since for each, since in self._blocked.items() if each in alive}


def counted_in(rollup: Rollup) -> list[int]:
    """The rollup's counts, in the order of `COUNTED`."""
    return [rollup.numbers.get(key, 0) for key in COUNTED.values()]
