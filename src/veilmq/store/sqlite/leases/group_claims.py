"""Receives from queues with groups. FIFO queues: consecutive messages of free groups, and repeats of a receive that
return them again. Standard queues with tenants: one tenant's thousands of messages do not delay another's ten.

Strategy of FIFO: walk the free groups in the order of their turns (groups.py). From each take as many messages as there
is room for, from its first up to one that is in flight or delayed. One statement finds what a receive may take, without
the bodies, since it may skip messages behind one in flight; a second one reads the bodies. A message that has expired,
is damaged or is due for the dead-letter queue is removed, and the next of its group takes its place.

A receive with a ReceiveRequestAttemptId has a row for five minutes, with the handles that it returned and the ends of
their leases. A repeat with the same id returns the same messages under the same handles, as long as every one of those
leases is in force and ends when the row says. Their visibility timeout starts again. The receive count does not rise,
since nothing new was granted. If one of the messages was deleted, or its lease changed, the client has already used the
answer: the id is refused. If the leases or the five minutes have simply ended, it is a receive like any other.

Strategy of tenants: messages of the default priority with a group belong to that group, a tenant; those without a group
are one tenant together. Each message is taken from the tenant that has visible messages and the fewest in flight; among
equals, from the one whose message has waited longest. A tenant that releases everything at once never has anything in
flight, and would keep the others waiting for ever. So the message that has waited longest of all is passed over at most
`PASSED_OVER_MAX` times in a row: a message behind k others is received after at most (k + 1) * (PASSED_OVER_MAX + 1)
messages. Both choices are first entries of an index, however many tenants there are. More urgent messages go before all
tenants and less urgent ones after, as everywhere.

Source: "FIFO queue delivery logic" and "Amazon SQS fair queues" in the SQS Developer Guide; ReceiveRequestAttemptId in
ReceiveMessage, SQS API Reference.
"""

import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

import msgspec

from veilmq.model.commands import LeaseSource, Receive
from veilmq.model.errors import AttemptNotRetryable
from veilmq.model.events import Kind
from veilmq.model.instant import MINUTE_US
from veilmq.model.messages import Delivery
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import PRIORITY_LINES_MAX, LiveQueue
from veilmq.store.sqlite.disk.rows import Row, intact
from veilmq.store.sqlite.leases.claims import Granting, Terms, capped, room
from veilmq.store.sqlite.messages import Place, StoredMessage, event_of, find_places, read_stored
from veilmq.store.sqlite.messages.groups import update_rows

logger = logging.getLogger("veilmq.store")

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


def receive_fifo(writer: Writer, queue: LiveQueue, command: Receive) -> Received | AttemptNotRetryable:
    """Lease up to `count_max` messages; empty if no group is free. Call after ended leases were returned and group rows
    updated.

    Also empty at the cap on messages in flight ("Amazon SQS returns no error messages").
    """
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    if command.attempt_id is not None:
        replayed = replay(writer, queue, command, command.attempt_id)
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
        remember(writer, queue, command.attempt_id, claim.granted)
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


ATTEMPT_US: Final = 5 * MINUTE_US
_LEASES: Final = msgspec.msgpack.Decoder(list[tuple[str, int]])
_PACK: Final = msgspec.msgpack.Encoder()
_FIND: Final = "SELECT number, ends, leases FROM receive_attempt WHERE generation = ? AND id = ?"


def remember(writer: Writer, queue: LiveQueue, attempt_id: str, granted: list[Delivery]) -> None:
    """Record what the receive got, replacing the record of an earlier receive with that id."""
    leases = _PACK.encode([(message.handle, message.due) for message in granted])
    writer.write(
        "INSERT OR REPLACE INTO receive_attempt (ends, generation, id, leases) VALUES (?, ?, ?, ?)",
        (writer.now + ATTEMPT_US, queue.generation, attempt_id, leases),
    )


def replay(
    writer: Writer, queue: LiveQueue, command: Receive, attempt_id: str
) -> list[Delivery] | AttemptNotRetryable | None:
    """What the receive with that id got, leased anew; None if there was none, or its leases have expired."""
    row = writer.read_one(_FIND, (queue.generation, attempt_id))
    if row is None or row[1] <= writer.now:
        return None
    leases = _decoded(queue, row[2])
    held = _held(writer, queue, leases) if leases else []
    if held is None:
        return AttemptNotRetryable(attempt_id=attempt_id)
    if not held:  # now it is a new receive, even if it finds nothing and tries again later
        writer.write("DELETE FROM receive_attempt WHERE number = ?", (row[0],))
        return None
    again = []
    for (handle, _), place in zip(leases, held, strict=True):
        delivery = _delivery(writer, queue, command, place, handle)
        if delivery is None:
            return None
        again.append(delivery)
    writer.touch(queue)
    given_back = writer.next_offset
    for place, delivery in zip(held, again, strict=True):
        assert delivery.due is not None
        turn = 0 if delivery.due > writer.now else given_back
        writer.write("UPDATE lease SET due = ?, turn = ? WHERE sequence = ?", (delivery.due, turn, place.sequence))
        writer.queues.lower_due(queue, delivery.due)
        event = event_of(Kind.EXTENDED, writer.now, queue, writer.origin(command.origin), place, {"attempt_id": True})
        event.lease_us, event.source = delivery.lease_us, LeaseSource.RECEIVE
        writer.events.append(event)
    leases = [(message.handle, message.due or 0) for message in again]
    writer.write("UPDATE receive_attempt SET leases = ? WHERE number = ?", (_PACK.encode(leases), row[0]))
    return again


