"""Where messages are, and the counts that follow from it: the start of every step on a message. Beside it is how one
enters a queue, and how it leaves: sends, groups, dead letters.

Strategy: each place (`PLACES`) is one of the states of the model; rows say in which one a message is. A `Place` is a
message without its body; the places of all messages of a batch are read at once. A `StoredMessage` has all of it. Code
that moves a message subtracts it from the counts here, then adds it where it goes.

Unflushed messages have no rows yet. A flush gives them rows in the tables, as if they had always had them: all or none,
in the open batch, and their journal is deleted with it, so that a message is either in the journal or in the tables.
Claims take messages of the tables and unflushed ones in one order, so in each line every waiting message is behind
every leased one: the cursor moves to the last leased one.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import apsw
import msgspec

from veilmq.model.events import Event, LeaseEnding
from veilmq.model.instant import Instant
from veilmq.model.messages import Delivery, Extras
from veilmq.model.messages.states import State
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import (
    INSERT_LEASE,
    INSERT_MESSAGE,
    MESSAGE_COLUMNS,
    Execute,
    LeaseRow,
    MessageRow,
    Row,
    Unflushed,
)


class Where(NamedTuple):
    """One of the places where a message may be."""

    name: str
    state: State
    kept: str
    """What holds it."""
    rows: str | None = None
    """What its rows are there, as an SQL condition: `m` is its row in `message`, `l` in `lease`, `q` in `quarantine`.
    None: it has none of them."""


MEMTABLE: Final = Where("memtable", State.READY, "memory, memtable row")
MEMTABLE_LEASED: Final = Where("memtable, leased", State.IN_FLIGHT, "memory, memtable row")
IN_LINE: Final = Where(
    "in its line", State.READY, "message", "m.in_line = 1 AND l.sequence IS NULL AND q.sequence IS NULL"
)
DELAYED: Final = Where(
    "delayed", State.DELAYED, "message, lease", "l.hidden = 1 AND l.attempt = 0 AND q.sequence IS NULL"
)
IN_FLIGHT: Final = Where(
    "in flight", State.IN_FLIGHT, "message, lease", "l.hidden = 1 AND l.attempt > 0 AND q.sequence IS NULL"
)
RETURNED: Final = Where("returned", State.RETURNED, "message, lease", "l.hidden = 0 AND q.sequence IS NULL")
QUARANTINE: Final = Where(
    "quarantine", State.GONE, "message, quarantine", "m.in_line = 0 AND l.sequence IS NULL AND q.sequence IS NOT NULL"
)
GONE: Final = Where("gone", State.GONE, "history only")
PLACES: Final = (MEMTABLE, MEMTABLE_LEASED, IN_LINE, DELAYED, IN_FLIGHT, RETURNED, QUARANTINE, GONE)
"""Every message is in exactly one of them. `veilmq check` looks for one that is in none; docs/how-it-works.md shows
their picture."""
ROWS_OF_A_MESSAGE: Final = (
    "message m LEFT JOIN lease l ON l.sequence = m.sequence LEFT JOIN quarantine q ON q.sequence = m.sequence"
)


class Way(NamedTuple):
    """How a message gets from one place to another: by a step of the table of states, or by a flush."""

    source: Where
    event: str
    target: Where


FLUSH: Final = "flush"
WAYS: Final = (
    Way(MEMTABLE, "receive", MEMTABLE_LEASED),
    Way(MEMTABLE_LEASED, "delete", GONE),
    Way(MEMTABLE, FLUSH, IN_LINE),
    Way(MEMTABLE_LEASED, FLUSH, IN_FLIGHT),
    Way(IN_LINE, "receive", IN_FLIGHT),
    Way(IN_LINE, "extend (attempt 0)", DELAYED),
    Way(DELAYED, "delay ends", RETURNED),
    Way(RETURNED, "receive", IN_FLIGHT),
    Way(IN_FLIGHT, "release", RETURNED),
    Way(IN_FLIGHT, "lease expires", RETURNED),
    Way(IN_FLIGHT, "delete", GONE),
    Way(IN_LINE, "quarantine", QUARANTINE),
    Way(RETURNED, "quarantine", QUARANTINE),
    Way(RETURNED, "dead-letter", GONE),
)
"""The usual ones. The table of states has all steps (veilmq.model.messages.states)."""


class Place(msgspec.Struct, array_like=True, gc=False):
    """The state of one message, with what the history records of it."""

    generation: int
    sequence: int
    id: Any
    """16 bytes."""
    sent: Instant
    own_expiry: Instant | None
    line: int
    in_line: int
    priority: int
    group: str | None
    type: str | None
    body_bytes: int
    attempt: int = 0
    rotation: int = 0
    leased: int = False
    """Whether it has a row in `lease`."""
    hidden: int = False
    due: Instant = Instant(0)
    granted: int = 0
    origin: int | None = None
    ending: int = LeaseEnding.EXPIRED.value

    def expires(self, retention_us: int) -> int:
        """The instant at which the message expires."""
        return self.sent + retention_us if self.own_expiry is None else self.own_expiry


_PLACE: Final = (
    "m.generation, m.sequence, {id}, m.sent, m.expires, m.line, m.in_line, m.priority, m.group_id, m.type,"
    " length(m.body), {lease}"
)
_LEASE: Final = "l.attempt, l.rotation, 1, l.hidden, l.due, l.granted, l.origin, l.ending"
_ANY_LEASE: Final = (
    "coalesce(l.attempt, 0), coalesce(l.rotation, 0), l.sequence IS NOT NULL, coalesce(l.hidden, 0),"
    " coalesce(l.due, 0), coalesce(l.granted, 0), l.origin, coalesce(l.ending, 0)"
)
_FOUND: Final = (
    "carray(?) c CROSS JOIN message m ON m.sequence = c.value LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.in_line = 1 OR l.sequence IS NOT NULL"  # a message in quarantine has no place
)


def packed_places(rows: str, lease: str = _LEASE) -> str:
    """A statement for `read_places`. rows: its FROM clause and all that follows, with tables `m` and `l`."""
    place = _PLACE.format(id="hex(m.id)", lease=lease)  # JSON cannot carry blobs
    return f"SELECT json_group_array(json_array({place})) FROM {rows}"


_PLACES: Final = f"SELECT {_PLACE.format(id='m.id', lease=_ANY_LEASE)} FROM {_FOUND}"
_PLACES_PACKED: Final = packed_places(_FOUND, _ANY_LEASE)
_PLACES_DECODER: Final = msgspec.json.Decoder(list[Place])
MANY: Final = 8
"""From this many messages on, packing all rows into one is faster.

