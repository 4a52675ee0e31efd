"""Where a held message can be, and every step between.

Strategy: a table, as in model/states.py; `step` is the only way to another state. A call under way is a state of its
own (EXTENDING, ENDING), so that extend and delete cannot overlap, and nothing follows DONE.

A hold: one narrow record a message, because there may be 100,000 of them; the table (table.py) alone writes it, under
the keeper's lock.

Plans: a keeper without a plan gives every lease its `visibility_timeout`. A plan answers in seconds, from any thread,
without I/O; a keeper clamps what it says to what the queue can do.
"""

from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

import msgspec

from veilmq.client.errors import ServiceError
from veilmq.client.messages import Received
from veilmq.model.errors import LeaseError, LeaseExpired, MessageGone, QueueMissing, ReceiptInvalid, VeilError


class State(StrEnum):
    """State of one held message."""

    HELD = "held"
    EXTENDING = "extending"
    """An extension is under way, the keeper's or the user's."""
    ENDING = "ending"
    """The user's delete or release is under way: no extension may start."""
    DONE = "done"
    """Deleted, released, or forgotten."""
    LOST = "lost"
    """Nobody extends it any more, and the handler was told."""


class Reason(StrEnum):
    """Why a lease was lost."""

    EXPIRED = "the lease ended before it could be extended"
    TAKEN = "another receiver has the message, or its handle was replaced"
    GONE = "the message was deleted, expired, purged or moved"
    INVALID = "the queue is gone, or does not know the handle"
    MAX_HOLD = "held for max_hold"
    TOTAL_CAP = "the protocol's cap on the whole lease is reached"
    CLOSED = "the keeper was closed"


STEPS: Final = {
    (State.HELD, "extend"): State.EXTENDING,
    (State.EXTENDING, "kept"): State.HELD,
    (State.EXTENDING, "failed"): State.HELD,
    (State.EXTENDING, "lost"): State.LOST,
    (State.HELD, "end"): State.ENDING,
    (State.ENDING, "ended"): State.DONE,
    (State.ENDING, "failed"): State.HELD,
    (State.ENDING, "lost"): State.LOST,
    (State.HELD, "lost"): State.LOST,
    (State.EXTENDING, "ended"): State.DONE,
}
"""All steps. The last one: a delete whose answer was lost had happened, as the next extension learns."""


class Look(StrEnum):
    """What one look at a held message decides (the documents' ChangeVisibilityTask)."""

    LEAVE = "leave it alone"
    LET_GO = "tell the handler; extend no more"
    OVER = "lost, unless a late extend is granted"
    EXTEND = "extend to visibility_timeout"
    WAIT = "look again when one of these is due"


LOOKS: Final = (
    ("Is its delete or release under way?", Look.LEAVE),
    ("Was it held for max_hold, or the protocol's own limit?", Look.LET_GO),
    ("Is its lease over?", Look.OVER),
    ("Is an extension under way, or is the last one made?", Look.WAIT),
    ("Is interval + minimal_life or less of its lease left?", Look.EXTEND),
)
"""The questions of one look, in their order: the first yes decides; without any it is WAIT. Printed as
docs/images/keeper-flow.svg."""

REFUSALS: Final = (LeaseError, ReceiptInvalid, QueueMissing)
"""What says that the lease is no more; every other error is of the way to the queue and is tried again."""


def reason_of(error: VeilError) -> Reason:
    """Why a refusal ends the lease."""
    if isinstance(error, LeaseExpired):
        return Reason.EXPIRED
    if isinstance(error, MessageGone):
        return Reason.GONE
    return Reason.TAKEN if isinstance(error, LeaseError) else Reason.INVALID


def may_have_happened(error: VeilError) -> bool:
    """Whether a call that ended with this error may have done its work."""
    if isinstance(error, ServiceError):
        return error.status >= 500
    return bool(getattr(error, "may_have_happened", False))


LATENESS_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the lateness buckets, in seconds; one more bucket is above."""


class KeeperStats(msgspec.Struct, frozen=True):
    """Counts since the keeper was made; `leases` is now."""

    leases: int
    """Messages held at the moment."""
    registered: int
    extensions: int
    """Extensions that the keeper itself made and the queue kept."""
    failures: int
    """Extensions that failed on their way and were tried again."""
    losses: dict[str, int]
    """Lost leases by the name of their Reason, e.g. `TAKEN`."""
    late: tuple[int, ...]
    """Extensions by how long after they were due the answer came: one count for each of LATENESS_BOUNDS, and above."""
    late_seconds: float
    """Sum of those times."""
    late_seconds_max: float
    senders: int
    """Sender threads that were started."""


class Hold:
    """All instants are seconds on the clock of `Received.lease_end`."""

    __slots__ = (
        "__weakref__",
        "busy",
        "deadline",
        "error",
        "fixed",
        "hold_end",
        "late_until",
        "lead",
        "maybe_deleted",
        "message",
        "newest",
        "queued",
        "reason",
        "registered",
        "renew_at",
        "slot",
        "status",
        "tries",
        "wanted",
    )

    def __init__(self, message: Received, *, lead: float, fixed: float | None, hold_end: float, now: float) -> None:
        self.message = message
        self.newest = message.handle
        self.deadline = message.lease_end
        self.status = State.HELD
        self.busy = False
        """A call with this lease's handle is under way: the next one waits."""
        self.queued = False
        """Due, and handed to the senders."""
        self.lead = lead
        """Seconds before `deadline` at which the next extension is due."""
        self.fixed = fixed
        """Length of every extension, where the caller named one."""
        self.wanted: float | None = None
        """Length of the first lease, if the one from the receive is to be replaced."""
        self.registered = now
        self.hold_end = hold_end
        """From here on it is not extended: max_hold or the total cap."""
        self.renew_at = self.deadline - lead
        self.late_until: float | None = None
        """The lease has ended by this clock, and an extension is under way that may take it up again: until when its
        answer is awaited before the handler is told."""
        self.slot: float | None = None
        self.tries = 0
        """Failed extensions since the last one that was kept."""
        self.error: VeilError | None = None
        """What the last failed call said."""
        self.reason: Reason | None = None
        self.maybe_deleted = False
        """A delete went out and its answer never came."""


class Plan(Protocol):
    """Lease lengths, in seconds."""

    @property
    def margin(self) -> float:
        """How long before its end a lease is to be extended; takes the place of interval + minimal_life. 0: never."""
        ...

    def first_lease(self, message: Received) -> float:
        """The lease that a message should have from its receive."""
        ...

    def next_lease(self, message: Received, held: float) -> float:
        """The lease that an extension should give to a message that has been held for `held` seconds."""
        ...


@runtime_checkable
class Learner(Protocol):
    """What a plan may have besides, to learn from what becomes of messages (AdaptiveTimeout). No I/O; any thread."""

    def finished(self, message: Received, held: float) -> None:
        """Deleted after `held` seconds."""
        ...

    def lost(self, message: Received, held: float) -> None:
        """The lease ended under a living handler, or somebody else has the message."""
        ...

    def late(self, seconds: float) -> None:
        """An extension took effect, so many seconds after it was due; 0 for one in time."""
        ...


@runtime_checkable
class CrashLearner(Protocol):
    """What a plan may have to learn how often workers die. Nobody sees another's crash, but its message comes back."""

    def redelivered(self, message: Received) -> None:
        """A message was registered that somebody had received before."""
        ...

    def given_back(self, message: Received) -> None:
        """A message was released by its handler or the keeper: somebody will receive it again, without a crash."""
        ...
