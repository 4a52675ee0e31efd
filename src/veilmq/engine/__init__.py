"""The engine, without I/O: batches, waiting receives, and timers. Here are its bounds, with their units.

Strategy: a shell (asyncio in server/, a thread in client/) owns the clock and the threads. It submits commands, takes a
batch, lets the store apply and commit it, hands the result back, and delivers the answers. The engine never calls the
store and never reads a clock. directory.py is the one place here that knows SQLite. This module has only the limits, so
that whoever needs nothing else (every command of the command line) does not load a store.
"""

import msgspec

from veilmq.model.instant import MILLISECOND_US, SECOND_US


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of batches, waiting and sweeping."""

    batch_messages_max: int = 512
    """Messages that a batch may touch (about 3 ms of statements); a single wire batch may exceed it."""
    batch_us: int = 10 * MILLISECOND_US
    """If a batch's statements take longer (bodies of 1 MiB, copies to 100 queues), the next batches are smaller."""
    pending_max: int = 100_000
    """Calls that may wait for a batch; beyond, Overloaded."""
    parked_max: int = 20_000
    """Parked receives in all."""
    parked_per_account_max: int = 10_000
    parked_per_queue_max: int = 5_000
    unread_bytes_max: int = 128 * 1024 * 1024
    """Bytes of answers that clients have not read; beyond, receives wait or are Overloaded (long_polls.py)."""
    brake_us: int = 0
    """A receive that may not park is answered empty after this time; 0: at once."""
    sweep_steps_max: int = 256
    beside_a_sweep_max: int = 8
    """If more calls than this wait, a sweep gets a batch of its own, so that no turn of the loop runs both."""
    sweep_every_us: int = SECOND_US
    """Expired leases are applied at least this often; at once if a receive waits for the queue."""
    snapshot_every_us: int = 10 * MILLISECOND_US
    """The pause between two steps of a snapshot of the history."""
    polls_every_us: int = 60 * SECOND_US
    stall_us: int = SECOND_US
    """After this long without a batch, commands that had arrived are applied before anything expires."""
