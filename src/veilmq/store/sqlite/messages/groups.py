"""Groups: what a claim may take from each, on FIFO queues and, as tenants, on standard ones; and which of them are
blocked.

Strategy: the messages of a group have a line of their own, whose number is the group's and greater than any priority. A
group with messages has one row: the message that a claim would take (`free`), and the group's position among those that
wait (`since`, `turn`). So one index shows which group is next, for three groups and for 200,000. A step that moves a
message of a group only marks the group as changed (`Groups`, in memory). `update_rows` updates the rows once for all
steps, before each claim and at the end of the batch.

FIFO: `free` is the first message of the group, if it is visible. A message in flight or delayed holds back all that are
behind it, and none before it. A group waits since its first message became visible, or since it was last served,
whichever is later. So a group that was served goes behind those that waited then, and none is passed over for ever.

Standard: `free` is the tenant's visible message that has waited longest, whatever is in flight. `held` counts the
tenant's messages in flight: the tenant with the fewest goes first. The line has a cursor here, like all lines of a
standard queue. A message that left the line without being claimed (it is delayed) is beside it (`in_line` is 0); the
group's row remains as long as the group has messages in its line or beside it.

Blocked groups are found from the hidden messages of a FIFO queue, up to a bound, and not from its groups, which may be
far more: only a hidden message can hold others back. The first hidden one of a group is its head; every visible message
behind it is blocked, and none before it. A group has been blocked since it was last received from, or since the first
message that waits became visible, whichever is later: one that moves is never blocked for longer than one message
takes.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import apsw

from veilmq.model.messages.states import Blocked, BlockedGroup, HeldLease
from veilmq.model.settings.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, Groups, LiveQueue
from veilmq.store.sqlite.disk.rows import HELD_LEASE_COLUMNS, Execute, Row, rows_of
from veilmq.store.sqlite.messages import flush, numbers

_FIND: Final = (
    "SELECT g.name, g.number, g.free IS NULL OR g.since >= ? FROM carray(?) c CROSS JOIN message_group g"
    " ON g.generation = ? AND g.name = c.value"
)
_INSERT: Final = (
    "INSERT INTO message_group (number, generation, name, held, free, granted, cursor, served, since, turn)"
    " VALUES (?, ?, ?, 0, ?, 0, 0, 0, ?, ?)"
)
FIRST_OF_FIFO: Final = (
    "SELECT f.sequence, max(f.since, message_group.granted), CASE WHEN f.since > message_group.granted THEN f.turn"
    " WHEN f.since < message_group.granted THEN message_group.served ELSE max(f.turn, message_group.served) END"
    " FROM (SELECT m.sequence, ifnull(l.due, m.sent) AS since, ifnull(l.turn, 0) AS turn, ifnull(l.hidden, 0) AS hidden"
    "  FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence"
    "  WHERE m.generation = message_group.generation AND m.line = message_group.number AND m.in_line = 1"
    "  ORDER BY m.sequence LIMIT 1) f"
    " WHERE NOT f.hidden"
)
"""What a FIFO group's `free`, `since` and `turn` must be; no row: NULL."""
FIRST_OF_TENANT: Final = (
    "SELECT sequence, since, turn FROM"
    " (SELECT * FROM (SELECT sequence, sent AS since, 0 AS turn FROM message INDEXED BY message_line"
    "   WHERE generation = message_group.generation AND line = message_group.number AND in_line = 1"
    "   AND sequence > {cursor} ORDER BY sequence LIMIT 1)"
    "  UNION ALL SELECT * FROM (SELECT sequence, due, turn FROM lease INDEXED BY lease_turn"
    "   WHERE generation = message_group.generation AND hidden = 0 AND line = message_group.number"
    "   ORDER BY due, turn, sequence LIMIT 1))"
    " ORDER BY since, turn, sequence LIMIT 1"
)
"""The same on a standard queue; `cursor` is the last sequence claimed from the line."""
_UPDATE_FIFO: Final = (
    f"UPDATE message_group SET (free, since, turn) = ({FIRST_OF_FIFO}) WHERE number = ? RETURNING free, EXISTS"
    " (SELECT 1 FROM message"
    "  WHERE generation = message_group.generation AND line = message_group.number AND in_line = 1)"
)
_UPDATE_TENANT: Final = (
    "UPDATE message_group SET held = held + ?2, cursor = max(cursor, ?3), (free, since, turn) ="
    f" ({FIRST_OF_TENANT.format(cursor='max(message_group.cursor, ?3)')}) WHERE number = ?1 RETURNING free, held > 0"
)
_REMOVE_EMPTY: Final = (
    "DELETE FROM message_group WHERE number = ?1"
    " AND NOT EXISTS (SELECT 1 FROM message WHERE generation = ?2 AND line = ?1 AND in_line = 1)"
    " AND NOT EXISTS (SELECT 1 FROM message WHERE generation = ?2 AND line = ?1 AND in_line = 0 AND line > 16)"
)


