"""Ends a salvaged database: the numbers that only grow, and a history that begins with a snapshot of what is there.

Strategy: the history is kept as far back as it is without a gap. Behind it a snapshot lists every queue and message, so
that the books of `veilmq check` begin there, and readers know the whole state at its end.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any, Final, TypeVar

import apsw
import msgspec

from veilmq.model.events import SCHEMA_VERSION, Event, Kind, Part
from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.batch.history_index import history_end
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER
from veilmq.store.sqlite.disk.redo import INSERT_HISTORY
from veilmq.store.sqlite.disk.redo.last_commit import Noted
from veilmq.store.sqlite.disk.schema import fresh_secret
from veilmq.store.sqlite.repair.salvage import EVENTS, NUMBER_MAX
from veilmq.store.sqlite.repair.settle import server
from veilmq.store.sqlite.repair.tables import read
from veilmq.store.sqlite.settings.queue_commands import recorded_settings
from veilmq.store.sqlite.tools.books import Recorded
from veilmq.store.sqlite.upkeep.snapshots import HELD, MESSAGES_MAX

_ROW_EVENTS: Final = 64
"""Events in a row of the snapshot."""
_BREAK: Final = (
    "SELECT max(offset) FROM (SELECT offset, lag(offset + count) OVER (ORDER BY offset) AS expected FROM history)"
    " WHERE offset <> expected"
)
_QUEUES: Final = (
    "SELECT incarnation, account, region, name, generation, created, modified, settings FROM queue"
    " WHERE deleted IS NULL ORDER BY incarnation"
)
_NUMBERS: Final = {
    "queue": "SELECT max(incarnation) FROM queue",
    "topic": "SELECT max(incarnation) FROM topic",
    "subscription": "SELECT max(id) FROM subscription",
    "move_task": "SELECT max(number) FROM move_task",
}
_SEQUENCE: Final = (
    "SELECT max(ifnull((SELECT max(sequence) FROM message), 0), ifnull((SELECT sequence FROM mark), 0),"
    " ifnull((SELECT max(sequence) FROM deduplication), 0))"
)
_GENERATION: Final = (
    "SELECT max(ifnull((SELECT max(generation) FROM queue), 0), ifnull((SELECT generation FROM mark), 0))"
)
_ENCODE: Final = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


def clock_of(target: apsw.Connection, noted: Noted | None) -> Instant:
    """The lease clock: that of the mark, unless the history and the last commit say that it cannot be right."""
    mark: Any = target.execute("SELECT clock FROM mark").fetchone()
    known: Any = target.execute("SELECT max(at) FROM history").fetchone()
    latest = max(known[0] or 0, 0 if noted is None else noted.clock)
    if mark is not None and (latest <= mark[0] <= latest + HOUR_US or not latest):
        return Instant(mark[0])
    return Instant(latest)


def end(target: apsw.Connection, clock: Instant, offset_min: int) -> None:
    """Write the mark, the secret, and the snapshot. offset_min: the next offset, if the history ends before it."""
    found: Any = target.execute(_BREAK).fetchone()
    if found[0] is not None:
        target.execute("DELETE FROM history WHERE offset < ?", (found[0],))
    target.execute("DELETE FROM history WHERE offset <= ?", (_last_contradiction(target),))
    row: Any = target.execute("SELECT max(offset + count) FROM history").fetchone()
    offset = max(offset_min, 1) if row[0] is None else row[0]  # a snapshot at 0 would not begin the books
    _write_mark(target, clock, offset)
    for kind, statement in _NUMBERS.items():
        last: Any = target.execute(statement).get
        target.execute(
            "INSERT INTO last_number VALUES (?, ?) ON CONFLICT (kind) DO UPDATE SET last = max(last, excluded.last)",
            (kind, last or 0),
        )
    target.execute("INSERT OR REPLACE INTO secret VALUES (1, ?, ?)", fresh_secret())
    _write_snapshot(target, clock, offset)


def _last_contradiction(target: apsw.Connection) -> int:
    """The last row of the history that says something else than the tables; -1: none does."""
    recorded, last = Recorded(target, []), -1
    rows: Any = target.cursor().execute("SELECT offset, events FROM history ORDER BY offset")
    for offset, packed in rows:
        for event in EVENTS.decode(packed):
            if recorded.compare(event):
                last = offset
    return NUMBER_MAX if any(recorded.queues()) else last


def _write_mark(target: apsw.Connection, clock: Instant, offset: int) -> None:
    sequence: Any = target.execute(_SEQUENCE).get
    generation: Any = target.execute(_GENERATION).get
    target.execute("INSERT OR REPLACE INTO mark VALUES (1, ?, ?, ?, ?)", (clock, sequence, generation, offset))


def _write_snapshot(target: apsw.Connection, clock: Instant, offset: int) -> None:
    begin, size = offset, history_end(target)
    for events in _pieces(_snapshot(target, clock, begin), _ROW_EVENTS):
        packed = _ENCODE(events)
        target.execute(INSERT_HISTORY, (offset, len(events), clock, size, SCHEMA_VERSION, packed))
        offset, size = offset + len(events), size + len(packed)
    target.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (begin, offset - 1))
    target.execute("UPDATE mark SET offset = ?", (offset,))


def _snapshot(target: apsw.Connection, clock: Instant, begin: int) -> Iterator[Event]:
    origin = server(target)
    last: Any = target.execute("SELECT sequence FROM mark").get

    def event(queue: int | None, detail: dict[str, Any]) -> Event:
        return Event(Kind.SNAPSHOT, clock, queue, origin, detail=detail)

    yield event(None, {"part": Part.BEGIN, "last": last})
    incarnations = {}
    for incarnation, account, region, name, generation, created, modified, settings in read(target, _QUEUES):
        incarnations[generation] = incarnation
        detail = {"part": Part.QUEUE, "created": created, "modified": modified}
        recorded = recorded_settings(QueueKey(account, region, name), SETTINGS_DECODER.decode(settings))
        yield event(incarnation, detail | recorded)
    messages: Any = target.cursor().execute(HELD, (0, last, -1))
    for generation, group in groupby(messages, key=lambda row: row[0]):
        for held in _pieces((row[1:] for row in group), MESSAGES_MAX):
            yield event(incarnations[generation], {"part": Part.MESSAGES, "messages": held})
    yield event(None, {"part": Part.END, "begin": begin})


def _pieces(values: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(values)
    while piece := list(islice(iterator, size)):
        yield piece
