"""What can be done to unflushed messages: a first lease, and deletion by its handle while it lasts.

For anything else they are flushed first.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from veilmq.model.commands import Delete, Receive
from veilmq.model.events import Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.message import Delivery
from veilmq.model.receipt import Receipt
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.unflushed import Unflushed
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.leases.terms import Terms

_DELETED: Final = int(Kind.DELETED)
_RECEIVED: Final = int(Kind.RECEIVED)


def lease_unflushed(
    writer: Writer, queue: LiveQueue, command: Receive, line: deque[Unflushed], count: int
) -> list[Delivery]:
    """Lease up to `count` messages from the head of a line of the queue. None of them may have expired."""
    writer.touch(queue)
    memtable, seal, events = writer.memtable, writer.receipts.seal, writer.events
    memtable.changed = True
    now, incarnation, origin = writer.now, queue.incarnation, writer.origin(command.origin)
    retention_us = queue.settings.retention_us
    terms = Terms(now, queue, command)
    lease_us, source, due = terms.usual
    held = memtable.held
    granted: list[Delivery] = []
    for _ in range(min(count, len(line))):
        unflushed = line.popleft()
        contents, extras = unflushed.contents, unflushed.extras
        sequence, sent, body = contents.sequence, contents.sent, contents.body
        if not terms.named:
            lease_us, source, due = terms.of(contents.type, extras)
        unflushed.leased, unflushed.due, unflushed.granted, unflushed.origin = True, due, now, origin
        handle = seal(incarnation, sequence, 1, 0)
        held[handle] = unflushed
        if due < queue.next_due:
            writer.queues.lower_due(queue, due)
        events.append(Event(
            _RECEIVED, now, incarnation, origin, contents.id, sequence, 1, 0, lease_us, source, sent, sent, None,
            len(body), None, contents.type,
        ))  # fmt: skip
        expires = sent + retention_us if contents.own_expiry is None else contents.own_expiry
        granted.append(Delivery(
            contents.id, sequence, body.decode(), contents.md5, extras, contents.sender, contents.priority, sent,
            Instant(expires), 1, now, handle, due, lease_us,
        ))  # fmt: skip
    queue.visible -= len(granted)
    queue.in_flight += len(granted)
    return granted


def delete_unflushed(writer: Writer, commands: Sequence[Delete]) -> list[tuple[int, Receipt | None]]:
    """Delete the unflushed messages that the handles name; returns the other commands' indexes, each with its receipt.

    From the first command that names an unflushed message but cannot delete it here, all are left to the caller, which
    judges them by the tables; so they keep their order.
    """
    memtable = writer.memtable
    held, messages, died = memtable.held, memtable.messages, memtable.died
    events, now = writer.events, writer.now
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
            or unflushed.contents.generation != queue.generation
            or now >= unflushed.due
            or now >= queue.next_expiry
            or (command.message_id is not None and command.message_id != unflushed.contents.id)
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
        contents = unflushed.contents
        del held[handle], messages[contents.sequence]
        died.append(contents.sequence)
        queue.woken += queue.in_flight >= queue.cap
        queue.in_flight -= 1
        events.append(Event(
            _DELETED, now, queue.incarnation, origin, contents.id, contents.sequence, 1, 0, None, None, contents.sent,
            None, now - unflushed.granted, len(contents.body), None, contents.type,
        ))  # fmt: skip
    return others