_OLDEST_GROUPS: Final = (
    "(SELECT generation, number, free FROM message_group INDEXED BY message_group_oldest"
    " WHERE generation = ?1 AND free IS NOT NULL ORDER BY free LIMIT ?3)"
)
_ENDS: Final = "m.sequence, coalesce(m.expires, m.sent + ?2) AS ends"
FIRST_OF_GROUPS: Final = (
    f"SELECT {_ENDS} FROM {_OLDEST_GROUPS} g CROSS JOIN message m ON m.sequence = g.free"
    f" UNION ALL SELECT * FROM (SELECT {_ENDS} FROM {_OLDEST_GROUPS} g"
    "  CROSS JOIN message m INDEXED BY message_line ON m.generation = g.generation AND m.line = g.number"
    "  AND m.in_line = 1 AND m.sequence > g.free LIMIT ?3)"
)
"""The first messages of the groups whose first messages are oldest, some that follow in the first of these groups, and
when they expire."""


class Joining:
    """Finds and creates the groups that the messages of one set of sends join; `flush` writes new ones."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[tuple[int, str], int] = {}
        self._new: list[Row] = []

    def find(self, queue: LiveQueue, names: Iterable[str]) -> None:
        """Look up groups in one statement."""
        wanted = tuple({name for name in names if (queue.generation, name) not in self._known})
        if not wanted:
            return
        for name, number, may_be_first in self._writer.read(_FIND, (self._writer.now, texts(wanted), queue.generation)):
            self._known[queue.generation, name] = number
            if may_be_first and not queue.settings.fifo:
                groups_of(self._writer, queue).note(number)

    def join(self, queue: LiveQueue, name: str, sequence: int, *, hidden: bool) -> int:
        """The number of the group that the message joins at its end."""
        number = self._known.get((queue.generation, name))
        if number is None and not queue.settings.fifo:  # for FIFO queues all groups were looked up before
            self.find(queue, (name,))
            number = self._known.get((queue.generation, name))
        if number is None:
            number = self._known[queue.generation, name] = PRIORITY_LINES_MAX + sequence
            groups = groups_of(self._writer, queue)
            first = (None, None, None) if hidden else (sequence, self._writer.now, 0)
            self._new.append((number, queue.generation, name, *first))
            if queue.settings.fifo:
                queue.woken += not hidden
            elif hidden:
                groups.note(number)  # a visible message may follow in the same batch
        return number

    def flush(self) -> None:
        """Write the rows of new groups."""
        if self._new:
            self._writer.insert_many(_INSERT, self._new)
            self._new = []


def join(writer: Writer, queue: LiveQueue, name: str, sequence: int, *, aside: bool) -> int:
    """The number of the group that one visible message joins at its end. aside: the message is not in the line."""
    joining = Joining(writer)
    joining.find(queue, (name,))
    number = joining.join(queue, name, sequence, hidden=aside)
    joining.flush()
    if aside:
        groups_of(writer, queue).note(number)
    return number


def groups_of(writer: Writer, queue: LiveQueue) -> Groups:
    """The queue's groups; a standard queue gets them with its first message of a group."""
    if queue.groups is None:
        flush(writer)
        queue.groups = Groups(queue, writer.queues.stale_groups)
        writer.undo(lambda: _forget(writer, queue))
    return queue.groups


def _forget(writer: Writer, queue: LiveQueue) -> None:
    writer.queues.stale_groups.pop(queue.incarnation, None)
    queue.groups = None


def is_grouped(queue: LiveQueue, priority: int) -> bool:
    """Whether a message with a group is in its group's line; on a standard queue, only at the default priority.

    All messages of another priority are in one line, whatever their groups.
    """
    return priority == PRIORITY_DEFAULT or queue.settings.fifo


def update_rows(writer: Writer, queue: LiveQueue) -> None:
    """Update the rows of changed groups; on FIFO, a group that may be claimed wakes one receiver."""
    groups = queue.groups
    if groups is None or not groups.changes:
        return
    fifo = queue.settings.fifo
    bare: list[tuple[int, int]] = []
    writer.wrote = True
    for number, (held, cursor) in groups.take().items():
        if fifo:
            row = writer.read_one(_UPDATE_FIFO, (number,))
        else:
            row = writer.read_one(_UPDATE_TENANT, (number, held, cursor))
        assert row is not None, f"group {number} has no row"
        free, stays = row
        if free is not None:
            queue.woken += fifo
        elif not stays:
            bare.append((number, queue.generation))
    if bare:
        writer.write_many(_REMOVE_EMPTY, bare)


def update_all_rows(writer: Writer) -> None:
    """The same for every queue, before the batch ends."""
    for queue in list(writer.queues.stale_groups.values()):
        update_rows(writer, queue)


def texts(values: tuple[str, ...]) -> Any:
    """Texts as one bound value, for `carray(?)`."""
    return apsw.carray(values)


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
    f"SELECT {HELD_LEASE_COLUMNS}"
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
        BlockedGroup(each.group, each.since, max(1, counted.get(each.line, 0)), holding[each.sequence])
        for each in found[:shown_max]
        if each.sequence in holding
    ]
    return Blocked(messages, len(found), shown, is_all and messages < COUNTED_MAX)


def leases(connection: apsw.Connection, sequences: list[int]) -> dict[int, HeldLease]:
    """The leases or delays of hidden messages, by sequence."""
    rows = rows_of(connection, _LEASES, (numbers(sequences),)) if sequences else []
    return {row[1]: HeldLease(*row) for row in rows}
