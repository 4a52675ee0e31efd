"""How a lease ends by itself, and how a message leaves without being deleted.

Strategy: what is due is applied when somebody looks (a claim, a use of a handle) or when the sweeper comes, whichever
is first, and is recorded once, with the instant at which it was due.
"""

from array import array
from collections.abc import Sequence
from hashlib import md5 as md5_of
from typing import Any, Final
from uuid import UUID

import apsw
import msgspec

from veilmq.model.commands import SERVER
from veilmq.model.events import Event, Kind
from veilmq.model.instant import FOREVER, Instant
from veilmq.model.message import NO_EXTRAS, Extras
from veilmq.model.topic import is_hidden
from veilmq.store.sqlite.groups import is_grouped, join
from veilmq.store.sqlite.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.sends import INSERT_MESSAGE, detail_of
from veilmq.store.sqlite.writer import Writer

_READ_EXTRAS: Final = msgspec.msgpack.Decoder(Extras).decode
_EXTRAS: Final = msgspec.msgpack.Encoder()
RETURNS_OF_BATCH: Final = 1_024
"""Leases that may end because commands of one batch look at their queues; beyond, `RETURNS_MIN` a command."""
RETURNS_MIN: Final = 16


def read_extras(packed: bytes | None) -> Extras | None:
    """The stored extras, or the shared empty ones; None if they are damaged."""
    if packed is None:
        return NO_EXTRAS
    try:
        return _READ_EXTRAS(packed)
    except msgspec.MsgspecError:
        return None


def intact(body: bytes, md5: bytes, packed: bytes | None) -> Extras | None:
    """The extras of a message that is as it was stored; None if its body lost its MD5, or its extras are damaged."""
    return read_extras(packed) if md5_of(body, usedforsecurity=False).digest() == md5 else None


def look_for_due(writer: Writer, queue: LiveQueue, count_max: int) -> None:
    """`return_due` for one of many commands that look at the same time: of a batch, the first find most of what there
    is, and the others no more than they need."""
    room = max(RETURNS_OF_BATCH - writer.returned, RETURNS_MIN)
    writer.returned += return_due(writer, queue, min(count_max, room))


def return_due(writer: Writer, queue: LiveQueue, count_max: int) -> int:
    """Make up to `count_max` messages visible whose lease or delay has ended; returns how many."""
    rows = writer.read(
        "SELECT l.sequence, l.due, l.attempt, l.rotation, l.granted, l.origin, m.id, m.sent, m.group_id, m.type,"
        " length(m.body), l.line"
        " FROM lease l INDEXED BY lease_hidden JOIN message m ON m.sequence = l.sequence"
        " WHERE l.generation = ? AND l.hidden = 1 AND l.due <= ? ORDER BY l.due LIMIT ?",
        (queue.generation, writer.now, count_max),
    )
    writer.touch(queue)
    at_cap = queue.in_flight >= queue.cap
    if rows:
        writer.write_many("UPDATE lease SET hidden = 0 WHERE sequence = ?", [(row[0],) for row in rows])
    for sequence, due, attempt, rotation, granted, origin, message, sent, group, kind, body_bytes, line in rows:
        if queue.groups is not None:
            queue.groups.leaves(line, in_flight=attempt > 0)
        if attempt == 0:
            queue.delayed -= 1
            continue
        queue.in_flight -= 1
        writer.events.append(
            Event(
                Kind.LEASE_EXPIRED,
                due,
                queue.incarnation,
                origin,
                message,
                sequence,
                attempt,
                rotation,
                sent=sent,
                visible_since=due,
                held_us=due - granted,
                body_bytes=body_bytes,
                group=group,
                type=kind,
            )
        )
    queue.returned += len(rows)
    queue.visible += len(rows)
    if rows and (at_cap or not queue.settings.fifo):
        queue.woken += len(rows)
    queue.next_due = FOREVER
    following = writer.read_one(
        "SELECT min(due) FROM lease INDEXED BY lease_hidden WHERE generation = ? AND hidden = 1", (queue.generation,)
    )
    if following is not None and following[0] is not None:
        writer.queues.lower_due(queue, following[0])
    return len(rows)


