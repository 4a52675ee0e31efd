"""Drops the origins that nothing names any more, so that restarted workers and renamed clients do not fill the table.

Strategy: when the history has lost rows, a walk notes which numbers are still named: by a lease, by a move task or job,
by an event. It takes a few rows a sweep. The order matters: first the leases that there were at its beginning, then the
history up to its present end. A lease that got its holder since then has an event that says so. When the walk has
reached the end, the other numbers leave the map in memory at once, so that nothing can name them again, and then the
table, a few rows a sweep.

A number is never assigned twice: the greatest row stays, and the next number is one more. So a reader that remembers
the name of a number never shows a wrong one. A walk exists in memory only; after a restart it begins anew.
"""

from typing import Final

import msgspec

from veilmq.model.commands import SERVER
from veilmq.store.options import MIB
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.messages.places import numbers

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
        """Where the history began at the last walk,"""
        self._end = 0
        """and ended,"""
        self._left = 0
        """and how many origins were left."""

    def step(self, writer: Writer, *, is_trimming: bool) -> None:
        """Run one bounded step, if there is something to do. is_trimming: the history has more rows to lose at once."""
        if not self._gone and self._walk is None:
            first = None if is_trimming else self._due(writer)
            if first is None:
                return
            self._can_roll_back(writer)
            named = {writer.origin(SERVER)}
            self._walk = _Walk(first, writer.greatest_origin, writer.mark.sequence, named, offset=first)
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
