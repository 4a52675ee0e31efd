"""Peeks: look at visible messages on a reading connection, as committed, in the order in which they would be received.

Strategy: the cursors come from memory and may be a batch ahead of or behind the snapshot. So a message of a line that
has a lease row counts as in flight or returned, whatever the cursor says, and the other two selects cover it.

With groups, the rows of the groups are read as committed. Leases and delays that have ended since, but that no command
has applied yet, are taken into account, as a receive would apply them first. No more of a group is read than the peek
shows. Expired messages are skipped, as a receive expires them. One exception: if an expired message that nothing has
removed yet has waited longest of all tenants' messages, the order may differ from a receive's.
"""

from collections import Counter
from operator import itemgetter
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import Peek
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import Instant
from veilmq.model.messages import Delivery
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.batch.memtable import replay
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue, Queues
from veilmq.store.sqlite.disk.rows import MESSAGE_COLUMNS, Unflushed, intact, rows_of
from veilmq.store.sqlite.leases.claims import RETURNS_MAX
from veilmq.store.sqlite.leases.group_claims import PASSED_OVER_MAX
from veilmq.store.sqlite.messages import STORED, STORED_COLUMNS, StoredMessage, numbers

_READY: Final = (
    f"SELECT {MESSAGE_COLUMNS} FROM message m LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 AND m.sequence > ? AND l.sequence IS NULL"
    " AND coalesce(m.expires, m.sent + ?) > ? ORDER BY m.sequence LIMIT ?"
)
_LEASED: Final = (
    f"SELECT {STORED_COLUMNS}"
    " FROM lease l INDEXED BY {index} JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND {where} AND coalesce(m.expires, m.sent + ?) > ?"
    " ORDER BY l.line, l.due, l.turn, l.sequence LIMIT ?"
)
_RETURNED: Final = _LEASED.format(index="lease_turn", where="l.hidden = 0")
_DUE: Final = _LEASED.format(
    index="lease_hidden",
    # The ended leases that a claim would return first, and of those the messages that it would then take.
    where="l.hidden = 1 AND l.sequence IN (SELECT sequence FROM lease INDEXED BY lease_hidden"
    " WHERE generation = ? AND hidden = 1 AND due <= ? ORDER BY due LIMIT ?)",
)


