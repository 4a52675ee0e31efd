"""Snapshots in the history: the state is written again, so that older events may be trimmed.

Strategy: snapshots are fuzzy, like checkpoints of databases. One is written in bounded steps of the sweeper, with other
commits between them; each message is described as it is at the offset of its event. Messages are written by sequence,
up to the last sequence assigned when the snapshot began. Later messages have events of their own, and so has every
change to a message already written. A message that leaves before it is written never appears. A snapshot in progress
exists in memory only: after a crash, on a low disk, and after a rollback of its first step, it is as if it had never
begun. One row names the newest complete snapshot. That one is never trimmed (trimming.py). See
docs/decisions/0008-snapshots.md.
"""

from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import SERVER
from veilmq.model.events import Event, Kind, Part
from veilmq.store import Options
from veilmq.store.sqlite.batch import Writer, history_index
from veilmq.store.sqlite.disk.rows import HELD_COLUMNS, Row
from veilmq.store.sqlite.settings.queue_commands import recorded_settings
from veilmq.store.sqlite.space import is_low

MESSAGES_MAX: Final = 16
"""Per event, so that a reader of events by the thousand needs no more memory for these."""
QUEUE_STEPS: Final = 4
"""How many messages a queue's settings count as."""
HELD: Final = (
    f"SELECT m.generation, {HELD_COLUMNS}, d.at"
    " FROM message m LEFT JOIN lease l ON l.sequence = m.sequence LEFT JOIN quarantine d ON d.sequence = m.sequence"
    " WHERE m.sequence > ? AND m.sequence <= ? ORDER BY m.sequence LIMIT ?"
)
_KEEP: Final = "INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)"
_ENDS: Final = (
    "SELECT at, events FROM history WHERE offset >= (SELECT max(offset) FROM history WHERE offset <= ?1)"
    " AND offset < ?2 AND instr(events, x'a470617274a3656e64')"
)
"""Commits with the end of a snapshot: what is looked for is the packed `part` and `end`."""
_UNINDEXED_BLOCKS: Final = 4
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_ROW_OF: Final = "SELECT at, bytes_before, length(events) FROM history WHERE offset <= ? ORDER BY offset DESC LIMIT 1"


class Base(msgspec.Struct, frozen=True, gc=False):
    """Where a replay of the history can begin: the newest complete snapshot, or offset 0."""

    begin: int
    end: int
    """Offset of its last event; -1 for offset 0."""
    at: int | None
    """None: not known yet."""
    bytes_before: int
    bytes_after: int | None


_ORIGIN: Final = Base(begin=0, end=-1, at=None, bytes_before=0, bytes_after=0)


class _Task(msgspec.Struct, frozen=True, gc=False):
    """A snapshot in progress."""

    begin: int
    at: int
    bytes_before: int
    last: int
    """Greatest sequence when it began."""
    queues: list[int]
    """Incarnations of the queues when it began."""
    queues_written: int = 0
    """How many of these queues were written."""
    reached: int = 0
    """The last sequence reached."""
    generations: dict[int, int] = {}
    """Generation -> incarnation of the queues written. No other queue can hold messages that must be written."""


