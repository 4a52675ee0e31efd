"""The history on disk: trimming, and reading back with names joined.

Strategy: the writer appends one row a commit (writer.py); the sweeper drops whole rows from the old end, a few at a
time; readers decode rows on a connection of their own. The number of bytes is the difference of two running totals, so
that nobody ever adds them up.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, EventRecord, HistoryTrimmed, Kind, shown_detail
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.message import id_text
from veilmq.store.sqlite.holds import HOLD_S_MAX, Holds
from veilmq.store.sqlite.options import Options
from veilmq.store.sqlite.rows import origin_names, queue_names
from veilmq.store.sqlite.writer import Writer

_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_SOURCES: Final = {int(source): source.name.lower() for source in LeaseSource}

FORGOTTEN_MAX: Final = 256
"""Deleted queues that one step forgets: all of them may have waited for it, as after a long stop."""
_FORGOTTEN: Final = (
    "SELECT incarnation FROM queue INDEXED BY queue_deleted"
    " WHERE deleted < (SELECT at FROM history ORDER BY offset LIMIT 1) AND deleted < ? LIMIT ?"
)
"""The first row of the history is the oldest: the clock never goes back."""


def trim(writer: Writer, options: Options, floor: int | None, holds: Holds, rows_max: int) -> int:
    """Drop the oldest rows beyond the bounds, at most `rows_max` and never the last; returns how many.

    floor: the offset from which on nothing goes, whatever the bounds say (snapshots.py). holds: the same of what is
    being read, but only up to half as many bytes again and for ten minutes, and not on a low disk.
    """
    if floor == 0:
        return 0
    with holds.trimming(writer.now) as step:
        held = step.held if writer.disk_low is None else None
        cut = _beyond(writer, options, floor, held, rows_max)
        if cut:
            offset, step.first = cut[-1]
            writer.write("DELETE FROM history WHERE offset <= ?", (offset,))
    return len(cut)


def _beyond(
    writer: Writer, options: Options, floor: int | None, held: int | None, rows_max: int
) -> list[tuple[int, int]]:
    """Offset and end of each row that goes."""
    rows = writer.read(
        "SELECT offset, count, at, bytes_before, length(events) FROM history ORDER BY offset LIMIT ?", (rows_max,)
    )
    keep_after, bytes_max = writer.now - options.history_us_max, options.history_bytes_max
    cut = []
    for offset, count, at, bytes_before, length in rows:
        end, left = offset + count, writer.history_bytes - (bytes_before + length)
        is_beyond = at < keep_after or left >= bytes_max
        is_spared = at >= keep_after - HOLD_S_MAX * SECOND_US and left < bytes_max + bytes_max // 2
        is_held = held is not None and end > held and is_spared
        if is_beyond and not is_held and (floor is None or end <= floor):
            cut.append((offset, end))
    if cut and cut[-1][0] == _last_row(writer):
        cut.pop()
    return cut


def forget_queues(writer: Writer, history_us_max: int) -> int:
    """Drop the rows of deleted queues that no event names any more, at most `FORGOTTEN_MAX`; returns how many."""
    rows = writer.read(_FORGOTTEN, (writer.now - history_us_max, FORGOTTEN_MAX))
    if rows:
        writer.write_many("DELETE FROM queue WHERE incarnation = ?", rows)
    return len(rows)


def _last_row(writer: Writer) -> int | None:
    row = writer.read_one("SELECT max(offset) FROM history", ())
    return None if row is None else row[0]


def bounds(connection: apsw.Connection) -> tuple[int, int]:
    """First offset that is still there, and the next to be given."""
    first, following = connection.execute(
        "SELECT (SELECT min(offset) FROM history), (SELECT offset FROM mark)"
    ).fetchone() or (None, 0)
    return (following if first is None else first), following


def read(connection: apsw.Connection, start: int, count_max: int) -> list[EventRecord]:
    """Up to `count_max` events from offset `start` on, in the connection's read transaction.

    Raises HistoryTrimmed if `start` is below the first offset.
    """
    first, following = bounds(connection)
    if start < first:
        raise HistoryTrimmed(first)
    if start >= following:
        return []
    names = Names(connection)
    return [names.record(offset, event) for offset, event in islice(events_from(connection, start), count_max)]


def events_from(connection: apsw.Connection, start: int) -> Iterator[tuple[int, Event]]:
    """All events from offset `start` on, as stored, with their offsets."""
    rows = connection.cursor().execute(
        "SELECT offset, events FROM history WHERE offset >="
        " coalesce((SELECT max(offset) FROM history WHERE offset <= ?), 0) ORDER BY offset",
        (start,),
    )
    for first, packed in rows:
        for place, event in enumerate(_EVENTS.decode(packed)):
            if first + place >= start:
                yield first + place, event


class Names:
    """Joins the numbers of stored events with their names; reads each name once."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._queues: dict[int, tuple[Any, ...]] = {}
        self._origins: dict[int, tuple[Any, ...]] = {}

    def _queue(self, incarnation: int | None) -> tuple[Any, ...]:
        if incarnation is None:
            return None, None, None
        found = self._queues.get(incarnation)
        if found is None:
            row = queue_names(self._connection, incarnation)
            if row is None:
                return None, None, None
            found = self._queues[incarnation] = row
        return found

    def _origin(self, number: int | None) -> tuple[Any, ...]:
        if number is None:
            return None, None, None
        found = self._origins.get(number)
        if found is None:
            found = self._origins[number] = origin_names(self._connection, number) or ("", "", "")
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
