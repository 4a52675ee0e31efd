"""Receives from FIFO queues: consecutive messages of free groups.

Strategy: walk the free groups in the order of their turns (groups.py). From each take as many messages as there is room
for, from its first up to one that is in flight or delayed. One statement finds what a receive may take, without the
bodies, since it may skip messages behind one in flight; a second one reads the bodies. A message that has expired, is
damaged or is due for the dead-letter queue is removed, and the next of its group takes its place. Source: "FIFO queue
delivery logic" in the SQS Developer Guide.
"""

from collections.abc import Sequence
from typing import Final

from veilmq.model.commands import Receive
from veilmq.model.errors import AttemptNotRetryable
from veilmq.model.outcomes import Received
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.disk.rows import Row
from veilmq.store.sqlite.leases import attempts
from veilmq.store.sqlite.leases.claims import Granting, room
from veilmq.store.sqlite.messages.places import read_stored

_HIDDEN: Final = "ifnull((SELECT hidden FROM lease WHERE sequence = m.sequence), 0)"
_FREE: Final = (
    f"SELECT m.line, m.sequence, {_HIDDEN}, g.since, g.turn, g.free"
    " FROM message_group g INDEXED BY message_group_free CROSS JOIN message m INDEXED BY message_line"
    " ON m.generation = g.generation AND m.line = g.number AND m.in_line = 1"
    " WHERE g.generation = ? AND g.held = 0 AND g.free IS NOT NULL AND (g.since, g.turn, g.free) > (?, ?, ?)"
    " AND m.sequence <= ?"
    " ORDER BY g.since, g.turn, g.free, g.number, m.sequence LIMIT ?"
)
_REST: Final = (
    f"SELECT m.line, m.sequence, {_HIDDEN} FROM message m INDEXED BY message_line"
    " WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 AND m.sequence > ? AND m.sequence <= ?"
    " ORDER BY m.sequence LIMIT ?"
)
_LOCK: Final = (
    "UPDATE message_group SET free = NULL, since = NULL, turn = NULL, granted = ?, served = ? WHERE number = ?"
)


def receive(writer: Writer, queue: LiveQueue, command: Receive) -> Received | AttemptNotRetryable:
    """Lease up to `count_max` messages; empty if no group is free. Call after ended leases were returned and group rows
    updated.

    Also empty at the cap on messages in flight ("Amazon SQS returns no error messages").
    """
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    if command.attempt_id is not None:
        replayed = attempts.replay(writer, queue, command, command.attempt_id)
        if isinstance(replayed, AttemptNotRetryable):
            return replayed
        if replayed is not None:
            writer.bytes_left -= sum(len(message.body) for message in replayed)
            queue.woken += queue.visible > 0  # a woken receive that took nothing of what is visible: wake another
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
    """The progress of one receive through the groups."""

    def __init__(self, writer: Writer, queue: LiveQueue, command: Receive, wanted: int) -> None:
        self._granting = Granting(writer, queue, command)
        self.granted = self._granting.granted
        self._writer = writer
        self._queue = queue
        self._wanted = wanted
        self._last = writer.mark.sequence
        """Messages that arrive during the claim (the queue may be its own dead-letter queue) are ignored."""
        self._taken: set[int] = set()
        self._ended: int | None = None
        """The group from which no more can be taken."""

    def walk(self) -> None:
        """Take messages, group by group."""
        after: Sequence[int] = (0, 0, 0)
        while room := self._room():
            rows = self._writer.read(_FREE, (self._queue.generation, *after, self._last, room))
            self._take(rows)
            if len(rows) < room:
                break
            line, sequence, _, *after = rows[-1]
            self._finish(line, sequence)
        if self._granting.detours_left <= 0 and self._queue.visible:
            self._queue.woken += 1

    def _room(self) -> int:
        ends = self._granting.detours_left <= 0 or self._writer.bytes_left <= 0
        return 0 if ends else self._wanted - len(self.granted)

    def _finish(self, number: int, sequence: int) -> None:
        """The rows ended within a group and there is room left: take what follows in it."""
        while number != self._ended and (room := self._room()):
            rows = self._writer.read(_REST, (self._queue.generation, number, sequence, self._last, room))
            self._take(rows)
            if len(rows) < room:
                return
            sequence = rows[-1][1]

    def _take(self, rows: Sequence[Row]) -> None:
        """Take the messages (line, sequence, whether hidden) that need not be removed; a hidden one ends its group."""
        found = []
        for number, sequence, hidden, *_ in rows:
            if hidden:
                self._ended = number
            elif number != self._ended:
                found.append(sequence)
        for candidate in read_stored(self._writer, found):
            if self._granting.take(candidate):
                self._taken.add(candidate.line)
            if self._granting.detours_left <= 0 or self._writer.bytes_left <= 0:
                return

    def lock(self) -> None:
        """Write the leases. Groups that delivered messages are no longer free."""
        if not self.granted:
            return
        writer, queue = self._writer, self._queue
        self._granting.write()
        served = self._granting.given_back
        writer.write_many(_LOCK, [(writer.now, served, number) for number in self._taken])
        queue.grouped += len(self.granted)
