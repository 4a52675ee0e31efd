"""Groups of FIFO queues that stand still: visible messages that wait behind one that is in flight or delayed.

Strategy: only a hidden message can hold others back, so the hidden messages of the queue are looked at, up to a bound,
and not its groups, which may be far more. The first hidden one of a group is its head; every visible message behind it
is blocked, and none before it. A group has been blocked since it was last received from, or since the first message
that waits became visible, whichever is later: one that moves is never blocked for longer than one message takes.
"""

from typing import Any, Final, NamedTuple

import apsw

from veilmq.model.messages.states import Blocked, BlockedGroup, HeldLease
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import Execute, rows_of
from veilmq.store.sqlite.messages.places import numbers

COUNTED_MAX: Final = 100_000
"""So many blocked messages of a queue are counted."""
_LOOKED_AT: Final = (
    "SELECT sequence, line FROM lease INDEXED BY lease_hidden"
    " WHERE generation = ?1 AND hidden = 1 AND due > ?2 LIMIT ?3"
)
_HEADS: Final = f"SELECT line, min(sequence) AS head, sum(count(*)) OVER () AS seen FROM ({_LOOKED_AT}) GROUP BY line"
_WAITS: Final = "NOT ifnull(l.hidden AND l.due > ?2, 0)"
_FIRST_BEHIND: Final = (
    "SELECT ifnull(l.due, m.sent) FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = g.generation AND m.line = h.line AND m.in_line = 1 AND m.sequence > h.head"
    f" AND {_WAITS} ORDER BY m.sequence LIMIT 1"
)
_GROUPS: Final = (
    f"SELECT max(g.granted, ({_FIRST_BEHIND})) AS since, h.head, h.line, g.name, h.seen FROM ({_HEADS}) h"
    f" LEFT JOIN message_group g ON g.number = h.line AND h.line > {PRIORITY_LINES_MAX} ORDER BY since, h.head"
)
"""Those that are not blocked have no `since`: they are among the rows only to say how many leases were looked at."""
_COUNTED: Final = (
    "SELECT line, count(*) FROM (SELECT m.line FROM carray(?1) c CROSS JOIN message h ON h.sequence = c.value"
    " CROSS JOIN message m INDEXED BY message_line ON m.generation = h.generation AND m.line = h.line AND m.in_line = 1"
    f" AND m.sequence > h.sequence LEFT JOIN lease l ON l.sequence = m.sequence WHERE {_WAITS} LIMIT ?3)"
    " GROUP BY line"
)
_LEASES: Final = (
    "SELECT l.due, m.sequence, m.id, l.attempt, l.rotation, l.granted, l.first, m.group_id, m.type, l.origin, l.ending"
    " FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value CROSS JOIN lease l ON l.sequence = c.value"
)


class Head(NamedTuple):
    """The message that holds back a group."""

    since: int
    """Since when the group has been blocked."""
    sequence: int
    line: int
    group: str


def heads(execute: Execute, queue: LiveQueue, now: int, leases_max: int) -> tuple[list[Head], bool]:
    """The blocked groups of a queue, those first that have been blocked for longest, and whether these are all: at most
    so many hidden messages are looked at."""
    if not queue.settings.fifo or not queue.visible or not (queue.in_flight or queue.delayed):
        return [], True
    rows: list[Any] = execute(_GROUPS, (queue.generation, now, leases_max)).fetchall()
    found = [Head(*row[:4]) for row in rows if row[0] is not None]
    return found, not rows or rows[0][4] < leases_max


def blocked_of(connection: apsw.Connection, queue: LiveQueue, now: int, leases_max: int, shown_max: int) -> Blocked:
    """What is blocked in a queue, with up to `shown_max` groups."""
    found, is_all = heads(connection.execute, queue, now, leases_max)
    if not found:
        return Blocked(0, 0, [], is_all)
    bound = (numbers([each.sequence for each in found]), now, COUNTED_MAX)
    counted: dict[int, int] = dict(rows_of(connection, _COUNTED, bound))
    messages = sum(counted.values())
    holding = leases(connection, [each.sequence for each in found[:shown_max]])
    shown = [
        BlockedGroup(each.group, each.since, max(1, counted.get(each.line, 0)), *holding[each.sequence])
        for each in found[:shown_max]
        if each.sequence in holding
    ]
    return Blocked(messages, len(found), shown, is_all and messages < COUNTED_MAX)


def leases(connection: apsw.Connection, sequences: list[int]) -> dict[int, tuple[HeldLease, int]]:
    """The leases or delays of hidden messages, and what it means if they end (LeaseEnding)."""
    rows = rows_of(connection, _LEASES, (numbers(sequences),)) if sequences else []
    return {row[1]: (HeldLease(*row[:-1]), row[-1]) for row in rows}
