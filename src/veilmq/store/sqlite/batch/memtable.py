"""The memtable: all unflushed messages of a store, and the lines in which they wait.

Strategy: an unflushed message is in no table yet, because most messages are received and deleted soon. Its content is
in the `memtable` row of the batch that sent it (the journal), and the history records what happens to it. Together they
give its state (`replay`), after a crash and after a rollback. If a batch is only in the redo log so far, its entry
there holds both. In memory a queue keeps unflushed messages in lines of their own. Messages in the tables (also those
too long or too deep in the queue to stay unflushed) come before, between and after them, ordered by sequence. Code that
needs a message in the tables first asks for a flush (messages/). All are flushed at each sweep, and when there
are many, so there are never more than those of a few moments. See docs/decisions/0013-unflushed-messages.md.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.events import Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.messages import NO_EXTRAS
from veilmq.store.sqlite.batch.queues import LiveQueue, Queues
from veilmq.store.sqlite.disk.redo import Entry
from veilmq.store.sqlite.disk.rows import MessageRow, Unflushed, read_extras

MESSAGES_MAX: Final = 2_048
"""Limit of unflushed messages in a store. One more, and all are flushed, which takes about 10 ms."""
BATCHES_MAX: Final = 64
"""Limit of batches since the journal began, with unflushed messages or without: a reader has to read the history of all
of them."""
BYTES_MAX: Final = 4 << 20
"""Limit of bodies and attributes in the journal, including those of deleted messages."""
EVENTS_MAX: Final = 8_192
"""Limit of events since the journal began: a reader takes some 10 ms for so many, and a flush copies them."""
DEPTH_MAX: Final = 512
"""A message with this many before it goes to the tables at once: it will not be deleted before the next flush."""
MESSAGE_BYTES_MAX: Final = 16 * 1024
"""A longer message (body and attributes) goes to the tables at once, so that it is written only once."""
_SINCE: Final = "SELECT count(*), ifnull(sum(count), 0) FROM history WHERE offset >= (SELECT min(offset) FROM memtable)"


class Memtable:
    """All unflushed messages of a store."""

    def __init__(self) -> None:
        self.messages: dict[int, Unflushed] = {}
        """By sequence."""
        self.queues: dict[int, LiveQueue] = {}
        """By generation: the queues of the messages, and queues whose unflushed messages are all gone since the last
        flush."""
        self.batches = 0
        """Batches since the journal began; 0: there is no journal."""
        self.changed = False
        """Whether the open batch may have changed anything here. Set before the change, because the change may fail
        midway."""
        self.held: dict[str, Unflushed] = {}
        """Messages in flight, by handle; after a restart, without those leased before it."""
        self.unchecked = False
        """The messages were read back from disk and not checked. They must be flushed, and so checked, before any is
        received."""
        self.deleted: list[int] = []
        """Sequences of the messages that the open batch deleted."""
        self._sent: list[MessageRow] = []
        self._bytes = 0
        self._events = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to flush."""
        return (
            len(self.messages) > MESSAGES_MAX
            or self.batches >= BATCHES_MAX
            or self._bytes > BYTES_MAX
            or self._events > EVENTS_MAX
        )

    def begin_batch(self) -> None:
        """Call when a batch is opened."""
        self.changed = False
        self.deleted = []

    def add(self, queue: LiveQueue, unflushed: Unflushed, size_bytes: int) -> None:
        """Add a message to the end of its line; it takes `size_bytes` in the journal."""
        self.changed = True
        row = unflushed.row
        self.messages[row.sequence] = unflushed
        self._sent.append(row)
        self._bytes += size_bytes
        line = queue.unflushed.get(row.priority)
        if line is None:
            line = self._line(queue, row.priority)
        line.append(unflushed)

    def add_all(self, queue: LiveQueue, rows: list[MessageRow], unflushed: list[Unflushed], size_bytes: int) -> None:
        """The same for messages of one priority, whose sequences follow one another."""
        self.changed = True
        first, priority = rows[0].sequence, rows[0].priority
        self.messages.update(zip(range(first, first + len(rows)), unflushed, strict=True))
        self._sent += rows
        self._bytes += size_bytes
        (queue.unflushed.get(priority) or self._line(queue, priority)).extend(unflushed)

    def _line(self, queue: LiveQueue, priority: int) -> deque[Unflushed]:
        self.queues[queue.generation] = queue
        return queue.unflushed.setdefault(priority, deque())

    def end_batch(self, events: int) -> list[MessageRow]:
        """The messages that the open batch sent and that are still unflushed: its row of the journal. events: their
        number in the batch."""
        messages, self._sent = self._sent, []
        if messages or self.batches:
            self.changed = True
            self.batches += 1
            self._events += events
        return messages

    def clear(self) -> None:
        """Forget all messages and the journal: everything was flushed."""
        self.changed = True
        for queue in self.queues.values():
            queue.unflushed = {}
        self.messages = {}
        self.queues = {}
        self.batches = 0
        self.held = {}
        self.unchecked = False
        self._sent = []
        self._bytes = self._events = 0

    def restore(self, connection: apsw.Connection, queues: Queues, unapplied: Sequence[Entry] = ()) -> None:
        """Rebuild from the database and the redo entries that it lacks, after a start or a rollback."""
        self.clear()
        self.messages = replay(connection, unapplied=unapplied)
        ((batches, events),) = connection.execute(_SINCE)
        self.batches = batches + len(unapplied)
        self._events = events + sum(entry.count for entry in unapplied)
        self._bytes = sum(unflushed.row.size_bytes for unflushed in self.messages.values())
        self.unchecked = bool(self.messages)
        if self.messages:
            by_generation = {queue.generation: queue for queue in queues.by_incarnation.values()}
            for unflushed in self.messages.values():
                queue = self.queues[unflushed.row.generation] = by_generation[unflushed.row.generation]
                if not unflushed.leased:
                    self._line(queue, unflushed.row.priority).append(unflushed)
        self.changed = False

    def count(self, queues: Queues) -> None:
        """After a start: add the messages to the counts of their queues, and make sure that a sweep checks them."""
        for unflushed in self.messages.values():
            queue = self.queues[unflushed.row.generation]
            queues.lower_expiry(queue, 0)
            if unflushed.leased:
                queue.in_flight += 1
                queues.lower_due(queue, unflushed.due)
            else:
                queue.visible += 1


