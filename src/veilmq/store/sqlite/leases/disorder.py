"""Reorders neighbouring messages on purpose, as clients see it at queues spread over many servers.

Strategy: sometimes a message further back in the line is claimed first. Those before it become returned messages that
nobody received, like messages whose delay has ended, and go out next. So no message is more than the window out of its
place, and counts, histories and restarts need no special case. The random choice follows from the sequences. Standard
queues only; groups keep their order. Source: document 002, the run 1 3 2 5 4 7 6 of a plain queue.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from veilmq.model.commands import SERVER
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import INSERT_LEASE, Writer

if TYPE_CHECKING:
    from veilmq.store.sqlite.leases.claims import Candidate


def disordered(
    writer: Writer, queue: LiveQueue, candidates: "Sequence[Candidate]", count: int, window: int
) -> "list[Candidate]":
    """The first `count` candidates in the order of delivery. The queue must be touched before."""
    rest = list(candidates)
    chosen: list[Candidate] = []
    while rest and len(chosen) < count:
        head = rest[0]
        place = 0
        if not head.returned:
            reach = 1
            while reach <= window and reach < len(rest) and _in_line(rest[reach], head):
                reach += 1
            place = crc32(head.sequence.to_bytes(8)) % reach
        for passed_over in rest[:place]:
            _step_aside(writer, queue, passed_over)
        chosen.append(rest.pop(place))
    return chosen


def _in_line(candidate: "Candidate", head: "Candidate") -> bool:
    return not candidate.returned and candidate.line == head.line


def _step_aside(writer: Writer, queue: LiveQueue, candidate: "Candidate") -> None:
    """Move the message out of its line; it stays visible and nobody has received it."""
    line, origin = candidate.line, writer.origin(SERVER)
    assert line is not None
    sent = candidate.sent
    writer.write(
        INSERT_LEASE,
        (candidate.sequence, queue.generation, candidate.priority, line, 0, sent, 0, 0, sent, None, origin, 0),
    )
    queue.cursors[line] = candidate.sequence
    queue.ready[line] -= 1
    queue.returned += 1
    candidate.returned = 1
    candidate.due = sent
