"""Messages that leave their queue without being deleted: to a dead-letter queue, by a move task, into the quarantine.

Strategy: damaged messages are put into the quarantine, where nobody receives them, until an operator drops them.
Such a message keeps its row in `message`, so that its body can still be exported, but it is in no line and has no
lease. For the counts and the books it has left its queue when it was quarantined; dropping it changes neither.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from veilmq.model.commands import SERVER, DropQuarantined
from veilmq.model.errors import ParameterInvalid
from veilmq.model.events import Kind
from veilmq.model.messages import id_text
from veilmq.model.outcomes import Deleted, Outcome
from veilmq.model.settings.topic import is_hidden
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.quarantine import CopyDamaged, Damaged
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import (
    INSERT_LEASE,
    INSERT_MESSAGE,
    LeaseRow,
    MessageRow,
    as_text,
    intact,
    pack_extras,
)
from veilmq.store.sqlite.messages import MANY, Place, event_of, numbers, read_stored, uncount
from veilmq.store.sqlite.messages.groups import is_grouped, join
from veilmq.store.sqlite.messages.sends import detail_of

_OUT_OF_LINE: Final = (
    "UPDATE message SET line = priority, in_line = 0, "
    + ", ".join(f"{column} = CAST({column} AS TEXT)" for column in ("sender", "group_id", "type"))
    + ", "
    + ", ".join(f"{column} = CAST({column} AS BLOB)" for column in ("extras", "md5", "body"))
    + " WHERE sequence = ?"
)
"""No row is updated in which a value has another type than its column, as a flipped bit may leave it."""
_FIND: Final = (
    "SELECT m.generation, m.sequence, m.id, m.sent, m.expires, m.line, m.in_line, m.priority, m.group_id, m.type,"
    " length(m.body) FROM quarantine d CROSS JOIN message m ON m.sequence = d.sequence"
    " WHERE d.generation = ? AND m.id = ?"
)


def quarantine(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """Quarantine a message whose body does not match its MD5, or of which anything else cannot be read: nobody receives
    it, others are not held up, and the log, `veilmq check` and the metrics report it. Raises CopyDamaged: see
    `Options.gives_up`."""
    gives_up = writer.options.gives_up
    if gives_up is not None and gives_up(f"message {id_text(place.id)} is damaged"):
        raise CopyDamaged(f"message {id_text(place.id)} of queue {queue.key} is damaged here")
    writer.touch(queue)
    place.group, place.type = as_text(place.group), as_text(place.type)
    if place.leased:
        writer.write("DELETE FROM lease WHERE sequence = ?", (place.sequence,))
    writer.write(_OUT_OF_LINE, (place.sequence,))
    writer.write("INSERT INTO quarantine VALUES (?, ?, ?)", (place.sequence, queue.generation, writer.now))
    uncount(queue, place)
    writer.events.append(event_of(Kind.QUARANTINED, writer.now, queue, writer.origin(SERVER), place))
    writer.quarantined.pending.append(Damaged(queue.key, place.id, place.sent))


def drop_quarantined(writer: Writer, command: DropQuarantined, queue: LiveQueue) -> Outcome:
    """Delete a message from quarantine, with an event."""
    row = writer.read_one(_FIND, (queue.generation, command.message))
    if row is None:
        reason = f"message {id_text(command.message)} is not in quarantine in {command.queue}"
        return ParameterInvalid(parameter="messages", reason=reason)
    place = Place(*row)
    for table in ("quarantine", "message"):
        writer.write(f"DELETE FROM {table} WHERE sequence = ?", (place.sequence,))
    writer.events.append(event_of(Kind.QUARANTINE_DROPPED, writer.now, queue, writer.origin(command.origin), place))
    return Deleted()


def dead_letter(writer: Writer, queue: LiveQueue, place: Place, target: LiveQueue, *, expired: bool = False) -> None:
    """Move a message, with its id and group, behind everything in the dead-letter queue.

    On a standard queue its retention counts from the original send, on a FIFO queue anew (Developer Guide, "Dead-letter
    queues"). A line is ordered by time of sending, so on a standard queue the message waits as one that was given back.
    Its deduplication id is replaced by the message's id: two messages that shared one at different times must not count
    as duplicates there (Developer Guide, "Configure a dead-letter queue redrive").
    """
    (message,) = read_stored(writer, (place.sequence,))
    extras = intact(message, message.failure)
    if extras is None:
        quarantine(writer, queue, place)
        return
    first = None if target.settings.fifo else extras.dead_first_received or message.first
    identity = None if extras.deduplication_id is None else id_text(place.id)
    receives = 0 if is_hidden(queue.key.name) else extras.dead_receives + place.attempt
    extras = msgspec.structs.replace(
        extras,
        deduplication_id=identity,
        dead_letter_source=queue.key,
        dead_first_received=first,
        dead_receives=receives,
    )
    message.sent = sent = writer.now if target.settings.fifo else place.sent
    message.packed = pack_extras(extras)
    aside = not target.settings.fifo
    detail = put_elsewhere(writer, queue, place, target, message, aside=aside)
    if target.settings.fifo:
        detail["sent"] = sent
    if expired:
        detail["expired"] = True
    if receives:
        detail["receives"] = receives
    detail |= error_detail(extras.error_type, extras.error)
    event = event_of(Kind.DEAD_LETTERED, writer.now, queue, writer.origin(SERVER), place, detail)
    event.visible_since = writer.now if aside else None
    writer.events.append(event)


def put_elsewhere(
    writer: Writer,
    queue: LiveQueue,
    place: Place,
    target: LiveQueue,
    message: MessageRow,
    *,
    aside: bool = False,
) -> dict[str, object]:
    """Remove a message from its queue and append it to its line in another queue.

    message: its row there, but for sequence, generation and line. aside: not into the line, but like a message given
    back now. Returns the event's detail about its new place.
    """
    writer.touch(target)
    given_back = writer.next_offset
    remove(writer, queue, place)
    sequence = writer.next_sequence()
    line = place.priority
    if place.group is not None and is_grouped(target, place.priority):
        line = join(writer, target, place.group, sequence, aside=aside)
    values = (
        sequence, target.generation, line, not aside, message.priority, message.id, message.sent, message.own_expiry,
        message.sender, message.group, message.type, message.packed, message.md5, message.body,
    )  # fmt: skip
    writer.write(INSERT_MESSAGE, values)
    if aside:
        lease = LeaseRow(
            sequence, target.generation, line, 0, 0, writer.now, 0, 0, message.sent, None, writer.origin(SERVER),
            given_back,
        )  # fmt: skip
        writer.write(INSERT_LEASE, lease)
        target.returned += 1
    elif line <= PRIORITY_LINES_MAX:
        target.ready[line] = target.ready.get(line, 0) + 1
    target.visible += 1
    target.woken += not target.settings.fifo
    writer.queues.lower_expiry(target, message.expires(target.settings.retention_us))
    detail = detail_of(place.priority, place.own_expiry) or {}
    return {"target": target.incarnation, "target_sequence": sequence, **detail}


def error_detail(error_type: str, error: str) -> dict[str, object]:
    """The members of an event's detail about an error; unknown ones are left out."""
    return {name: text for name, text in (("error_type", error_type), ("error", error)) if text}


def remove(writer: Writer, queue: LiveQueue, *places: Place) -> None:
    """Delete the rows of messages and subtract them from the counts."""
    writer.touch(queue)
    remove_rows(writer, [place.sequence for place in places])
    for place in places:
        uncount(queue, place)


def remove_rows(writer: Writer, sequences: Sequence[int]) -> None:
    """Delete the rows of messages, wherever they are."""
    for table in ("lease", "message"):
        if len(sequences) < MANY:
            writer.write_many(f"DELETE FROM {table} WHERE sequence = ?", [(sequence,) for sequence in sequences])
        else:
            which = "IN (SELECT value FROM carray(?))"
            writer.write(f"DELETE FROM {table} WHERE sequence {which}", (numbers(sequences),))
