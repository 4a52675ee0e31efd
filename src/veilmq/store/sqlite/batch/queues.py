"""The queues in memory: settings, cursors and counts, changed and rolled back with the batch; and their names, sorted.

Strategy: before a batch changes a queue, it saves a copy of the queue's few numbers; a rollback restores the copies.
Two heaps hold a lower bound per queue for the next instant at which it needs the sweeper. A bound that is too early
costs a needless check; one that is too late would be a bug. So a bound is only ever lowered until a sweep has checked
the queue. Lists are read in pages: one sorted list of names per account and region, so that the cost of a page depends
on its length, not on the number of names. Names appended out of order are sorted at the next read.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from veilmq.model.instant import FOREVER, Instant
from veilmq.model.settings.queue import (
    NO_PLAN,
    PRIORITY_MAX,
    QueueCounts,
    QueueInfo,
    QueueKey,
    QueueSettings,
    RedrivePolicy,
    alias_key,
)
from veilmq.store.sqlite.disk.rows import Unflushed

AccountRegion = tuple[str, str]
"""Account and region."""


class OrderedNames:
    """Names of queues; a name occurs once in an account and region."""

    def __init__(self) -> None:
        self._names: dict[AccountRegion, list[str]] = {}
        self._unsorted: set[AccountRegion] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, key: QueueKey) -> None:
        """Add a name."""
        place = (key.account, key.region)
        names = self._names.setdefault(place, [])
        if names and names[-1] > key.name:
            self._unsorted.add(place)
        names.append(key.name)

    def remove(self, key: QueueKey) -> None:
        """Remove a name."""
        place = (key.account, key.region)
        names = self._sorted(place)
        del names[bisect_left(names, key.name)]
        if not names:
            del self._names[place]

    def places(self, account: str | None, region: str | None) -> list[AccountRegion]:
        """Accounts and regions with names, ordered by `account/region/`; None: any."""
        if account is not None and region is not None:
            return [(account, region)] if (account, region) in self._names else []
        found = [each for each in self._names if account in (None, each[0]) and region in (None, each[1])]
        return sorted(found, key="{0[0]}/{0[1]}/".format)

    def following(self, place: AccountRegion, prefix: str, after: str) -> Iterator[str]:
        """The names in that place that begin with `prefix` and are greater than `after`, in order."""
        if place not in self._names:
            return
        names = self._sorted(place)
        for at in range(max(bisect_left(names, prefix), bisect_right(names, after)), len(names)):
            if not names[at].startswith(prefix):
                return
            yield names[at]

    def _sorted(self, place: AccountRegion) -> list[str]:
        names = self._names[place]
        if place in self._unsorted:
            self._unsorted.remove(place)
            names.sort()
        return names


SETTINGS_DECODER: Final = msgspec.msgpack.Decoder(QueueSettings)
SETTINGS_ENCODER: Final = msgspec.msgpack.Encoder()
STALE_MAX: Final = 4_096
"""Entries that a heap of bounds may have beyond two per queue before it is rebuilt."""
PRIORITY_LINES_MAX: Final = PRIORITY_MAX
"""A line up to this number is a priority's; one with a higher number is a group's (groups.py)."""
FIRST_DUE: Final = "SELECT min(due) FROM lease INDEXED BY lease_hidden WHERE generation = ? AND hidden = 1"


class LiveQueue:
    """An existing queue."""

    __slots__ = (
        "cap", "created", "cursors", "delayed", "generation", "grouped", "groups", "handed", "in_flight", "incarnation",
        "key", "looked", "modified", "next_due", "next_expiry", "passed_over", "plan", "purged", "ready", "returned",
        "settings", "unflushed", "visible", "woken",
    )  # fmt: skip

    def __init__(
        self, key: QueueKey, incarnation: int, generation: int, created: Instant, settings: QueueSettings
    ) -> None:
        self.key = key
        self.incarnation = incarnation
        self.generation = generation
        self.created = created
        self.modified = created
        self.purged: Instant | None = None
        self.settings = settings
        self.plan = NO_PLAN
        self.cursors: dict[int, int] = {}
        """By priority: the last sequence claimed from that line."""
        self.ready: dict[int, int] = {}
        """By priority: messages in that line after its cursor."""
        self.unflushed: dict[int, deque[Unflushed]] = {}
        """By priority: the unflushed messages in that line. Together with the line in the tables they are in one order
        (memtable.py)."""
        self.visible = 0
        """All that can be claimed: in the lines, unflushed, and returned."""
        self.returned = self.delayed = self.in_flight = 0
        self.cap: int = FOREVER
        """The limit of messages in flight that cut a receive short. A parked receive is woken when one of them ends."""
        self.grouped = 0
        """Messages in flight that belong to a group."""
        self.passed_over = 0
        """Messages delivered in a row before the one that has waited longest: see leases/group_claims.py."""
        self.groups: Groups | None = None
        """None: a standard queue that never had a message with a group."""
        self.woken = 0
        """Messages that became visible in the open batch: a hint for parked receives."""
        self.handed = (0, 0)
        """The queue's rate, and what it delivered under that rate: see leases/__init__.py."""
        self.next_due = FOREVER
        """Not after the earliest end of a lease or delay."""
        self.next_expiry = FOREVER
        """Not after the earliest expiry that a sweep could apply."""
        self.looked: tuple[int, int] = (FOREVER, 0)
        """End of the lease, and sequence, of the hidden message that a sweep looked at last: a hint."""

    def save(self) -> tuple[object, ...]:
        """Everything that a batch can change."""
        return (
            self.generation, self.modified, self.purged, self.settings, self.plan, self.cursors.copy(),
            self.ready.copy(), self.visible, self.returned, self.delayed, self.in_flight, self.grouped,
            self.passed_over, self.handed, self.next_due, self.next_expiry,
        )  # fmt: skip

    def restore(self, saved: tuple[object, ...]) -> None:
        """Restore what `save` returned."""
        (
            self.generation, self.modified, self.purged, self.settings, self.plan, self.cursors, self.ready,
            self.visible, self.returned, self.delayed, self.in_flight, self.grouped, self.passed_over, self.handed,
            self.next_due, self.next_expiry,
        ) = saved  # type: ignore[assignment]  # fmt: skip
        if self.groups is not None:
            self.groups.take()

    def empty(self, generation: int) -> int:
        """Leave all messages in the old generation; returns how many there were."""
        count = self.visible + self.delayed + self.in_flight
        self.generation = generation
        self.cursors = {}
        self.ready = {}
        self.visible = self.returned = self.delayed = self.in_flight = self.grouped = self.passed_over = 0
        self.next_due = self.next_expiry = FOREVER
        if self.groups is not None:
            self.groups.take()
        return count

    def info(self) -> QueueInfo:
        """The queue as protocols show it."""
        counts = QueueCounts(self.visible, self.delayed, self.in_flight)
        return QueueInfo(
            self.key, self.incarnation, self.created, self.modified, self.settings, counts, self.plan, self.purged
        )


