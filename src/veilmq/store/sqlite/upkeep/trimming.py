"""Trims what is old and what nothing names any more: the history's oldest rows, except what is being read, deleted
queues, and origins.

Strategy: drop whole rows from the old end, a few at a time. The history's size is the difference of two running totals,
so nothing has to be added up.

A full history loses its oldest events all the time, and a reader that starts with them would never get to read them. So
a reader pins the offset that it needs, for a time, and trimming keeps everything from there on. Pins are bounded: they
expire, they let the history grow by at most half its size and for at most ten minutes, and they are ignored when disk
space is low. They are kept in buckets of 10 s by expiry, so that any number of readers takes a few numbers. Their time
begins with the next sweep, because the readers' threads do not have the store's clock.

Origins go so that restarted workers and renamed clients do not fill their table. When the history has lost rows, a walk
notes which numbers are still named: by a lease, by a move task or job, by an event. It takes a few rows a sweep. The
order matters: first the leases that there were at its beginning, then the history up to its present end. A lease that
got its holder since then has an event that says so. When the walk has reached the end, the other numbers leave the map
in memory at once, so that nothing can name them again, and then the table, a few rows a sweep.

A number is never assigned twice: the greatest row stays, and the next number is one more. So a reader that remembers
the name of a number never shows a wrong one. A walk exists in memory only; after a restart it begins anew.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Final

import msgspec

from veilmq.model.commands import SERVER
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.store import MIB, Options
from veilmq.store.reader import HOLD_S_MAX
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.history_index import NAME_BYTES
from veilmq.store.sqlite.messages import numbers
from veilmq.store.sqlite.space import is_low

_TICK_S: Final = 10


class ReadPins:
    """The offsets that readers of one store need. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[int, int] = {}
        """Pins since the latest sweep: the least offset, by the number of ticks that it is to last."""
        self._held: dict[int, int] = {}
        """The least pinned offset, by the tick in which it expires."""
        self._first = 0

    def keep(self, offset: int, seconds: float) -> int:
        """Protect the history from `offset` on for `seconds` (at most `HOLD_S_MAX`) or some seconds more.

        Returns the first offset that is not trimmed: events before it count as gone, though they may still be readable.
        """
        ticks = ceil(min(seconds, HOLD_S_MAX) / _TICK_S)
        with self._lock:
            self._new[ticks] = min(offset, self._new.get(ticks, offset))
            return self._first

    @contextmanager
    def trimming(self, now: int) -> Iterator["Trimming"]:
        """While the body runs, no pin can be added."""
        with self._lock:
            tick = now // (_TICK_S * SECOND_US)
            self._held = {end: offset for end, offset in self._held.items() if end > tick}
            for ticks, offset in self._new.items():
                end = tick + ticks + 1
                self._held[end] = min(offset, self._held.get(end, offset))
            self._new = {}
            step = Trimming(min(self._held.values(), default=None))
            yield step
            self._first = max(self._first, step.first)

    def forget(self) -> None:
        """The batch that trimmed was rolled back: what it trimmed is there again."""
        with self._lock:
            self._first = 0


class Trimming:
    """One step of trimming: what it must keep, and what is left after it."""

    def __init__(self, held: int | None) -> None:
        self.held = held
        """The least pinned offset; None if there is none."""
        self.first = 0
        """If rows are dropped, set it to the first offset that is left."""


FORGOTTEN_MAX: Final = 256
"""How many deleted queues one step forgets: all of them may be due at once, as after a long stop."""
DELETED_US_MIN: Final = 2 * MINUTE_US
"""How long a deleted queue is known at least: for a minute its name may not be used again (SQS)."""
_FORGOTTEN: Final = (
    "SELECT incarnation FROM queue INDEXED BY queue_deleted"
    " WHERE deleted < (SELECT at FROM history ORDER BY offset LIMIT 1) AND deleted < ? LIMIT ?"
)
"""The first row of the history is the oldest: the clock never goes back."""


