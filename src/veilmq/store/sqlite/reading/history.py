"""Reads the history, and the rollups that were made of it: of one queue, and of all queues those with failures.

Strategy: the writer appends one row per commit to the history (batch/), the sweeper drops whole rows from the
old end (upkeep/trimming.py). Reads of it go row by row. Of rollups the ids of the rows of a range are known, so each is
a seek, and the other queues' rows are never read. What a queue held before the range is in the last row before it: of a
minute if one is kept, else of an hour.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, EventRecord, Kind, shown_detail
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, Instant
from veilmq.model.messages import id_text
from veilmq.store.reader import View
from veilmq.store.rollups import FailingRollups, MinutesOfMany, Rollup, State, StoredRollups, unpacked
from veilmq.store.sqlite.batch.rollups import HOURS, INCARNATION, MINUTES, PERIOD_SHIFT, row_id
from veilmq.store.sqlite.messages import numbers
from veilmq.store.sqlite.upkeep.rollups import periods_ran

_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_SOURCES: Final = {int(source): source.name.lower() for source in LeaseSource}
_COMMIT: Final = "SELECT offset, count, at FROM history WHERE offset <= ? ORDER BY offset DESC LIMIT 1"
_COMMITS: Final = (
    "SELECT offset, count, at, events FROM history WHERE offset >="
    " coalesce((SELECT max(offset) FROM history WHERE offset <= ?), 0) AND offset < ? ORDER BY offset"
)
_NO_STOP: Final = (1 << 63) - 1
_BACK: Final = {MINUTES: DAY_US // MINUTE_US, HOURS: 90 * DAY_US // HOUR_US}
"""How many periods before a range its last row before is searched."""
_ROWS: Final = "SELECT r.id, r.numbers FROM carray(?) c CROSS JOIN {table} r ON r.id = c.value"
_FAILING: Final = (
    "SELECT id, numbers FROM (SELECT id, numbers FROM rollup_minute WHERE id >= :first AND id < :end ORDER BY id DESC"
    " LIMIT :rows) WHERE instr(numbers, x'97') LIMIT :limit"
)
"""A cause is stored as an array of seven, which begins with this byte."""
_ROW_BEHIND: Final = (
    "SELECT id FROM rollup_minute WHERE id >= :first AND id < :end ORDER BY id DESC LIMIT 1 OFFSET :rows"
)
_LAST: Final = "SELECT max(r.id) FROM carray(?) c CROSS JOIN {table} r ON r.id = c.value"
_ONE: Final = "SELECT numbers FROM {table} WHERE id = ?"


def bounds(connection: apsw.Connection) -> tuple[int, int]:
    """First offset still in the history, and the next offset to be assigned."""
    first, following = connection.execute(
        "SELECT (SELECT min(offset) FROM history), (SELECT offset FROM mark)"
    ).fetchone() or (None, 0)
    return (following if first is None else first), following


def events_from(connection: apsw.Connection, start: int) -> Iterator[tuple[int, Event]]:
    """(offset, event) of all events from offset `start` on, as stored."""
    for first, _, _, packed in commits(connection, start, _NO_STOP):
        for place, event in enumerate(_EVENTS.decode(packed)):
            if first + place >= start:
                yield first + place, event


class Names:
    """Replaces the numbers in stored events by names; reads each name once."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._queues: dict[int, tuple[Any, ...]] = {}
        self._origins: dict[int, tuple[Any, ...]] = {}

    def _queue(self, incarnation: int | None) -> tuple[Any, ...]:
        if incarnation is None:
            return None, None, None
        found = self._queues.get(incarnation)
        if found is None:
            row = self._view.queue_names(incarnation)
            if row is None:
                return None, None, None
            found = self._queues[incarnation] = row
        return found

    def _origin(self, number: int | None) -> tuple[Any, ...]:
        if number is None:
            return None, None, None
        found = self._origins.get(number)
        if found is None:
            found = self._origins[number] = self._view.origin_names(number) or ("", "", "")
        return found

    def record(self, offset: int, event: Event) -> EventRecord:
        """The event with its names."""
        account, region, queue = self._queue(event.queue)
        protocol, principal, client = self._origin(event.origin)
        return EventRecord(
            offset=offset,
            kind=_KINDS.get(event.kind, str(event.kind)),
            at=Instant(event.at),
            account=account,
            region=region,
            queue=queue,
            incarnation=event.queue,
            protocol=protocol,
            principal=principal,
            client=client,
            message=None if event.message is None else id_text(event.message),
            sequence=event.sequence,
            attempt=event.attempt,
            rotation=event.rotation,
            lease_us=event.lease_us,
            source=None if event.source is None else _SOURCES[event.source],
            sent=event.sent,
            visible_since=event.visible_since,
            held_us=event.held_us,
            body_bytes=event.body_bytes,
            group=event.group,
            type=event.type,
            detail=shown_detail(event.kind, event.detail),
        )


