"""Peeks into queues with groups: which messages a receive would take, in its order.

Strategy: the rows of the groups are read as committed. Leases and delays that have ended since, but that no command has
applied yet, are taken into account, as a receive would apply them first. No more of a group is read than the peek
shows. Expired messages are skipped, as a receive expires them. One exception: if an expired message that nothing has
removed yet has waited longest of all tenants' messages, the order may differ from a receive's.
"""

from collections import Counter
from operator import itemgetter
from typing import Any, Final

import apsw

from veilmq.model.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.batch.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.leases.claims import RETURNS_MAX
from veilmq.store.sqlite.leases.fair_claims import PASSED_OVER_MAX
from veilmq.store.sqlite.messages.places import numbers

_DUE: Final = (
    "SELECT l.priority, l.sequence, l.attempt > 0, m.priority, l.due, l.turn FROM lease l INDEXED BY lease_hidden"
    " JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 1 AND l.due <= ? ORDER BY l.due LIMIT ?"
)
_FREE: Final = (
    "SELECT since, turn, free, number FROM message_group INDEXED BY message_group_free"
    " WHERE generation = ? AND held = 0 AND free IS NOT NULL ORDER BY since, turn, free LIMIT ?"
)
_HEAD: Final = (
    "SELECT g.granted, g.served, ifnull(l.due, m.sent), ifnull(l.turn, 0), m.sequence, l.hidden = 1 AND l.due > ?"
    " FROM message_group g CROSS JOIN message m INDEXED BY message_line ON m.generation = g.generation"
    " AND m.line = g.number LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE g.number = ? ORDER BY m.sequence LIMIT 1"
)
_IN_GROUP: Final = (
    "SELECT m.sequence, l.hidden = 1 AND l.due > ?, coalesce(m.expires, m.sent + ?) <= ?"
    " FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? ORDER BY m.sequence LIMIT ?"
)
_TENANT: Final = "SELECT number, held, cursor FROM message_group WHERE number = ?"
_TENANTS: Final = (
    "SELECT number, held, cursor FROM message_group INDEXED BY message_group_free"
    " WHERE generation = ? AND free IS NOT NULL ORDER BY held, since, turn, free LIMIT ?"
)
_BUSY_TENANTS: Final = (
    "SELECT number, held, cursor FROM message_group INDEXED BY message_group_busy"
    " WHERE generation = ? AND held > 0 AND free IS NOT NULL ORDER BY since, turn, free LIMIT ?"
)
_ALIVE: Final = "AND coalesce(m.expires, m.sent + ?) > ?"
_READY: Final = (
    "SELECT m.sent, 0, m.sequence FROM message m INDEXED BY message_line"
    f" WHERE m.generation = ? AND m.line = ? AND m.sequence > ? {_ALIVE} ORDER BY m.sequence LIMIT ?"
)
_RETURNED: Final = (
    "SELECT l.priority, l.due, l.turn, l.sequence FROM lease l INDEXED BY lease_turn"
    " JOIN message m ON m.sequence = l.sequence"
    f" WHERE l.generation = ? AND l.hidden = 0 AND l.priority BETWEEN ? AND ? {_ALIVE}"
    " ORDER BY l.priority, l.due, l.turn, l.sequence LIMIT ?"
)
_ALIVE_AMONG: Final = (
    f"SELECT m.sequence FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value WHERE 1 {_ALIVE}"
)
DEAD_MAX: Final = 256
"""How many expired messages of a FIFO group, and FIFO groups with only expired messages, one peek skips."""
TENANTS_MORE: Final = 32
"""How many tenants with only expired messages one peek skips."""

Turn = tuple[int, int, int]
"""Instant since which the message is visible, `lease.turn`, sequence."""


def next_in_groups(connection: apsw.Connection, queue: LiveQueue, now: int, count: int) -> list[int]:
    """Sequences of up to `count` messages."""
    due = _rows(connection, _DUE, (queue.generation, now, RETURNS_MAX))
    if queue.settings.fifo:
        return _fifo(connection, queue, now, count, due)
    return _fair(connection, queue, now, count, due)


