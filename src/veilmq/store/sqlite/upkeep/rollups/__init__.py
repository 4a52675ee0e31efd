"""Stores rollups of minutes that are over, adds them to their hours, and drops old rows and those of deleted queues.

Strategy: each sweep does a bounded number of rows, and more the more queues there are, so that a minute is stored
within the next one. A row of a minute, its part of the hour and the sizes are written in one transaction. Whole periods
are dropped from the old end. Rows of deleted queues are found by a walk over all rows, a piece a sweep, whenever a
queue was deleted.

Before changing it: a minute that is stored in part and read again after a crash must not be dropped before all of it is
stored, for its rows show what was counted already.
"""

from itertools import islice
from typing import Any, Final

import apsw

from veilmq.model.instant import HOUR_US, MINUTE_US
from veilmq.store import Options
from veilmq.store.rollups import Rollup, State, unpacked
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.rollups import (
    HOUR_PERIODS,
    HOURS,
    INCARNATION,
    MINUTES,
    MINUTES_AN_HOUR,
    PERIOD_SHIFT,
    TABLES,
    Minute,
    Rollups,
    row_id,
)
from veilmq.store.sqlite.batch.rollups.worst import counted_in
from veilmq.store.sqlite.messages import numbers, oldest_of_each, oldest_sent
from veilmq.store.sqlite.messages.groups import heads

ROWS_MIN: Final = 512
"""A sweep may store this many rows, and more if a minute would otherwise take more than `SWEEPS_MAX` sweeps."""
SWEEPS_MAX: Final = 48
"""All rows of a minute are stored in about this many sweeps: there is one a second."""
CATCH_UP_EVENTS: Final = 8_192
"""After a crash, how many events one sweep adds again."""
DROPPED_MAX: Final = 2_048
"""How many old rows one sweep drops, and how many it searches for those of deleted queues."""
BLOCKED_LEASES_MAX: Final = 256
"""To find blocked groups, a sweep looks at this many messages in flight or delayed of a queue at most, and at twice as
many in all queues together."""
BLOCKED_US_MIN: Final = 2 * MINUTE_US
"""It looks only where groups may have been blocked for longer than this."""
LOOKED_UP_MAX: Final = 256
"""After a start, for how many queues one sweep looks up the oldest message."""
GROUPED_MAX: Final = 8
"""How many of these may have groups."""
ROW_BYTES: Final = 14
"""What a row takes besides its numbers: the id, lengths, and its place in the page."""
_PERIOD: Final = (
    "INSERT INTO rollup_period VALUES (?, ?, ?)"
    " ON CONFLICT DO UPDATE SET rows = rows + excluded.rows, bytes = bytes + excluded.bytes"
)
_SIZED: Final = "SELECT id, length(numbers) FROM {table} WHERE id > ? ORDER BY id LIMIT ?"


class Sizes:
    """How many rollups there are of each period in which the server ran, and how large they are: (rows, bytes)."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.of: dict[str, dict[int, tuple[int, int]]] = {MINUTES: {}, HOURS: {}}
        """By table and number of the period."""
        found: Any = connection.execute("SELECT id, rows, bytes FROM rollup_period ORDER BY id")
        for id_, rows, size in found:
            table = HOURS if id_ >= HOUR_PERIODS else MINUTES
            self.of[table][id_ % HOUR_PERIODS] = (rows, size)

    def add(self, writer: Writer, table: str, period: int, rows: int, size: int) -> None:
        """Change a period's numbers of rows and bytes; with two zeros, only note that the server ran then."""
        periods = self.of[table]
        before = periods.get(period)
        old = before or (0, 0)
        periods[period] = (old[0] + rows, old[1] + size)
        writer.undo(lambda: _put_back(periods, period, before))
        writer.write(_PERIOD, (_period_id(table, period), rows, size))

    def drop(self, writer: Writer, table: str, period: int) -> None:
        """Forget a period of which no row is left."""
        periods = self.of[table]
        before = periods.pop(period)
        writer.undo(lambda: _put_back(periods, period, before))
        writer.write("DELETE FROM rollup_period WHERE id = ?", (_period_id(table, period),))


def _put_back(periods: dict[int, tuple[int, int]], period: int, before: tuple[int, int] | None) -> None:
    if before is None:
        periods.pop(period, None)
    else:
        periods[period] = before


def _period_id(table: str, period: int) -> int:
    return period + HOUR_PERIODS if table == HOURS else period