The gain grows while another thread is busy: apsw releases the interpreter lock at every row, and getting it back then
takes up to `sys.setswitchinterval`.
"""


def find_places(writer: Writer, sequences: Sequence[int]) -> dict[int, Place]:
    """The places of messages, by sequence. Missing messages are left out; those of dead generations are not.

    If one of them is unflushed, all unflushed messages are flushed.
    """
    flush_named(writer, sequences)
    if len(sequences) < MANY:
        rows = writer.read(_PLACES, (numbers(sequences),))
        return {row[1]: Place(*row) for row in rows}
    return {place.sequence: place for place in read_places(writer, _PLACES_PACKED, (numbers(sequences),))}


def read_places(writer: Writer, statement: str, values: Row) -> list[Place]:
    """The places that a statement of `packed_places` finds."""
    places = writer.read_packed(statement, values, _PLACES_DECODER)
    for place in places:
        place.id = bytes.fromhex(place.id)
    return places


Turn = tuple[int, Instant, int, int]
"""Priority, instant since which it is visible, `lease.turn`, sequence."""


class StoredMessage(MessageRow, gc=False):
    """A message in the tables: its row, and what its row in `lease` says, if it has one."""

    attempt: int = 0
    rotation: int = 0
    leased: int = 0
    """Whether it has a row in `lease`."""
    due: Instant = Instant(0)
    first: Instant | None = None
    given_back: int = 0
    """`lease.turn`."""
    failure: bytes | None = None

    def turn(self) -> Turn:
        """Its position in the order of all visible messages, if it is visible."""
        since = self.due if self.leased else self.sent
        return self.priority, since, self.given_back, self.sequence

    def place(self) -> Place:
        """The same message without its body. Call only if it is visible."""
        return Place(
            self.generation, self.sequence, self.id, self.sent, self.own_expiry, self.line, self.in_line, self.priority,
            self.group, self.type, len(self.body), self.attempt, self.rotation, leased=bool(self.leased), due=self.due,
        )  # fmt: skip

    def delivery(
        self,
        extras: Extras,
        retention_us: int,
        handle: str = "",
        due: Instant | None = None,
        lease_us: int | None = None,
    ) -> Delivery:
        """The same message as a client gets it. Without handle and lease: as a peek shows it."""
        return Delivery(
            self.id, self.sequence, self.body.decode(), self.md5, extras, self.sender, self.priority, self.sent,
            Instant(self.expires(retention_us)), self.attempt, self.first, handle, due, lease_us,
        )  # fmt: skip


STORED_COLUMNS: Final = f"{MESSAGE_COLUMNS}, l.attempt, l.rotation, 1, l.due, l.first, l.turn, l.failure"
"""What a `StoredMessage` with a row in `lease` is made of. Without such a row, `MESSAGE_COLUMNS` do."""
STORED: Final = (
    f"SELECT {MESSAGE_COLUMNS}, coalesce(l.attempt, 0), coalesce(l.rotation, 0), l.sequence IS NOT NULL,"
    " coalesce(l.due, 0), l.first, coalesce(l.turn, 0), l.failure FROM carray(?) c"
    " CROSS JOIN message m ON m.sequence = c.value LEFT JOIN lease l ON l.sequence = m.sequence"
)


def read_stored(writer: Writer, sequences: Sequence[int]) -> list[StoredMessage]:
    """Those messages of the tables, in the given order. All of them must be there: if not, raises what SQLite raises
    where it looks itself for the row that an index names."""
    rows = writer.read(STORED, (numbers(sequences),)) if sequences else []
    found = {row[0]: StoredMessage(*row) for row in rows}
    for sequence in sequences:
        if sequence not in found:
            text = f"message {sequence} has no row, though an index has it: see what `veilmq check` finds"
            raise apsw.CorruptError(text)
    return [found[sequence] for sequence in sequences]


def numbers(values: Sequence[int]) -> Any:
    """Integers as one bound value, for `carray(?)`."""
    return apsw.carray(array("q", values))


def find_place(writer: Writer, queue: LiveQueue, sequence: int) -> Place | None:
    """The message's place; None if it is no longer in the queue."""
    place = find_places(writer, (sequence,)).get(sequence)
    return place if place is not None and place.generation == queue.generation else None


