"""Receives: lease the first visible messages.

Strategy: the candidates are the head of each line beyond its cursor, and the returned ones; the lowest (priority,
sequence) of both goes first. A candidate that turns out dead, damaged or due for the dead-letter queue is dealt with on
the way and the next one takes its place, within a bound; what the bound leaves is met by the next claim.
"""

from hashlib import md5 as md5_of
from typing import Final

import msgspec

from veilmq.model.commands import LeaseSource, Receive
from veilmq.model.errors import InFlightFull, QueueMissing
from veilmq.model.events import Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.message import NO_EXTRAS, Delivery, Extras
from veilmq.model.outcomes import Outcome, Received
from veilmq.store.sqlite.disorder import disordered
from veilmq.store.sqlite.endings import EXTRAS_DECODER, Place, dead_letter, expire, quarantine, return_due
from veilmq.store.sqlite.queues import LINES_MAX, LiveQueue
from veilmq.store.sqlite.sends import INSERT_LEASE
from veilmq.store.sqlite.writer import Row, Writer

DETOURS_MAX: Final = 64
"""Candidates that one receive may drop, quarantine or dead-letter on its way."""
RETURNS_MAX: Final = 256
"""Leases that end within one receive's look; the sweeper takes the rest."""
_RECEIVED: Final = int(Kind.RECEIVED)
_FROM_QUEUE: Final = int(LeaseSource.QUEUE)
_FROM_RECEIVE: Final = int(LeaseSource.RECEIVE)
_FROM_PLAN: Final = int(LeaseSource.PLAN)

_READY: Final = (
    "SELECT sequence, id, sent, expires, line, priority, group_id, type, length(body), 0, 0, 0, 0, NULL,"
    " sender, extras, md5, body"
    " FROM message WHERE generation = ? AND line = ? AND sequence > ? ORDER BY sequence LIMIT ?"
)
_RETURNED: Final = (
    "SELECT m.sequence, m.id, m.sent, m.expires, l.line, m.priority, m.group_id, m.type, length(m.body),"
    " l.attempt, l.rotation, 1, l.due, l.first, m.sender, m.extras, m.md5, m.body"
    " FROM lease l INDEXED BY lease_returned JOIN message m ON m.sequence = l.sequence"
    " WHERE l.generation = ? AND l.hidden = 0 ORDER BY l.priority, l.sequence LIMIT ?"
)
_GRANT_AGAIN: Final = (
    "UPDATE lease SET hidden = 1, due = ?, attempt = ?, granted = ?, first = ?, origin = ? WHERE sequence = ?"
)


class Candidate(msgspec.Struct, gc=False):
    """A visible message, as `_READY` and `_RETURNED` select it."""

    sequence: int
    id: bytes
    sent: Instant
    own_expiry: Instant | None
    line: int | None
    priority: int
    group: str | None
    type: str | None
    body_bytes: int
    attempt: int
    rotation: int
    returned: int
    due: int
    first: Instant | None
    sender: str
    extras: bytes | None
    md5: bytes
    body: bytes

    def place(self, generation: int) -> Place:
        """The same message, as the endings see it."""
        return Place(
            generation,
            self.sequence,
            self.id,
            self.sent,
            self.own_expiry,
            self.line,
            self.priority,
            self.group,
            self.type,
            self.body_bytes,
            self.attempt,
            self.rotation,
            leased=bool(self.returned),
            due=self.due,
        )