_MESSAGES: Final = msgspec.msgpack.Decoder(list[MessageRow])
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_RECEIVED: Final = int(Kind.RECEIVED)
_DELETED: Final = int(Kind.DELETED)


def replay(
    connection: apsw.Connection, generation: int | None = None, *, unapplied: Sequence[Entry] = ()
) -> dict[int, Unflushed]:
    """All unflushed messages, or those of one generation, by sequence, oldest first, as seen in the connection's read
    transaction.

    unapplied: entries of the redo log that the database lacks.
    """
    found: dict[int, Unflushed] = {}
    start = 0
    for offset, messages in chain(_batches(connection), ((entry.offset, entry.messages) for entry in unapplied)):
        for row in messages:
            if generation is None or row.generation == generation:
                start = start if found else offset
                found[row.sequence] = Unflushed(row, read_extras(row.packed) or NO_EXTRAS)
    if not found:
        return found
    later = (entry.events for entry in unapplied if entry.offset >= start)
    for event in chain.from_iterable(map(_EVENTS.decode, chain(_packed(connection, start), later))):
        unflushed = found.get(event.sequence or 0)
        if unflushed is None:
            continue
        if event.kind == _DELETED:
            del found[unflushed.row.sequence]
            continue
        if event.kind == _RECEIVED:
            unflushed.lease = Instant(event.at + (event.lease_us or 0)), event.at, event.origin or 0
    return found


def _batches(connection: apsw.Connection) -> Iterator[tuple[int, list[MessageRow]]]:
    rows: Any = connection.execute("SELECT offset, messages FROM memtable ORDER BY offset")
    return ((offset, _MESSAGES.decode(packed)) for offset, packed in rows)


def _packed(connection: apsw.Connection, start: int) -> Iterator[bytes]:
    rows: Any = connection.execute("SELECT events FROM history WHERE offset >= ? ORDER BY offset", (start,))
    return (packed for (packed,) in rows)
