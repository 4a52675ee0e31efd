"""How a lease ends by itself, and how a message leaves without being deleted.

Strategy: what is due is applied when somebody looks (a claim, a use of a handle) or when the sweeper comes, whichever
is first, and is recorded once, with the instant at which it was due.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import apsw
import msgspec

from veilmq.model.commands import SERVER
from veilmq.model.events import Event, Kind
from veilmq.model.instant import FOREVER, Instant
from veilmq.model.message import NO_EXTRAS, Extras
from veilmq.store.sqlite.queues import LiveQueue
from veilmq.store.sqlite.sends import INSERT_MESSAGE
from veilmq.store.sqlite.writer import Writer

EXTRAS_DECODER: Final = msgspec.msgpack.Decoder(Extras)
_EXTRAS: Final = msgspec.msgpack.Encoder()


def extras_of(packed: bytes | None) -> Extras:
    """The stored extras, or the shared empty ones."""
    return NO_EXTRAS if packed is None else EXTRAS_DECODER.decode(packed)


def return_due(writer: Writer, queue: LiveQueue, count_max: int) -> int:
    """Make up to `count_max` messages visible whose lease or delay has ended; returns how many."""
    rows = writer.read(
        "SELECT l.sequence, l.due, l.attempt, l.rotation, l.granted, l.origin, m.id, m.sent, m.group_id, m.type,"
        " length(m.body)"
        " FROM lease l INDEXED BY lease_hidden JOIN message m ON m.sequence = l.sequence"
        " WHERE l.generation = ? AND l.hidden = 1 AND l.due <= ? ORDER BY l.due LIMIT ?",
        (queue.generation, writer.now, count_max),
    )
    writer.touch(queue)
    if rows:
        writer.write_many("UPDATE lease SET hidden = 0 WHERE sequence = ?", [(row[0],) for row in rows])
    for sequence, due, attempt, rotation, granted, origin, message, sent, group, kind, body_bytes in rows:
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
    if rows:
        queue.woken += len(rows)
    queue.next_due = FOREVER
    following = writer.read_one(
        "SELECT min(due) FROM lease INDEXED BY lease_hidden WHERE generation = ? AND hidden = 1", (queue.generation,)
    )
    if following is not None and following[0] is not None:
        writer.queues.lower_due(queue, following[0])
    return len(rows)


class Place(msgspec.Struct, gc=False):
    """Where one message is, with what the history says of it: what every step on a message starts from."""

    generation: int
    sequence: int
    id: bytes
    sent: int
    own_expiry: int | None
    line: int | None
    priority: int
    group: str | None
    type: str | None
    body_bytes: int
    attempt: int = 0
    rotation: int = 0
    leased: bool = False
    """Has a row in `lease`."""
    hidden: bool = False
    due: int = 0
    granted: int = 0
    origin: int | None = None

    def expires(self, retention_us: int) -> int:
        """The instant from which the message is dead."""
        return self.sent + retention_us if self.own_expiry is None else self.own_expiry


_PLACES: Final = (
    "SELECT m.generation, m.sequence, m.id, m.sent, m.expires, m.line, m.priority, m.group_id, m.type, length(m.body),"
    " coalesce(l.attempt, 0), coalesce(l.rotation, 0), l.sequence IS NOT NULL, coalesce(l.hidden, 0),"
    " coalesce(l.due, 0), coalesce(l.granted, 0), l.origin"
    " FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.line IS NOT NULL OR l.sequence IS NOT NULL"  # a message in quarantine is nowhere
)


def find_places(writer: Writer, sequences: Sequence[int]) -> dict[int, Place]:
    """Where the messages are, by sequence; those that are gone are missing, those of dead generations are not."""
    rows = writer.read(_PLACES, (apsw.carray(array("q", sequences)),))
    return {row[1]: Place(*row) for row in rows}


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
    event.visible_since = Instant(place.due)
    writer.events.append(event)
    place.hidden = False
    queue.returned += 1
    queue.visible += 1


def remove(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """Delete the rows of a message and take it off the counts."""
    writer.touch(queue)
    remove_rows(writer, [(place.sequence,)])
    uncount(queue, place)


def remove_rows(writer: Writer, rows: Sequence[tuple[int]]) -> None:
    """Delete the rows of messages, given as one-tuples of sequences, wherever they are."""
    writer.write_many("DELETE FROM lease WHERE sequence = ?", rows)
    writer.write_many("DELETE FROM message WHERE sequence = ?", rows)


def uncount(queue: LiveQueue, place: Place) -> None:
    """Take a message off the counts of the place where it is."""
    if not place.leased:
        assert place.line is not None
        queue.ready[place.line] -= 1
        queue.visible -= 1
    elif not place.hidden:
        queue.returned -= 1
        queue.visible -= 1
    elif place.attempt:
        queue.in_flight -= 1
    else:
        queue.delayed -= 1


def event_of(
    kind: Kind, at: int, queue: LiveQueue, origin: int, place: Place, detail: dict[str, object] | None = None
) -> Event:
    """An event about a message as it stands."""
    return Event(
        kind,
        Instant(at),
        queue.incarnation,
        origin,
        place.id,
        place.sequence,
        place.attempt,
        place.rotation,
        None,
        None,
        Instant(place.sent),
        None,
        at - place.granted if place.attempt and place.hidden else None,
        place.body_bytes,
        place.group,
        place.type,
        detail,
    )


def expire(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """A message whose retention or own time to live is over."""
    remove(writer, queue, place)
    at = place.expires(queue.settings.retention_us)
    writer.events.append(event_of(Kind.EXPIRED, at, queue, writer.origin(SERVER), place))


def dead_letter(writer: Writer, queue: LiveQueue, place: Place, target: LiveQueue) -> None:
    """Move a message, with its id and sent instant, to the end of the dead-letter queue's line."""
    writer.touch(target)
    (row,) = writer.read("SELECT sender, extras, md5, body FROM message WHERE sequence = ?", (place.sequence,))
    sender, packed, md5, body = row
    extras = msgspec.structs.replace(extras_of(packed), dead_letter_source=queue.key)
    sequence = writer.next_sequence()
    remove(writer, queue, place)
    writer.write(
        INSERT_MESSAGE,
        (
            sequence,
            target.generation,
            place.priority,
            place.priority,
            place.id,
            place.sent,
            place.own_expiry,
            sender,
            place.group,
            place.type,
            _EXTRAS.encode(extras),
            md5,
            body,
        ),
    )
    target.ready[place.priority] = target.ready.get(place.priority, 0) + 1
    target.visible += 1
    target.woken += 1
    writer.queues.lower_expiry(target, place.expires(target.settings.retention_us))
    detail: dict[str, object] = {"target": target.incarnation, "target_sequence": sequence}
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