def trim(writer: Writer, options: Options, floor: int | None, pins: ReadPins, rows_max: int) -> int:
    """Drop the oldest rows beyond the bounds, at most `rows_max` and never the last; returns how many.

    floor: nothing is dropped from this offset on, whatever the bounds say (snapshots.py). pins: the same for what is
    being read, but for at most half as many bytes again and ten minutes, and not on a low disk.
    """
    if floor == 0:
        return 0
    with pins.trimming(writer.now) as step:
        held = None if is_low(writer) else step.held
        cut = _beyond(writer, options, floor, held, rows_max)
        if cut:
            offset, step.first = cut[-1]
            writer.write("DELETE FROM history WHERE offset <= ?", (offset,))
            writer.index.trim(step.first)
    return len(cut)


def _beyond(
    writer: Writer, options: Options, floor: int | None, held: int | None, rows_max: int
) -> list[tuple[int, int]]:
    """Offset and end of each row to drop."""
    rows = writer.read(
        "SELECT offset, count, at, bytes_before, length(events) FROM history ORDER BY offset LIMIT ?", (rows_max,)
    )
    keep_after, bytes_max = writer.expiry_now - options.history_us_max, options.history_bytes_max
    cut = []
    for offset, count, at, bytes_before, length in rows:
        end = offset + count
        index_bytes = NAME_BYTES * (writer.mark.offset - end)  # at most
        left = writer.history_bytes - (bytes_before + length) + index_bytes
        is_beyond = at < keep_after or left >= bytes_max
        is_spared = at >= keep_after - HOLD_S_MAX * SECOND_US and left < bytes_max + bytes_max // 2
        is_held = held is not None and end > held and is_spared
        if is_beyond and not is_held and (floor is None or end <= floor):
            cut.append((offset, end))
    if cut and cut[-1][0] == _last_row(writer):
        cut.pop()
    return cut


def forget_queues(writer: Writer) -> int:
    """Drop the rows of deleted queues that no event names any more, at most `FORGOTTEN_MAX`; returns how many."""
    rows = writer.read(_FORGOTTEN, (writer.now - DELETED_US_MIN, FORGOTTEN_MAX))
    if rows:
        writer.write_many("DELETE FROM queue WHERE incarnation = ?", rows)
    return len(rows)


def _last_row(writer: Writer) -> int | None:
    row = writer.read_one("SELECT max(offset) FROM history", ())
    return None if row is None else row[0]


ORIGINS_KEPT: Final = 1_000
"""Fewer than this many are not worth a walk."""
HELD_ROWS_MAX: Final = 4_096
"""Leases and move tasks in one step."""
HISTORY_ROWS_MAX: Final = 2_048
"""Rows of the history in one step."""
HISTORY_BYTES_MAX: Final = 2 * MIB
"""After this many bytes of the history a step ends."""
_READ_ROWS: Final = 32
DROPPED_MAX: Final = 1_000
"""Rows that one step deletes."""


class _Asked(msgspec.Struct, array_like=True, gc=False):
    """The beginning of an `Event`."""

    kind: int
    at: int
    queue: int | None
    origin: int | None = None


_EVENTS: Final = msgspec.msgpack.Decoder(list[_Asked])


class _Walk(msgspec.Struct, frozen=True, gc=False):
    """A walk in progress."""

    first: int
    """Where the history began."""
    greatest: int
    """The greatest number at the beginning."""
    sequence: int
    """The last message's, at the beginning."""
    named: set[int]
    """Grows only: after a rollback it may hold a few too many."""
    lease: int | None = 0
    """The last lease seen; None: all were."""
    task: int = 0
    """The last move task seen."""
    offset: int = 0
    """Where the walk goes on in the history."""