def offset_after(connection: apsw.Connection, instant: int) -> int:
    """See `View.offset_after`: a binary search, because the instants of commits never go back."""
    low, high = bounds(connection)
    while low < high:
        row: Any = connection.execute(_COMMIT, ((low + high) // 2,)).fetchone()
        low, high = (row[0] + row[1], high) if row[2] <= instant else (low, row[0])
    return low


def commits(connection: apsw.Connection, start: int, stop: int) -> Iterator[tuple[int, int, int, bytes]]:
    """See `View.commits`."""
    rows: Iterator[Any] = connection.cursor().execute(_COMMITS, (start, stop))
    return rows


def stored(connection: apsw.Connection, incarnation: int, hours: bool, first: int, last: int) -> StoredRollups:
    """See `View.rollups`."""
    table = HOURS if hours else MINUTES
    ids = [row_id(period, incarnation) for period in range(first, last + 1)]
    rows: Any = connection.execute(_ROWS.format(table=table), (numbers(ids),))
    found = {id_ >> PERIOD_SHIFT: unpacked(packed) for id_, packed in rows}
    return StoredRollups(
        found, periods_ran(connection, table, first, last), _before(connection, table, incarnation, first)
    )


def of_many(connection: apsw.Connection, incarnations: Sequence[int], first: int, last: int) -> MinutesOfMany:
    """See `View.minutes`."""
    ids = [row_id(minute, incarnation) for minute in range(first, last + 1) for incarnation in incarnations]
    rows: Any = connection.execute(_ROWS.format(table=MINUTES), (numbers(ids),)) if ids else ()
    found: dict[int, dict[int, Rollup]] = {}
    for id_, packed in rows:
        found.setdefault(id_ & INCARNATION, {})[id_ >> PERIOD_SHIFT] = unpacked(packed)
    return MinutesOfMany(found, periods_ran(connection, MINUTES, first, last))


def failing(connection: apsw.Connection, first: int, last: int, rows_max: int, limit: int) -> FailingRollups:
    """See `View.failing_rollups`."""
    bound = {"first": row_id(first, 0), "end": row_id(last + 1, 0), "rows": rows_max, "limit": limit}
    rows: list[Any] = connection.execute(_FAILING, bound).fetchall()
    unpacked_rows = ((id_, unpacked(packed)) for id_, packed in rows)
    # Other numbers may have the byte, too.
    found = {(id_ >> PERIOD_SHIFT, id_ & INCARNATION): each for id_, each in unpacked_rows if each.causes.found}
    stop: Any = connection.execute(_ROW_BEHIND, bound).get if len(rows) < limit else rows[-1][0]
    return FailingRollups(found, None if stop is None else stop >> PERIOD_SHIFT)


def _before(connection: apsw.Connection, table: str, incarnation: int, first: int) -> State | None:
    """What the queue held at the end of the last row before that period."""
    state = _last(connection, table, incarnation, first)
    if state is None and table == MINUTES:
        state = _last(connection, HOURS, incarnation, first * MINUTE_US // HOUR_US)
    return state


def _last(connection: apsw.Connection, table: str, incarnation: int, end: int) -> State | None:
    ids = [row_id(period, incarnation) for period in range(max(0, end - _BACK[table]), end)]
    if not ids:  # of 1970
        return None
    id_: Any = connection.execute(_LAST.format(table=table), (numbers(ids),)).get
    if id_ is None:
        return None
    packed: Any = connection.execute(_ONE.format(table=table), (id_,)).get
    return unpacked(packed).state