def _decoded(queue: LiveQueue, packed: bytes) -> list[tuple[str, int]]:
    """The handles and the ends of the leases; none of a damaged record: what it names comes back by itself."""
    try:
        return _LEASES.decode(packed)
    except ValueError:
        logger.error("queue %s: the record of a receive attempt is damaged and was dropped", queue.key)
        return []


def _held(writer: Writer, queue: LiveQueue, leases: list[tuple[str, int]]) -> list[Place] | None:
    """The places of the messages, if each is still under the recorded lease; empty if leases have expired; None if a
    message was deleted or its lease changed."""
    receipts = [writer.receipts.unseal(handle) for handle, _ in leases]
    known = [receipt.sequence for receipt in receipts if receipt is not None]
    if len(known) < len(receipts):  # a backup was restored since: its handles are void
        return []
    places = find_places(writer, known)
    held = []
    for receipt, (_, due) in zip(receipts, leases, strict=True):
        assert receipt is not None
        place = places.get(receipt.sequence)
        if place is None or place.expires(queue.settings.retention_us) <= writer.expiry_now:
            return None
        is_same_lease = (place.attempt, place.rotation) == (receipt.attempt, receipt.rotation)
        if (is_same_lease and place.due != due) or (not is_same_lease and due > writer.now):
            return None
        if is_same_lease and place.hidden and due > writer.now:
            held.append(place)
    return held if len(held) == len(leases) else []


def _delivery(writer: Writer, queue: LiveQueue, command: Receive, place: Place, handle: str) -> Delivery | None:
    """The message as it is delivered again; None if it is damaged."""
    (message,) = read_stored(writer, (place.sequence,))
    extras = intact(message, message.failure)
    if extras is None:
        return None
    lease_us, _, due = Terms(writer.now, queue, command).of(message.type, extras)
    return message.delivery(extras, queue.settings.retention_us, handle, due, lease_us)


PASSED_OVER_MAX: Final = 7
"""How many messages in a row may go before the one that has waited longest."""
_FIRST: Final = (
    "SELECT * FROM (SELECT held, since, turn, free FROM message_group INDEXED BY message_group_free"
    "  WHERE generation = ?1 AND free IS NOT NULL ORDER BY held, since, turn, free LIMIT 1)"
    " UNION ALL SELECT * FROM (SELECT held, since, turn, free FROM message_group INDEXED BY message_group_busy"
    "  WHERE generation = ?1 AND held > 0 AND free IS NOT NULL ORDER BY since, turn, free LIMIT 1)"
)
"""The tenant with the fewest in flight, and, of the tenants with messages in flight, the one that has waited longest:
one of the two has waited longest of all."""
_READY: Final = (
    "SELECT sent, sequence FROM message INDEXED BY message_line"
    " WHERE generation = ? AND line = ? AND in_line = 1 AND sequence > ? ORDER BY sequence LIMIT 1"
)
_RETURNED: Final = (
    "SELECT line, due, turn, sequence FROM lease INDEXED BY lease_turn"
    " WHERE generation = ? AND hidden = 0 AND line <= ? ORDER BY line, due, turn, sequence LIMIT 1"
)


def receive_fair(writer: Writer, queue: LiveQueue, command: Receive) -> Outcome:
    """Lease up to `count_max` messages. Call after ended leases were returned and group rows updated."""
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    wanted = room(queue, command)
    if wanted <= 0:
        return capped(queue, wait_us)
    if not queue.visible:
        return Received([], wait_us)
    assert queue.groups is not None
    granting = Granting(writer, queue, command)
    alone: StoredMessage | None = None
    looked = False
    while len(granting.granted) < wanted and queue.visible and granting.detours_left > 0 and writer.bytes_left > 0:
        if not looked:
            alone, looked = _alone(writer, queue), True
        candidate = _next(writer, queue, alone)
        if candidate is None:
            break
        if candidate is alone:
            looked = False
        if granting.take(candidate):
            queue.groups.holds(candidate.line, 0 if candidate.leased else candidate.sequence)
            granting.write()
        update_rows(writer, queue)
    if granting.detours_left <= 0 and queue.visible:
        queue.woken += 1
    return Received(granting.granted, wait_us, queue.settings.xml_body, wanted < command.count_max)


def _alone(writer: Writer, queue: LiveQueue) -> StoredMessage | None:
    """The first message without a group."""
    found = writer.read(_RETURNED, (queue.generation, PRIORITY_LINES_MAX)) if queue.returned else []
    for priority in sorted(queue.ready):
        if queue.ready[priority]:
            row = writer.read_one(_READY, (queue.generation, priority, queue.cursors.get(priority, 0)))
            assert row is not None
            sent, sequence = row
            found.append((priority, sent, 0, sequence))
            break
    return _candidate(writer, min(found)[3]) if found else None


def _next(writer: Writer, queue: LiveQueue, alone: StoredMessage | None) -> StoredMessage | None:
    """The message to deliver next."""
    if alone is not None and alone.priority < PRIORITY_DEFAULT:
        return alone
    waiting = writer.read(_FIRST, (queue.generation,))
    if alone is not None and alone.priority == PRIORITY_DEFAULT:
        _, *turn = alone.turn()
        waiting.append((queue.in_flight - queue.grouped, *turn))
    if not waiting:
        return alone
    longest = min(waiting, key=itemgetter(1, 2, 3))
    first = longest if queue.passed_over >= PASSED_OVER_MAX else min(waiting)
    queue.passed_over = 0 if first == longest else queue.passed_over + 1
    sequence = first[3]
    return alone if alone is not None and sequence == alone.sequence else _candidate(writer, sequence)


def _candidate(writer: Writer, sequence: int) -> StoredMessage:
    (found,) = read_stored(writer, (sequence,))
    return found