class Place(msgspec.Struct, array_like=True, gc=False):
    """Where one message is, with what the history says of it: what every step on a message starts from."""

    generation: int
    sequence: int
    id: Any
    """16 bytes."""
    sent: Instant
    own_expiry: Instant | None
    line: int | None
    priority: int
    group: str | None
    type: str | None
    body_bytes: int
    attempt: int = 0
    rotation: int = 0
    leased: int = False
    """Has a row in `lease`."""
    hidden: int = False
    due: Instant = Instant(0)
    granted: int = 0
    origin: int | None = None

    def expires(self, retention_us: int) -> int:
        """The instant from which the message is dead."""
        return self.sent + retention_us if self.own_expiry is None else self.own_expiry


# What stands for the id is bound late: JSON carries no blobs.
_PLACE: Final = (
    "m.generation, m.sequence, {id}, m.sent, m.expires, m.line, m.priority, m.group_id, m.type, length(m.body),"
    " coalesce(l.attempt, 0), coalesce(l.rotation, 0), l.sequence IS NOT NULL, coalesce(l.hidden, 0),"
    " coalesce(l.due, 0), coalesce(l.granted, 0), l.origin"
)
_WHERE: Final = (
    " FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.line IS NOT NULL OR l.sequence IS NOT NULL"  # a message in quarantine is nowhere
)
_PLACES: Final = f"SELECT {_PLACE.format(id='m.id')}{_WHERE}"
_PLACES_PACKED: Final = f"SELECT json_group_array(json_array({_PLACE.format(id='hex(m.id)')})){_WHERE}"
_PLACES_DECODER: Final = msgspec.json.Decoder(list[Place])
MANY: Final = 8
"""From so many messages on, one statement for all is faster than one each.

More than that: apsw lets the interpreter go at every row, and gets it back from threads that burn the CPU 5 ms later.
"""


def find_places(writer: Writer, sequences: Sequence[int]) -> dict[int, Place]:
    """Where the messages are, by sequence; those that are gone are missing, those of dead generations are not."""
    if len(sequences) < MANY:
        rows = writer.read(_PLACES, (numbers(sequences),))
        return {row[1]: Place(*row) for row in rows}
    (packed,) = writer.read_one(_PLACES_PACKED, (numbers(sequences),)) or ("[]",)
    places = _PLACES_DECODER.decode(packed)
    for place in places:
        place.id = bytes.fromhex(place.id)
    return {place.sequence: place for place in places}


def numbers(values: Sequence[int]) -> Any:
    """Whole numbers as one value to bind, for `carray(?)`."""
    return apsw.carray(array("q", values))


def find_place(writer: Writer, queue: LiveQueue, sequence: int) -> Place | None:
    """Where the message is, or None if the queue holds it no longer."""
    place = find_places(writer, (sequence,)).get(sequence)
    return place if place is not None and place.generation == queue.generation else None