class Origins:
    """What is known about a store's origins."""

    def __init__(self) -> None:
        self._walk: _Walk | None = None
        self._gone: tuple[int, ...] = ()
        """Out of the map, still in the table."""
        self._first = 0
        """Where the history began at the last walk."""
        self._end = 0
        """Where it ended then."""
        self._left = 0
        """How many origins that walk left."""

    def step(self, writer: Writer, *, is_trimming: bool) -> None:
        """Run one bounded step, if there is something to do. is_trimming: the history has more rows to lose at once."""
        if not self._gone and self._walk is None:
            first = None if is_trimming else self._due(writer)
            if first is None:
                return
            self._can_roll_back(writer)
            named = {writer.origin(SERVER)}
            self._walk = _Walk(first, writer.origins.greatest, writer.mark.sequence, named, offset=first)
        self._can_roll_back(writer)
        if self._walk is not None:
            self._walk = _leases(writer, self._walk) if self._walk.lease is not None else self._events(writer)
        if self._gone:
            dropped, self._gone = self._gone[:DROPPED_MAX], self._gone[DROPPED_MAX:]
            writer.write("DELETE FROM origin WHERE id IN (SELECT value FROM carray(?))", (numbers(dropped),))

    def _due(self, writer: Writer) -> int | None:
        """Where the history begins, if a walk is worth its time: rows were trimmed since the last one, and there are
        twice as many origins or half of the events of that time are gone."""
        if len(writer.origins) < ORIGINS_KEPT:
            return None
        row = writer.read_one("SELECT min(offset) FROM history", ())
        first = 0 if row is None or row[0] is None else int(row[0])
        due = first > self._first and (len(writer.origins) >= 2 * self._left or first >= (self._first + self._end) // 2)
        return first if due else None

    def _events(self, writer: Writer) -> _Walk | None:
        """Go on in the history; at its end, forget what is not named. Returns what the walk is then."""
        assert self._walk is not None
        walk = self._walk
        rows = writer.read(
            "SELECT number, origin FROM move_task WHERE number > ? ORDER BY number LIMIT ?", (walk.task, HELD_ROWS_MAX)
        )
        walk.named.update(origin for _, origin in rows)
        task = rows[-1][0] if rows else walk.task
        offset, is_end = _history(writer, walk)
        if len(rows) < HELD_ROWS_MAX and is_end:
            walk.named.update(origin for (origin,) in writer.read("SELECT origin FROM job", ()))
            walk.named.update(event.origin for event in writer.events if event.origin is not None)
            self._forget(writer, walk)
            return None
        return msgspec.structs.replace(walk, task=task, offset=offset)

    def _forget(self, writer: Writer, walk: _Walk) -> None:
        rows = writer.read("SELECT id FROM origin WHERE id < ?", (walk.greatest,))
        self._gone = tuple(number for (number,) in rows if number not in walk.named)
        writer.forget_origins(set(self._gone))
        self._first, self._end, self._left = walk.first, writer.mark.offset, len(writer.origins)

    def _can_roll_back(self, writer: Writer) -> None:
        before = dict(vars(self))
        writer.undo(lambda: vars(self).update(before))


def _leases(writer: Writer, walk: _Walk) -> _Walk:
    rows = writer.read(
        "SELECT sequence, origin FROM lease WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
        (walk.lease, walk.sequence, HELD_ROWS_MAX),
    )
    walk.named.update(origin for _, origin in rows)
    return msgspec.structs.replace(walk, lease=None if len(rows) < HELD_ROWS_MAX else rows[-1][0])


def _history(writer: Writer, walk: _Walk) -> tuple[int, bool]:
    """Note the origins of some rows; returns the next offset, and whether no committed row is left."""
    offset, rows_left, bytes_left = walk.offset, HISTORY_ROWS_MAX, HISTORY_BYTES_MAX
    while rows_left > 0 and bytes_left > 0:
        rows = writer.read(
            "SELECT offset, count, events FROM history WHERE offset >= ? ORDER BY offset LIMIT ?", (offset, _READ_ROWS)
        )
        for first, count, packed in rows:
            walk.named.update(event.origin for event in _EVENTS.decode(packed) if event.origin is not None)
            offset = first + count
            bytes_left -= len(packed)
        rows_left -= _READ_ROWS
        if len(rows) < _READ_ROWS:
            return offset, True
    return offset, False
