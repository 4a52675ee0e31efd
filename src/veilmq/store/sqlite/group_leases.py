"""Uses of a handle where the message is of a group: what differs from a message that stands alone.

Strategy: two questions that `leases.py` asks; everything else is noted by `uncount` and settled later (groups.py).
"""

from veilmq.store.sqlite.places import Place
from veilmq.store.sqlite.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.writer import Writer


def line_aside(queue: LiveQueue, place: Place) -> tuple[int | None, int]:
    """Line and order of a message that was in its line and becomes delayed (extended before anybody received it)."""
    if place.line is None or place.line <= LINES_MAX:
        return None, place.priority
    return place.line if queue.settings.fifo else -place.line, place.line


def may_extend(writer: Writer, queue: LiveQueue, place: Place) -> bool:
    """Whether a lease of a FIFO group may go on: if it has ended, only as long as no other batch has the group."""
    if place.hidden or not place.attempt:
        return True
    assert queue.groups is not None
    assert place.line is not None
    row = writer.read_one("SELECT held, granted FROM message_group WHERE number = ?", (place.line,))
    change, _ = queue.groups.changes.get(place.line, (0, 0))
    return row is not None and (row[0] + change == 0 or row[1] == place.granted)
