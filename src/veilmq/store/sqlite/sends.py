"""Sends: append to the line, or hide until the delay ends."""

from typing import Final

import msgspec

from veilmq.model.commands import Send
from veilmq.model.errors import DiskLow, MessageTooLarge, QueueMissing
from veilmq.model.events import Event, Kind
from veilmq.model.instant import FOREVER, Instant
from veilmq.model.message import NO_EXTRAS
from veilmq.model.outcomes import Outcome, Sent
from veilmq.model.queue import PRIORITY_DEFAULT
from veilmq.store.sqlite.writer import Writer

INSERT_MESSAGE: Final = "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_LEASE: Final = "INSERT INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SENT: Final = int(Kind.SENT)
_EXTRAS: Final = msgspec.msgpack.Encoder()


def send(writer: Writer, command: Send) -> Outcome:
    """Append one message."""
    queue = writer.queues.by_key.get(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    settings = queue.settings
    if command.size_bytes > settings.message_bytes_max:
        return MessageTooLarge(size_bytes=command.size_bytes, limit_bytes=settings.message_bytes_max)
    if writer.disk_low is not None:
        return DiskLow(free_bytes=writer.disk_low)
    writer.touch(queue)
    now = writer.now
    extras = command.extras
    group = extras.group
    kind = extras.type
    priority = command.priority
    delay_us = settings.delay_us if command.delay_us is None else command.delay_us
    own_expiry = None if command.ttl_us is None else min(now + command.ttl_us, FOREVER)
    expires = now + settings.retention_us if own_expiry is None else own_expiry
    sequence = writer.next_sequence()
    message = writer.next_id()
    visible = now + delay_us
    origin = writer.origin(command.origin)
    line = None if delay_us else priority
    writer.write(
        INSERT_MESSAGE,
        (
            sequence,
            queue.generation,
            line,
            priority,
            message,
            now,
            own_expiry,
            command.origin.principal,
            group,
            kind,
            None if extras is NO_EXTRAS else _EXTRAS.encode(extras),
            command.md5,
            command.body.encode(),
        ),
    )
    if line is None:
        writer.write(INSERT_LEASE, (sequence, queue.generation, priority, None, 1, visible, 0, 0, now, None, origin))
        queue.delayed += 1
        writer.queues.lower_due(queue, visible)
    else:
        queue.ready[priority] = queue.ready.get(priority, 0) + 1
        queue.visible += 1
        writer.note_visible(queue)
    if expires < queue.next_expiry:
        writer.queues.lower_expiry(queue, expires)
    writer.events.append(
        Event(
            _SENT,
            now,
            queue.incarnation,
            origin,
            message,
            sequence,
            0,
            0,
            None,
            None,
            now,
            Instant(visible),
            None,
            command.size_bytes,
            group,
            kind,
            _detail(priority, own_expiry),
        )
    )
    handle = writer.receipts.seal(queue.incarnation, sequence, 0, 0) if command.wants_handle else ""
    return Sent(message, sequence, now, Instant(visible), Instant(expires), handle)


def _detail(priority: int, own_expiry: int | None) -> dict[str, int] | None:
    """What a plain message does not have."""
    if own_expiry is None and priority == PRIORITY_DEFAULT:
        return None
    return {"priority": priority} if own_expiry is None else {"priority": priority, "expires": own_expiry}
