"""Uses of a handle where the message is of a group: what differs from a message that stands alone.

Strategy: two questions that `handles.py` asks; everything else is noted by `uncount` and written later (groups.py).
"""

from typing import Final

from veilmq.store.sqlite.batch.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.messages.places import Place

_EARLIER_OF_OTHERS: Final = (
    "SELECT 1 FROM message m INDEXED BY message_line CROSS JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.sequence < ?"
    " AND l.hidden = 1 AND l.attempt > 0 AND l.due > ? AND l.granted <> ? LIMIT 1"
)


def line_aside(queue: LiveQueue, place: Place) -> tuple[int | None, int]:
    """Line and order of a message that was in its line and becomes delayed (extended before anybody received it)."""
    if place.line is None or place.line <= LINES_MAX:
        return None, place.priority
    return place.line if queue.settings.fifo else -place.line, place.line


def may_extend(writer: Writer, queue: LiveQueue, place: Place) -> bool:
    """Whether a lease of a FIFO group may go on. If it has ended, only if no earlier message of the group is leased to
    somebody else since.

    Earlier messages that are still in the group were received together with this one: there are few.
    """
    if not place.attempt or (place.hidden and place.due > writer.now):
        return True
    values = (queue.generation, place.line, place.sequence, writer.now, place.granted)
    return writer.read_one(_EARLIER_OF_OTHERS, values) is None
