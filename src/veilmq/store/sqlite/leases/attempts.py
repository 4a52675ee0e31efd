"""Receive attempts: a receive repeated with the same ReceiveRequestAttemptId gets the same messages again.

Strategy: each receive with an id has a row for five minutes, with the handles that it returned and the ends of their
leases. A repeat returns the same messages under the same handles, as long as every one of those leases is in force and
ends when the row says. Their visibility timeout starts again. The receive count does not rise, since nothing new was
granted. If one of the messages was deleted, or its lease changed, the client has already used the answer: the id is
refused. If the leases or the five minutes have simply ended, it is a receive like any other. Source:
ReceiveRequestAttemptId in ReceiveMessage, SQS API Reference.
"""

from typing import Final

import msgspec

from veilmq.model.commands import LeaseSource, Receive
from veilmq.model.errors import AttemptNotRetryable
from veilmq.model.events import Kind
from veilmq.model.instant import MINUTE_US, Instant
from veilmq.model.messages.message import Delivery
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.disk.rows import intact, with_failure
from veilmq.store.sqlite.messages.places import Place, event_of, find_places, read_stored

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
    leases = _LEASES.decode(row[2])
    held = _held(writer, queue, leases)
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
    extras = intact(message.body, message.md5, message.packed)
    if extras is None:
        return None
    if message.failure is not None:
        extras = with_failure(extras, message.failure)
    lease_us = command.lease_us
    if lease_us is None:
        lease_us = extras.lease_hint_us
    if lease_us is None and queue.plan.applied is not None:
        lease_us = queue.plan.applied.lease_of(place.type)
    if lease_us is None:
        lease_us = queue.settings.visibility_timeout_us
    return Delivery(
        message.id,
        message.sequence,
        message.body.decode(),
        message.md5,
        extras,
        message.sender,
        message.priority,
        message.sent,
        Instant(message.expires(queue.settings.retention_us)),
        message.attempt,
        message.first,
        handle,
        Instant(writer.now + lease_us),
        lease_us,
    )
