"""A FIFO queue's delay is changed: it acts on the messages that are in the queue already.

Strategy: only messages that nobody received count, and none whose delay was set through a handle. Those that are
delayed get the new end; those that are visible and would not be under the new delay are hidden until it ends. All of it
is a few statements over the queue's messages: a change of settings is rare, and no command of every day looks at the
delay again. Source: "Amazon SQS delay queues" in the SQS Developer Guide ("for FIFO queues, the per-queue delay setting
is retroactive").
"""

from typing import Final

from veilmq.model.commands import SERVER
from veilmq.store.sqlite.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.writer import Writer

_RETIME: Final = (
    "UPDATE lease SET due = granted + ?3 WHERE generation = ?1 AND hidden = 1 AND attempt = 0 AND due = granted + ?2"
)
_HIDE_RETURNED: Final = (
    "UPDATE lease SET hidden = 1, due = granted + ?3 WHERE generation = ?1 AND hidden = 0 AND attempt = 0"
    " AND due = granted + ?2 AND granted + ?3 > ?4"
)
_HIDE_READY: Final = (
    "INSERT INTO lease SELECT m.sequence, ?1, m.line, m.line, 1, m.sent + ?2, 0, 0, m.sent, NULL, ?4"
    " FROM message m INDEXED BY message_line WHERE m.generation = ?1 AND m.line > ?5 AND m.sent + ?2 > ?3"
    " AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.sequence = m.sequence)"
)
_BLOCK: Final = (
    "UPDATE message_group SET free = NULL WHERE generation = ? AND free IS NOT NULL"
    " AND EXISTS (SELECT 1 FROM lease l WHERE l.sequence = free AND l.hidden = 1)"
)
_FIRST_DUE: Final = "SELECT min(due) FROM lease INDEXED BY lease_hidden WHERE generation = ? AND hidden = 1"


def retime(writer: Writer, queue: LiveQueue, old_us: int, new_us: int) -> None:
    """Give the messages of the queue the new delay. The queue is touched, and its groups are settled."""
    writer.write(_RETIME, (queue.generation, old_us, new_us))
    if new_us > old_us:
        writer.write(_HIDE_RETURNED, (queue.generation, old_us, new_us, writer.now))
        returned = writer.connection.changes()
        origin = writer.origin(SERVER)
        writer.write(_HIDE_READY, (queue.generation, new_us, writer.now, origin, LINES_MAX))
        ready = writer.connection.changes()
        queue.returned -= returned
        queue.visible -= returned + ready
        queue.delayed += returned + ready
        writer.write(_BLOCK, (queue.generation,))
    row = writer.read_one(_FIRST_DUE, (queue.generation,))
    if row is not None and row[0] is not None:
        writer.queues.lower_due(queue, row[0])
