"""One held message: its states with every transition between them, its record, and the lease that its handler sees.

Strategy: a table, as in model/messages/states.py; every state change is looked up in `STEPS`. A call in progress is a
state (EXTENDING, ENDING), so extend and delete cannot overlap, and nothing follows DONE.

A `Hold` is one narrow record for each message, because there may be 100,000 of them. Only decisions.py changes its
state, under the keeper's lock. A `Lease` is this record plus the handler's calls. Each call goes through the keeper, so
it waits for an extension in progress and uses the newest handle. Reading needs no lock.

Plans: without a plan every lease gets the keeper's `visibility_timeout`. A plan returns seconds, from any thread,
without I/O; the keeper clamps the result to what the queue can do.
"""

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.messages import Received
from veilmq.model.errors import LeaseError, LeaseExpired, MessageGone, QueueMissing, ReceiptInvalid, VeilError
from veilmq.model.messages import Failure


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

    def first_lease(self, message: Received) -> float:
        """The lease that a message should get at its receive."""

    def next_lease(self, message: Received, held: float) -> float:
        """The lease that an extension should give to a message held for `held` seconds."""


@runtime_checkable
class Learner(Protocol):
    """Optional methods of a plan that learns what becomes of messages (AdaptiveTimeout). No I/O; any thread."""

    def finished(self, message: Received, held: float) -> None:
        """The message was deleted after `held` seconds."""

    def lost(self, message: Received, held: float) -> None:
        """The lease ended while its handler was alive, or another receiver has the message."""

    def late(self, seconds: float) -> None:
        """An extension took effect this many seconds after it was due; 0 if it was on time."""


@runtime_checkable
class CrashLearner(Protocol):
    """Optional methods of a plan that learns how often workers crash. A crash shows only as a redelivered message."""

    def redelivered(self, message: Received) -> None:
        """A message was registered that had been received before."""

    def given_back(self, message: Received) -> None:
        """The handler or the keeper released a message: it will be received again, without a crash."""


class Calls(Protocol):
    """What a lease needs from its keeper."""

    clock: Clock
    renews: bool

    def extend(self, lease: "Lease", seconds: float, body: str | None = None) -> None: ...
    def release(self, lease: "Lease", delay: float = 0, *, failure: Failure | None = None) -> None: ...
    def delete(self, lease: "Lease") -> None: ...
    def forget(self, lease: "Lease") -> None: ...
    def watch(self, lease: "Lease", callback: Callable[["Lease"], object]) -> None: ...
    def event_of(self, lease: "Lease") -> threading.Event: ...


class Loss:
    """A handler's cancellation token: set once, when the lease is lost."""

    __slots__ = ("_lease",)

    def __init__(self, lease: "Lease") -> None:
        self._lease = lease

    def is_set(self) -> bool:
        """True: stop working; another receiver has the message or will soon get it."""
        return self._lease.reason is not None

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever) for the loss. Returns whether it happened."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        return self.is_set() or self._lease.keeper.event_of(self._lease).wait(timeout)

    @property
    def reason(self) -> Reason | None:
        """Why the lease was lost; None before that."""
        return self._lease.reason

    @property
    def error(self) -> VeilError | None:
        """The error of the last extension, if it failed."""
        return self._lease.error


class Lease(Hold):
    """A message that the keeper holds. `extend`, `release` and `delete` may be called from any thread."""

    __slots__ = ("callbacks", "event", "keeper")

    def __init__(
        self, keeper: Calls, message: Received, *, lead: float, fixed: float | None, hold_end: float, now: float
    ) -> None:
        super().__init__(message, lead=lead, fixed=fixed, hold_end=hold_end, now=now)
        self.keeper = keeper
        self.callbacks: list[Callable[[Lease], object]] | None = None
        self.event: threading.Event | None = None

    def __repr__(self) -> str:
        return f"Lease(message {self.message.id}, {self.status})"

    @property
    def handle(self) -> str:
        """The newest handle."""
        return self.newest

    @property
    def state(self) -> State:
        """HELD, EXTENDING, ENDING, DONE or LOST."""
        return self.status

    @property
    def lost(self) -> Loss:
        """The handler's cancellation token."""
        return Loss(self)

    @property
    def held_until(self) -> float:
        """Until when the message can be this process's: the end of the longest hold, or of a lease that is not
        renewed."""
        return self.hold_end if self.keeper.renews else self.deadline

    def remaining(self) -> float:
        """Seconds until the lease ends, as far as this process knows; negative after that."""
        return self.deadline - self.keeper.clock.monotonic()

    def on_lost(self, callback: Callable[["Lease"], object]) -> None:
        """Call `callback(lease)` when the lease is lost, in a separate thread; at once if it is lost already."""
        self.keeper.watch(self, callback)

    def extend(self, seconds: float, body: str | None = None) -> None:
        """Let the lease end `seconds` from now; the keeper continues from there. `body` as in `Queue.extend`.

        Raises ParameterInvalid for seconds that the queue cannot give, else like `Queue.extend`. After a refusal the
        lease is LOST.
        """
        self.keeper.extend(self, seconds, body)

    def release(self, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back, visible after `delay` seconds, and stop extending. Raises like `Queue.release`.

        After an error that is not a refusal, the message stays held.
        """
        self.keeper.release(self, delay, failure=failure)

    def delete(self) -> None:
        """Delete the message with the newest handle and stop extending. Idempotent.

        Raises like `Queue.delete`. After an error that is not a refusal, the message stays held and the delete may be
        retried. A LOST lease is sent to the queue too: perhaps nobody else has received the message yet.
        """
        self.keeper.delete(self)

    def forget(self) -> None:
        """Stop extending, without a call to the queue: the message comes back when its lease ends.

        Waits for a call in progress. ParameterInvalid in a forked child.
        """
        self.keeper.forget(self)
