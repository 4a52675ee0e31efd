"""What happens when a number does not come.

Strategy: a gap is known by its first number, and its time counts from when it was first seen here; a restart counts
anew, because the missing message may only have been in the hands of the process before. Pure: the receiver brings the
clock and carries out what is decided.
"""

import logging
from collections.abc import Callable
from enum import StrEnum

from veilmq.client import checked
from veilmq.client.errors import GapFound
from veilmq.client.ordered.reorder import Gap
from veilmq.model.errors import ParameterInvalid

log = logging.getLogger("veilmq.ordered")


class GapPolicy(StrEnum):
    """After the gap timeout."""

    WAIT = "wait"
    """Tell once, and wait on."""
    SKIP = "skip"
    """Tell, and go on behind the gap; what still comes of it is a stray."""
    RAISE = "raise"
    """`receive` raises GapFound, and again after each further timeout."""

    @classmethod
    def of(cls, given: "GapPolicy | str") -> "GapPolicy":
        """Raises ParameterInvalid."""
        try:
            return cls(given)
        except ValueError:
            reason = f"must be one of {', '.join(cls)}, not {given!r}"
            raise ParameterInvalid(parameter="on_gap", reason=reason) from None


class GapWatch:
    """The time of one receiver's gap."""

    def __init__(self, policy: GapPolicy, timeout: float | None, tell: Callable[[GapFound], object] | None) -> None:
        if timeout is None and policy is not GapPolicy.WAIT:
            raise ParameterInvalid(parameter="gap_timeout", reason=f"is needed to {policy}")
        if timeout is not None:
            checked.not_negative(timeout, "gap_timeout")
        self.policy = policy
        self.timeout = timeout
        self._tell = tell
        self._first: tuple[int, int] | None = None
        self._since = 0.0
        self._told = False

    def check(self, lease: float, retention: float | None) -> None:
        """Raises ParameterInvalid for a timeout that would take what is merely leased, or already expired, for lost."""
        checked.positive(lease, "lease")
        if self.timeout is None:
            return
        if self.policy is not GapPolicy.WAIT and self.timeout <= lease:
            reason = f"{self.timeout:g} s must exceed the lease of {lease:g} s: a missing message may only be leased"
            raise ParameterInvalid(parameter="gap_timeout", reason=reason)
        if retention is not None and retention < self.timeout:
            reason = f"{self.timeout:g} s exceeds the queue's retention of {retention:g} s: what is waited for expires"
            raise ParameterInvalid(parameter="gap_timeout", reason=reason)

    def over(self, gap: Gap | None, now: float) -> float | None:
        """How long the gap has lasted, once that is the timeout and there is something to do about it."""
        first = None if gap is None else (gap.epoch, gap.first)
        if first != self._first:
            self._first, self._since, self._told = first, now, False
        if gap is None or self.timeout is None or self._told:
            return None
        waited = now - self._since
        return waited if waited >= self.timeout else None

    def wait_max(self, now: float) -> float:
        """Longest wait after which the gap must be looked at again."""
        if self._first is None or self.timeout is None or self._told:
            return float("inf")
        return max(0.0, self._since + self.timeout - now)

    def tell(self, queue: str, gap: Gap, waited: float, now: float) -> bool:
        """Tell of it; True: skip it. Raises GapFound."""
        found = GapFound(queue=queue, epoch=gap.epoch, first=gap.first, last=gap.last, waited=waited)
        log.warning("%s: %s", found, self.policy)
        if self._tell is not None:
            self._tell(found)
        if self.policy is GapPolicy.RAISE:
            self._since = now
            raise found
        self._told = self.policy is GapPolicy.WAIT
        return self.policy is GapPolicy.SKIP
