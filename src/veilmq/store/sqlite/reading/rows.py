"""What the admin room reads: rows of a reading connection, as they are stored.

Strategy: everything here is a select of one read transaction (`Readers.lend`). Pages seek by index and never count;
what goes through the history does so row by row, newest or oldest first, and leaves the unpacking to its caller.
"""

from collections.abc import Iterator
from heapq import merge
from operator import itemgetter
from typing import Any, Final, NamedTuple

import apsw

from veilmq.store.sqlite.batch.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.batch.young import Young, replay

Connection = apsw.Connection
PRIORITIES: Final = range(1, LINES_MAX + 1)

_COLUMNS: Final = (
    "m.sequence, m.id, m.priority, m.sent, m.expires, m.sender, m.extras, length(m.body),"
    " l.attempt, l.rotation, l.hidden, l.due, l.granted, l.first"
)
_READY: Final = (
    f"SELECT {_COLUMNS} FROM message m LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.sequence > ? AND l.sequence IS NULL ORDER BY m.sequence LIMIT ?"
)
_RETURNED: Final = (
    f"SELECT {_COLUMNS} FROM lease l INDEXED BY lease_returned JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 0 AND l.priority = ? AND l.sequence > ? ORDER BY l.sequence LIMIT ?"
)
_HIDDEN: Final = (
    f"SELECT {_COLUMNS} FROM lease l INDEXED BY lease_hidden JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 1 AND (l.due, l.sequence) > (?, ?) ORDER BY l.due, l.sequence LIMIT ?"
)
_LIVE: Final = (
    "SELECT q.incarnation, m.sequence, m.id, m.priority, m.sent, m.expires, m.group_id, m.type, length(m.body),"
    " l.attempt, l.rotation, l.hidden, l.due, l.granted, l.first, d.at"
    " FROM message m JOIN queue q ON q.generation = m.generation AND q.deleted IS NULL"
    " LEFT JOIN lease l ON l.sequence = m.sequence LEFT JOIN quarantine d ON d.sequence = m.sequence"
    " ORDER BY m.sequence"
)
_OLDEST_IN_LINE: Final = (
    "SELECT sent FROM message INDEXED BY message_line WHERE generation = ? AND line = ? ORDER BY sequence LIMIT 1"
)
_OF_GROUPS: Final = (
    f"SELECT {_COLUMNS} FROM ("
    " SELECT sequence FROM message r INDEXED BY message_line WHERE generation = ?1 AND line > ?2 AND sequence > ?3"
    " AND NOT EXISTS (SELECT 1 FROM lease WHERE sequence = r.sequence)"
    " UNION ALL SELECT sequence FROM lease INDEXED BY lease_returned"
    " WHERE generation = ?1 AND hidden = 0 AND priority > ?2 AND sequence > ?3 ORDER BY sequence LIMIT ?4) s"
    " CROSS JOIN message m ON m.sequence = s.sequence LEFT JOIN lease l ON l.sequence = s.sequence"
)
_ANY_GROUP: Final = "SELECT 1 FROM message_group INDEXED BY message_group_name WHERE generation = ? LIMIT 1"
_OLDEST_OF_GROUPS: Final = (
    "SELECT sent FROM message WHERE sequence = (SELECT min(s) FROM ("
    " SELECT min(free) s FROM message_group INDEXED BY message_group_oldest WHERE generation = ?1 AND free IS NOT NULL"
    " UNION ALL SELECT min(sequence) FROM lease INDEXED BY lease_returned"
    " WHERE generation = ?1 AND hidden = 0 AND priority > ?2"
    " UNION ALL SELECT min(sequence) FROM lease INDEXED BY lease_hidden"
    " WHERE generation = ?1 AND hidden = 1 AND attempt > 0 AND priority > ?2))"
)
_OLDEST_RETURNED: Final = (
    "SELECT m.sent FROM lease l INDEXED BY lease_returned JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 0 AND l.priority = ? ORDER BY l.sequence LIMIT 1"
)


class Held(NamedTuple):
    """A message that a queue holds, without its body. The last six are of its lease, if it has a row there."""

    sequence: int
    id: bytes
    priority: int
    sent: int
    own_expiry: int | None
    sender: str
    extras: bytes | None
    body_bytes: int
    attempt: int | None
    rotation: int | None
    hidden: int | None
    due: int | None
    granted: int | None
    first: int | None


def visible(connection: Connection, queue: LiveQueue, behind: int, limit: int) -> list[Held]:
    """Up to `limit` visible messages by sequence, of greater ones than `behind`."""
    young = replay(connection, queue.generation).values()
    rows = [_held(each) for each in young if not each.leased and each.contents.sequence > behind]
    for line in list(queue.ready):
        start = max(behind, queue.cursors.get(line, 0))
        rows += connection.execute(_READY, (queue.generation, line, start, limit)).fetchall()
    for priority in PRIORITIES:
        rows += connection.execute(_RETURNED, (queue.generation, priority, behind, limit)).fetchall()
    if queue.groups is not None:
        rows += connection.execute(_OF_GROUPS, (queue.generation, LINES_MAX, behind, limit)).fetchall()
    rows.sort()
    return [Held(*row) for row in rows[:limit]]


def hidden(connection: Connection, queue: LiveQueue, due: int, sequence: int, limit: int) -> list[Held]:
    """Up to `limit` delayed or leased messages by due instant, behind the one of that due instant and sequence."""
    rows: list[tuple[Any, ...]] = connection.execute(_HIDDEN, (queue.generation, due, sequence, limit)).fetchall()
    young = replay(connection, queue.generation).values()
    rows += [_held(each) for each in young if each.leased and (each.due, each.contents.sequence) > (due, sequence)]
    return sorted((Held(*row) for row in rows), key=lambda held: (held.due, held.sequence))[:limit]


