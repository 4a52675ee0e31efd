"""Receives from standard queues with tenants: nobody's thousands of messages stand before somebody else's ten.

Strategy: messages of the usual priority that name a group are the group's, a tenant; those that name none are one
tenant together. Each message is taken of the tenant that has visible ones and the fewest in flight, then of the one
whose message has waited longest: the first entry of an index, however many tenants there are. More urgent messages go
before all tenants, less urgent ones after, as everywhere. Source: "Amazon SQS fair queues" in the SQS Developer Guide.
"""

from typing import Final

from veilmq.model.commands import Receive
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.claims import Candidate, Granting, candidates, capped, room
from veilmq.store.sqlite.groups import settle
from veilmq.store.sqlite.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.writer import Writer

_FIRST: Final = (
    "SELECT held, since, turn, free FROM message_group INDEXED BY message_group_free"
    " WHERE generation = ? AND free IS NOT NULL ORDER BY held, since, turn, free LIMIT 1"
)
_READY: Final = (
    "SELECT sent, sequence FROM message INDEXED BY message_line"
    " WHERE generation = ? AND line = ? AND sequence > ? ORDER BY sequence LIMIT 1"
)
_RETURNED: Final = (
    "SELECT priority, due, turn, sequence FROM lease INDEXED BY lease_turn"
    " WHERE generation = ? AND hidden = 0 AND priority <= ? ORDER BY priority, due, turn, sequence LIMIT 1"
)


def receive(writer: Writer, queue: LiveQueue, command: Receive) -> Outcome:
    """Lease up to `count_max` messages. What is due has returned, and groups are settled."""
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    wanted = room(queue, command)
    if wanted <= 0:
        return capped(queue, wait_us)
    if not queue.visible:
        return Received([], wait_us)
    assert queue.groups is not None
    granting = Granting(writer, queue, command)
    alone: Candidate | None = None
    looked = False
    while len(granting.granted) < wanted and queue.visible and granting.detours_left > 0:
        if not looked:
            alone, looked = _alone(writer, queue), True
        candidate = _next(writer, queue, alone)
        if candidate is None:
            break
        if candidate is alone:
            looked = False
        if granting.take(candidate):
            queue.groups.holds(candidate.line, 0 if candidate.returned else candidate.sequence)
            granting.write()
        settle(writer, queue)
    if granting.detours_left <= 0 and queue.visible:
        queue.woken += 1
    return Received(granting.granted, wait_us, queue.settings.xml_body, wanted < command.count_max)


def _alone(writer: Writer, queue: LiveQueue) -> Candidate | None:
    """The first message that is of no group."""
    found = writer.read(_RETURNED, (queue.generation, LINES_MAX)) if queue.returned else []
    for priority in sorted(queue.ready):
        if queue.ready[priority]:
            row = writer.read_one(_READY, (queue.generation, priority, queue.cursors.get(priority, 0)))
            assert row is not None
            sent, sequence = row
            found.append((priority, sent, 0, sequence))
            break
    return _candidate(writer, min(found)[3]) if found else None


def _next(writer: Writer, queue: LiveQueue, alone: Candidate | None) -> Candidate | None:
    """Whose turn it is."""
    if alone is not None and alone.priority < PRIORITY_DEFAULT:
        return alone
    first = writer.read_one(_FIRST, (queue.generation,))
    if first is None:
        return alone
    if alone is not None and alone.priority == PRIORITY_DEFAULT:
        _, *turn = alone.turn()
        if (queue.in_flight - queue.grouped, *turn) < first:
            return alone
    return _candidate(writer, first[3])


def _candidate(writer: Writer, sequence: int) -> Candidate:
    (found,) = candidates(writer, (sequence,))
    return found
