"""Uses of a handle whose message belongs to a group: the differences from a message without one.

Strategy: handles.py calls these two functions; `uncount` records everything else, which is written later (groups.py).
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
    """Line and order of a message that leaves its line because it becomes delayed (extended before it was ever
    received)."""
    if place.line is None or place.line <= LINES_MAX:
        return None, place.priority
    return place.line if queue.settings.fifo else -place.line, place.line


def may_extend(writer: Writer, queue: LiveQueue, place: Place) -> bool:
    """Whether a lease of a FIFO group may be extended. If it has ended: only if no earlier message of the group has
    been leased to somebody else since.

    Earlier messages still in the group were received together with this one, so there are few.
    """
    if not place.attempt or (place.hidden and place.due > writer.now):
        return True
    values = (queue.generation, place.line, place.sequence, writer.now, place.granted)
    return writer.read_one(_EARLIER_OF_OTHERS, values) is None
