"""Uses of a handle: extend, release, delete, undeliver.

Strategy: every use first finds where the message is and judges the handle against it (`_judge`); what is not current
changes nothing and is recorded as refused. A lease that ended while nobody looked is returned here first, so that its
end stands in the history before what followed it.
"""

from typing import Final

from veilmq.model.commands import SERVER, AfterExpiry, Delete, Extend, LeaseSource, Undeliver
from veilmq.model.errors import (
    LeaseExpired,
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.events import Event, Kind, Refusal
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Deleted, Extended, Outcome, Undelivered
from veilmq.model.receipt import Receipt
from veilmq.store.sqlite.endings import Place, event_of, expire, find_place, remove, uncount
from veilmq.store.sqlite.queues import LiveQueue
from veilmq.store.sqlite.sends import INSERT_LEASE
from veilmq.store.sqlite.writer import Writer

LEASE_TOTAL_REASON: Final = "total"
"""ParameterInvalid.reason when an extension would pass the protocol's cap on the whole lease."""

Found = tuple[LiveQueue, Receipt, Place]


def delete(writer: Writer, command: Delete) -> Outcome:
    """Delete the message if the handle is current."""
    found = _find(writer, command)
    if isinstance(found, VeilError):
        return _refused(writer, Kind.DELETE_REFUSED, command, found)
    queue, _, place = found
    remove(writer, queue, place)
    writer.events.append(event_of(Kind.DELETED, writer.now, queue, writer.origin(command.origin), place))
    return Deleted()


def extend(writer: Writer, command: Extend) -> Outcome:
    """Set the lease's end from now, or release; replace the body if the command has one."""
    found = _find(writer, command)
    if isinstance(found, VeilError):
        return _refused(writer, Kind.EXTEND_REFUSED, command, found)
    queue, _, place = found
    now = writer.now
    due = Instant(now + command.lease_us)
    cap_us = command.lease_total_us_max
    if cap_us is not None and command.lease_us and place.attempt and due > place.granted + cap_us:
        return ParameterInvalid(parameter="lease_us", reason=LEASE_TOTAL_REASON)
    if command.size_bytes > queue.settings.message_bytes_max:
        return MessageTooLarge(size_bytes=command.size_bytes, limit_bytes=queue.settings.message_bytes_max)
    rotation = place.rotation + 1 if command.rotate else place.rotation
    _move(writer, queue, place, due, rotation, hidden=command.lease_us > 0)
    origin = writer.origin(command.origin)
    event = event_of(Kind.EXTENDED if command.lease_us else Kind.RELEASED, now, queue, origin, place)
    event.rotation = rotation
    event.held_us = now - place.granted if place.attempt else None
    event.lease_us, event.source = command.lease_us, LeaseSource.EXTEND
    writer.events.append(event)
    if command.body is not None:
        writer.write(
            "UPDATE message SET body = ?, md5 = ? WHERE sequence = ?", (command.body.encode(), command.md5, place.sequence)
        )
        place.body_bytes = command.size_bytes
        writer.events.append(event_of(Kind.CONTENT_UPDATED, now, queue, origin, place))
    handle = command.handle
    if command.rotate:
        handle = writer.receipts.seal(queue.incarnation, place.sequence, place.attempt, rotation)
    return Extended(handle, due)


def undeliver(writer: Writer, command: Undeliver) -> Outcome:
    """Release what was granted to a client that is gone."""
    queue = writer.queues.by_key.get(command.queue)
    released = 0
    for handle in command.handles:
        receipt = writer.receipts.unseal(handle)
        if queue is None or receipt is None or receipt.queue != queue.incarnation:
            continue
        place = find_place(writer, queue, receipt.sequence)
        if place is None or not place.hidden or (place.attempt, place.rotation) != receipt[2:]:
            continue
        _move(writer, queue, place, writer.now, place.rotation, hidden=False)
        writer.events.append(event_of(Kind.UNDELIVERED, writer.now, queue, writer.origin(command.origin), place))
        released += 1
    return Undelivered(released)


def _find(writer: Writer, command: Delete | Extend) -> Found | VeilError:
    """The message that a handle names, if the handle may still act on it."""
    queue = writer.queues.by_key.get(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    receipt = writer.receipts.unseal(command.handle)
    if receipt is None:
        return ReceiptInvalid(reason="it was not made by this server")
    if receipt.queue != queue.incarnation:
        return ReceiptInvalid(reason="it is of another queue")
    place = find_place(writer, queue, receipt.sequence)
    if place is None or command.message_id not in (None, place.id):
        return MessageGone(sequence=receipt.sequence, attempt=receipt.attempt)
    if place.expires(queue.settings.retention_us) <= writer.now:
        expire(writer, queue, place)
        return MessageGone(sequence=receipt.sequence, attempt=receipt.attempt)
    if place.attempt != receipt.attempt or place.rotation != receipt.rotation:
        return LeaseTaken(sequence=receipt.sequence, attempt=receipt.attempt)
    ended = place.leased and place.attempt > 0 and (not place.hidden or place.due <= writer.now)
    if ended and command.after_expiry is AfterExpiry.REFUSE and command.arrived > place.due:
        return LeaseExpired(sequence=receipt.sequence, attempt=receipt.attempt)
    return queue, receipt, place


_REASONS: Final[dict[type[VeilError], str]] = {
    LeaseTaken: Refusal.STALE,
    LeaseExpired: Refusal.EXPIRED,
    MessageGone: Refusal.GONE,
}


def _refused(writer: Writer, kind: Kind, command: Delete | Extend, error: VeilError) -> VeilError:
    """Record a refusal that tells of a race; a handle that is not genuine tells nothing."""
    reason = _REASONS.get(type(error))
    receipt = writer.receipts.unseal(command.handle)
    if reason is not None and receipt is not None:
        row = writer.read_one("SELECT id, sent, group_id, type FROM message WHERE sequence = ?", (receipt.sequence,))
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


def _move(writer: Writer, queue: LiveQueue, place: Place, due: Instant, rotation: int, *, hidden: bool) -> None:
    """Hide the message until `due`, or make it visible, under the same attempt."""
    writer.touch(queue)
    if place.leased:
        writer.write(
            "UPDATE lease SET hidden = ?, due = ?, rotation = ? WHERE sequence = ?",
            (hidden, due, rotation, place.sequence),
        )
    else:
        writer.write("UPDATE message SET line = NULL WHERE sequence = ?", (place.sequence,))
        origin = writer.origin(SERVER)
        values = (
            place.sequence, queue.generation, place.priority, None, hidden, due, 0, rotation, place.sent, None, origin,
        )  # fmt: skip
        writer.write(INSERT_LEASE, values)
    uncount(queue, place)
    if not hidden:
        queue.returned += 1
        queue.visible += 1
        writer.note_visible(queue)
        return
    if place.attempt:
        queue.in_flight += 1
    else:
        queue.delayed += 1
    if due < queue.next_due:
        writer.queues.lower_due(queue, due)