class Groups:
    """Changes to a queue's groups since their rows were written. By group number: by how much the count of messages in
    flight changed, and the last sequence claimed from the line. `pool` holds every queue with such changes."""

    __slots__ = ("_pool", "_queue", "changes")

    def __init__(self, queue: LiveQueue, pool: dict[int, LiveQueue]) -> None:
        self._queue = queue
        self._pool = pool
        self.changes: dict[int, tuple[int, int]] = {}

    def note(self, number: int, held: int = 0, cursor: int = 0) -> None:
        """Record a change of a group: `held` more messages in flight, and `cursor` as the last sequence claimed."""
        known = self.changes.get(number)
        if known is None:
            self._pool[self._queue.incarnation] = self._queue
        else:
            held += known[0]
            cursor = max(cursor, known[1])
        self.changes[number] = (held, cursor)

    def leaves(self, line: int, *, in_flight: bool) -> None:
        """A message of that line has left its place."""
        if line <= PRIORITY_LINES_MAX:
            return
        self.note(line, -in_flight)
        self._queue.grouped -= in_flight

    def holds(self, line: int, cursor: int = 0) -> None:
        """A message of that line is now in flight. cursor: its sequence, if it was claimed from the line."""
        if line <= PRIORITY_LINES_MAX:
            return
        self.note(line, 1, cursor)
        self._queue.grouped += 1

    def take(self) -> dict[int, tuple[int, int]]:
        """Return all changes and forget them."""
        changes, self.changes = self.changes, {}
        self._pool.pop(self._queue.incarnation, None)
        return changes


class Bounds:
    """A heap of (instant, incarnation): when each queue next needs a check. The reader skips stale entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def renew(self, entries: Iterable[tuple[int, int]]) -> None:
        """Replace all entries."""
        self._heap = list(entries)
        heapify(self._heap)

    def push(self, instant: int, incarnation: int) -> None:
        """The queue needs a check at that instant or before."""
        heappush(self._heap, (instant, incarnation))

    def first(self) -> Instant | None:
        """The earliest bound; None if there is none."""
        return Instant(self._heap[0][0]) if self._heap else None

    def is_due(self, now: int) -> bool:
        """Whether `due` would yield anything."""
        return bool(self._heap) and self._heap[0][0] <= now

    def due(self, now: int) -> Iterator[int]:
        """Remove and yield the queues whose bound is not after `now`, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]