def end_lease(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """A late use of a handle that still counts: the lease's end stands in the history before it."""
    writer.touch(queue)
    writer.write("UPDATE lease SET hidden = 0 WHERE sequence = ?", (place.sequence,))
    uncount(queue, place)
    event = event_of(Kind.LEASE_EXPIRED, place.due, queue, place.origin or writer.origin(SERVER), place)
    event.visible_since = place.due
    writer.events.append(event)
    place.hidden = False
    queue.returned += 1
    queue.visible += 1
    queue.woken += not queue.settings.fifo  # the use may be refused after all


def remove(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """Delete the rows of a message and take it off the counts."""
    writer.touch(queue)
    remove_rows(writer, [place.sequence])
    uncount(queue, place)


def remove_rows(writer: Writer, sequences: Sequence[int]) -> None:
    """Delete the rows of messages, wherever they are."""
    for table in ("lease", "message"):
        if len(sequences) < MANY:
            writer.write_many(f"DELETE FROM {table} WHERE sequence = ?", [(sequence,) for sequence in sequences])
        else:
            which = "IN (SELECT value FROM carray(?))"
            writer.write(f"DELETE FROM {table} WHERE sequence {which}", (numbers(sequences),))


def uncount(queue: LiveQueue, place: Place) -> None:
    """Take a message off the counts of the place where it is."""
    if queue.groups is not None:
        queue.groups.leaves(place.line, in_flight=bool(place.leased and place.hidden and place.attempt))
    if not place.leased:
        assert place.line is not None
        if place.line <= LINES_MAX:
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
    """An event about a message as it stands."""
    return Event(
        kind,
        at,
        queue.incarnation,
        origin,
        place.id,
        place.sequence,
        place.attempt,
        place.rotation,
        None,
        None,
        place.sent,
        None,
        at - place.granted if place.attempt and place.hidden else None,
        place.body_bytes,
        place.group,
        place.type,
        detail,
    )


def expire(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """A message whose retention or own time to live is over.

    A push that expired goes to its subscription's dead-letter queue, if there is one (mns.md, section 8).
    """
    redrive = queue.settings.redrive
    if redrive is not None and is_hidden(queue.key.name):
        target = writer.queues.by_key.get(redrive.target)
        if target is not None:
            dead_letter(writer, queue, place, target, expired=True)
            return
    remove(writer, queue, place)
    at = Instant(place.expires(queue.settings.retention_us))
    writer.events.append(event_of(Kind.EXPIRED, at, queue, writer.origin(SERVER), place))


_WHOLE: Final = (
    "SELECT m.sender, m.extras, m.md5, m.body, l.first FROM message m LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.sequence = ?"
)


def dead_letter(writer: Writer, queue: LiveQueue, place: Place, target: LiveQueue, *, expired: bool = False) -> None:
    """Move a message, with its id and group, to the end of its line in the dead-letter queue.

    On a standard queue its time goes on from its sending, on a FIFO queue anew (Developer Guide, "Dead-letter queues").
    A deduplication id gives way to the message's id: two messages that shared one at different times must not be taken
    for one there (Developer Guide, "Configure a dead-letter queue redrive").
    """
    (row,) = writer.read(_WHOLE, (place.sequence,))
    sender, packed, md5, body, first = row
    extras = read_extras(packed)
    if extras is None:
        quarantine(writer, queue, place)
        return
    writer.touch(target)
    first = None if target.settings.fifo else extras.dead_first_received or first
    identity = None if extras.deduplication_id is None else str(UUID(bytes=place.id))
    receives = 0 if is_hidden(queue.key.name) else extras.dead_receives + place.attempt
    extras = msgspec.structs.replace(
        extras,
        deduplication_id=identity,
        dead_letter_source=queue.key,
        dead_first_received=first,
        dead_receives=receives,
    )
    sequence = writer.next_sequence()
    remove(writer, queue, place)
    line = place.priority
    if place.group is not None and is_grouped(target, place.priority):
        line = join(writer, target, place.group, sequence)
    sent = writer.now if target.settings.fifo else place.sent
    writer.write(
        INSERT_MESSAGE,
        (
            sequence,
            target.generation,
            line,
            place.priority,
            place.id,
            sent,
            place.own_expiry,
            sender,
            place.group,
            place.type,
            _EXTRAS.encode(extras),
            md5,
            body,
        ),
    )
    if line <= LINES_MAX:
        target.ready[line] = target.ready.get(line, 0) + 1
    target.visible += 1
    target.woken += not target.settings.fifo
    expires = sent + target.settings.retention_us if place.own_expiry is None else place.own_expiry
    writer.queues.lower_expiry(target, expires)
    detail: dict[str, object] = {"target": target.incarnation, "target_sequence": sequence}
    detail |= detail_of(place.priority, place.own_expiry) or {}
    if target.settings.fifo:
        detail["sent"] = sent
    if expired:
        detail["expired"] = True
    writer.events.append(event_of(Kind.DEAD_LETTERED, writer.now, queue, writer.origin(SERVER), place, detail))


def quarantine(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """A body that does not match its MD5: nobody receives it, the others flow, `veilmq check` names it."""
    writer.touch(queue)
    if place.leased:
        writer.write("DELETE FROM lease WHERE sequence = ?", (place.sequence,))
    writer.write("UPDATE message SET line = NULL WHERE sequence = ?", (place.sequence,))
    writer.write("INSERT INTO quarantine VALUES (?, ?, ?)", (place.sequence, queue.generation, writer.now))
    uncount(queue, place)
    writer.events.append(event_of(Kind.QUARANTINED, writer.now, queue, writer.origin(SERVER), place))
