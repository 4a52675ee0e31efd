"""Promotion: young messages get rows of their own, as if they had always had them.

Strategy: all at once or none, in the open batch, and their journal goes with them, so that a store knows a message
either by its journal or by its rows. Claims take the tables' messages and the young ones in one order, so all that wait
in a line stand behind all that were leased from it: its cursor goes to the last of these.
"""

from collections.abc import Sequence

import msgspec

from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import INSERT_LEASE, INSERT_MESSAGE, Writer
from veilmq.store.sqlite.batch.young import Young
from veilmq.store.sqlite.disk.inserts import Row


def promote(writer: Writer, given_back: int | None = None) -> None:
    """Write all young messages into the tables. given_back: the turn of those that were leased for no time."""
    nursery = writer.nursery
    nursery.changed = True
    if nursery.batches:
        writer.write("DELETE FROM nursery", ())  # first: its pages are used again
    if nursery.messages:
        for queue in nursery.queues.values():
            writer.touch(queue)
        messages: list[Row] = []
        leases: list[Row] = []
        turn = writer.next_offset if given_back is None else given_back
        for young in nursery.messages.values():
            lease = _lease(nursery.queues[young.contents.generation], young, turn)
            if lease is not None:
                leases.append(lease)
            messages.append(msgspec.structs.astuple(young.contents))
        writer.insert_many(INSERT_MESSAGE, messages)
        if leases:
            writer.insert_many(INSERT_LEASE, leases)
    if nursery.messages or nursery.batches:
        nursery.clear()


def promote_named(writer: Writer, sequences: Sequence[int]) -> None:
    """The same if one of these messages is young."""
    young = writer.nursery.messages
    if young and any(sequence in young for sequence in sequences):
        promote(writer)


def _lease(queue: LiveQueue, young: Young, turn: int) -> Row | None:
    """The lease row of a message that is in flight; one that waits counts in its line.

    The queue knows the line from either: who looks for its oldest message looks in the lines that `ready` names.
    """
    contents = young.contents
    priority = contents.priority
    queue.ready[priority] = queue.ready.get(priority, 0) + (not young.leased)
    if not young.leased:
        return None
    queue.cursors[priority] = max(queue.cursors.get(priority, 0), contents.sequence)
    granted = young.granted
    return (
        contents.sequence, contents.generation, priority, priority, 1, young.due, 1, 0, granted, granted, young.origin,
        0 if young.due > granted else turn,
    )  # fmt: skip