def receive(writer: Writer, command: Receive) -> Outcome:
    """Lease up to `count_max` messages; empty if none is visible."""
    queue = writer.queue(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    if writer.now >= queue.next_due:
        return_due(writer, queue, RETURNS_MAX)
    wanted = command.count_max
    if command.in_flight_max is not None:
        wanted = min(wanted, command.in_flight_max - queue.in_flight)
        if wanted <= 0:
            return InFlightFull(queue=str(command.queue), limit=command.in_flight_max)
    wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
    if not queue.visible:
        return Received([], wait_us)
    writer.touch(queue)
    origin = writer.origin(command.origin)
    granted: list[Delivery] = []
    leases: list[Row] = []
    detours = 0
    while len(granted) < wanted and queue.visible and detours < DETOURS_MAX:
        candidates = _candidates(writer, queue, wanted - len(granted) + writer.disorder)
        if writer.disorder:
            candidates = disordered(writer, queue, candidates, wanted - len(granted), writer.disorder)
        for candidate in candidates:
            extras = stays(writer, queue, candidate)
            if extras is None:
                detours += 1
            else:
                granted.append(grant(writer, queue, command, candidate, extras, origin, leases))
        if not candidates:
            break
    if leases:
        writer.write_many(INSERT_LEASE, leases)
    if detours >= DETOURS_MAX and queue.visible:
        queue.woken += 1
    return Received(granted, wait_us, queue.settings.xml_body)


def _candidates(writer: Writer, queue: LiveQueue, count: int) -> list[Candidate]:
    """The first `count` visible messages by (priority, sequence)."""
    found: list[Candidate] = []
    for priority in queue.ready if len(queue.ready) == 1 else sorted(queue.ready):
        if queue.ready[priority]:
            values = (queue.generation, priority, queue.cursors.get(priority, 0), count - len(found))
            found += [Candidate(*row) for row in writer.read(_READY, values)]
            if len(found) >= count:
                break
    if queue.returned:
        found += [Candidate(*row) for row in writer.read(_RETURNED, (queue.generation, count))]
        found.sort(key=lambda candidate: (candidate.priority, candidate.sequence))
        del found[count:]
    return found


def stays(writer: Writer, queue: LiveQueue, candidate: Candidate) -> Extras | None:
    """The candidate's extras if it goes to the receiver; None if it goes elsewhere: then it has gone."""
    settings = queue.settings
    own_expiry = candidate.own_expiry
    if (candidate.sent + settings.retention_us if own_expiry is None else own_expiry) <= writer.now:
        expire(writer, queue, candidate.place(queue.generation))
        return None
    if md5_of(candidate.body, usedforsecurity=False).digest() != candidate.md5:
        quarantine(writer, queue, candidate.place(queue.generation))
        return None
    try:
        extras = NO_EXTRAS if candidate.extras is None else EXTRAS_DECODER.decode(candidate.extras)
    except msgspec.MsgspecError:
        quarantine(writer, queue, candidate.place(queue.generation))
        return None
    redrive = settings.redrive
    if redrive is not None and candidate.attempt >= redrive.receive_count_max:
        target = writer.queues.by_key.get(redrive.target)
        if target is not None:
            dead_letter(writer, queue, candidate.place(queue.generation), target)
            return None
    return extras


def grant(
    writer: Writer, queue: LiveQueue, command: Receive, candidate: Candidate, extras: Extras, origin: int,
    leases: list[Row],
) -> Delivery:  # fmt: skip
    """Lease the candidate to the receiver."""
    now = writer.now
    sequence = candidate.sequence
    attempt = candidate.attempt + 1
    if command.lease_us is not None:
        lease_us, source = command.lease_us, _FROM_RECEIVE
    elif extras.lease_hint_us is not None:
        lease_us, source = extras.lease_hint_us, _FROM_PLAN
    else:
        lease_us, source = queue.settings.visibility_timeout_us, _FROM_QUEUE
        if queue.plan.applied is not None:
            planned_us = queue.plan.applied.lease_of(candidate.type)
            if planned_us is not None:
                lease_us, source = planned_us, _FROM_PLAN
    due = Instant(now + lease_us)
    if candidate.returned:
        first = now if candidate.first is None else candidate.first
        visible_since = candidate.due
        writer.write(_GRANT_AGAIN, (due, attempt, now, first, origin, sequence))
        queue.returned -= 1
    else:
        assert candidate.line is not None
        first, visible_since = now, candidate.sent
        line = candidate.line
        order = candidate.priority if line <= LINES_MAX else line
        leases.append((sequence, queue.generation, order, line, 1, due, 1, 0, now, now, origin))
        if line <= LINES_MAX:
            queue.cursors[line] = sequence
            queue.ready[line] -= 1
    queue.visible -= 1
    queue.in_flight += 1
    if due < queue.next_due:
        writer.queues.lower_due(queue, due)
    writer.events.append(
        Event(
            _RECEIVED,
            now,
            queue.incarnation,
            origin,
            candidate.id,
            sequence,
            attempt,
            candidate.rotation,
            lease_us,
            source,
            candidate.sent,
            Instant(visible_since),
            None,
            candidate.body_bytes,
            candidate.group,
            candidate.type,
        )
    )
    expires = candidate.sent + queue.settings.retention_us if candidate.own_expiry is None else candidate.own_expiry
    return Delivery(
        candidate.id,
        sequence,
        candidate.body.decode(),
        candidate.md5,
        extras,
        candidate.sender,
        candidate.priority,
        candidate.sent,
        Instant(expires),
        attempt,
        first,
        writer.receipts.seal(queue.incarnation, sequence, attempt, candidate.rotation),
        due,
        lease_us,
    )
