"""Neighbours that change places, on purpose: what clients meet at queues that many servers share.

Strategy: sometimes a message further back in the line is claimed first, and those before it become returned messages
that nobody received, just as a delay that ends makes them. They go out next, so that nothing is more than the window
out of its place, and counts, histories and restarts know nothing special. What is drawn follows from the sequences.
Standard queues alone; groups keep their order. Source: document 002, the run 1 3 2 5 4 7 6 of a plain queue.
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
    """The first `count` in the order in which they go out; the queue has been touched."""
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
    """Out of its line, visible, received by nobody."""
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
