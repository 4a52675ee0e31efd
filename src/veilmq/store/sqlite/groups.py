"""Groups: what a claim may take of each, on FIFO queues and, as tenants, on standard ones.

Strategy: the messages of a group stand in a line of their own: `message.line` is the group's number, which is greater
than any priority, and `lease.priority` too. A group that is not empty has one row: how many of its messages are in
flight (`held`), and which of them a claim would take (`free`), so that one index shows whom to serve next, whether the
queue has three groups or 200,000. Every step that moves a message of a group only notes the group (`Groups`, in
memory); `settle` brings the rows up to date once for all steps, before anybody claims and at the end of the batch.

FIFO: `free` is the first message of the group; there is none while one of its messages is in flight, or while the first
is delayed. Standard: `free` is the first visible message of the tenant, whoever holds others. There the line has a
cursor, as all lines of a standard queue have; a message that left the line without being claimed (it is delayed) has
the negative number as its line, so that the group's row stays as long as it has messages.
"""

from collections.abc import Iterable
from typing import Any, Final

import apsw

from veilmq.model.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.inserts import Row
from veilmq.store.sqlite.promotion import promote
from veilmq.store.sqlite.queues import LINES_MAX, Groups, LiveQueue
from veilmq.store.sqlite.writer import Writer

_FIND: Final = (
    "SELECT g.name, g.number, g.free FROM carray(?) c CROSS JOIN message_group g"
    " ON g.generation = ? AND g.name = c.value"
)
_INSERT: Final = "INSERT INTO message_group VALUES (?, ?, ?, 0, ?, 0, 0)"
_SETTLE_FIFO: Final = (
    "UPDATE message_group SET held = held + ?1, free = CASE WHEN held + ?1 > 0 THEN NULL ELSE"
    " (SELECT iif(l.hidden, NULL, m.sequence) FROM message m INDEXED BY message_line"
    " LEFT JOIN lease l ON l.sequence = m.sequence WHERE m.generation = ?2 AND m.line = ?3 ORDER BY m.sequence LIMIT 1)"
    " END WHERE number = ?3 RETURNING held, free"
)
_NONE: Final = (1 << 63) - 1
_SETTLE_FAIR: Final = (
    "UPDATE message_group SET held = held + ?1, cursor = max(cursor, ?4), free = nullif(min("
    " ifnull((SELECT sequence FROM message INDEXED BY message_line"
    "  WHERE generation = ?2 AND line = ?3 AND sequence > max(cursor, ?4) ORDER BY sequence LIMIT 1), ?5),"
    " ifnull((SELECT sequence FROM lease INDEXED BY lease_returned"
    "  WHERE generation = ?2 AND hidden = 0 AND priority = ?3 ORDER BY sequence LIMIT 1), ?5)), ?5)"
    " WHERE number = ?3 RETURNING held, free"
)
_REMOVE_EMPTY: Final = (
    "DELETE FROM message_group WHERE number = ?1 AND held = 0 AND free IS NULL"
    " AND NOT EXISTS (SELECT 1 FROM message WHERE generation = ?2 AND line = ?1)"
    " AND NOT EXISTS (SELECT 1 FROM message WHERE generation = ?2 AND line = -?1)"
)


FIRST_OF_GROUPS: Final = (
    "SELECT m.sequence, coalesce(m.expires, m.sent + ?2) AS ends"
    " FROM (SELECT generation, number, free FROM message_group INDEXED BY message_group_free"
    "  WHERE generation = ?1 AND free IS NOT NULL ORDER BY held, free LIMIT ?3) g"
    " CROSS JOIN message m INDEXED BY message_line ON m.generation = g.generation AND m.line = g.number"
    " AND m.sequence >= g.free LIMIT ?3"
)
"""The messages that come first in the groups with the least in flight, and when they expire."""


class Joining:
    """Finds and makes the groups that the messages of one set of sends join; `flush` writes the new ones."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[tuple[int, str], int] = {}
        self._new: list[Row] = []

    def find(self, queue: LiveQueue, names: Iterable[str]) -> None:
        """Look up groups in one go."""
        wanted = tuple({name for name in names if (queue.generation, name) not in self._known})
        if not wanted:
            return
        for name, number, free in self._writer.read(_FIND, (texts(wanted), queue.generation)):
            self._known[queue.generation, name] = number
            if free is None and not queue.settings.fifo:
                groups_of(self._writer, queue).note(number)

    def join(self, queue: LiveQueue, name: str, sequence: int, *, hidden: bool) -> int:
        """The number of the group that the message joins at its end."""
        number = self._known.get((queue.generation, name))
        if number is None and not queue.settings.fifo:  # of FIFO queues all groups were looked up before
            self.find(queue, (name,))
            number = self._known.get((queue.generation, name))
        if number is None:
            number = self._known[queue.generation, name] = LINES_MAX + sequence
            groups = groups_of(self._writer, queue)
            self._new.append((number, queue.generation, name, None if hidden else sequence))
            if queue.settings.fifo:
                queue.woken += not hidden
            elif hidden:
                groups.note(number)  # one that is visible may follow in the same batch
        return number

    def flush(self) -> None:
        """Write the rows of the groups that are new."""
        if self._new:
            self._writer.insert_many(_INSERT, self._new)
            self._new = []


def join(writer: Writer, queue: LiveQueue, name: str, sequence: int) -> int:
    """The number of the group that one visible message joins at its end."""
    joining = Joining(writer)
    joining.find(queue, (name,))
    number = joining.join(queue, name, sequence, hidden=False)
    joining.flush()
    return number


def groups_of(writer: Writer, queue: LiveQueue) -> Groups:
    """The queue's groups; a standard queue gets them with its first message of a group."""
    if queue.groups is None:
        promote(writer)
        queue.groups = Groups(queue, writer.queues.unsettled)
        writer.undo(lambda: _forget(writer, queue))
    return queue.groups


def _forget(writer: Writer, queue: LiveQueue) -> None:
    writer.queues.unsettled.pop(queue.incarnation, None)
    queue.groups = None


def is_grouped(queue: LiveQueue, priority: int) -> bool:
    """Whether a message of a group stands in its group's line there; on a standard queue, only at the usual priority.

    Of the messages with another priority, all of the same one are one line, whatever group they name.
    """
    return priority == PRIORITY_DEFAULT or queue.settings.fifo


def settle(writer: Writer, queue: LiveQueue) -> None:
    """Bring the rows of the groups that changed up to date; on FIFO, a group that may be claimed wakes one receiver."""
    groups = queue.groups
    if groups is None or not groups.changes:
        return
    fifo = queue.settings.fifo
    generation = queue.generation
    bare: list[tuple[int, int]] = []
    writer.wrote = True
    for number, (held, cursor) in groups.take().items():
        if fifo:
            row = writer.read_one(_SETTLE_FIFO, (held, generation, number))
        else:
            row = writer.read_one(_SETTLE_FAIR, (held, generation, number, cursor, _NONE))
        assert row is not None, f"group {number} has no row"
        if row[1] is not None:
            queue.woken += fifo
        elif not row[0]:
            bare.append((number, generation))
    if bare:
        writer.write_many(_REMOVE_EMPTY, bare)


def settle_all(writer: Writer) -> None:
    """The same for every queue, before the batch ends."""
    for queue in list(writer.queues.unsettled.values()):
        settle(writer, queue)


def texts(values: tuple[str, ...]) -> Any:
    """Texts as one value to bind, for `carray(?)`."""
    return apsw.carray(values)
