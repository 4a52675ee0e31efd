"""The worker: runs handlers on messages, in threads, processes or coroutines; with checkpoints and an idempotency
guard.

Strategy: intake.py receives messages, each becomes a `Hand` (hand.py) and waits in line (ready.py); runners take them
from there through a flow (flow.py) that settles them (settling.py). Source: docs/patterns/worker.md and
docs/patterns/checkpoint.md.
"""

from veilmq.client.worker.checkpoints import Checkpoints, FileCheckpoints, ObjectCheckpoints, Saved
from veilmq.client.worker.guard import (
    Begun,
    Busy,
    Claim,
    DirectoryGuard,
    Done,
    Guard,
    Prolonging,
    Superseded,
    TableGuard,
)
from veilmq.client.worker.job import AsyncJob, Cancellation, Cancelled, Cause, Job, Reject, Retry
from veilmq.client.worker.metrics import Counts, Meter, PrometheusMeter
from veilmq.client.worker.parameters import Backoff, Kind
from veilmq.client.worker.worker import Options, Worker, worker

__all__ = [
    "AsyncJob",
    "Backoff",
    "Begun",
    "Busy",
    "Cancellation",
    "Cancelled",
    "Cause",
    "Checkpoints",
    "Claim",
    "Counts",
    "DirectoryGuard",
    "Done",
    "FileCheckpoints",
    "Guard",
    "Job",
    "Kind",
    "Meter",
    "ObjectCheckpoints",
    "Options",
    "Prolonging",
    "PrometheusMeter",
    "Reject",
    "Retry",
    "Saved",
    "Superseded",
    "TableGuard",
    "Worker",
    "worker",
]
