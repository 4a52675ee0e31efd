"""Peeks: look at visible messages on a reading connection, as committed.

Strategy: the cursors come from memory and may be a batch ahead of or behind the snapshot. So a message of a line that
has a lease row counts as in flight or returned, whatever the cursor says, and the other two selects cover it.
"""

from typing import Any, Final

import apsw

from veilmq.model.commands import Peek
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import Instant
from veilmq.model.message import Delivery
from veilmq.model.outcomes import Outcome, Received
from veilmq.store.sqlite.batch.extras import intact, with_failure
from veilmq.store.sqlite.batch.queues import LiveQueue, Queues
from veilmq.store.sqlite.batch.unflushed import Unflushed, replay
from veilmq.store.sqlite.leases.claims import RETURNS_MAX
from veilmq.store.sqlite.messages.places import numbers
from veilmq.store.sqlite.reading.group_peeks import next_in_groups

_COLUMNS: Final = "m.sequence, m.id, m.sent, m.expires, m.priority, m.sender, m.extras, m.md5, m.body"
_READY: Final = (
    f"SELECT {_COLUMNS}, 0, NULL, m.sent, 0, NULL FROM message m LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.sequence > ? AND l.sequence IS NULL"
    " AND coalesce(m.expires, m.sent + ?) > ? ORDER BY m.sequence LIMIT ?"
)
_LEASED: Final = (
    f"SELECT {_COLUMNS}, l.attempt, l.first, l.due, l.turn, l.failure"
    " FROM lease l INDEXED BY {index} JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND {where} AND coalesce(m.expires, m.sent + ?) > ?"
    " ORDER BY l.priority, l.due, l.turn, l.sequence LIMIT ?"
)
_RETURNED: Final = _LEASED.format(index="lease_turn", where="l.hidden = 0")
_DUE: Final = _LEASED.format(
    index="lease_hidden",
    # The ended leases that a claim would return first, and of those the messages that it would then take.
    where="l.hidden = 1 AND l.sequence IN (SELECT sequence FROM lease INDEXED BY lease_hidden"
    " WHERE generation = ? AND hidden = 1 AND due <= ? ORDER BY due LIMIT ?)",
)

_NAMED: Final = (
    f"SELECT {_COLUMNS}, coalesce(l.attempt, 0), l.first, 0, 0, l.failure"
    " FROM carray(?) c CROSS JOIN message m ON m.sequence = c.value LEFT JOIN lease l ON l.sequence = m.sequence"
)


def peek(connection: apsw.Connection, queues: Queues, command: Peek, now: Instant) -> Outcome:
    """Up to `count_max` visible messages, in the order in which they would be received."""
    queue = queues.by_key.get(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    generation, retention_us, count = queue.generation, queue.settings.retention_us, command.count_max
    unflushed = replay(connection, generation).values()
    rows = [_row(each) for each in unflushed if _is_shown(each, retention_us, now)]
    if queue.groups is not None and not rows:  # while it had unflushed messages, it had no groups
        return _peek_groups(connection, queue, command, now)
    for priority in sorted(queue.ready):
        cursor = queue.cursors.get(priority, 0)
        rows += connection.execute(_READY, (generation, priority, cursor, retention_us, now, count)).fetchall()
    rows += connection.execute(_RETURNED, (generation, retention_us, now, count)).fetchall()
    rows += connection.execute(_DUE, (generation, generation, now, RETURNS_MAX, retention_us, now, count)).fetchall()
    rows.sort(key=_turn)
    found = _intact(rows, retention_us)[:count]
    return Received(found, xml_body=queue.settings.xml_body)


def _turn(row: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """As `claims.Candidate.turn`."""
    return row[4], row[11], row[12], row[0]


def _is_shown(unflushed: Unflushed, retention_us: int, now: Instant) -> bool:
    return unflushed.expires(retention_us) > now and (not unflushed.leased or unflushed.due <= now)


def _row(unflushed: Unflushed) -> tuple[Any, ...]:
    """As the selects return it."""
    found, first = unflushed.contents, unflushed.granted if unflushed.leased else None
    return (
        found.sequence, found.id, found.sent, found.own_expiry, found.priority, found.sender, found.packed, found.md5,
        found.body, int(unflushed.leased), first, unflushed.due if unflushed.leased else found.sent, 0, None,
    )  # fmt: skip


def _peek_groups(connection: apsw.Connection, queue: LiveQueue, command: Peek, now: Instant) -> Outcome:
    sequences = next_in_groups(connection, queue, now, command.count_max)
    rows = connection.execute(_NAMED, (numbers(sequences),)).fetchall() if sequences else []
    return Received(_intact(rows, queue.settings.retention_us), xml_body=queue.settings.xml_body)


def _intact(rows: list[tuple[Any, ...]], retention_us: int) -> list[Delivery]:
    """The undamaged messages; a claim will quarantine the others."""
    found = []
    for sequence, message, sent, own_expiry, priority, sender, packed, md5, body, attempt, first, *_, failure in rows:
        extras = intact(body, md5, packed)
        if extras is not None:
            if failure is not None:
                extras = with_failure(extras, failure)
            expires = sent + retention_us if own_expiry is None else own_expiry
            text = body.decode()
            found.append(
                Delivery(message, sequence, text, md5, extras, sender, priority, sent, expires, attempt, first)
            )
    return found
