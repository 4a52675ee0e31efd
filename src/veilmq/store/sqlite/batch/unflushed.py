"""Unflushed messages: messages that are in no table yet, because most messages are received and deleted soon.

Strategy: the content of an unflushed message is in the `memtable` row of the batch that sent it, and the history
records what happens to it. Together they give its state (`replay`), after a crash and after a rollback. If a batch is
only in the redo log so far, its entry there holds both. In memory a queue keeps unflushed messages in lines of their
own. Messages in the tables (also those too long or too deep in the queue to stay unflushed) come before, between and
after them, ordered by sequence. Code that needs a message in the tables first asks for a flush (flush.py). All are
flushed at each sweep, and when there are many, so there are never more than those of a few moments. See
docs/decisions/0013-unflushed-messages.md.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.events import Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.message import NO_EXTRAS, Extras
from veilmq.store.sqlite.batch.extras import read_extras
from veilmq.store.sqlite.disk.redo import Contents, Entry


class Unflushed(msgspec.Struct, gc=False, eq=False):
    """An unflushed message, and its first lease if it has been received."""

    contents: Contents
    extras: Extras
    leased: bool = False
    """Under its first lease. A message that is given back has been flushed."""
    due: Instant = Instant(0)
    granted: Instant = Instant(0)
    origin: int = 0
    """The client that holds the lease."""

    def expires(self, retention_us: int) -> int:
        """The instant at which the message expires."""
        own_expiry = self.contents.own_expiry
        return self.contents.sent + retention_us if own_expiry is None else own_expiry


_BORN: Final = msgspec.msgpack.Decoder(list[Contents])
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
    for offset, born in chain(_batches(connection), ((entry.offset, entry.born) for entry in unapplied)):
        for contents in born:
            if generation is None or contents.generation == generation:
                start = start if found else offset
                found[contents.sequence] = Unflushed(contents, read_extras(contents.packed) or NO_EXTRAS)
    if not found:
        return found
    later = (entry.events for entry in unapplied if entry.offset >= start)
    for event in chain.from_iterable(map(_EVENTS.decode, chain(_packed(connection, start), later))):
        unflushed = found.get(event.sequence or 0)
        if unflushed is None:
            continue
        if event.kind == _DELETED:
            del found[unflushed.contents.sequence]
            continue
        if event.kind == _RECEIVED:
            unflushed.leased, unflushed.granted, unflushed.origin = True, event.at, event.origin or 0
            unflushed.due = Instant(event.at + (event.lease_us or 0))
    return found


def _batches(connection: apsw.Connection) -> Iterator[tuple[int, list[Contents]]]:
    rows: Any = connection.execute("SELECT offset, messages FROM memtable ORDER BY offset")
    return ((offset, _BORN.decode(packed)) for offset, packed in rows)


def _packed(connection: apsw.Connection, start: int) -> Iterator[bytes]:
    rows: Any = connection.execute("SELECT events FROM history WHERE offset >= ? ORDER BY offset", (start,))
    return (packed for (packed,) in rows)
