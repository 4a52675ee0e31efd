"""When the engine's own commands are due: the sweeps of the store, and the counts of receives for the history.

Strategy: a sweep comes at its usual interval; at once, if the last one left work; and when something in the store
becomes due while receives are parked, because its messages are theirs. After a sweep that failed (a full disk) only the
interval counts, or the next one would follow at once.
"""

from veilmq.engine import Limits
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome, Swept


class Upkeep:
    """The times of one engine's own commands."""

    __slots__ = ("_failed", "_limits", "_polled", "_sweep_every_us", "_swept", "store_due", "sweeps_on")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._swept = Instant(0)
        self._sweep_every_us = limits.sweep_every_us
        self._polled: Instant | None = None
        self._failed = False
        self.store_due: Instant | None = Instant(0)
        """The earliest instant at which a lease or a delay in the store may end; None if none will."""
        self.sweeps_on = True
        """The last sweep left work."""

    @property
    def next_sweep(self) -> Instant:
        """When the next sweep is due if nobody waits for messages."""
        return Instant(self._swept + self._sweep_every_us)

    @property
    def next_wake(self) -> Instant | None:
        """When one is due for receives that wait."""
        return None if self._failed else self.store_due

    def takes_sweep(self, now: Instant, *, awaited: bool) -> bool:
        """Whether a sweep is due, which the caller then begins. awaited: receives are parked."""
        due = self.next_wake
        if not (self.sweeps_on or (awaited and due is not None and due <= now) or now >= self.next_sweep):
            return False
        self._swept = now
        self.sweeps_on = False
        return True

    def takes_polls(self, now: Instant) -> bool:
        """Whether the counts of receives are due, which the caller then writes."""
        since, self._polled = self._polled, now if self._polled is None else self._polled
        return since is not None and now - since >= self._limits.polls_every_us

    def polls_taken(self, now: Instant) -> None:
        """The counts are being written."""
        self._polled = now

    def swept(self, outcome: Outcome) -> None:
        """What a sweep has done."""
        self._failed = type(outcome) is not Swept
        if type(outcome) is Swept:
            self.sweeps_on = outcome.more
            limits = self._limits
            self._sweep_every_us = limits.snapshot_every_us if outcome.unhurried else limits.sweep_every_us
