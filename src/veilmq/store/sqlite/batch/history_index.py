"""Where in the history a message is named: an index, so that a trace reads a few thousand events and not all of them.

Strategy: the history is divided into blocks of about `BLOCK_EVENTS` events. For each block the index has the set of the
names in it, each cut to 4 bytes. It only says where to look: the reader then compares the events of that block. A name
is a message's id; the sequence of a message that is gone, which is all that a refused handle names; the incarnation of
a queue that was emptied, for such an event names none of the messages; or the mark that a message's id has of its
deduplication id. The names of the newest block are in memory; the first transaction after the block is full writes
them. A look-up also returns the events that no block covers yet.

Before changing it: the index may have a name that the history lacks (a batch was rolled back), never the reverse.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import Struct
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.events import Event, Kind, Part
from veilmq.model.messages import MARK
from veilmq.store.reader import Span

BLOCK_EVENTS: Final = 4096
"""In a smaller block a message is found faster, but each block costs every look-up a seek."""
NAME_BYTES: Final = 4
_ID_BYTES: Final = 16
_CATCH_UP_BLOCKS: Final = 8
"""After a start the events of the newest block are read again, if they are no more than these."""
_PARTS: Final = 16
"""The names of a block are divided by their first four bits, so a look-up reads a sixteenth of the index."""
_PART: Final = 1 << 48
"""Row ids: part * _PART + first offset of the block. So the rows of one part lie side by side."""
_NO_BLOCK: Final = (_PART, 0)
_SPREAD: Final = 0x9E3779B97F4A7C15
_NUMBER: Final = Struct(">Q8x")
_UNUSED: Final = bytes(MARK.start)
_EMPTIED: Final = frozenset({Kind.PURGED, Kind.QUEUE_DELETED})
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])


class HistoryIndex:
    """The writer's side: the newest block."""

    def __init__(self, connection: apsw.Connection, following: int) -> None:
        """following: the next offset to be assigned; all events from there on will be noted."""
        self._connection = connection
        self._first = _next_block(connection, following)
        """Offset at which the newest block begins."""
        self._noted_from = following
        self._names: set[Any] = set()
        """Of 16 bytes each: ids, and names of numbers. The loop over a batch's events must be as short as can be."""

    def note(self, events: list[Event]) -> None:
        """Add the names in the events of a batch."""
        names = self._names
        names.update([event.message for event in events])
        if None in names:
            names.remove(None)
            for event in events:
                if event.message is None:
                    names.update(_names_without_id(event))

    def add(self, name: bytes) -> None:
        """Add a name that stands only in an event's detail."""
        self._names.add(name)

    def is_full(self, following: int) -> bool:
        """Whether the next transaction should write the block."""
        return following - self._first >= BLOCK_EVENTS

    def write_block(self, until: int, undo: Callable[[Callable[[], None]], None]) -> None:
        """Write the block up to offset `until`, in the open transaction; all of its events are noted. Begin the
        next."""
        before = (self._first, self._noted_from, self._names)
        undo(lambda: self._restore(*before))
        if self._noted_from - self._first <= _CATCH_UP_BLOCKS * BLOCK_EVENTS:
            names = self._names | _names_between(self._connection, self._first, self._noted_from)
            self._connection.executemany("INSERT INTO history_index VALUES (?, ?, ?)", _rows(self._first, until, names))
        self._first = self._noted_from = until
        self._names = set()

    def _restore(self, first: int, noted_from: int, names: set[Any]) -> None:
        self._first, self._noted_from = first, noted_from
        self._names |= names

    def trim(self, first: int) -> None:
        """In the open transaction: drop the blocks that end at or before `first`, which is now the first offset."""
        oldest: Any = self._connection.execute("SELECT until FROM history_index ORDER BY id LIMIT 1").get
        if oldest is not None and oldest <= first:
            bounds = [(part * _PART, part * _PART + first, first) for part in range(_PARTS)]
            self._connection.executemany("DELETE FROM history_index WHERE id >= ? AND id < ? AND until <= ?", bounds)


def spans(connection: apsw.Connection, bounds: tuple[int, int], names_sought: Iterable[bytes]) -> list[Span]:
    """Offsets of the events that may have one of these names, oldest first: blocks, and what no block covers.

    bounds: first and next offset of the history. names_sought: ids, `sequence_name`s and `emptied_name`s.
    """
    by_part: dict[int, list[bytes]] = {}
    for name in names_sought:
        by_part.setdefault(name[0] >> 4, []).append(name[:NAME_BYTES])
    blocks: dict[int, int] = {}
    found: set[int] = set()
    for part, names in by_part.items():
        rows: Iterator[Any] = connection.cursor().execute(
            "SELECT id - ?1, until, names FROM history_index WHERE id >= ?1 AND id < ?2 ORDER BY id",
            (part * _PART, (part + 1) * _PART),
        )
        for first, until, packed in rows:
            blocks[first] = until
            if any(_holds(packed, name) for name in names):
                found.add(first)
    return list(_with_gaps(sorted(blocks.items()), found, *bounds))