def _fifo(connection: apsw.Connection, queue: LiveQueue, now: int, count: int, due: list[Any]) -> list[int]:
    free = _rows(connection, _FREE, (queue.generation, count + DEAD_MAX))
    waiting: dict[int, Turn] = {number: (since, turn, head) for since, turn, head, number in free}
    for number in {number for number, *_ in due} - waiting.keys():
        for granted, served, since, turn, head, is_hidden in _rows(connection, _HEAD, (now, number)):
            if not is_hidden:
                waiting[number] = (*max((granted, served), (since, turn)), head)
    found: list[int] = []
    for number in sorted(waiting, key=waiting.__getitem__):
        if len(found) >= count:
            break
        values = (now, queue.settings.retention_us, now, queue.generation, number, count + DEAD_MAX)
        for sequence, hidden, dead in _rows(connection, _IN_GROUP, values):
            if hidden:
                break
            if not dead:
                found.append(sequence)
    return found[:count]


def _fair(connection: apsw.Connection, queue: LiveQueue, now: int, count: int, due: list[Any]) -> list[int]:
    generation = queue.generation
    alive = (queue.settings.retention_us, now)
    living: set[int] = set()
    if due:
        among = (numbers([row[1] for row in due]), *alive)
        living = {sequence for (sequence,) in _rows(connection, _ALIVE_AMONG, among)}
    back = [
        (line, priority, (since, turn, sequence))
        for line, sequence, _, priority, since, turn in due
        if sequence in living
    ]
    returning = Counter(max(number, LINES_MAX) for number, _, in_flight, *_ in due if in_flight)
    tenants_max = count + TENANTS_MORE + len(returning)
    known = {
        row[0]: row
        for statement in (_TENANTS, _BUSY_TENANTS)
        for row in _rows(connection, statement, (generation, tenants_max))
    }
    for number in {number for number, *_ in due if number > LINES_MAX} - known.keys():
        known.update((row[0], row) for row in _rows(connection, _TENANT, (number,)))
    tenants: dict[int, tuple[int, list[Turn]]] = {}
    for number, held, cursor in known.values():
        mine: list[Turn] = _rows(connection, _READY, (generation, number, cursor, *alive, count))
        mine += [row[1:] for row in _rows(connection, _RETURNED, (generation, number, number, *alive, count))]
        mine += [turn for line, _, turn in back if line == number]
        tenants[number] = (held - returning[number], sorted(mine))
    alone: list[tuple[int, Turn]] = [
        (priority, (since, turn, sequence))
        for priority, since, turn, sequence in _rows(connection, _RETURNED, (generation, 1, LINES_MAX, *alive, count))
    ]
    for priority in sorted(queue.ready):
        cursor = queue.cursors.get(priority, 0)
        ready = _rows(connection, _READY, (generation, priority, cursor, *alive, count))
        alone += [(priority, turn) for turn in ready]
    alone += [(priority, turn) for line, priority, turn in back if line <= LINES_MAX]
    in_flight = queue.in_flight - queue.grouped - returning[LINES_MAX]
    return _by_turns(tenants, sorted(set(alone)), in_flight, queue.passed_over, count)


def _by_turns(
    tenants: dict[int, tuple[int, list[Turn]]],
    alone: list[tuple[int, Turn]],
    in_flight: int,
    passed_over: int,
    count: int,
) -> list[int]:
    """What `fair_claims` would take, one by one. alone: the messages without a group, with their priorities."""
    found = [turn for priority, turn in alone if priority < PRIORITY_DEFAULT]
    in_flight += len(found)
    usual = [turn for priority, turn in alone if priority == PRIORITY_DEFAULT]
    waiting = {**tenants, 0: (in_flight, usual)}
    while len(found) < count:
        turns = [(held, line[0], number) for number, (held, line) in waiting.items() if line]
        if not turns:
            break
        longest = min(turns, key=itemgetter(1))
        first = longest if passed_over >= PASSED_OVER_MAX else min(turns)
        passed_over = 0 if first is longest else passed_over + 1
        held, turn, number = first
        waiting[number] = (held + 1, waiting[number][1][1:])
        found.append(turn)
    found += [turn for priority, turn in alone if priority > PRIORITY_DEFAULT]
    return [sequence for _, _, sequence in found[:count]]


def _rows(connection: apsw.Connection, statement: str, values: tuple[Any, ...]) -> list[Any]:
    return connection.execute(statement, values).fetchall()
