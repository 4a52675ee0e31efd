"""Message move tasks and jobs: what moves many messages, or acts on them.

Strategy: each is a record in the store. Commands start, show and cancel it; the sweeper's bounded steps carry it on, so
that it continues after a restart.

In a move task the messages of a dead-letter queue go back to where they came from, or elsewhere. Source:
StartMessageMoveTask in the SQS API Reference; "Configuring a dead-letter queue redrive" in the SQS Developer Guide (36
hours, 100 tasks).

A job is what an operator does to all messages of a queue that a filter matches. It looks at each message once, in an
order that no receive or release changes, and keeps its place in the batch in which it acts.
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
    """16 bytes."""
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


JOB_RATE_MAX: Final = 10_000
JOB_RATE_DEFAULT: Final = 500
JOBS_ACTIVE_MAX: Final = 100
"""Running jobs of a server."""
JOBS_KEPT: Final = 1_000
"""Jobs that a server remembers, running ones among them."""


class Act(StrEnum):
    """What a job does to each message."""

    REDRIVE = "redrive"
    """Move it back to the queue that dead-lettered it, or to a destination."""
    MOVE = "move"
    DELETE = "delete"
    PURGE = "purge"
    """Delete all, in flight and delayed ones too, at once."""
    RELEASE = "release"
    """End its lease: it becomes visible."""


class Filter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which messages of a queue. What is None or 0 admits all."""

    type: str | None = None
    group: str | None = None
    age_us_min: int = 0
    """Since it was sent."""
    receives_min: int = 0
    text: str | None = None
    """In the body; looked for apart, because it costs the most."""

    def admits(self, type_: str | None, group: str | None, sent: int, receives: int, now: int) -> bool:
        """Whether the message matches, but for the text."""
        return (
            (self.type is None or type_ == self.type)
            and (self.group is None or group == self.group)
            and sent <= now - self.age_us_min
            and receives >= self.receives_min
        )

    @property
    def is_empty(self) -> bool:
        """Whether it admits every message."""
        return self == _EVERYTHING


_EVERYTHING: Final = Filter()


class JobInfo(msgspec.Struct, frozen=True, gc=False):
    """The current state of a job."""

    id: bytes
    """16 bytes."""
    act: Act
    source: QueueKey
    destination: QueueKey | None
    filter: Filter
    rate_max: int | None
    dry_run: bool
    """Only count what it would act on."""
    status: MoveStatus
    failure: MoveFailure | None
    """The first reason why a message could not be moved, or why the job ended early."""
    principal: str
    started: Instant
    ended: Instant | None
    total: int
    """Messages that it may have to look at, when it began."""
    seen: int
    matched: int
    """Of those, the ones that the filter matched and that the act could be done to."""
    done: int
    failed: int
