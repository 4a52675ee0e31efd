"""Receives, by the kind of queue.

Strategy: a standard queue that never had a message with a group is served by `claims` alone and pays for nothing else.
"""

from veilmq.model.commands import Receive
from veilmq.model.outcomes import Outcome
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.leases import claims, fair_claims, fifo_claims
from veilmq.store.sqlite.leases.rates import receive_within
from veilmq.store.sqlite.messages.expiry import look_for_due
from veilmq.store.sqlite.messages.groups import update_rows


def receive(writer: Writer, command: Receive) -> Outcome:
    """Lease up to `count_max` messages; empty if none is available."""
    queue = writer.queue(command.queue)
    if queue is not None and (rate := queue.settings.receives_per_second_max) is not None:
        return receive_within(writer, queue, rate, command, lambda within: _receive(writer, queue, within))
    return _receive(writer, queue, command)


def _receive(writer: Writer, queue: LiveQueue | None, command: Receive) -> Outcome:
    if queue is None or queue.groups is None:
        return claims.receive(writer, command)
    if writer.now >= queue.next_due:
        look_for_due(writer, queue, claims.RETURNS_MAX)
    update_rows(writer, queue)
    if queue.settings.fifo:
        return fifo_claims.receive(writer, queue, command)
    return fair_claims.receive(writer, queue, command)
