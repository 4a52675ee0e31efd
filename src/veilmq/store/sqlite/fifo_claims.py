"""Receives from FIFO queues: consecutive messages of free groups.

Strategy: free groups are walked by their first message, and of each as many messages are taken as there is room for,
until one is delayed; so one statement finds all that a receive takes. A group that gave messages is locked until all of
them have left or come back. A message that is dead, damaged or due for the dead-letter queue goes on the way, and the
next of its group takes its place. Source: "FIFO queue delivery logic" in the SQS Developer Guide.
"""

from typing import Any, Final

from veilmq.model.commands import Receive
from veilmq.model.outcomes import Received
from veilmq.store.sqlite import attempts
from veilmq.store.sqlite.claims import Candidate, Granting, room
from veilmq.store.sqlite.queues import LiveQueue
from veilmq.store.sqlite.writer import Writer

_COLUMNS: Final = (
    "m.sequence, m.id, m.sent, m.expires, m.line, m.priority, m.group_id, m.type, m.sender, m.extras, m.md5, m.body,"
    " coalesce(l.attempt, 0), coalesce(l.rotation, 0), l.sequence IS NOT NULL, coalesce(l.due, 0), l.first,"
    " coalesce(l.hidden, 0)"
)
_FREE: Final = (
    f"SELECT {_COLUMNS}, g.free"
    " FROM message_group g INDEXED BY message_group_free CROSS JOIN message m INDEXED BY message_line"
    " ON m.generation = g.generation AND m.line = g.number LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE g.generation = ? AND g.held = 0 AND g.free > ? ORDER BY g.free, g.number, m.sequence LIMIT ?"
)
_REST: Final = (
    f"SELECT {_COLUMNS} FROM message m INDEXED BY message_line LEFT JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.sequence > ? ORDER BY m.sequence LIMIT ?"
)
_LOCK: Final = "UPDATE message_group SET held = ?, free = NULL, granted = ? WHERE number = ?"


def receive(writer: Writer, queue: LiveQueue, command: Receive) -> Received:
    """Lease up to `count_max` messages; empty if no group is free. What is due has returned, and groups are settled.

    At the cap on messages in flight it is empty too ("Amazon SQS returns no error messages").
    """
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    if command.attempt_id is not None:
        replayed = attempts.replay(writer, queue, command, command.attempt_id)
        if replayed is not None:
            queue.woken += queue.visible > 0  # it was woken, and took nothing of what is visible
            return Received(replayed, wait_us, queue.settings.xml_body)
    wanted = room(queue, command)
    if not queue.visible or wanted <= 0:
        return Received([], wait_us, capped=wanted <= 0)
    claim = _Claim(writer, queue, command, wanted)
    claim.walk()
    claim.lock()
    if command.attempt_id is not None and claim.granted:
        attempts.remember(writer, queue, command.attempt_id, claim.granted)
    return Received(claim.granted, wait_us, queue.settings.xml_body, wanted < command.count_max)


class _Claim:
    """One receive on its way through the groups."""

    def __init__(self, writer: Writer, queue: LiveQueue, command: Receive, wanted: int) -> None:
        self._granting = Granting(writer, queue, command)
        self.granted = self._granting.granted
        self._writer = writer
        self._queue = queue
        self._wanted = wanted
        self._taken: dict[int, int] = {}
        self._ended: int | None = None
        """The group of which no more can be taken."""

    def walk(self) -> None:
        """Take what there is, group by group."""
        after = 0
        while room := self._room():
            rows = self._writer.read(_FREE, (self._queue.generation, after, room))
            for row in rows:
                if self._look(row[:-1]):
                    break
            else:
                if len(rows) < room:
                    return
                after = rows[-1][-1]
                self._finish(rows[-1][4], rows[-1][0])
        if self._granting.detours_left <= 0 and self._queue.visible:
            self._queue.woken += 1

    def _room(self) -> int:
        return self._wanted - len(self.granted) if self._granting.detours_left > 0 else 0

    def _finish(self, number: int, sequence: int) -> None:
        """The rows were cut amid a group, and some of them went elsewhere: take what follows in it."""
        while number != self._ended and (room := self._room()):
            rows = self._writer.read(_REST, (self._queue.generation, number, sequence, room))
            for row in rows:
                if self._look(row):
                    return
            if len(rows) < room:
                return
            sequence = rows[-1][0]

    def _look(self, row: tuple[Any, ...]) -> bool:
        """Take the message, unless it goes elsewhere; one that is delayed ends its group. True: look no further."""
        number, hidden = row[4], row[17]
        if number == self._ended:
            return False
        if hidden:
            self._ended = number
            return False
        if self._granting.take(Candidate(*row[:17])):
            self._taken[number] = self._taken.get(number, 0) + 1
            return False
        return self._granting.detours_left <= 0

    def lock(self) -> None:
        """Write the leases, and lock the groups that gave messages."""
        if not self.granted:
            return
        writer, queue = self._writer, self._queue
        self._granting.write()
        writer.write_many(_LOCK, [(count, writer.now, number) for number, count in self._taken.items()])
        queue.grouped += len(self.granted)
