"""The quarantine: damaged messages that nobody receives, until an operator drops them.

Strategy: a message in quarantine keeps its row in `message`, so that its body can still be exported, but it is in no
line and has no lease. For the counts and the books it has left its queue when it was set apart; dropping it changes
neither.
"""

from typing import Final

from veilmq.model.commands import SERVER, DropQuarantined
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.events import Kind
from veilmq.model.messages.message import id_text
from veilmq.model.outcomes import Deleted, Outcome
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.set_apart import Damaged
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.messages.places import Place, event_of, uncount

_FIND: Final = (
    "SELECT m.generation, m.sequence, m.id, m.sent, m.expires, m.line, m.in_line, m.priority, m.group_id, m.type,"
    " length(m.body) FROM quarantine d CROSS JOIN message m ON m.sequence = d.sequence"
    " WHERE d.generation = ? AND m.id = ?"
)


def quarantine(writer: Writer, queue: LiveQueue, place: Place) -> None:
    """Set apart a message whose body does not match its MD5, or whose attributes cannot be read: nobody receives it,
    others are not held up, and the log, `veilmq check` and the metrics report it."""
    writer.touch(queue)
    if place.leased:
        writer.write("DELETE FROM lease WHERE sequence = ?", (place.sequence,))
    writer.write("UPDATE message SET line = priority, in_line = 0 WHERE sequence = ?", (place.sequence,))
    writer.write("INSERT INTO quarantine VALUES (?, ?, ?)", (place.sequence, queue.generation, writer.now))
    uncount(queue, place)
    writer.events.append(event_of(Kind.QUARANTINED, writer.now, queue, writer.origin(SERVER), place))
    writer.set_apart.pending.append(Damaged(queue.key, place.id, place.sent))


def drop(writer: Writer, command: DropQuarantined) -> Outcome:
    """Delete a message from quarantine, with an event."""
    queue = writer.queue(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    row = writer.read_one(_FIND, (queue.generation, command.message))
    if row is None:
        reason = f"message {id_text(command.message)} is not in quarantine in {command.queue}"
        return ParameterInvalid(parameter="messages", reason=reason)
    place = Place(*row)
    for table in ("quarantine", "message"):
        writer.write(f"DELETE FROM {table} WHERE sequence = ?", (place.sequence,))
    writer.events.append(event_of(Kind.QUARANTINE_DROPPED, writer.now, queue, writer.origin(command.origin), place))
    return Deleted()
