"""Flush: gives unflushed messages rows in the tables, as if they had always had them.

Strategy: flush all or none, in the open batch, and delete their journal with it, so that a message is either in the
journal or in the tables. Claims take messages of the tables and unflushed ones in one order, so in each line every
waiting message is behind every leased one: the cursor moves to the last leased one.
"""

from collections.abc import Sequence

import msgspec

from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.disk.rows import INSERT_LEASE, INSERT_MESSAGE, LeaseRow, Row, Unflushed


def flush(writer: Writer, given_back: int | None = None) -> None:
    """Write all unflushed messages into the tables. given_back: the turn of those leased for no time."""
    memtable = writer.memtable
    memtable.changed = True
    if memtable.batches:
        writer.write("DELETE FROM memtable", ())  # first, so that its pages are reused
    if memtable.messages:
        for queue in memtable.queues.values():
            writer.touch(queue)
        messages: list[Row] = []
        leases: list[LeaseRow] = []
        turn = writer.next_offset if given_back is None else given_back
        for unflushed in memtable.messages.values():
            lease = _lease(memtable.queues[unflushed.row.generation], unflushed, turn)
            if lease is not None:
                leases.append(lease)
            messages.append(msgspec.structs.astuple(unflushed.row))
        writer.insert_many(INSERT_MESSAGE, messages)
        if leases:
            writer.insert_many(INSERT_LEASE, leases)
    if memtable.messages or memtable.batches:
        memtable.clear()


def flush_named(writer: Writer, sequences: Sequence[int]) -> None:
    """Flush if one of these messages is unflushed."""
    unflushed = writer.memtable.messages
    if unflushed and any(sequence in unflushed for sequence in sequences):
        flush(writer)


def _lease(queue: LiveQueue, unflushed: Unflushed, turn: int) -> LeaseRow | None:
    """The lease row of a message in flight; None for one that waits, which counts in its line.

    Either way the line gets an entry in `ready`: the search for the oldest message goes through those lines.
    """
    row = unflushed.row
    priority = row.priority
    queue.ready[priority] = queue.ready.get(priority, 0) + (not unflushed.leased)
    if not unflushed.leased:
        return None
    queue.cursors[priority] = max(queue.cursors.get(priority, 0), row.sequence)
    granted = unflushed.granted
    return LeaseRow(
        row.sequence, row.generation, priority, 1, 1, unflushed.due, 1, 0, granted, granted,
        unflushed.origin, 0 if unflushed.due > granted else turn,
    )  # fmt: skip
