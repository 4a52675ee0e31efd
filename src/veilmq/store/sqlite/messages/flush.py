"""Flush: unflushed messages get rows of their own, as if they had always had them.

Strategy: all at once or none, in the open batch, and their journal goes with them, so that a store knows a message
either by its journal or by its rows. Claims take the tables' messages and the unflushed ones in one order, so all that
wait in a line stand behind all that were leased from it: its cursor goes to the last of these.
"""

from collections.abc import Sequence

import msgspec

from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.unflushed import Unflushed
from veilmq.store.sqlite.batch.writer import INSERT_LEASE, INSERT_MESSAGE, Writer
from veilmq.store.sqlite.disk.inserts import Row


def flush(writer: Writer, given_back: int | None = None) -> None:
    """Write all unflushed messages into the tables. given_back: the turn of those that were leased for no time."""
    memtable = writer.memtable
    memtable.changed = True
    if memtable.batches:
        writer.write("DELETE FROM memtable", ())  # first: its pages are used again
    if memtable.messages:
        for queue in memtable.queues.values():
            writer.touch(queue)
        messages: list[Row] = []
        leases: list[Row] = []
        turn = writer.next_offset if given_back is None else given_back
        for unflushed in memtable.messages.values():
            lease = _lease(memtable.queues[unflushed.contents.generation], unflushed, turn)
            if lease is not None:
                leases.append(lease)
            messages.append(msgspec.structs.astuple(unflushed.contents))
        writer.insert_many(INSERT_MESSAGE, messages)
        if leases:
            writer.insert_many(INSERT_LEASE, leases)
    if memtable.messages or memtable.batches:
        memtable.clear()


def flush_named(writer: Writer, sequences: Sequence[int]) -> None:
    """The same if one of these messages is unflushed."""
    unflushed = writer.memtable.messages
    if unflushed and any(sequence in unflushed for sequence in sequences):
        flush(writer)


def _lease(queue: LiveQueue, unflushed: Unflushed, turn: int) -> Row | None:
    """The lease row of a message that is in flight; one that waits counts in its line.

    The queue knows the line from either: who looks for its oldest message looks in the lines that `ready` names.
    """
    contents = unflushed.contents
    priority = contents.priority
    queue.ready[priority] = queue.ready.get(priority, 0) + (not unflushed.leased)
    if not unflushed.leased:
        return None
    queue.cursors[priority] = max(queue.cursors.get(priority, 0), contents.sequence)
    granted = unflushed.granted
    return (
        contents.sequence, contents.generation, priority, priority, 1, unflushed.due, 1, 0, granted, granted,
        unflushed.origin, 0 if unflushed.due > granted else turn,
    )  # fmt: skip