class Queues:
    """All existing queues, by name and by incarnation."""

    def __init__(self) -> None:
        self.by_key: dict[QueueKey, LiveQueue] = {}
        self.by_incarnation: dict[int, LiveQueue] = {}
        self.aliases: dict[QueueKey, QueueKey] = {}
        """Alias -> the queue's own key. The alias is a key in the queue's account and region."""
        self.per_account: Counter[str] = Counter()
        self.subscriptions: Counter[str] = Counter()
        """How many each account has."""
        self.names = OrderedNames()
        self.alias_names = OrderedNames()
        self.sources: dict[QueueKey, OrderedNames] = {}
        """Dead-letter queue -> the queues whose redrive policies name it. The dead-letter queue need not exist."""
        self._alias_of: dict[QueueKey, QueueKey] = {}
        self._target_of: dict[QueueKey, QueueKey] = {}
        self.due = Bounds()
        self.expiry = Bounds()
        self.stale_groups: dict[int, LiveQueue] = {}
        """Queues whose groups changed in the open batch."""

    def add(self, queue: LiveQueue) -> None:
        """Add a queue that was created or loaded."""
        if queue.settings.fifo and queue.groups is None:
            queue.groups = Groups(queue, self.stale_groups)
        self.by_key[queue.key] = queue
        self.by_incarnation[queue.incarnation] = queue
        self.per_account[queue.key.account] += 1
        self.names.add(queue.key)
        if queue.settings.alias is not None:
            self.set_alias(queue.key, queue.settings.alias)
        if queue.settings.redrive is not None:
            self.set_redrive(queue.key, queue.settings.redrive)

    def remove(self, queue: LiveQueue) -> None:
        """Remove a queue that was deleted."""
        del self.by_key[queue.key]
        del self.by_incarnation[queue.incarnation]
        self.per_account[queue.key.account] -= 1
        if not self.per_account[queue.key.account]:
            del self.per_account[queue.key.account]
        self.names.remove(queue.key)
        self.set_alias(queue.key, None)
        self.set_redrive(queue.key, None)

    def set_alias(self, key: QueueKey, alias: str | None) -> None:
        """Set the queue's only alias; None removes it."""
        known = self._alias_of.pop(key, None)
        if known is not None:
            del self.aliases[known]
            self.alias_names.remove(known)
        if alias is not None:
            known = self._alias_of[key] = alias_key(key, alias)
            self.aliases[known] = key
            self.alias_names.add(known)

    def set_redrive(self, key: QueueKey, policy: RedrivePolicy | None) -> None:
        """Set the queue's redrive policy; None removes it."""
        known = self._target_of.pop(key, None)
        if known is not None:
            self.sources[known].remove(key)
            if not self.sources[known]:
                del self.sources[known]
        if policy is not None:
            self._target_of[key] = policy.target
            self.sources.setdefault(policy.target, OrderedNames()).add(key)

    def lower_due(self, queue: LiveQueue, instant: int) -> None:
        """A lease or delay of the queue ends at `instant`."""
        if instant < queue.next_due:
            queue.next_due = Instant(instant)
            self.due.push(instant, queue.incarnation)
            if len(self.due) > self._entries_max():
                every = self.by_incarnation.values()
                self.due.renew((each.next_due, each.incarnation) for each in every if each.next_due < FOREVER)

    def lower_expiry(self, queue: LiveQueue, instant: int) -> None:
        """A message of the queue expires at `instant`."""
        if instant < queue.next_expiry:
            queue.next_expiry = Instant(instant)
            self.expiry.push(instant, queue.incarnation)
            if len(self.expiry) > self._entries_max():
                every = self.by_incarnation.values()
                self.expiry.renew((each.next_expiry, each.incarnation) for each in every if each.next_expiry < FOREVER)

    def _entries_max(self) -> int:
        """With more entries than this, most of a heap is stale."""
        return 2 * len(self.by_incarnation) + STALE_MAX

    def rebound(self, queue: LiveQueue) -> None:
        """After a rollback: put the queue's bounds back into both heaps."""
        if queue.next_due < FOREVER:
            self.due.push(queue.next_due, queue.incarnation)
        if queue.next_expiry < FOREVER:
            self.expiry.push(queue.next_expiry, queue.incarnation)
