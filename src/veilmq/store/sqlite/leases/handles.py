"""Uses of a handle: extend, release, delete, undeliver.

Strategy: the commands of one kind in a batch form one group. Messages that are still unflushed are deleted in memory.
The places of all others are read at once (`Places`), and each handle is checked against its message's place. A handle
that is not current changes nothing and is recorded as refused. What differs for a message of a group is at the end;
`uncount` records everything else about groups, which is written later (messages/groups.py).
"""

from collections.abc import Sequence
from typing import Final

from veilmq.model.commands import SERVER, AfterExpiry, Delete, Extend, LeaseSource, Undeliver
from veilmq.model.errors import (
    OTHER_QUEUE,
    LeaseExpired,
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.events import Event, Kind, LeaseEnding, Refusal
from veilmq.model.instant import Instant
from veilmq.model.messages import Receipt, Reported
from veilmq.model.outcomes import Deleted, Extended, Outcome, Undelivered
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.disk.rows import INSERT_LEASE, LeaseRow, pack_failure
from veilmq.store.sqlite.leases.expiry import end_lease, expire
from veilmq.store.sqlite.messages import (
    MANY,
    Place,
    event_of,
    find_place,
    find_places,
    numbers,
    uncount,
)
from veilmq.store.sqlite.messages.dead_letters import error_detail, remove_rows
from veilmq.store.sqlite.messages.sends import as_stored

# Looking up a member of an enum is a call each time; these are needed for every message.
_DELETED: Final = int(Kind.DELETED)
_EXTENDED: Final = int(Kind.EXTENDED)
_RELEASED: Final = int(Kind.RELEASED)
_RESUMED: Final = int(Kind.LEASE_RESUMED)
_FOR_RETRY: Final = int(Kind.RELEASED_FOR_RETRY)
_FROM_EXTEND: Final = int(LeaseSource.EXTEND)
_DONE: Final = Deleted()
_SENT: Final = "SELECT m.id, m.sent, m.group_id, m.type FROM message m WHERE m.sequence = ?"
_MOVE: Final = "UPDATE lease SET hidden = ?, due = ?, rotation = ?, turn = ?, ending = ? WHERE sequence"
LEASE_TOTAL_REASON: Final = "total"
"""ParameterInvalid.reason when an extension would exceed the protocol's cap on the whole lease."""


class Places:
    """Places of the messages of a group of commands: read at once, and kept up to date while the group changes them."""

    def __init__(self, writer: Writer, receipts: Sequence[Receipt | None]) -> None:
        self._writer = writer
        sequences = [receipt.sequence for receipt in receipts if receipt is not None]
        self._places = find_places(writer, sequences) if sequences else {}

    def find(self, command: Delete | Extend, receipt: Receipt | None) -> tuple[LiveQueue, Place] | VeilError:
        """The message that a handle names, if the handle may still act on it; else the error."""
        writer = self._writer
        queue = writer.queue(command.queue)
        if queue is None:
            return QueueMissing(queue=str(command.queue))
        if receipt is None:
            return ReceiptInvalid(reason="it was not made by this server")
        if receipt.queue != queue.incarnation:
            return ReceiptInvalid(reason=OTHER_QUEUE)
        place = self._places.get(receipt.sequence)
        if (
            place is None
            or place.generation != queue.generation
            or (command.message_id is not None and command.message_id != place.id)
        ):
            return MessageGone(sequence=receipt.sequence, attempt=receipt.attempt)
        if place.expires(queue.settings.retention_us) <= writer.expiry_now:
            expire(writer, queue, place)
            self.gone(place)
            return MessageGone(sequence=receipt.sequence, attempt=receipt.attempt)
        if place.attempt != receipt.attempt or place.rotation != receipt.rotation:
            return LeaseTaken(sequence=receipt.sequence, attempt=receipt.attempt)
        if place.attempt and command.arrived > place.due and (not place.hidden or place.due <= writer.now):
            # On FIFO an ended lease allows nothing, as at AWS: the message may be received again at any moment.
            if command.after_expiry is AfterExpiry.REFUSE or queue.settings.fifo:
                return LeaseExpired(sequence=receipt.sequence, attempt=receipt.attempt)
            if place.hidden:
                end_lease(writer, queue, place)
        return queue, place

    def gone(self, place: Place) -> None:
        """The message is gone; the next handle for it finds nothing."""
        del self._places[place.sequence]


def delete_all(writer: Writer, commands: Sequence[Delete]) -> list[Outcome]:
    """Delete the messages whose handles are current."""
    start = len(writer.events)
    others = delete_unflushed(writer, commands)
    outcomes: list[Outcome] = [_DONE] * len(commands)
    if not others:
        return outcomes
    deleted_unflushed = {event.sequence: event for event in writer.events[start:]}
    leaving: list[int] = []
    places = Places(writer, [receipt for _, receipt in others])
    find, events, now = places.find, writer.events, writer.now
    for number, receipt in others:
        command = commands[number]
        found = find(command, receipt)
        if isinstance(found, VeilError):
            deletion = None if receipt is None else deleted_unflushed.get(receipt.sequence)
            outcomes[number] = _refused(writer, Kind.DELETE_REFUSED, command, receipt, found, deletion)
            continue
        queue, place = found
        writer.touch(queue)
        uncount(queue, place)
        places.gone(place)
        leaving.append(place.sequence)
        events.append(event_of(_DELETED, now, queue, writer.origin(command.origin), place))
    if leaving:
        remove_rows(writer, leaving)
    return outcomes


def delete_unflushed(writer: Writer, commands: Sequence[Delete]) -> list[tuple[int, Receipt | None]]:
    """Delete the unflushed messages that the handles name; returns the other commands' indexes, each with its receipt.

    From the first command that names an unflushed message but cannot delete it here, all are left to the caller, which
    judges them by the tables; so they keep their order.
    """
    memtable = writer.memtable
    held, messages, deleted = memtable.held, memtable.messages, memtable.deleted
    events, now, expiry_now = writer.events, writer.now, writer.expiry_now
    others: list[tuple[int, Receipt | None]] = []
    queue: LiveQueue | None = None
    key = sender = None
    origin = 0
    for place, command in enumerate(commands):
        handle = command.handle
        unflushed = held.get(handle)
        if command.queue is not key:
            key, sender = command.queue, None
            queue = writer.queue(key)
        if (
            unflushed is None
            or queue is None
            or unflushed.row.generation != queue.generation
            or (lease := unflushed.lease) is None
            or now >= lease[0]
            or expiry_now >= queue.next_expiry
            or (command.message_id is not None and command.message_id != unflushed.row.id)
        ):
            receipt = writer.receipts.unseal(handle)
            others.append((place, receipt))
            if receipt is not None and receipt.sequence in messages:
                held = {}
            continue
        if command.origin is not sender:  # a wire batch has only one origin
            sender = command.origin
            origin = writer.origin(sender)
            writer.touch(queue)
            memtable.changed = True
        row = unflushed.row
        del held[handle], messages[row.sequence]
        deleted.append(row.sequence)
        queue.woken += queue.in_flight >= queue.cap
        queue.in_flight -= 1
        events.append(Event(
            _DELETED, now, queue.incarnation, origin, row.id, row.sequence, 1, 0, None, None, row.sent,
            None, now - lease[1], len(row.body), None, row.type,
        ))  # fmt: skip
    return others


def extend_all(writer: Writer, commands: Sequence[Extend]) -> list[Outcome]:
    """Move the ends of leases."""
    unseal = writer.receipts.unseal
    receipts = [unseal(command.handle) for command in commands]
    places = Places(writer, receipts)
    moves = Moves(writer)
    outcomes = [
        _extend(writer, places, command, receipt, moves) for command, receipt in zip(commands, receipts, strict=True)
    ]
    moves.write()
    return outcomes


def _extend(writer: Writer, places: Places, command: Extend, receipt: Receipt | None, moves: "Moves") -> Outcome:
    """Set the lease's end, counted from now, or release the message; replace the body if the command has one."""
    found = places.find(command, receipt)
    if isinstance(found, VeilError):
        return _refused(writer, Kind.EXTEND_REFUSED, command, receipt, found)
    queue, place = found
    if command.from_xml:
        stored = as_stored(queue, command)
        if isinstance(stored, ParameterInvalid):
            return stored
        command = stored
    now = writer.now
    due = Instant(now + command.lease_us)
    cap_us = command.lease_total_us_max
    if cap_us is not None and command.lease_us and place.attempt and due > place.granted + cap_us:
        return ParameterInvalid(parameter="lease_us", reason=LEASE_TOTAL_REASON)
    if command.size_bytes > queue.settings.message_bytes_max:
        return MessageTooLarge(size_bytes=command.size_bytes, limit_bytes=queue.settings.message_bytes_max)
    if queue.settings.fifo and command.lease_us and place.due <= now:
        moves.write()  # `may_extend` reads these rows
    if queue.settings.fifo and command.lease_us and not may_extend(writer, queue, place):
        error = LeaseExpired(sequence=place.sequence, attempt=place.attempt)
        return _refused(writer, Kind.EXTEND_REFUSED, command, receipt, error)
    rotation = place.rotation + 1 if command.rotate else place.rotation
    kind, ending = _meaning(command, place, due)
    _move(writer, queue, place, due, rotation, moves, hidden=command.lease_us > 0, ending=ending)
    origin = writer.origin(command.origin)
    event = event_of(kind, now, queue, origin, place)
    event.held_us = now - place.granted if place.attempt else None
    event.lease_us, event.source = command.lease_us, _FROM_EXTEND
    if kind == _FOR_RETRY:
        event.detail = _keep_failure(writer, command, place)
    writer.events.append(event)
    if command.body is not None:
        body = command.body.encode()
        writer.write("UPDATE message SET body = ?, md5 = ? WHERE sequence = ?", (body, command.md5, place.sequence))
        place.body_bytes = len(body)
        writer.events.append(event_of(Kind.CONTENT_UPDATED, now, queue, origin, place))
    handle = command.handle
    if command.rotate:
        handle = writer.receipts.seal(queue.incarnation, place.sequence, place.attempt, rotation)
    return Extended(handle, due)


def _meaning(command: Extend, place: Place, due: Instant) -> tuple[int, LeaseEnding]:
    """The kind of event that an extend is, and what it will mean if the new lease runs out."""
    reported = None if command.report is None else command.report.reported
    if not place.attempt:
        return _EXTENDED if command.lease_us else _RELEASED, LeaseEnding.EXPIRED
    if reported is Reported.RETRY:
        return _FOR_RETRY, LeaseEnding.RETRY
    if not command.lease_us:
        return _RELEASED, LeaseEnding.EXPIRED
    if not place.hidden:
        return _RESUMED, LeaseEnding.EXPIRED
    if reported is None and due < place.due:
        return _EXTENDED, LeaseEnding.CHANGED
    return _EXTENDED, LeaseEnding.EXPIRED


def _keep_failure(writer: Writer, command: Extend, place: Place) -> dict[str, object] | None:
    """Store the error with the lease, so that later receives and a dead letter show it; returns the event's detail."""
    assert command.report is not None
    failure = command.report.failure
    error = failure.error if writer.options.error_lines else ""
    detail = error_detail(failure.error_type, error)
    if detail:
        packed = pack_failure(failure.error_type, error)
        writer.write("UPDATE lease SET failure = ? WHERE sequence = ?", (packed, place.sequence))
    if failure.reason:
        detail = {"reason": failure.reason, **detail}
    return detail or None


def undeliver(writer: Writer, command: Undeliver) -> Outcome:
    """Release a message that was granted to a client that is gone."""
    queue = writer.queue(command.queue)
    moves = Moves(writer)
    released = 0
    for handle in command.handles:
        receipt = writer.receipts.unseal(handle)
        if queue is None or receipt is None or receipt.queue != queue.incarnation:
            continue
        place = find_place(writer, queue, receipt.sequence)
        if place is None or not place.hidden:
            continue
        if place.attempt != receipt.attempt or place.rotation != receipt.rotation:
            continue
        event = event_of(Kind.UNDELIVERED, writer.now, queue, writer.origin(command.origin), place)
        _move(writer, queue, place, writer.now, place.rotation, moves, hidden=False, ending=LeaseEnding.EXPIRED)
        moves.write()  # the same handle may come again
        writer.events.append(event)
        released += 1
    return Undelivered(released)


def release_all(
    writer: Writer, queue: LiveQueue, places: Sequence[Place], origin: int, detail: dict[str, object]
) -> None:
    """End the leases of messages in flight, because an operator asked for it. Their handles stay valid, as after a
    release by their holder. detail: of the event of each."""
    moves = Moves(writer)
    for place in places:
        event = event_of(_RELEASED, writer.now, queue, origin, place, dict(detail))
        event.lease_us = 0
        _move(writer, queue, place, writer.now, place.rotation, moves, hidden=False, ending=LeaseEnding.EXPIRED)
        writer.events.append(event)
    moves.write()


_REASONS: Final[dict[type[VeilError], str]] = {
    LeaseTaken: Refusal.STALE,
    LeaseExpired: Refusal.EXPIRED,
    MessageGone: Refusal.GONE,
}


def _refused(
    writer: Writer,
    kind: Kind,
    command: Delete | Extend,
    receipt: Receipt | None,
    error: VeilError,
    deletion: Event | None = None,
) -> VeilError:
    """Record a refusal that shows a race. A handle that is not genuine is not recorded.

    deletion: the event of the message's deletion, if the message was deleted unflushed and so is in no table.
    """
    reason = _REASONS.get(type(error))
    if reason is not None and receipt is not None:
        row = writer.read_one(_SENT, (receipt.sequence,))
        if row is None and deletion is not None:
            row = deletion.message, deletion.sent, deletion.group, deletion.type
        message, sent, group, type_ = row or (None, None, None, None)
        writer.events.append(
            Event(
                kind,
                writer.now,
                receipt.queue,
                writer.origin(command.origin),
                message,
                receipt.sequence,
                receipt.attempt,
                receipt.rotation,
                sent=sent,
                group=group,
                type=type_,
                detail={"reason": reason},
            )
        )
    return error


class Moves:
    """New values of lease rows, by sequence; a message's last values count. `write` writes them, rows with equal values
    in one statement."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._given_back = writer.next_offset
        self._ends: dict[int, tuple[bool, Instant, int, int, int]] = {}
        """By sequence: hidden, due, rotation, turn, ending."""

    def turn(self, *, hidden: bool) -> int:
        """`turn` of the lease row. Messages given back together keep the order in which they were sent."""
        return 0 if hidden else self._given_back

    def add(self, place: Place, due: Instant, rotation: int, ending: int, *, hidden: bool) -> None:
        """Set these values in the message's lease row."""
        self._ends[place.sequence] = (hidden, due, rotation, self.turn(hidden=hidden), ending)

    def write(self) -> None:
        """Write what was added since the last call."""
        groups: dict[tuple[bool, Instant, int, int, int], list[int]] = {}
        for sequence, end in self._ends.items():
            groups.setdefault(end, []).append(sequence)
        self._ends = {}
        for end, sequences in groups.items():
            if len(sequences) < MANY:
                for sequence in sequences:
                    self._writer.write(f"{_MOVE} = ?", (*end, sequence))
            else:
                self._writer.write(f"{_MOVE} IN (SELECT value FROM carray(?))", (*end, numbers(sequences)))


def _move(
    writer: Writer,
    queue: LiveQueue,
    place: Place,
    due: Instant,
    rotation: int,
    moves: Moves,
    *,
    hidden: bool,
    ending: LeaseEnding,
) -> None:
    """Hide the message until `due`, or make it visible, under the same attempt."""
    writer.touch(queue)
    if place.leased:
        moves.add(place, due, rotation, ending, hidden=hidden)
    else:
        if not queue.settings.fifo:  # there a hidden message keeps its place in the line of its group
            place.in_line = 0
            writer.write("UPDATE message SET in_line = 0 WHERE sequence = ?", (place.sequence,))
        lease = LeaseRow(
            place.sequence, queue.generation, place.line, place.in_line, hidden, due, 0, rotation, place.sent, None,
            writer.origin(SERVER), moves.turn(hidden=hidden),
        )  # fmt: skip
        writer.write(INSERT_LEASE, lease)
    uncount(queue, place)
    place.leased, place.hidden, place.due, place.rotation, place.ending = True, hidden, due, rotation, ending
    if not hidden:
        queue.returned += 1
        queue.visible += 1
        queue.woken += not queue.settings.fifo
        return
    if place.attempt:
        queue.in_flight += 1
        if queue.groups is not None:
            queue.groups.holds(place.line)
    else:
        queue.delayed += 1
    if due < queue.next_due:
        writer.queues.lower_due(queue, due)


_EARLIER_OF_OTHERS: Final = (
    "SELECT 1 FROM message m INDEXED BY message_line CROSS JOIN lease l ON l.sequence = m.sequence"
    " WHERE m.generation = ? AND m.line = ? AND m.in_line = 1 AND m.sequence < ?"
    " AND l.hidden = 1 AND l.attempt > 0 AND l.due > ? AND l.granted <> ? LIMIT 1"
)


def may_extend(writer: Writer, queue: LiveQueue, place: Place) -> bool:
    """Whether a lease of a FIFO group may be extended. If it has ended: only if no earlier message of the group has
    been leased to somebody else since.

    Earlier messages still in the group were received together with this one, so there are few.
    """
    if not place.attempt or (place.hidden and place.due > writer.now):
        return True
    values = (queue.generation, place.line, place.sequence, writer.now, place.granted)
    return writer.read_one(_EARLIER_OF_OTHERS, values) is None
