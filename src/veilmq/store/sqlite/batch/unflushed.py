"""Unflushed messages: those that no table holds yet, because most are received and deleted before any would have to.

Strategy: what an unflushed message holds is written in the `memtable` row of the batch that sent it, and what becomes
of it stands in the history anyway: both together say where it is (`replay`), after a crash and after a rollback alike.
Of a batch that is still in the redo log alone, the entry there says both. In memory a queue has them in lines of their
own: what the tables hold, and what would be too long or too deep to be unflushed, stands before, between and behind
them, by sequence. Whatever needs a message in the tables asks for its flush first (flush.py), and all are flushed at
each sweep, and when there are many: so there are never more than a few moments' worth. See
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
    """For the first time: one that comes back has been flushed."""
    due: Instant = Instant(0)
    granted: Instant = Instant(0)
    origin: int = 0
    """Who holds the lease."""

    def expires(self, retention_us: int) -> int:
        """The instant from which the message is dead."""
        own_expiry = self.contents.own_expiry
        return self.contents.sent + retention_us if own_expiry is None else own_expiry


_BORN: Final = msgspec.msgpack.Decoder(list[Contents])
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_RECEIVED: Final = int(Kind.RECEIVED)
_DELETED: Final = int(Kind.DELETED)


def replay(
    connection: apsw.Connection, generation: int | None = None, *, unapplied: Sequence[Entry] = ()
) -> dict[int, Unflushed]:
    """All unflushed messages by sequence, as a connection's read transaction sees them, oldest first; or those of one
    queue.

    unapplied: entries of the redo log that the database lacks, if it may lack any.
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