def uncount(queue: LiveQueue, place: Place) -> None:
    """Subtract a message from the counts of its place."""
    if queue.groups is not None:
        queue.groups.leaves(place.line, in_flight=bool(place.leased and place.hidden and place.attempt))
    if not place.leased:
        if place.line <= PRIORITY_LINES_MAX:
            queue.ready[place.line] -= 1
        queue.visible -= 1
    elif not place.hidden:
        queue.returned -= 1
        queue.visible -= 1
    elif place.attempt:
        queue.woken += queue.in_flight >= queue.cap
        queue.in_flight -= 1
    else:
        queue.delayed -= 1


def event_of(
    kind: int, at: Instant, queue: LiveQueue, origin: int, place: Place, detail: dict[str, object] | None = None
) -> Event:
    """An event about a message in its present state."""
    held_us = at - place.granted if place.attempt and place.hidden else None
    return Event(
        kind, at, queue.incarnation, origin, place.id, place.sequence, place.attempt, place.rotation, None, None,
        place.sent, None, held_us, place.body_bytes, place.group, place.type, detail,
    )  # fmt: skip


PRIORITIES: Final = range(1, PRIORITY_LINES_MAX + 1)
_OLDEST_IN_LINE: Final = (
    "SELECT sent FROM message INDEXED BY message_line"
    " WHERE generation = ? AND line = ? AND in_line = 1 ORDER BY sequence LIMIT 1"
)
_OLDEST_RETURNED: Final = (
    "SELECT m.sent FROM lease l INDEXED BY lease_returned JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 0 AND l.line = ? ORDER BY l.sequence LIMIT 1"
)
_ANY_GROUP: Final = "SELECT 1 FROM message_group INDEXED BY message_group_name WHERE generation = ? LIMIT 1"
_OLDEST_OF_GROUPS: Final = (
    "SELECT sent FROM message WHERE sequence = (SELECT min(s) FROM ("
    " SELECT min(free) s FROM message_group INDEXED BY message_group_oldest WHERE generation = ?1 AND free IS NOT NULL"
    " UNION ALL SELECT min(sequence) FROM lease INDEXED BY lease_returned"
    " WHERE generation = ?1 AND hidden = 0 AND line > ?2"
    " UNION ALL SELECT min(sequence) FROM lease INDEXED BY lease_hidden"
    " WHERE generation = ?1 AND hidden = 1 AND attempt > 0 AND line > ?2))"
)