class Snapshots:
    """The state of a store's snapshots."""

    def __init__(self, base: Base | None) -> None:
        self._base = base
        self._task: _Task | None = None

    @property
    def under_way(self) -> bool:
        """Whether a snapshot is in progress."""
        return self._task is not None

    def floor(self, writer: Writer) -> int | None:
        """The offset from which on nothing may be trimmed; None: anything may.

        On a low disk the history's bounds take precedence: a new snapshot is written when there is space again.
        """
        if is_low(writer):
            return None
        return 0 if self._base is None else self._base.begin

    def trimmed(self, writer: Writer) -> None:
        """Call when history rows were dropped; forgets the base if it was among them."""
        row = writer.read_one("SELECT min(offset) FROM history", ())
        if self._base is not None and row is not None and self._base.begin < (row[0] or 0):
            self._can_roll_back(writer)
            self._base = None
            writer.write("DELETE FROM snapshot", ())

    def step(self, writer: Writer, options: Options, steps_max: int) -> None:
        """Begin a snapshot if one is due; continue the one in progress by up to `steps_max` messages."""
        if is_low(writer):
            if self._task is not None:
                self._can_roll_back(writer)
                self._task = None
            return
        if self._task is None and not self._is_due(writer, options):
            return
        self._can_roll_back(writer)
        if self._task is None:
            self._task = _begin(writer)
        left = steps_max
        while left > 0 and self._task.queues_written < len(self._task.queues):
            self._task = _write_queue(writer, self._task)
            left -= QUEUE_STEPS
        if left > 0:
            rows = writer.read(HELD, (self._task.reached, self._task.last, left))
            _write_messages(writer, self._task, rows)
            if len(rows) < left:
                self._end(writer, self._task)
            else:
                self._task = msgspec.structs.replace(self._task, reached=rows[-1][1])

    def _end(self, writer: Writer, task: _Task) -> None:
        end = writer.next_offset
        writer.events.append(_event(writer, None, {"part": Part.END, "begin": task.begin}))
        writer.write(_KEEP, (task.begin, end))
        self._base = Base(task.begin, end, task.at, task.bytes_before, None)
        self._task = None

    def _is_due(self, writer: Writer, options: Options) -> bool:
        """Whether half of a bound has passed since the base. An idle store writes nothing."""
        base = self._base
        if base is None:
            return True
        if writer.mark.offset <= base.end + 1:
            return False
        base = self._base = _with_sizes(writer, base)
        assert base.at is not None
        assert base.bytes_after is not None
        since_bytes = writer.history_bytes - base.bytes_after
        # If a snapshot were as large as all events since the last one, it would be half of all writes.
        enough_bytes = max(options.history_bytes_max // 2, base.bytes_after - base.bytes_before)
        return since_bytes >= enough_bytes or writer.now - base.at > options.history_us_max // 2

    def _can_roll_back(self, writer: Writer) -> None:
        before = (self._base, self._task)
        writer.undo(lambda: self._restore(*before))

    def _restore(self, base: Base | None, task: _Task | None) -> None:
        self._base, self._task = base, task


def load(connection: apsw.Connection) -> Snapshots:
    """Load the state from the database. A snapshot that was in progress at the last stop is void."""
    row: Any = connection.execute("SELECT first, last FROM snapshot").fetchone()
    if row is not None:
        begin, end = row
        found: Any = connection.execute(_ROW_OF, (begin,)).fetchone()
        return Snapshots(Base(begin, end, found[0], found[1], None))
    first: Any = connection.execute("SELECT min(offset) FROM history").fetchone()
    return Snapshots(None if first[0] else _ORIGIN)


def newest(connection: apsw.Connection) -> int | None:
    """Offset at which the newest complete snapshot begins; 0 if the whole history is there; None if neither is."""
    row: Any = connection.execute("SELECT first FROM snapshot").fetchone()
    if row is not None:
        return int(row[0])
    first: Any = connection.execute("SELECT min(offset) FROM history").fetchone()
    return None if first[0] else 0


def complete(connection: apsw.Connection, bounds: tuple[int, int]) -> list[tuple[int, int]]:
    """(first offset, instant of its end) of the complete snapshots in the history, oldest first. One that the index
    lacks, because an earlier release wrote it or much was not indexed, is left out, but for the newest."""
    found: dict[int, int] = {}
    spans = history_index.spans(connection, bounds, [history_index.SNAPSHOT_END])
    unindexed_max = _UNINDEXED_BLOCKS * history_index.BLOCK_EVENTS
    ranges = [(start, stop) for start, stop, indexed in spans if indexed or stop - start <= unindexed_max]
    newest_end: Any = connection.execute("SELECT last, last + 1 FROM snapshot").fetchall()
    for each in ranges + newest_end:
        rows: Any = connection.execute(_ENDS, each).fetchall()
        for at, packed in rows:
            ends = [event.detail or {} for event in _EVENTS.decode(packed) if event.kind == Kind.SNAPSHOT]
            found |= {end["begin"]: at for end in ends if end["part"] == Part.END and end["begin"] >= bounds[0]}
    return sorted(found.items())


def _with_sizes(writer: Writer, base: Base) -> Base:
    """Read what was unknown while the batch that created the base was open."""
    at, bytes_after = base.at, base.bytes_after
    if at is None:
        row = writer.read_one("SELECT at FROM history ORDER BY offset LIMIT 1", ())
        assert row is not None
        at = row[0]
    if bytes_after is None:
        row = writer.read_one(_ROW_OF, (base.end,))
        assert row is not None
        bytes_after = row[1] + row[2]
    return Base(base.begin, base.end, at, base.bytes_before, bytes_after)


def _begin(writer: Writer) -> _Task:
    begin = writer.next_offset
    last = writer.mark.sequence
    writer.events.append(_event(writer, None, {"part": Part.BEGIN, "last": last}))
    queues = sorted(writer.queues.by_incarnation)
    return _Task(begin, writer.now, writer.history_bytes, last, queues)


def _write_queue(writer: Writer, task: _Task) -> _Task:
    """Write the next queue, if it still exists."""
    queue = writer.queues.by_incarnation.get(task.queues[task.queues_written])
    generations = task.generations
    if queue is not None:
        detail = {"part": Part.QUEUE, "created": queue.created, "modified": queue.modified}
        writer.events.append(_event(writer, queue.incarnation, detail | recorded_settings(queue.key, queue.settings)))
        # After a rollback these entries are written again, and no others are looked up.
        generations[queue.generation] = queue.incarnation
    return msgspec.structs.replace(task, queues_written=task.queues_written + 1, generations=generations)


def _write_messages(writer: Writer, task: _Task, rows: list[Row]) -> None:
    """Write the messages that are in a queue; the others are garbage."""
    by_queue: dict[int, list[Row]] = {}
    for generation, *held in rows:
        by_queue.setdefault(generation, []).append(tuple(held))
    for generation, messages in by_queue.items():
        queue = writer.queues.by_incarnation.get(task.generations.get(generation, 0))
        if queue is None or queue.generation != generation:
            continue
        for at in range(0, len(messages), MESSAGES_MAX):
            detail = {"part": Part.MESSAGES, "messages": messages[at : at + MESSAGES_MAX]}
            writer.events.append(_event(writer, queue.incarnation, detail))


def _event(writer: Writer, incarnation: int | None, detail: dict[str, Any]) -> Event:
    return Event(Kind.SNAPSHOT, writer.now, incarnation, writer.origin(SERVER), detail=detail)
