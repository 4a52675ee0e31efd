"""Bounds of the engine, with their units."""

import msgspec

from veilmq.model.instant import MILLISECOND_US, SECOND_US


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds batches, waiting and sweeping."""

    batch_messages_max: int = 512
    """Messages that a batch's commands may touch (about 3 ms of statements); one wire batch may pass it."""
    batch_us: int = 10 * MILLISECOND_US
    """Statements of a batch that take longer make the next batches smaller: bodies of a MiB, copies for 100 queues."""
    pending_max: int = 100_000
    """Calls that may wait for a batch; beyond, Overloaded."""
    parked_max: int = 20_000
    """Parked receives in all."""
    parked_per_account_max: int = 10_000
    parked_per_queue_max: int = 5_000
    brake_us: int = 0
    """Who may not park is answered empty after so long; 0: at once."""
    sweep_steps_max: int = 256
    sweep_every_us: int = SECOND_US
    """Due leases are applied at least this often; at once where a receive waits."""
    snapshot_every_us: int = 10 * MILLISECOND_US
    """The pause between two steps of a snapshot of the history."""
    polls_every_us: int = 60 * SECOND_US
    stall_us: int = SECOND_US
    """After so long without a batch, what had arrived is applied before anything expires."""
