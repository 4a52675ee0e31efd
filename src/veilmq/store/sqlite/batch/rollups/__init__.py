"""What is counted from the events of committed batches: the rollups of minutes that are not stored yet, and what each
client did in the last hour.

Strategy: a batch only hands its list of events over when it is committed, so nothing has to be rolled back. They are
added to their queues' rollups thousands at a time: when there are many, when a minute ends, at a sweep, and before
anybody reads. When a minute is over, sweeps store its rollups, a bounded number each (upkeep/rollups). A row is written
once, when its minute is over, and then it is complete. So after a crash the events from the offset on that the store
has written down are added again, but for those whose queue already has the row of that minute.

Clients (`Clients`) have windows of five minutes, each with the counts of the clients that did something in it.
Thousands of events are added at once: those of each kind are counted by client without a step of Python for each. It is
in memory only: after a restart it begins anew, and says since when it knows. What a client holds is not here, but in
the leases.

Before changing it: an event belongs to the minute of its batch, as in the history's column `at`: its own instant may be
earlier. `note` may run in the thread of a commit, everything else runs where batches are applied. The number of clients
is bounded, and one that is forgotten leaves all windows. An expiry names the holder of the lease, who was not there.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain, compress, islice
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.events import Event, Kind
from veilmq.model.instant import HOUR_US, MINUTE_US
from veilmq.store.rollups import ARRIVED, CLIENT_COUNTS, Rollup, SeenClients, is_failure, selecting
from veilmq.store.sqlite.batch.queues import Queues
from veilmq.store.sqlite.batch.rollups.worst import Worst, counted_in

EVENTS_MAX: Final = 512
"""About this many events of committed batches may wait to be added: adding them takes the loop some 0.4 ms. More at a
time cost as much each."""
MINUTES_AN_HOUR: Final = HOUR_US // MINUTE_US
PERIOD_SHIFT: Final = 36
"""A row's id is the number of the minute or hour, shifted by this many bits, plus the queue's incarnation."""
INCARNATION: Final = (1 << PERIOD_SHIFT) - 1
MINUTES_END: Final = 1 << 63 - PERIOD_SHIFT
"""The first minute, in the year 2225, whose number is too great for a row's id."""
HOUR_PERIODS: Final = 1 << 40
"""In `rollup_period` the id of an hour is its number plus this."""
MINUTES: Final = "rollup_minute"
HOURS: Final = "rollup_hour"
TABLES: Final = (MINUTES, HOURS)
_COUNTED_KINDS: Final = frozenset(
    {
        Kind.QUEUE_CREATED,
        Kind.SENT,
        Kind.RECEIVED,
        Kind.RELEASED,
        Kind.LEASE_EXPIRED,
        Kind.DELETED,
        Kind.DELETE_REFUSED,
        Kind.DEAD_LETTERED,
        Kind.EXPIRED,
        Kind.MOVED,
        Kind.PURGED,
        Kind.UNDELIVERED,
        Kind.QUARANTINED,
        Kind.LEASE_RESUMED,
        Kind.RELEASED_FOR_RETRY,
        Kind.EXPIRED_AFTER_CHANGE,
        Kind.RETRY_DUE,
    }
)
"""Kinds of events that are counted, or that change what a queue holds."""
_MOVING: Final = frozenset({Kind.DEAD_LETTERED, Kind.MOVED})
_QUEUE_DELETED, _DEAD_LETTERED, _MOVED = int(Kind.QUEUE_DELETED), int(Kind.DEAD_LETTERED), int(Kind.MOVED)
_LEASE_EXPIRED, _FOR_RETRY = int(Kind.LEASE_EXPIRED), int(Kind.RELEASED_FOR_RETRY)
_STORED: Final = "SELECT id FROM rollup_minute WHERE id IN (SELECT value FROM carray(?))"
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])


