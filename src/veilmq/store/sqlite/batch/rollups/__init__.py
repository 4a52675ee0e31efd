"""The rollups of minutes that are not stored yet, made of the events of committed batches.

Strategy: a batch only hands its list of events over when it is committed, so nothing has to be rolled back. They are
added to their queues' rollups thousands at a time: when there are many, when a minute ends, at a sweep, and before
anybody reads. When a minute is over, sweeps store its rollups, a bounded number each (upkeep/rollups). A row is written
once, when its minute is over, and then it is complete. So after a crash the events from the offset on that the store
has written down are added again, but for those whose queue already has the row of that minute.

Before changing it: an event belongs to the minute of its batch, as in the history's column `at`: its own instant may be
earlier. `note` may run in the thread of a commit, everything else runs where batches are applied.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.events import Event, Kind
from veilmq.model.instant import MINUTE_US
from veilmq.store.rollups import ARRIVED, Rollup

EVENTS_MAX: Final = 4_096
"""So many events of committed batches wait to be added."""
PERIOD_SHIFT: Final = 36
"""Row ids: number of the minute or hour, and behind it so many bits for the queue's incarnation."""
MINUTES: Final = "rollup_minute"
HOURS: Final = "rollup_hour"
TABLES: Final = (MINUTES, HOURS)
_TELLING: Final = frozenset(
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
"""Kinds that are counted, or after which a queue holds something else."""
_MOVING: Final = frozenset({Kind.DEAD_LETTERED, Kind.MOVED})
_QUEUE_DELETED, _DEAD_LETTERED, _MOVED = int(Kind.QUEUE_DELETED), int(Kind.DEAD_LETTERED), int(Kind.MOVED)
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])


class Minute:
    """The rollups of one minute by incarnation, as far as they are not stored."""

    __slots__ = ("first", "rollups", "stored")

    def __init__(self, first: int) -> None:
        self.first = first
        """None of its events has a smaller offset."""
        self.rollups: dict[int, Rollup] = {}
        self.stored: set[int] = set()
        """After a crash: queues that have their row of this minute."""


class Rollups:
    """Adds up the events of committed batches."""

    def __init__(self, connection: apsw.Connection, following: int) -> None:
        """following: the next offset to be assigned; all events from there on will be noted."""
        self._connection = connection
        self._batches: deque[list[Event]] = deque()
        self.pending = 0
        """About how many events wait to be added."""
        self.ends = 0
        """When the present minute ends."""
        self.minutes: dict[int, Minute] = {}
        """By number of the minute since 1970."""
        self.garbage = False
        """Whether a queue was deleted whose rows may be there."""
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

    def add_pending(self) -> None:
        """Add the events that wait."""
        batches, taken = self._batches, []
        while batches:
            taken.append(batches.popleft())
        self.pending = 0
        events = list(chain.from_iterable(taken))
        if events:
            self._add(self._minute, self._added, events)
            self._added += len(events)

    def _add(self, minute: int, first: int, events: list[Event]) -> None:
        found = self.minutes.get(minute)
        if found is None:
            found = self.minutes[minute] = Minute(first)
        incarnations = [event.queue for event in events]
        kinds = bytes([event.kind for event in events])
        if incarnations.count(incarnations[0]) == len(events):
            _add_to(found, incarnations[0], events, kinds)
        else:
            by_queue: dict[int | None, list[Event]] = {}
            for incarnation, event in zip(incarnations, events, strict=True):
                known = by_queue.get(incarnation)
                if known is None:
                    by_queue[incarnation] = [event]
                else:
                    known.append(event)
            for incarnation, each in by_queue.items():
                _add_to(found, incarnation, each, bytes([event.kind for event in each]))
        self.garbage = self.garbage or _QUEUE_DELETED in kinds
        if _DEAD_LETTERED in kinds or _MOVED in kinds:
            for event in events:
                if event.kind in _MOVING:
                    _arrive(found, event)

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
                self._look_up(minute, first, events)
                self._add(minute, first, events)
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
        for incarnation in named - found.rollups.keys() - found.stored - {None}:
            id_ = row_id(minute, incarnation)
            if self._connection.execute("SELECT 1 FROM rollup_minute WHERE id = ?", (id_,)).fetchone():
                found.stored.add(incarnation)

    @property
    def written(self) -> int:
        """The events before this offset are in rows."""
        if self.is_catching_up:
            return min([self._caught_up, *(each.first for each in self.minutes.values())])
        return min((each.first for each in self.minutes.values()), default=self._added)

    def live(self, incarnation: int) -> dict[int, Rollup]:
        """The queue's minutes that are not stored, by number: copies."""
        self.add_pending()
        return {
            number: Rollup(minute.rollups[incarnation].numbers.copy())
            for number, minute in self.minutes.items()
            if incarnation in minute.rollups
        }


def _add_to(minute: Minute, incarnation: int | None, events: list[Event], kinds: bytes) -> None:
    if incarnation is None or incarnation in minute.stored:
        return
    rollup = minute.rollups.get(incarnation)
    if rollup is None:
        if _TELLING.isdisjoint(kinds):
            return
        rollup = minute.rollups[incarnation] = Rollup()
    rollup.add(events, kinds)


def _arrive(minute: Minute, event: Event) -> None:
    """A message came into another queue: the event names as its own the queue that the message left."""
    target = _target_of(event)
    if target is not None and target not in minute.stored:
        rollup = minute.rollups.get(target)
        if rollup is None:
            rollup = minute.rollups[target] = Rollup()
        rollup.count(ARRIVED)


def _target_of(event: Event) -> int | None:
    return None if event.detail is None else event.detail.get("target")


def row_id(period: int, incarnation: int) -> int:
    """The id of a row of that minute or hour."""
    return period << PERIOD_SHIFT | incarnation
