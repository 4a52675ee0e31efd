"""Deletions of young messages: by the handle of a lease that lasts. For any other use they are promoted first."""

from collections.abc import Sequence
from typing import Final

from veilmq.model.commands import Delete
from veilmq.model.events import Event, Kind
from veilmq.store.sqlite.writer import Writer

_DELETED: Final = int(Kind.DELETED)


def delete_young(writer: Writer, commands: Sequence[Delete]) -> list[int]:
    """Delete those whose handles are such; returns the places of the other commands."""
    nursery = writer.nursery
    held, events, now = nursery.held, writer.events, writer.now
    others: list[int] = []
    for place, command in enumerate(commands):
        young = held.get(command.handle)
        queue = None if young is None else writer.queue(command.queue)
        if (
            young is None
            or queue is None
            or young.contents.generation != queue.generation
            or now >= young.due
            or now >= queue.next_expiry
            or (command.message_id is not None and command.message_id != young.contents.id)
        ):
            others.append(place)
            continue
        writer.touch(queue)
        contents = young.contents
        del held[command.handle], nursery.messages[contents.sequence]
        queue.woken += queue.in_flight >= queue.cap
        queue.in_flight -= 1
        events.append(Event(
            _DELETED, now, queue.incarnation, writer.origin(command.origin), contents.id, contents.sequence, 1, 0, None,
            None, contents.sent, None, now - young.granted, len(contents.body), None, contents.type,
        ))  # fmt: skip
    nursery.changed = nursery.changed or len(others) < len(commands)
    return others
