"""A worker's parameters, and the checks that they can work.

Strategy: one frozen value, checked when the worker is made, and again against the queue's capabilities as soon as the
queue is known, before a message is received. Durations are seconds.

Backoff: exponential with jitter, and separate from the lease: a retry delay says when to try again, a lease says how
long a worker may be silent. Pure: the caller passes the random number.
"""

import secrets
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from veilmq.client import checks
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.decisions import check_lease
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.worker.checkpoints import Checkpoints
from veilmq.client.worker.guard import Guard
from veilmq.client.worker.metrics import Meter
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid, VeilError

_STEPS: Final = 1 << 30
_DOUBLINGS_MAX: Final = 64


def chance() -> float:
    """A random number from 0 up to, but not including, 1."""
    return secrets.randbelow(_STEPS) / _STEPS


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: `first`, then `factor` times the previous one, at most `longest`; up to `jitter` of it is subtracted.

    Raises ParameterInvalid for values that cannot work.
    """

    first: float = 1.0
    factor: float = 2.0
    longest: float = 300.0
    jitter: float = 0.5
    """The random share of the delay: 0 is none, 1 is all of it."""

    def __post_init__(self) -> None:
        checks.positive(self.first, "first")
        checks.positive(self.longest, "longest")
        checks.number(self.factor, "factor", 1, 1_000)
        checks.number(self.jitter, "jitter", 0, 1)
        if self.longest < self.first:
            raise ParameterInvalid(parameter="longest", reason=f"{self.longest:g} s is below first = {self.first:g} s")

    def delay(self, tries: int, drawn: float) -> float:
        """Seconds to wait after failure number `tries` (from 1). drawn: a random number from 0 up to 1."""
        power = min(max(tries, 1) - 1, _DOUBLINGS_MAX)
        return min(self.longest, self.first * self.factor**power) * (1 - self.jitter * drawn)


LEASE: Final = 30.0
WAIT: Final = 20.0
CONCURRENCY_MAX: Final = 10_000
IN_HAND_MAX: Final = 100_000


class Kind(StrEnum):
    """Where handlers run."""

    THREADS = "threads"
    PROCESSES = "processes"
    """Child processes, for CPU-bound handlers: the parent keeps the leases."""
    ASYNC = "async"
    """Coroutines on one event loop in a separate thread."""


class ErrorReport(StrEnum):
    """How much of an error is reported to the server when its message is given back."""

    LINE = "line"
    """Its type and the first line of its text."""
    TYPE = "type"
    NONE = "none"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """See `Worker`."""

    concurrency: int = 1
    kind: Kind = Kind.THREADS
    prefetch: int = 0
    batch: int | None = None
    lease: float | Callable[[Received], float] = LEASE
    keeper: "bool | Mapping[str, Any] | LeaseKeeper" = True
    stop_before_expiry: float | None = None
    retry: Backoff = Backoff()
    error_report: ErrorReport | Callable[[str], str] = ErrorReport.LINE
    poison_after: int | None = None
    dead_letter_queue: str | Queue | None = None
    checkpoints: Checkpoints | None = None
    guard: Guard | None = None
    guard_key: Callable[[Received], str] | None = None
    wait: float | None = None
    pollers: int = 1
    drain: float = 30.0
    kill_after: float = 10.0
    give_up_after: float | None = None
    on_lost: Callable[[Any], object] | None = None
    on_error: Callable[[VeilError], object] | None = None
    on_result: Callable[[Any, Any], object] | None = None
    metrics: Meter | None = None
    tracer: Any = None

    def __post_init__(self) -> None:
        checks.whole(self.concurrency, "concurrency", 1, CONCURRENCY_MAX)
        checks.whole(self.prefetch, "prefetch", 0, IN_HAND_MAX)
        checks.whole(self.pollers, "pollers", 1, 100)
        if self.batch is not None:
            checks.whole(self.batch, "batch", 1, IN_HAND_MAX)
        if self.capacity > IN_HAND_MAX:
            raise ParameterInvalid(
                parameter="concurrency",
                reason=f"with batch and prefetch these are {self.capacity} messages in hand, more than {IN_HAND_MAX}",
            )
        for name in ("stop_before_expiry", "give_up_after", "kill_after"):
            if getattr(self, name) is not None:
                checks.positive(getattr(self, name), name)
        for name in ("drain", "wait"):
            if getattr(self, name) is not None:
                checks.not_negative(getattr(self, name), name)
        if not callable(self.lease):
            checks.positive(self.lease, "lease")
        if self.poison_after is not None:
            checks.whole(self.poison_after, "poison_after", 1, 1_000_000)
            if self.dead_letter_queue is None:
                raise ParameterInvalid(parameter="dead_letter_queue", reason="poison_after needs one to send to")
        if self.guard_key is not None and self.guard is None:
            raise ParameterInvalid(parameter="guard", reason="guard_key says nothing without one")
        self._check_stop()

    def _check_stop(self) -> None:
        if self.stop_before_expiry is None or callable(self.lease) or self.keeper is not False:
            return
        if self.stop_before_expiry >= self.lease:
            raise ParameterInvalid(
                parameter="stop_before_expiry",
                reason=f"{self.stop_before_expiry:g} s is not below the lease of {self.lease:g} s",
            )

    @property
    def capacity(self) -> int:
        """The most messages in hand."""
        return self.concurrency * (self.batch or 1) + self.prefetch

    @property
    def first_lease(self) -> float:
        """The lease that a receive asks for, before a message's content is known."""
        return LEASE if callable(self.lease) else self.lease

    def keeper_parameters(self) -> dict[str, Any]:
        """Parameters of the worker's own keeper: leases are extended when half is gone, unless the user says
        otherwise."""
        lease = self.first_lease
        derived = {"visibility_timeout": lease, "interval": lease / 3, "minimal_life": lease / 6}
        return derived | dict(self.keeper) if isinstance(self.keeper, Mapping) else derived

    def check(self, queue: Queue) -> None:
        """Raises ParameterInvalid if this queue cannot do it, or the keeper cannot hold its messages."""
        capabilities = queue.capabilities
        if isinstance(self.keeper, LeaseKeeper):
            self.keeper.check_open()
            if self.keeper.queue.name != queue.name:
                reason = f"it keeps leases of queue {self.keeper.queue.name}, not of {queue.name}"
                raise ParameterInvalid(parameter="keeper", reason=reason)
        if isinstance(self.dead_letter_queue, str) and (pattern := _changing_bodies(queue)) is not None:
            reason = (
                f"bodies go through {pattern}, and a name is a bare queue: pass the queue object, in the same pattern"
            )
            raise ParameterInvalid(parameter="dead_letter_queue", reason=reason)
        check_lease("lease", self.first_lease, capabilities)
        if self.wait is not None and self.wait > capabilities.wait_max:
            raise ParameterInvalid(
                parameter="wait",
                reason=f"{self.wait:g} s is above the {capabilities.wait_max:g} s of {capabilities.protocol}",
            )


def _changing_bodies(queue: Queue) -> str | None:
    """The pattern around the queue that transforms what is sent; None: there is none."""
    while isinstance(queue, Wrapping):
        if type(queue).send is not Wrapping.send:
            return type(queue).__name__
        queue = queue.inner
    return None
