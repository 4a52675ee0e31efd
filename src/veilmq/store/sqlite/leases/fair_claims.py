"""Receives from standard queues with tenants: one tenant's thousands of messages do not delay another's ten.

Strategy: messages of the default priority with a group belong to that group, a tenant; those without a group are one
tenant together. Each message is taken from the tenant that has visible messages and the fewest in flight; among equals,
from the one whose message has waited longest. A tenant that releases everything at once never has anything in flight,
and would keep the others waiting for ever. So the message that has waited longest of all is passed over at most
`PASSED_OVER_MAX` times in a row: a message behind k others is received after at most (k + 1) * (PASSED_OVER_MAX + 1)
messages. Both choices are first entries of an index, however many tenants there are. More urgent messages go before
all tenants and less urgent ones after, as everywhere. Source: "Amazon SQS fair queues" in the SQS Developer Guide.
"""

from operator import itemgetter
from typing import Final

from veilmq.model.commands import Receive
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.leases.claims import Granting, capped, room
from veilmq.store.sqlite.messages.groups import update_rows
from veilmq.store.sqlite.messages.places import StoredMessage, read_stored

PASSED_OVER_MAX: Final = 7
"""How many messages in a row may go before the one that has waited longest."""
_FIRST: Final = (
    "SELECT * FROM (SELECT held, since, turn, free FROM message_group INDEXED BY message_group_free"
    "  WHERE generation = ?1 AND free IS NOT NULL ORDER BY held, since, turn, free LIMIT 1)"
    " UNION ALL SELECT * FROM (SELECT held, since, turn, free FROM message_group INDEXED BY message_group_busy"
    "  WHERE generation = ?1 AND held > 0 AND free IS NOT NULL ORDER BY since, turn, free LIMIT 1)"
)
"""The tenant with the fewest in flight, and, of the tenants with messages in flight, the one that has waited longest:
one of the two has waited longest of all."""
_READY: Final = (
    "SELECT sent, sequence FROM message INDEXED BY message_line"
    " WHERE generation = ? AND line = ? AND in_line = 1 AND sequence > ? ORDER BY sequence LIMIT 1"
)
_RETURNED: Final = (
    "SELECT line, due, turn, sequence FROM lease INDEXED BY lease_turn"
    " WHERE generation = ? AND hidden = 0 AND line <= ? ORDER BY line, due, turn, sequence LIMIT 1"
)


def receive(writer: Writer, queue: LiveQueue, command: Receive) -> Outcome:
    """Lease up to `count_max` messages. Call after ended leases were returned and group rows updated."""
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    wanted = room(queue, command)
    if wanted <= 0:
        return capped(queue, wait_us)
    if not queue.visible:
        return Received([], wait_us)
    assert queue.groups is not None
    granting = Granting(writer, queue, command)
    alone: StoredMessage | None = None
    looked = False
    while len(granting.granted) < wanted and queue.visible and granting.detours_left > 0 and writer.bytes_left > 0:
        if not looked:
            alone, looked = _alone(writer, queue), True
        candidate = _next(writer, queue, alone)
        if candidate is None:
            break
        if candidate is alone:
            looked = False
        if granting.take(candidate):
            queue.groups.holds(candidate.line, 0 if candidate.leased else candidate.sequence)
            granting.write()
        update_rows(writer, queue)
    if granting.detours_left <= 0 and queue.visible:
        queue.woken += 1
    return Received(granting.granted, wait_us, queue.settings.xml_body, wanted < command.count_max)


def _alone(writer: Writer, queue: LiveQueue) -> StoredMessage | None:
    """The first message without a group."""
    found = writer.read(_RETURNED, (queue.generation, PRIORITY_LINES_MAX)) if queue.returned else []
    for priority in sorted(queue.ready):
        if queue.ready[priority]:
            row = writer.read_one(_READY, (queue.generation, priority, queue.cursors.get(priority, 0)))
            assert row is not None
            sent, sequence = row
            found.append((priority, sent, 0, sequence))
            break
    return _candidate(writer, min(found)[3]) if found else None


def _next(writer: Writer, queue: LiveQueue, alone: StoredMessage | None) -> StoredMessage | None:
    """The message to deliver next."""
    if alone is not None and alone.priority < PRIORITY_DEFAULT:
        return alone
    waiting = writer.read(_FIRST, (queue.generation,))
    if alone is not None and alone.priority == PRIORITY_DEFAULT:
        _, *turn = alone.turn()
        waiting.append((queue.in_flight - queue.grouped, *turn))
    if not waiting:
        return alone
    longest = min(waiting, key=itemgetter(1, 2, 3))
    first = longest if queue.passed_over >= PASSED_OVER_MAX else min(waiting)
    queue.passed_over = 0 if first == longest else queue.passed_over + 1
    sequence = first[3]
    return alone if alone is not None and sequence == alone.sequence else _candidate(writer, sequence)


def _candidate(writer: Writer, sequence: int) -> StoredMessage:
    (found,) = read_stored(writer, (sequence,))
    return found