class Rolling:
    """What the sweeps know of the rollups."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._sizes = Sizes(connection)
        ((garbage,),) = connection.execute("SELECT garbage FROM rollup_mark")
        self._walk: tuple[str, int] | None = (MINUTES, 0) if garbage else None
        """Table and id up to which deleted queues were looked for."""

    def load_counts(self, connection: apsw.Connection, rollups: Rollups, now: int) -> None:
        """At a start: load the counts of the present hour and the one before, and add some events that no row has."""
        worst, hour = rollups.worst, now // HOUR_US
        worst.start()
        worst.turn(hour)
        bounds = (row_id(hour - 1, 0), row_id(hour + 1, 0))
        rows: Any = connection.cursor().execute("SELECT id, numbers FROM rollup_hour WHERE id >= ? AND id < ?", bounds)
        for id_, packed in rows:
            worst.count(id_ & INCARNATION, id_ >> PERIOD_SHIFT, counted_in(unpacked(packed)))
        rollups.catch_up(CATCH_UP_EVENTS)

    def step(self, writer: Writer, options: Options) -> None:
        """A bounded part of what there is to do."""
        rollups = writer.rollups
        rollups.add_pending()
        rollups.catch_up(CATCH_UP_EVENTS)
        minute = writer.now // MINUTE_US
        self._ran(writer, minute)
        due = min(rollups.minutes, default=minute)
        if due < minute and not rollups.is_catching_up:
            self._store(writer, due)
        self._trim(writer, MINUTES, (writer.expiry_now - options.rollup_minutes_us_max) // MINUTE_US, options)
        self._trim(writer, HOURS, (writer.expiry_now - options.rollup_hours_us_max) // HOUR_US, options)
        if rollups.garbage:
            rollups.garbage = False
            writer.undo(lambda: setattr(rollups, "garbage", True))
            self._walk = (MINUTES, 0)
            writer.write("UPDATE rollup_mark SET garbage = 1 WHERE id = 1", ())
        self._look_up_oldest(writer)
        if self._walk is not None:
            self._look_for_deleted(writer, *self._walk)

    def _look_up_oldest(self, writer: Writer) -> None:
        """After a start: find out how old the messages of some queues are."""
        unseen, by_incarnation = writer.rollups.worst.unseen, writer.queues.by_incarnation
        plain: dict[int, LiveQueue] = {}
        grouped = 0
        while unseen and len(plain) < LOOKED_UP_MAX and grouped < GROUPED_MAX:
            queue = by_incarnation.get(unseen.pop())
            if queue is None:
                continue
            if queue.groups is None:
                plain[queue.generation] = queue
            else:
                grouped += 1
                writer.rollups.worst.note_oldest(queue, _state_of(writer, queue).oldest)
                _look_for_blocked(writer, queue, looks=True)
        if plain:
            writer.transact()
            for generation, sent in oldest_of_each(writer.connection.execute, list(plain)):
                writer.rollups.worst.note_oldest(plain[generation], sent)

    def _ran(self, writer: Writer, minute: int) -> None:
        for table, period in ((MINUTES, minute), (HOURS, minute // MINUTES_AN_HOUR)):
            if period not in self._sizes.of[table]:
                self._sizes.add(writer, table, period, 0, 0)

    def _store(self, writer: Writer, number: int) -> None:
        """Write some rows of a minute that is over."""
        rollups = writer.rollups
        minute = rollups.minutes[number]
        left = minute.rollups
        waiting = sum(len(each.rollups) for each in rollups.minutes.values())
        some = list(islice(left, max(ROWS_MIN, waiting // SWEEPS_MAX + 1)))
        taken = {incarnation: left.pop(incarnation) for incarnation in some}
        writer.undo(lambda: left.update(taken))
        by_incarnation = writer.queues.by_incarnation
        found: list[tuple[int, Rollup]] = []
        looked_at = 0
        for incarnation, rollup in taken.items():
            queue = by_incarnation.get(incarnation)
            if queue is not None:
                rollup.state = _state_of(writer, queue)
                rollups.worst.note_oldest(queue, rollup.state.oldest)
                looked_at += _look_for_blocked(writer, queue, looks=looked_at <= BLOCKED_LEASES_MAX)
                found.append((incarnation, rollup))
        self._ran(writer, number)
        if found:
            self._insert(writer, MINUTES, number, found)
            self._add_to_hour(writer, number // MINUTES_AN_HOUR, found)
        if not left:
            self._end(writer, number, minute)

    def _end(self, writer: Writer, number: int, minute: Minute) -> None:
        minutes = writer.rollups.minutes
        del minutes[number]
        writer.undo(lambda: minutes.__setitem__(number, minute))
        writer.write("UPDATE rollup_mark SET offset = ? WHERE id = 1", (writer.rollups.written,))

    def _add_to_hour(self, writer: Writer, hour: int, found: list[tuple[int, Rollup]]) -> None:
        ids = [row_id(hour, incarnation) for incarnation, _ in found]
        rows = writer.read(
            "SELECT id, numbers FROM rollup_hour WHERE id IN (SELECT value FROM carray(?))", (numbers(ids),)
        )
        known: dict[int, bytes] = dict(rows)
        merged = []
        for id_, (incarnation, rollup) in zip(ids, found, strict=True):
            stored = known.get(id_)
            so_far = Rollup() if stored is None else unpacked(stored)
            so_far.merge(rollup)
            merged.append((incarnation, so_far))
        self._insert(writer, HOURS, hour, merged, known)

    def _insert(
        self,
        writer: Writer,
        table: str,
        period: int,
        found: list[tuple[int, Rollup]],
        known: dict[int, bytes] | None = None,
    ) -> None:
        rows = [(row_id(period, incarnation), rollup.packed()) for incarnation, rollup in found]
        known = known or {}
        writer.insert_many(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", rows)
        size = sum(len(packed) for _, packed in rows) - sum(map(len, known.values()))
        count = len(rows) - len(known)
        self._sizes.add(writer, table, period, count, size + ROW_BYTES * count)

    def _trim(self, writer: Writer, table: str, keep_from: int, options: Options) -> None:
        """Drop the oldest period if it is too old, or all are too large; of a large one, some rows."""
        periods = self._sizes.of[table]
        oldest = min(periods, default=keep_from)
        if table == MINUTES:
            safe = min(writer.rollups.minutes, default=writer.now // MINUTE_US)
        else:
            safe = writer.now // HOUR_US
        if oldest >= safe:
            return
        too_large = sum(size for _, size in periods.values()) > options.rollup_bytes_max // 2
        if oldest >= keep_from and not too_large:
            return
        rows, _ = periods[oldest]
        first, end = row_id(oldest, 0), row_id(oldest + 1, 0)
        if rows > DROPPED_MAX:
            sized = writer.read(_SIZED.format(table=table), (first, DROPPED_MAX))
            self._drop(writer, table, sized)
            return
        if rows:
            writer.write(f"DELETE FROM {table} WHERE id >= ? AND id < ?", (first, end))
        self._sizes.drop(writer, table, oldest)

    def _drop(self, writer: Writer, table: str, sized: list[Any]) -> None:
        ids = [id_ for id_, _ in sized]
        writer.write(f"DELETE FROM {table} WHERE id IN (SELECT value FROM carray(?))", (numbers(ids),))
        by_period: dict[int, tuple[int, int]] = {}
        for id_, size in sized:
            rows, total = by_period.get(id_ >> PERIOD_SHIFT, (0, 0))
            by_period[id_ >> PERIOD_SHIFT] = (rows + 1, total + size + ROW_BYTES)
        for period, (rows, total) in by_period.items():
            self._sizes.add(writer, table, period, -rows, -total)

    def _look_for_deleted(self, writer: Writer, table: str, after: int) -> None:
        sized = writer.read(_SIZED.format(table=table), (after, DROPPED_MAX))
        alive = writer.queues.by_incarnation
        dead = [row for row in sized if row[0] & INCARNATION not in alive]
        if dead:
            self._drop(writer, table, dead)
        before, self._walk = self._walk, (table, sized[-1][0]) if sized else None
        if not sized and table != TABLES[-1]:
            self._walk = (HOURS, 0)
        if self._walk is None:
            writer.write("UPDATE rollup_mark SET garbage = 0 WHERE id = 1", ())
        writer.undo(lambda: setattr(self, "_walk", before))


def periods_ran(connection: apsw.Connection, table: str, first: int, last: int) -> set[int]:
    """The periods from `first` to `last` in which the server ran."""
    bounds = (_period_id(table, first), _period_id(table, last))
    rows: Any = connection.execute("SELECT id FROM rollup_period WHERE id BETWEEN ? AND ?", bounds)
    return {id_ % HOUR_PERIODS for (id_,) in rows}


def _look_for_blocked(writer: Writer, queue: LiveQueue, *, looks: bool) -> int:
    """Find out since when groups of the queue have been blocked; returns how many leases were looked at, at most.
    looks: False: only a queue without any hidden message is settled, which needs no look."""
    worst = writer.rollups.worst
    since = worst.may_be_blocked_since(queue.incarnation)
    hidden = min(queue.in_flight + queue.delayed, BLOCKED_LEASES_MAX) if queue.visible else 0
    if since is None or (hidden and (not looks or since > writer.now - BLOCKED_US_MIN)):
        return 0
    writer.transact()
    found, is_all = heads(writer.connection.execute, queue, writer.now, BLOCKED_LEASES_MAX)
    if is_all:
        writer.undo(lambda: worst.note_blocked(queue, since))
        worst.note_blocked(queue, min((each.since for each in found), default=None))
    return hidden


def _state_of(writer: Writer, queue: LiveQueue) -> State:
    """What the queue holds now."""
    depth = queue.visible + queue.delayed + queue.in_flight
    oldest = None
    if queue.visible or queue.in_flight:
        writer.transact()
        oldest = oldest_sent(
            writer.connection.execute,
            queue.generation,
            list(queue.ready),
            returned=queue.returned > 0,
            grouped=queue.groups is not None,
        )
    return State(depth, queue.in_flight, oldest)