def sequence_name(sequence: int) -> bytes:
    """The name of a message by its sequence."""
    return _NUMBER.pack(sequence * _SPREAD & (1 << 64) - 1)


def emptied_name(incarnation: int) -> bytes:
    """The name of an event that emptied a queue."""
    return sequence_name(-incarnation)


def deduplication_name(message: bytes) -> bytes:
    """The name of a send to a FIFO queue, by the mark of the deduplication id in its message's id."""
    return message[MARK] + _UNUSED


SNAPSHOT_END: Final = sequence_name(0)
"""The name of the end of a snapshot; no message has that sequence."""


def names_in(event: Event) -> list[bytes]:
    """Everything that the index must find the event by."""
    if event.message is None:
        return _names_without_id(event)
    moved = (event.detail or {}).get("target_message")
    return [event.message] if moved is None else [event.message, bytes.fromhex(moved)]


def checked(
    connection: apsw.Connection, events: Iterable[tuple[int, Event]], complain: Callable[[str], None]
) -> Iterator[tuple[int, Event]]:
    """The same events, from the first offset on; complains of each block in which a name of its events is missing."""
    blocks: Iterator[Any] = connection.cursor().execute("SELECT id, until FROM history_index WHERE id < ?", (_PART,))
    first, until = next(blocks, _NO_BLOCK)
    names: set[bytes] = set()
    for offset, event in events:
        yield offset, event
        if offset >= first:
            names.update(name[:NAME_BYTES] for name in names_in(event))
        if offset == until - 1:
            names.discard(SNAPSHOT_END[:NAME_BYTES])  # blocks of earlier releases lack it
            if not names <= _stored(connection, first):
                complain(f"the index lacks a name that is in an event from offset {first} to {until}")
            first, until = next(blocks, _NO_BLOCK)
            names = set()


def _stored(connection: apsw.Connection, first: int) -> set[bytes]:
    ids = [part * _PART + first for part in range(_PARTS)]
    rows: Iterator[Any] = connection.execute(
        "SELECT names FROM history_index WHERE id IN (SELECT value FROM json_each(?))", (str(ids),)
    )
    return {packed[at : at + NAME_BYTES] for (packed,) in rows for at in range(0, len(packed), NAME_BYTES)}


def _names_without_id(event: Event) -> list[bytes]:
    if event.kind == Kind.SNAPSHOT:
        detail = event.detail or {}
        return [SNAPSHOT_END] if detail["part"] == Part.END else [held[1] for held in detail.get("messages", ())]
    if event.kind in _EMPTIED and event.queue is not None:
        return [emptied_name(event.queue)]
    return [] if event.sequence is None else [sequence_name(event.sequence)]


def _next_block(connection: apsw.Connection, following: int) -> int:
    row: Any = connection.execute(
        "SELECT (SELECT until FROM history_index WHERE id < ? ORDER BY id DESC LIMIT 1),"
        " (SELECT min(offset) FROM history)", (_PART,)
    ).fetchone()  # fmt: skip
    until, oldest = row
    return int(next((offset for offset in (until, oldest) if offset is not None), following))


def _names_between(connection: apsw.Connection, first: int, until: int) -> set[bytes]:
    rows: Iterator[Any] = connection.cursor().execute(
        "SELECT events FROM history WHERE offset >= ? AND offset < ?", (first, until)
    )
    names: set[bytes] = set()
    for (packed,) in rows:
        for event in _EVENTS.decode(packed):
            names.update(names_in(event))
            if event.kind == Kind.SENT and event.group is not None and event.message is not None:
                names.add(deduplication_name(event.message))  # perhaps it was a FIFO queue
    return names


def _rows(first: int, until: int, names: set[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """One row for each part, also without names: each part shows what the index covers."""
    cut = sorted(_swapped(array("I", b"".join(names))[:: _ID_BYTES // NAME_BYTES]))
    bounds = [bisect_left(cut, part << 28) for part in range(_PARTS + 1)]
    for part, (start, stop) in enumerate(pairwise(bounds)):
        yield part * _PART + first, until, _swapped(array("I", cut[start:stop])).tobytes()


def _swapped(names: "array[int]") -> "array[int]":
    """Between big-endian, in which they are stored, and the machine's order."""
    if sys.byteorder == "little":
        names.byteswap()
    return names


def _holds(packed: bytes, name: bytes) -> bool:
    at = packed.find(name)
    while at % NAME_BYTES and at >= 0:
        at = packed.find(name, at + 1)
    return at >= 0


def _with_gaps(blocks: list[tuple[int, int]], found: set[int], first: int, following: int) -> Iterator[Span]:
    reached = first
    for start, until in blocks:
        if start > reached:
            yield Span(reached, start, indexed=False)
        if start in found and until > reached:
            yield Span(max(start, reached), until, indexed=True)
        reached = max(reached, until)
    if following > reached:
        yield Span(reached, following, indexed=False)


def history_end(connection: apsw.Connection) -> int:
    """Total bytes of all events ever appended."""
    row = connection.execute("SELECT bytes_before, length(events) FROM history ORDER BY offset DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0]) + int(row[1])