def peek(connection: apsw.Connection, queues: Queues, command: Peek, now: Instant, expiry_now: Instant) -> Outcome:
    """Up to `count_max` visible messages, in the order in which they would be received. expiry_now: the expiry
    clock."""
    queue = queues.by_key.get(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    generation, retention_us, count = queue.generation, queue.settings.retention_us, command.count_max
    unflushed = replay(connection, generation).values()
    found = [_stored(each) for each in unflushed if _is_shown(each, retention_us, now, expiry_now)]
    if queue.groups is not None and not found:  # while it had unflushed messages, it had no groups
        return _peek_groups(connection, queue, command, now, expiry_now)
    rows: list[Any] = []
    alive = (retention_us, expiry_now)
    for priority in sorted(queue.ready):
        cursor = queue.cursors.get(priority, 0)
        rows += rows_of(connection, _READY, (generation, priority, cursor, *alive, count))
    rows += rows_of(connection, _RETURNED, (generation, *alive, count))
    rows += rows_of(connection, _DUE, (generation, generation, now, RETURNS_MAX, *alive, count))
    found += [StoredMessage(*row) for row in rows]
    found.sort(key=StoredMessage.turn)
    return Received(_intact(found, retention_us)[:count], xml_body=queue.settings.xml_body)


def _is_shown(unflushed: Unflushed, retention_us: int, now: Instant, expiry_now: Instant) -> bool:
    return unflushed.expires(retention_us) > expiry_now and (not unflushed.leased or unflushed.due <= now)


def _stored(unflushed: Unflushed) -> StoredMessage:
    """As it would be in the tables."""
    row: tuple[Any, ...] = msgspec.structs.astuple(unflushed.row)
    if unflushed.leased:
        row += (1, 0, True, unflushed.due, unflushed.granted)
    return StoredMessage(*row)


def _peek_groups(
    connection: apsw.Connection, queue: LiveQueue, command: Peek, now: Instant, expiry_now: Instant
) -> Outcome:
    sequences = next_in_groups(connection, queue, now, expiry_now, command.count_max)
    rows = rows_of(connection, STORED, (numbers(sequences),)) if sequences else []
    return Received(
        _intact([StoredMessage(*row) for row in rows], queue.settings.retention_us), xml_body=queue.settings.xml_body
    )


def _intact(messages: list[StoredMessage], retention_us: int) -> list[Delivery]:
    """The undamaged messages; a claim will quarantine the others."""
    read = ((message, intact(message, message.failure)) for message in messages)
    return [message.delivery(extras, retention_us) for message, extras in read if extras is not None]


_DUE_TURNS: Final = (
    "SELECT l.line, l.sequence, l.attempt > 0, m.priority, l.due, l.turn FROM lease l INDEXED BY lease_hidden"
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
    " AND m.line = g.number AND m.in_line = 1 LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE g.number = ? ORDER BY m.sequence LIMIT 1"
)
_IN_GROUP: Final = (
    "SELECT m.sequence, l.hidden = 1 AND l.due > ?, coalesce(m.expires, m.sent + ?) <= ?"
    " FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 ORDER BY m.sequence LIMIT ?"
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
_READY_TURNS: Final = (
    "SELECT m.sent, 0, m.sequence FROM message m INDEXED BY message_line"
    f" WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 AND m.sequence > ? {_ALIVE} ORDER BY m.sequence LIMIT ?"
)
_RETURNED_TURNS: Final = (
    "SELECT l.line, l.due, l.turn, l.sequence FROM lease l INDEXED BY lease_turn"
    " JOIN message m ON m.sequence = l.sequence"
    f" WHERE l.generation = ? AND l.hidden = 0 AND l.line BETWEEN ? AND ? {_ALIVE}"
    " ORDER BY l.line, l.due, l.turn, l.sequence LIMIT ?"
)
_ALIVE_AMONG: Final = (
    f"SELECT m.sequence FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value WHERE 1 {_ALIVE}"
)
DEAD_MAX: Final = 256
"""How many expired messages of a FIFO group, and FIFO groups with only expired messages, one peek skips."""
TENANTS_MORE: Final = 32
"""How many tenants with only expired messages one peek skips."""

Wait = tuple[int, int, int]
"""Instant since which the message is visible, `lease.turn`, sequence."""


def next_in_groups(connection: apsw.Connection, queue: LiveQueue, now: int, expiry_now: int, count: int) -> list[int]:
    """Sequences of up to `count` messages."""
    due = rows_of(connection, _DUE_TURNS, (queue.generation, now, RETURNS_MAX))
    if queue.settings.fifo:
        return _fifo(connection, queue, (now, expiry_now), count, due)
    return _fair(connection, queue, expiry_now, count, due)


def _fifo(
    connection: apsw.Connection, queue: LiveQueue, clocks: tuple[int, int], count: int, due: list[Any]
) -> list[int]:
    now, expiry_now = clocks
    free = rows_of(connection, _FREE, (queue.generation, count + DEAD_MAX))
    waiting: dict[int, Wait] = {number: (since, turn, head) for since, turn, head, number in free}
    for number in {number for number, *_ in due} - waiting.keys():
        for granted, served, since, turn, head, is_hidden in rows_of(connection, _HEAD, (now, number)):
            if not is_hidden:
                waiting[number] = (*max((granted, served), (since, turn)), head)
    found: list[int] = []
    for number in sorted(waiting, key=waiting.__getitem__):
        if len(found) >= count:
            break
        values = (now, queue.settings.retention_us, expiry_now, queue.generation, number, count + DEAD_MAX)
        for sequence, hidden, dead in rows_of(connection, _IN_GROUP, values):
            if hidden:
                break
            if not dead:
                found.append(sequence)
    return found[:count]


def _fair(connection: apsw.Connection, queue: LiveQueue, expiry_now: int, count: int, due: list[Any]) -> list[int]:
    generation = queue.generation
    alive = (queue.settings.retention_us, expiry_now)
    living: set[int] = set()
    if due:
        among = (numbers([row[1] for row in due]), *alive)
        living = {sequence for (sequence,) in rows_of(connection, _ALIVE_AMONG, among)}
    back = [
        (line, priority, (since, turn, sequence))
        for line, sequence, _, priority, since, turn in due
        if sequence in living
    ]
    returning = Counter(max(number, PRIORITY_LINES_MAX) for number, _, in_flight, *_ in due if in_flight)
    tenants_max = count + TENANTS_MORE + len(returning)
    known = {
        row[0]: row
        for statement in (_TENANTS, _BUSY_TENANTS)
        for row in rows_of(connection, statement, (generation, tenants_max))
    }
    for number in {number for number, *_ in due if number > PRIORITY_LINES_MAX} - known.keys():
        known.update((row[0], row) for row in rows_of(connection, _TENANT, (number,)))
    tenants: dict[int, tuple[int, list[Wait]]] = {}
    for number, held, cursor in known.values():
        mine: list[Wait] = rows_of(connection, _READY_TURNS, (generation, number, cursor, *alive, count))
        mine += [row[1:] for row in rows_of(connection, _RETURNED_TURNS, (generation, number, number, *alive, count))]
        mine += [turn for line, _, turn in back if line == number]
        tenants[number] = (held - returning[number], sorted(mine))
    alone: list[tuple[int, Wait]] = [
        (priority, (since, turn, sequence))
        for priority, since, turn, sequence in rows_of(
            connection, _RETURNED_TURNS, (generation, 1, PRIORITY_LINES_MAX, *alive, count)
        )
    ]
    for priority in sorted(queue.ready):
        cursor = queue.cursors.get(priority, 0)
        ready = rows_of(connection, _READY_TURNS, (generation, priority, cursor, *alive, count))
        alone += [(priority, turn) for turn in ready]
    alone += [(priority, turn) for line, priority, turn in back if line <= PRIORITY_LINES_MAX]
    in_flight = queue.in_flight - queue.grouped - returning[PRIORITY_LINES_MAX]
    return _by_turns(tenants, sorted(set(alone)), in_flight, queue.passed_over, count)


def _by_turns(
    tenants: dict[int, tuple[int, list[Wait]]],
    alone: list[tuple[int, Wait]],
    in_flight: int,
    passed_over: int,
    count: int,
) -> list[int]:
    """What `receive_fair` would take, one by one. alone: the messages without a group, with their priorities."""
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
