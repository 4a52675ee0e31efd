"""Peeks into queues with groups: which messages a receive would take, in its order.

Strategy: the rows of the groups are read as committed, and what has come due since and nobody has looked at yet is
reckoned in, as a receive would return it first. Of each group no more is read than the peek shows; dead messages are
passed over, as a receive expires them on its way.
"""

from collections import Counter
from typing import Any, Final

import apsw

from veilmq.model.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.claims import RETURNS_MAX
from veilmq.store.sqlite.places import numbers
from veilmq.store.sqlite.queues import LINES_MAX, LiveQueue

_DUE: Final = (
    "SELECT l.priority, l.sequence, l.attempt > 0, m.priority FROM lease l INDEXED BY lease_hidden"
    " JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 1 AND l.due <= ? ORDER BY l.due LIMIT ?"
)
_GROUP: Final = "SELECT number, held, free, cursor FROM message_group WHERE number = ?"
_FREE: Final = (
    "SELECT number, held, free, cursor FROM message_group INDEXED BY message_group_free"
    " WHERE generation = ? AND free IS NOT NULL ORDER BY held, free LIMIT ?"
)
_HEAD: Final = (
    "SELECT sequence FROM message INDEXED BY message_line WHERE generation = ? AND line = ? ORDER BY sequence LIMIT 1"
)
_IN_GROUP: Final = (
    "SELECT m.sequence, l.hidden = 1 AND l.due > ?, coalesce(m.expires, m.sent + ?) <= ?"
    " FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? ORDER BY m.sequence LIMIT ?"
)
_ALIVE: Final = "AND coalesce(m.expires, m.sent + ?) > ?"
_READY: Final = (
    "SELECT m.sequence FROM message m INDEXED BY message_line"
    f" WHERE m.generation = ? AND m.line = ? AND m.sequence > ? {_ALIVE} ORDER BY m.sequence LIMIT ?"
)
_RETURNED: Final = (
    "SELECT l.priority, l.sequence FROM lease l INDEXED BY lease_returned JOIN message m ON m.sequence = l.sequence"
    f" WHERE l.generation = ? AND l.hidden = 0 AND l.priority BETWEEN ? AND ? {_ALIVE}"
    " ORDER BY l.priority, l.sequence LIMIT ?"
)
_ALIVE_AMONG: Final = (
    f"SELECT m.sequence FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value WHERE 1 {_ALIVE}"
)
DEAD_MAX: Final = 256
"""Dead messages in a FIFO group, and FIFO groups of nothing else, that one peek passes over."""
TENANTS_MORE: Final = 32
"""Tenants with nothing but dead messages that one peek passes over."""


def next_in_groups(connection: apsw.Connection, queue: LiveQueue, now: int, count: int) -> list[int]:
    """Sequences of up to `count` messages."""
    due = _rows(connection, _DUE, (queue.generation, now, RETURNS_MAX))
    if queue.settings.fifo:
        return _fifo(connection, queue, now, count, due)
    return _fair(connection, queue, now, count, due)


def _fifo(connection: apsw.Connection, queue: LiveQueue, now: int, count: int, due: list[Any]) -> list[int]:
    returning = Counter(number for number, _, in_flight, _ in due if in_flight)
    free = _rows(connection, _FREE, (queue.generation, count + DEAD_MAX))
    heads = [(head, number) for number, held, head, _ in free if held == returning[number]]
    for number in {number for number, *_ in due} - {row[0] for row in free}:
        for _, held, _, _ in _rows(connection, _GROUP, (number,)):
            if held == returning[number]:
                heads += [(row[0], number) for row in _rows(connection, _HEAD, (queue.generation, number))]
    found: list[int] = []
    for _, number in sorted(heads):
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
    returning = Counter(max(number, LINES_MAX) for number, _, in_flight, _ in due if in_flight)
    known = {row[0]: row for row in _rows(connection, _FREE, (generation, count + TENANTS_MORE + len(returning)))}
    for number in {number for number, *_ in due if number > LINES_MAX} - known.keys():
        known.update((row[0], row) for row in _rows(connection, _GROUP, (number,)))
    tenants: dict[int, tuple[int, list[int]]] = {}
    for number, held, _, cursor in known.values():
        mine = [row[0] for row in _rows(connection, _READY, (generation, number, cursor, *alive, count))]
        mine += [row[1] for row in _rows(connection, _RETURNED, (generation, number, number, *alive, count))]
        mine += [sequence for line, sequence, *_ in due if line == number and sequence in living]
        tenants[number] = (held - returning[number], sorted(mine))
    alone = _rows(connection, _RETURNED, (generation, 1, LINES_MAX, *alive, count))
    for priority in sorted(queue.ready):
        cursor = queue.cursors.get(priority, 0)
        ready = _rows(connection, _READY, (generation, priority, cursor, *alive, count))
        alone += [(priority, sequence) for (sequence,) in ready]
    alone += [(priority, sequence) for line, sequence, _, priority in due if line <= LINES_MAX and sequence in living]
    in_flight = queue.in_flight - queue.grouped - returning[LINES_MAX]
    return _by_turns(tenants, sorted(set(alone)), in_flight, count)


def _by_turns(
    tenants: dict[int, tuple[int, list[int]]], alone: list[tuple[int, int]], in_flight: int, count: int
) -> list[int]:
    """What `fair_claims` would take, one after the other. `alone`: (priority, sequence) of those of no group."""
    found = [sequence for priority, sequence in alone if priority < PRIORITY_DEFAULT]
    in_flight += len(found)
    usual = [sequence for priority, sequence in alone if priority == PRIORITY_DEFAULT]
    waiting = {**tenants, 0: (in_flight, usual)}
    while len(found) < count:
        turns = [(held, line[0], number) for number, (held, line) in waiting.items() if line]
        if not turns:
            break
        held, sequence, number = min(turns)
        waiting[number] = (held + 1, waiting[number][1][1:])
        found.append(sequence)
    found += [sequence for priority, sequence in alone if priority > PRIORITY_DEFAULT]
    return found[:count]


def _rows(connection: apsw.Connection, statement: str, values: tuple[Any, ...]) -> list[Any]:
    return connection.execute(statement, values).fetchall()