def _held(young: Young) -> tuple[Any, ...]:
    """A young message as the selects give others."""
    found = young.contents
    lease = (1, 0, 1, young.due, young.granted, young.granted) if young.leased else (None,) * 6
    message = (found.sequence, found.id, found.priority, found.sent, found.own_expiry, found.sender, found.packed)
    return (*message, len(found.body), *lease)


def oldest_young(connection: Connection) -> dict[int, int]:
    """When the oldest young message of each queue was sent, by generation: `oldest_sent` does not see them."""
    return {young.contents.generation: young.contents.sent for young in reversed(replay(connection).values())}


def oldest_sent(connection: Connection, generation: int, lines: list[int]) -> int | None:
    """When the oldest message of a queue was sent that is visible or in flight; None without one.

    A few index seeks; where there are groups, a look at each group and each message in flight.
    """
    found = [row for line in lines for row in connection.execute(_OLDEST_IN_LINE, (generation, line))]
    found += [row for each in PRIORITIES for row in connection.execute(_OLDEST_RETURNED, (generation, each))]
    if connection.execute(_ANY_GROUP, (generation,)).fetchone():
        found += connection.execute(_OLDEST_OF_GROUPS, (generation, LINES_MAX)).fetchall()
    return min((sent for (sent,) in found), default=None)


def head(connection: Connection) -> tuple[int, int, str]:
    """Clock's mark, next offset, epoch in hexadecimal."""
    rows: Any = connection.execute("SELECT clock, offset, lower(hex(epoch)) FROM mark, secret")
    ((clock, offset, epoch),) = rows
    return clock, offset, epoch


def live_queues(connection: Connection) -> list[tuple[Any, ...]]:
    """(incarnation, account, region, name, created, modified, packed settings) of every queue that exists."""
    return connection.execute(
        "SELECT incarnation, account, region, name, created, modified, settings FROM queue WHERE deleted IS NULL"
        " ORDER BY incarnation"
    ).fetchall()


def live_messages(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """Every message that a queue holds, by sequence: (incarnation, sequence, id, priority, sent, own expiry, group,
    type, body's bytes, attempt, rotation, hidden, due, granted, first, instant of its quarantine)."""
    held: Iterator[tuple[Any, ...]] = connection.cursor().execute(_LIVE)
    return merge(held, _live_young(connection), key=itemgetter(1))


def _live_young(connection: Connection) -> Iterator[tuple[Any, ...]]:
    incarnations = dict(connection.execute("SELECT generation, incarnation FROM queue WHERE deleted IS NULL"))
    for young in replay(connection).values():
        found = young.contents
        incarnation = incarnations.get(found.generation)
        if incarnation is None:
            continue
        lease = (1, 0, 1, young.due, young.granted, young.granted) if young.leased else (None,) * 6
        message = (found.sequence, found.id, found.priority, found.sent, found.own_expiry, found.group, found.type)
        yield (incarnation, *message, len(found.body), *lease, None)


def incarnations(connection: Connection, account: str) -> list[tuple[int, str]]:
    """(incarnation, name) of the account's queues that the history can name, deleted ones too."""
    rows = connection.execute("SELECT incarnation, name FROM queue WHERE account = ?", (account,))
    return [(incarnation, name) for incarnation, name in rows]


def incarnations_named(connection: Connection, *key: str) -> list[int]:
    """All queues, deleted ones too, of a name, or of an account, region and name."""
    where = "name = ?" if len(key) == 1 else "account = ? AND region = ? AND name = ?"
    return [found for (found,) in connection.execute(f"SELECT incarnation FROM queue WHERE {where}", key)]


def newest_first(connection: Connection) -> Iterator[tuple[int, int, bytes]]:
    """(first offset, count, packed events) of every commit."""
    rows: Iterator[Any] = connection.cursor().execute("SELECT offset, count, events FROM history ORDER BY offset DESC")
    return rows


def oldest_first(connection: Connection, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(first offset, packed events) of every commit with an event in [start, stop)."""
    rows: Iterator[Any] = connection.cursor().execute(
        "SELECT offset, events FROM history WHERE offset >="
        " coalesce((SELECT max(offset) FROM history WHERE offset <= ?), 0) AND offset < ? ORDER BY offset",
        (start, stop),
    )
    return rows


def packed_bytes(connection: Connection, start: int, stop: int) -> int:
    """About how many bytes the events of these offsets take: whole commits, but for the last."""
    found: Any = connection.execute(
        "SELECT (SELECT bytes_before FROM history WHERE offset < ?2 ORDER BY offset DESC LIMIT 1)"
        " - (SELECT bytes_before FROM history WHERE offset <= ?1 ORDER BY offset DESC LIMIT 1)", (start, stop)
    ).fetchone()  # fmt: skip
    return found[0] or 0


def queue_names(connection: Connection, incarnation: int) -> tuple[Any, ...] | None:
    """(account, region, name) of a queue, a deleted one too."""
    return connection.execute(
        "SELECT account, region, name FROM queue WHERE incarnation = ?", (incarnation,)
    ).fetchone()


def origin_names(connection: Connection, number: int) -> tuple[Any, ...] | None:
    """(protocol, principal, client) of an origin."""
    return connection.execute("SELECT protocol, principal, client FROM origin WHERE id = ?", (number,)).fetchone()
