"""Message move tasks: the messages of a dead-letter queue go back to where they came from, or elsewhere.

Strategy: a task is a record in the store. Commands start, show and cancel it; the sweeper's bounded steps carry it on,
so that it continues after a restart. Source: StartMessageMoveTask in the SQS API Reference; "Configuring a dead-letter
queue redrive" in the SQS Developer Guide (36 hours, 100 tasks).
"""

from enum import StrEnum
from typing import Final

import msgspec

from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.settings.queue import QueueKey

MOVES_PER_SECOND_MAX: Final = 500
TASKS_ACTIVE_MAX: Final = 100
"""Running tasks of an account in a region."""
TASK_US_MAX: Final = 36 * HOUR_US
"""How long a task may run."""
TASKS_KEPT: Final = 10
"""Tasks that a store remembers for each source."""
TASK_ID_BYTES: Final = 16


class MoveStatus(StrEnum):
    """The state of a task."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class MoveFailure(StrEnum):
    """Why a task failed."""

    SOURCE_UNKNOWN = "source unknown"
    """A message that was not dead-lettered here has no queue to go back to."""
    QUEUE_MISSING = "queue missing"
    """The queue to which a message goes is gone."""
    KIND_DIFFERS = "kind differs"
    """One of the two queues is FIFO, the other is not."""
    MESSAGE_TOO_LARGE = "message too large"
    """The queue to which a message goes takes only smaller ones."""
    TOO_LONG = "too long"
    """The task ran for `TASK_US_MAX` without finishing."""


class MoveInfo(msgspec.Struct, frozen=True, gc=False):
    """The current state of a task."""

    id: bytes
    """`TASK_ID_BYTES` bytes."""
    source: QueueKey
    destination: QueueKey | None
    """None: each message goes back to the queue that dead-lettered it."""
    rate_max: int | None
    """Messages a second, if that was asked for."""
    status: MoveStatus
    started: Instant
    moved: int
    to_move: int
    """Messages that were visible in the source when the task began."""
    failure: MoveFailure | None = None
