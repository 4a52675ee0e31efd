"""Changes of a FIFO queue's delay: they also apply to messages already in the queue, in bounded steps.

Strategy: the change applies to messages that nobody received and whose delay was not set through a handle. Delayed
messages get the new end; visible ones that would still be delayed under the new delay are hidden until it ends. The
change itself handles the first messages of the queue. A row of `retiming` makes the sweeper go on with the rest, line
by line; until it reaches a message, that message keeps its old delay. Messages sent after the change have the new
delay. Another change before the walk has ended starts the walk again. No ordinary command has to look at the delay
again. Source: "Amazon SQS delay queues" in the SQS Developer Guide ("for FIFO queues, the per-queue delay setting is
retroactive"); a change of attributes "can take up to 60 seconds" (SetQueueAttributes).
"""

from typing import Final, NamedTuple

import msgspec

from veilmq.model.commands import SERVER
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import INSERT_LEASE, LeaseRow, Row

AT_ONCE: Final = 1_000
"""How many messages the change itself handles."""
_COLUMNS: Final = (
    "SELECT m.sequence, m.line, m.sent, l.hidden, l.due, l.attempt, l.granted"
    " FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence WHERE m.generation = ?1"
    " AND m.in_line = 1"
)
_IN_LINE: Final = f"{_COLUMNS} AND m.line = ?2 AND m.sequence > ?3 ORDER BY m.sequence LIMIT ?4"
_NEXT_LINES: Final = f"{_COLUMNS} AND m.line > ?2 ORDER BY m.line, m.sequence LIMIT ?3"
_HIDE: Final = "UPDATE lease SET hidden = 1, due = ? WHERE sequence = ?"
_FOLLOW: Final = "UPDATE lease SET due = ? WHERE sequence = ?"
"""For a message that is and stays visible: the next change must recognise it by today's delay."""
_KNOWN: Final = "SELECT before FROM retiming WHERE incarnation = ?"
_KEEP: Final = "INSERT OR REPLACE INTO retiming VALUES (?, ?, ?, ?, ?, ?)"
_FORGET: Final = "DELETE FROM retiming WHERE incarnation = ?"
_FIRST: Final = "SELECT * FROM retiming LIMIT 1"
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[int])


class _Walk(NamedTuple):
    """A row of `retiming`."""

    incarnation: int
    generation: int
    before: bytes
    last: int
    line: int
    sequence: int


def retime(writer: Writer, queue: LiveQueue, old_us: int, new_us: int) -> None:
    """Give the queue's messages the new delay: the first ones now, the others in `carry_on`."""
    writer.touch(queue)
    known = writer.read_one(_KNOWN, (queue.incarnation,))
    before = {old_us} if known is None else {old_us, *_DECODER.decode(known[0])}
    packed = _ENCODER.encode(sorted(before))
    walk = _Walk(queue.incarnation, queue.generation, packed, writer.mark.sequence, PRIORITY_LINES_MAX, 0)
    _step(writer, queue, walk, new_us, AT_ONCE)


def carry_on(writer: Writer, count: int) -> int:
    """Go on with one queue, by up to `count` messages; returns how many were examined, 0 if there is nothing to do."""
    row = writer.read_one(_FIRST, ())
    if row is None:
        return 0
    walk = _Walk(*row)
    queue = writer.queues.by_incarnation.get(walk.incarnation)
    if queue is None or queue.generation != walk.generation:
        writer.write(_FORGET, (walk.incarnation,))  # the queue was purged or deleted, so its messages are gone
        return 1
    writer.touch(queue)
    return _step(writer, queue, walk, queue.settings.delay_us, count)


def _step(writer: Writer, queue: LiveQueue, walk: _Walk, new_us: int, count: int) -> int:
    rows = writer.read(_IN_LINE, (walk.generation, walk.line, walk.sequence, count))
    if len(rows) < count:
        rows += writer.read(_NEXT_LINES, (walk.generation, walk.line, count - len(rows)))
    _give(writer, queue, rows, walk, new_us)
    if len(rows) == count:
        sequence, line = rows[-1][:2]
        writer.write(_KEEP, walk._replace(line=line, sequence=sequence))
    else:
        writer.write(_FORGET, (walk.incarnation,))
    return len(rows) or 1


def _give(writer: Writer, queue: LiveQueue, rows: list[Row], walk: _Walk, new_us: int) -> None:
    """Write the ends that the new delay gives to the messages."""
    before = _DECODER.decode(walk.before)
    raised = new_us > before[0]
    origin = writer.origin(SERVER)
    dues: list[Row] = []
    over: list[Row] = []
    hidden: list[LeaseRow] = []
    first: int | None = None
    for sequence, line, sent, was_hidden, due, attempt, granted in rows:
        if sequence > walk.last:
            continue
        visible = not was_hidden or due <= writer.now
        end = (sent if was_hidden is None else granted) + new_us
        if was_hidden is None:
            if not raised or end <= writer.now:
                continue
            hidden.append(LeaseRow(sequence, walk.generation, line, 1, 1, end, 0, 0, sent, None, origin))
        elif attempt or due == end or due - granted not in before:
            continue
        elif visible and end <= writer.now:
            over.append((end, sequence))
            if not was_hidden:
                _note(queue, line)  # its group now waits since another instant
            continue
        else:
            dues.append((end, sequence))
        if not was_hidden:
            _hide(queue, line, returned=was_hidden is not None)
        first = end if first is None else min(first, end)
    if dues:
        writer.write_many(_HIDE, dues)
    if over:
        writer.write_many(_FOLLOW, over)
    if hidden:
        writer.insert_many(INSERT_LEASE, hidden)
    if first is not None:
        writer.queues.lower_due(queue, first)


def _hide(queue: LiveQueue, line: int, *, returned: bool) -> None:
    """Count a visible message as delayed."""
    _note(queue, line)
    queue.returned -= returned
    queue.visible -= 1
    queue.delayed += 1


def _note(queue: LiveQueue, line: int) -> None:
    assert queue.groups is not None
    queue.groups.note(line)
