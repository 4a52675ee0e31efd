"""The worker: runs handlers on messages, in threads, processes or coroutines; with checkpoints and an idempotency
guard.

Strategy: a run (run.py) receives messages. Each becomes a `Hand` (job/) and waits in line until a runner takes it
(runners/: flow.py, then threads, coroutines or processes.py). After the handler it is deleted, released or
dead-lettered (runners/settling.py). Source: docs/patterns/worker.md and docs/patterns/checkpoint.md.
"""

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
from veilmq.client.worker.job.checkpoints import Checkpoints, FileCheckpoints, ObjectCheckpoints, Saved
from veilmq.client.worker.metrics import Counts, Meter, PrometheusMeter
from veilmq.client.worker.options import Backoff, Kind, Options
from veilmq.client.worker.worker import Worker, worker

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