class Minute:
    """The rollups of one minute by incarnation, as far as they are not stored."""

    __slots__ = ("failing", "first", "rollups", "stored")

    def __init__(self, first: int) -> None:
        self.first = first
        """None of its events has a smaller offset."""
        self.rollups: dict[int, Rollup] = {}
        self.failing: set[int] = set()
        """Those that may have a cause of a failure."""
        self.stored: set[int] = set()
        """After a crash: queues whose row of this minute is written already."""


class Rollups:
    """Adds up the events of committed batches."""

    def __init__(self, connection: apsw.Connection, queues: Queues, following: int) -> None:
        """following: the next offset to be assigned; all events from there on will be noted."""
        self._connection = connection
        self.worst = Worst(queues)
        self._batches: deque[list[Event]] = deque()
        self.pending = 0
        """About how many events wait to be added."""
        self.ends = 0
        """When the present minute ends."""
        self.minutes: dict[int, Minute] = {}
        """By number of the minute since 1970."""
        self.clients = Clients()
        """What clients did since the start."""
        self.garbage = False
        """Whether a queue was deleted, so that its rows may still be there."""
        self._minute = 0
        self._added = self._caught_up_until = following
        offset: Any = connection.execute("SELECT offset FROM rollup_mark").get
        self._caught_up = int(offset)

    def note(self, events: list[Event]) -> None:
        """The events of a batch are committed."""
        self._batches.append(events)
        self.pending += len(events)

    def turn(self, now: int) -> None:
        """Call before the first batch of a minute, and when many events wait."""
        self.add_pending()
        self._minute = now // MINUTE_US
        self.ends = (self._minute + 1) * MINUTE_US
        self.worst.turn(self._minute // MINUTES_AN_HOUR)
        self.clients.turn(now)

    def add_many(self) -> bool:
        """Add the events that wait if they are many. Returns whether they were."""
        if self.pending < EVENTS_MAX:
            return False
        self.add_pending()
        return True

    def add_pending(self) -> None:
        """Add the events that wait."""
        batches, taken = self._batches, []
        while batches:
            taken.append(batches.popleft())
        self.pending = 0
        events = list(chain.from_iterable(taken))
        if events:
            kinds = bytes([event.kind for event in events])
            self._add(self._minute, self._added, events, kinds)
            self.clients.add(events, kinds)
            self._added += len(events)

    def _add(self, minute: int, first: int, events: list[Event], kinds: bytes) -> None:
        found = self.minutes.get(minute)
        if found is None:
            found = self.minutes[minute] = Minute(first)
        incarnations = [event.queue for event in events]
        if incarnations.count(incarnations[0]) == len(events):
            self._add_to(minute, found, incarnations[0], events, kinds)
        else:
            by_queue: dict[int | None, list[Event]] = {}
            for incarnation, event in zip(incarnations, events, strict=True):
                known = by_queue.get(incarnation)
                if known is None:
                    by_queue[incarnation] = [event]
                else:
                    known.append(event)
            for incarnation, each in by_queue.items():
                self._add_to(minute, found, incarnation, each, bytes([event.kind for event in each]))
        self.garbage = self.garbage or _QUEUE_DELETED in kinds
        if _DEAD_LETTERED in kinds or _MOVED in kinds:
            for event in events:
                if event.kind in _MOVING:
                    self._arrive(found, event)

    def _add_to(self, number: int, minute: Minute, incarnation: int | None, events: list[Event], kinds: bytes) -> None:
        if incarnation is None or incarnation in minute.stored:
            return
        rollup = minute.rollups.get(incarnation)
        if rollup is None:
            if _COUNTED_KINDS.isdisjoint(kinds):
                return
            rollup = minute.rollups[incarnation] = Rollup()
        if _LEASE_EXPIRED in kinds or _FOR_RETRY in kinds or _DEAD_LETTERED in kinds:
            minute.failing.add(incarnation)
            before = counted_in(rollup)
            rollup.add(events, kinds)
            added = [now - then for now, then in zip(counted_in(rollup), before, strict=True)]
            self.worst.count(incarnation, number // MINUTES_AN_HOUR, added)
        else:
            rollup.add(events, kinds)
        self.worst.touch(incarnation, events, kinds)

    def _arrive(self, minute: Minute, event: Event) -> None:
        """Count a message that came into another queue; the event's own queue is the one that the message left."""
        target = _target_of(event)
        if target is None or target in minute.stored:
            return
        rollup = minute.rollups.get(target)
        if rollup is None:
            rollup = minute.rollups[target] = Rollup()
        rollup.count(ARRIVED)
        self.worst.arrive(target, event.sent if event.kind == _DEAD_LETTERED else event.at)

    @property
    def is_catching_up(self) -> bool:
        """Whether events from before the start are still to be added."""
        return self._caught_up < self._caught_up_until

    def catch_up(self, events_max: int) -> None:
        """Add some of the events from before the start that no row has."""
        left = events_max
        while self.is_catching_up and left > 0:
            rows = self._history(left)
            if not rows:
                self._caught_up = self._caught_up_until
            for minute, first, events in rows:
                if minute < MINUTES_END:  # else a damaged disk has made another instant of it
                    self._look_up(minute, first, events)
                    self._add(minute, first, events, bytes([event.kind for event in events]))
                left -= len(events)
                self._caught_up = first + len(events)

    def _history(self, events_max: int) -> list[tuple[int, int, list[Event]]]:
        """Events from the next offset on: some, of one minute at a time, with the offset of the first."""
        rows: Iterator[Any] = self._connection.cursor().execute(
            "SELECT offset, at, events FROM history WHERE offset >= ? AND offset < ? ORDER BY offset",
            (self._caught_up, self._caught_up_until),
        )
        found: list[tuple[int, int, list[Event]]] = []
        count = 0
        for offset, at, packed in rows:
            events, minute = _EVENTS.decode(packed), at // MINUTE_US
            count += len(events)
            if found and found[-1][0] == minute:
                found[-1][2].extend(events)
            else:
                found.append((minute, offset, events))
            if count >= events_max:
                break
        return found

    def _look_up(self, minute: int, first: int, events: Iterable[Event]) -> None:
        """Find out which of the queues have their row of this minute."""
        found = self.minutes.setdefault(minute, Minute(first))
        named: set[Any] = {event.queue for event in events}
        named.update(_target_of(event) for event in events if event.kind in _MOVING)
        ids = [row_id(minute, incarnation) for incarnation in named - found.rollups.keys() - found.stored - {None}]
        if not ids:
            return
        stored: Any = self._connection.execute(_STORED, (apsw.carray(array("q", ids)),))
        found.stored.update(id_ & INCARNATION for (id_,) in stored)

    @property
    def written(self) -> int:
        """The events before this offset are in rows."""
        if self.is_catching_up:
            return min([self._caught_up, *(each.first for each in self.minutes.values())])
        return min((each.first for each in self.minutes.values()), default=self._added)

    def shown_worst(self) -> Worst:
        """The rankings, with everything that is committed."""
        self.add_pending()
        return self.worst

    def live(self, incarnation: int) -> dict[int, Rollup]:
        """The queue's minutes that are not stored, by number: copies."""
        self.add_pending()
        return {
            number: _copy(rollup)
            for number, minute in self.minutes.items()
            if (rollup := minute.rollups.get(incarnation)) is not None
        }

    def live_failing(self, limit: int) -> dict[tuple[int, int], Rollup]:
        """Up to `limit` rollups with causes of failures that are not stored, by minute and queue: copies."""
        self.add_pending()
        found = (
            ((number, incarnation), rollup)
            for number, minute in sorted(self.minutes.items(), reverse=True)
            for incarnation in minute.failing
            if (rollup := minute.rollups.get(incarnation)) is not None and rollup.causes.found
        )
        return {place: _copy(rollup) for place, rollup in islice(found, limit)}


def _copy(rollup: Rollup) -> Rollup:
    return Rollup(rollup.numbers.copy(), causes=rollup.causes.copy())


def _target_of(event: Event) -> int | None:
    return None if event.detail is None else event.detail.get("target")


def row_id(period: int, incarnation: int) -> int:
    """The id of a row of that minute or hour."""
    return period << PERIOD_SHIFT | incarnation


CLIENTS_MAX: Final = 10_000
WINDOW_US: Final = 5 * MINUTE_US
_RECEIVED, _DELETED, _EXTENDED, _RELEASED, _FAILED, _LOST, _REFUSED = range(len(CLIENT_COUNTS))
_COLUMNS: Final[dict[int, int]] = {
    int(Kind.RECEIVED): _RECEIVED,
    int(Kind.DELETED): _DELETED,
    int(Kind.EXTENDED): _EXTENDED,
    int(Kind.LEASE_RESUMED): _EXTENDED,
    int(Kind.RELEASED): _RELEASED,
    _FOR_RETRY: _RELEASED,
    _LEASE_EXPIRED: _LOST,
    int(Kind.DELETE_REFUSED): _REFUSED,
    int(Kind.EXTEND_REFUSED): _REFUSED,
}
_SELECTING: Final = {kind: selecting(kind) for kind in _COLUMNS}


class Clients:
    """Counts by origin."""

    def __init__(self) -> None:
        self._since = 0
        """From when on everything is counted; 0: not known yet."""
        self._seen: dict[int, int] = {}
        """When each client did something last; 0 if only its lease ended."""
        self._windows: deque[tuple[int, dict[int, list[int]]]] = deque()
        """When each began, and its counts by client."""
        self._latest = 0
        """Instant of the latest events."""
        self._left_out = 0
        """Events of clients beyond the bound."""

    def turn(self, now: int) -> None:
        """Begin a window if the last one is over, and forget those of more than an hour ago. Call it once a minute."""
        self._since = self._since or now
        begun = now - now % WINDOW_US
        if self._windows and begun <= self._windows[-1][0]:
            return
        self._windows.append((begun, {}))
        while self._windows[0][0] < begun - HOUR_US:
            self._windows.popleft()
            self._since = max(self._since, self._windows[0][0])
        kept: set[int] = set().union(*(counts for _, counts in self._windows))
        self._seen = {origin: at for origin, at in self._seen.items() if origin in kept}

    def add(self, events: list[Event], kinds: bytes) -> None:
        """Count events. kinds: theirs, in their order."""
        present, seen = self._windows[-1][1], self._seen
        self._latest = at = max(self._latest, events[-1].at)
        origins = [event.origin for event in events]
        for kind, column in _COLUMNS.items():
            if kind not in kinds:
                continue
            for origin, count in _counted(origins, kinds, kind):
                counts = present.get(origin)
                if counts is None:
                    if origin not in seen and len(seen) >= CLIENTS_MAX:
                        self._left_out += count
                        continue
                    counts = present[origin] = [0] * len(CLIENT_COUNTS)
                counts[column] += count
                if kind != _LEASE_EXPIRED:
                    seen[origin] = at
                elif origin not in seen:
                    seen[origin] = 0
        if _FOR_RETRY in kinds:
            for event in events:
                if event.kind == _FOR_RETRY and is_failure(event) and event.origin in present:
                    present[event.origin][_RELEASED] -= 1
                    present[event.origin][_FAILED] += 1

    def state(self, now: int) -> SeenClients:
        """What is known now: a copy, but for the counts of the present window, which go on."""
        self.turn(now)
        windows = [counts.copy() for _, counts in self._windows]
        recent_since = max(self._since, list(self._windows)[-2:][0][0])
        return SeenClients(now, self._since, recent_since, self._seen.copy(), windows, self._left_out)


def _counted(origins: list[int | None], kinds: bytes, kind: int) -> Iterable[tuple[int, int]]:
    """How many events of that kind there are of each client."""
    first = origins[0]
    if first is not None and origins.count(first) == len(origins):
        return [(first, kinds.count(kind))]
    of_kind = compress(origins, kinds.translate(_SELECTING[kind]))
    return [(origin, count) for origin, count in Counter(of_kind).items() if origin is not None]
