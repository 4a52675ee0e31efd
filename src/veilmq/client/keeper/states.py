"""The states of a held message, and every transition between them.

Strategy: a table, as in model/states.py; every state change is looked up in `STEPS`. A call in progress is a state
(EXTENDING, ENDING), so extend and delete cannot overlap, and nothing follows DONE.

A `Hold` is one narrow record for each message, because there may be 100,000 of them. Only decisions.py changes its
state, under the keeper's lock.

Plans: without a plan every lease gets the keeper's `visibility_timeout`. A plan returns seconds, from any thread,
without I/O; the keeper clamps the result to what the queue can do.
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
    """An extension is in progress, the keeper's or the user's."""
    ENDING = "ending"
    """The user's delete or release is in progress: no extension may start."""
    DONE = "done"
    """Deleted, released, or forgotten."""
    LOST = "lost"
    """No longer extended; the handler was notified."""


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
"""All transitions. The last one: a delete had happened but lost its answer, and the next extension finds out."""


class Look(StrEnum):
    """What one check of a held message decides (the documents' ChangeVisibilityTask)."""

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
"""The questions of one check, in order: the first yes decides; if there is none, the result is WAIT. Printed as
docs/images/keeper-flow.svg."""

REFUSALS: Final = (LeaseError, ReceiptInvalid, QueueMissing)
"""Errors that mean the lease is gone. Every other error is a failure on the way to the queue and is retried."""


def reason_of(error: VeilError) -> Reason:
    """The loss reason for a refusal."""
    if isinstance(error, LeaseExpired):
        return Reason.EXPIRED
    if isinstance(error, MessageGone):
        return Reason.GONE
    return Reason.TAKEN if isinstance(error, LeaseError) else Reason.INVALID


def may_have_happened(error: VeilError) -> bool:
    """Whether a call that failed with this error may have taken effect."""
    if isinstance(error, ServiceError):
        return error.status >= 500
    return bool(getattr(error, "may_have_happened", False))


LATENESS_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the lateness buckets, in seconds; one more bucket counts everything above."""


class KeeperStats(msgspec.Struct, frozen=True):
    """Counts since the keeper was made, except `leases`, which is current."""

    leases: int
    """Messages held now."""
    registered: int
    extensions: int
    """Extensions that the keeper made and the queue granted."""
    failures: int
    """Extensions that failed on the way and were retried."""
    losses: dict[str, int]
    """Lost leases by the name of their Reason, e.g. `TAKEN`."""
    late: tuple[int, ...]
    """Extensions by the time from due to answered: one count for each of LATENESS_BOUNDS, and one for everything
    above."""
    late_seconds: float
    """Sum of those times."""
    late_seconds_max: float
    senders: int
    """Sender threads that were started."""


class Hold:
    """The record of one held message. All instants are seconds on the clock of `Received.lease_end`."""

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
        """A call with this lease's handle is in progress: the next one waits."""
        self.queued = False
        """Due, and passed to the senders."""
        self.lead = lead
        """Seconds before `deadline` at which the next extension is due."""
        self.fixed = fixed
        """Length of every extension, if the caller set one."""
        self.wanted: float | None = None
        """Length of the first lease, if it should replace the one from the receive."""
        self.registered = now
        self.hold_end = hold_end
        """When extending stops: max_hold or the protocol's total cap."""
        self.renew_at = self.deadline - lead
        self.late_until: float | None = None
        """The lease has ended by this clock, but an extension in progress may renew it. Its answer is awaited until
        this instant before the handler is notified."""
        self.slot: float | None = None
        self.tries = 0
        """Failed extensions since the last one that was granted."""
        self.error: VeilError | None = None
        """The error of the last failed call."""
        self.reason: Reason | None = None
        self.maybe_deleted = False
        """A delete was sent and its answer was lost."""


class Plan(Protocol):
    """Lease lengths, in seconds."""

    @property
    def margin(self) -> float:
        """How long before its end a lease is extended; replaces interval + minimal_life. 0: never extend."""
        ...

    def first_lease(self, message: Received) -> float:
        """The lease that a message should get at its receive."""
        ...

    def next_lease(self, message: Received, held: float) -> float:
        """The lease that an extension should give to a message held for `held` seconds."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Optional methods of a plan that learns what becomes of messages (AdaptiveTimeout). No I/O; any thread."""

    def finished(self, message: Received, held: float) -> None:
        """The message was deleted after `held` seconds."""
        ...

    def lost(self, message: Received, held: float) -> None:
        """The lease ended while its handler was alive, or another receiver has the message."""
        ...

    def late(self, seconds: float) -> None:
        """An extension took effect this many seconds after it was due; 0 if it was on time."""
        ...


@runtime_checkable
class CrashLearner(Protocol):
    """Optional methods of a plan that learns how often workers crash. A crash shows only as a redelivered message."""

    def redelivered(self, message: Received) -> None:
        """A message was registered that had been received before."""
        ...

    def given_back(self, message: Received) -> None:
        """The handler or the keeper released a message: it will be received again, without a crash."""
        ...