def oldest_sent(
    execute: Execute, generation: int, lines: Iterable[int], *, returned: bool = True, grouped: bool | None = None
) -> int | None:
    """When the oldest message of a queue was sent, among those that have rows; None if there is none.

    Takes a few index seeks; with groups, one for each group and each message in flight. returned: whether messages may
    have been given back. grouped: whether there may be groups; None: it is not known.
    """
    found: list[Row] = [row for line in lines for row in execute(_OLDEST_IN_LINE, (generation, line))]
    if returned:
        found += [row for each in PRIORITIES for row in execute(_OLDEST_RETURNED, (generation, each))]
    if grouped is None:
        grouped = execute(_ANY_GROUP, (generation,)).fetchone() is not None
    if grouped:
        found += execute(_OLDEST_OF_GROUPS, (generation, PRIORITY_LINES_MAX)).fetchall()
    return min((sent for (sent,) in found), default=None)


_OLDEST_OF_EACH: Final = (
    "SELECT c.value, min(m.sent) FROM carray(?1) c"
    f" CROSS JOIN (VALUES {', '.join(f'({priority})' for priority in PRIORITIES)}) p"
    " CROSS JOIN message m ON m.sequence IN ("
    "  (SELECT min(sequence) FROM message INDEXED BY message_line"
    "   WHERE generation = c.value AND line = p.column1 AND in_line = 1),"
    "  (SELECT min(sequence) FROM lease INDEXED BY lease_returned"
    "   WHERE generation = c.value AND line = p.column1 AND hidden = 0)) GROUP BY c.value"
)


def oldest_of_each(execute: Execute, generations: list[int]) -> list[tuple[int, int]]:
    """The same of many queues without groups, by generation, in one statement."""
    found: list[tuple[int, int]] = execute(_OLDEST_OF_EACH, (numbers(generations),)).fetchall()
    return found


def flush(writer: Writer, given_back: int | None = None) -> None:
    """Write all unflushed messages into the tables. given_back: the turn of those leased for no time."""
    memtable = writer.memtable
    memtable.changed = True
    if memtable.batches:
        writer.write("DELETE FROM memtable", ())  # first, so that its pages are reused
    if memtable.messages:
        for queue in memtable.queues.values():
            writer.touch(queue)
        messages: list[Row] = []
        leases: list[LeaseRow] = []
        turn = writer.next_offset if given_back is None else given_back
        for unflushed in memtable.messages.values():
            lease = _lease(memtable.queues[unflushed.row.generation], unflushed, turn)
            if lease is not None:
                leases.append(lease)
            messages.append(msgspec.structs.astuple(unflushed.row))
        writer.insert_many(INSERT_MESSAGE, messages)
        if leases:
            writer.insert_many(INSERT_LEASE, leases)
    if memtable.messages or memtable.batches:
        memtable.clear()


def flush_named(writer: Writer, sequences: Sequence[int]) -> None:
    """Flush if one of these messages is unflushed."""
    unflushed = writer.memtable.messages
    if unflushed and any(sequence in unflushed for sequence in sequences):
        flush(writer)


def _lease(queue: LiveQueue, unflushed: Unflushed, turn: int) -> LeaseRow | None:
    """The lease row of a message in flight; None for one that waits, which counts in its line.

    Either way the line gets an entry in `ready`: the search for the oldest message goes through those lines.
    """
    row = unflushed.row
    priority = row.priority
    lease = unflushed.lease
    queue.ready[priority] = queue.ready.get(priority, 0) + (lease is None)
    if lease is None:
        return None
    queue.cursors[priority] = max(queue.cursors.get(priority, 0), row.sequence)
    due, granted, origin = lease
    return LeaseRow(
        row.sequence, row.generation, priority, 1, 1, due, 1, 0, granted, granted, origin, 0 if due > granted else turn
    )
