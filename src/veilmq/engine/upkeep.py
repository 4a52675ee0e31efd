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

    __slots__ = ("_failed", "_limits", "_polled", "_sweep_every_us", "_swept", "has_more", "store_due")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._swept = Instant(0)
        self._sweep_every_us = limits.sweep_every_us
        self._polled: Instant | None = None
        self._failed = False
        self.store_due: Instant | None = Instant(0)
        """The earliest instant at which a lease or a delay in the store may end; None if none will."""
        self.has_more = True
        """A sweep is due at once: there was none yet, or the last one left work."""

    @property
    def next_sweep(self) -> Instant:
        """When the next sweep is due if nobody waits for messages."""
        return Instant(self._swept + self._sweep_every_us)

    @property
    def next_awaited_sweep(self) -> Instant | None:
        """When a sweep is due if receives are parked; None: only when `next_sweep` is."""
        return None if self._failed else self.store_due

    def sweep_is_due(self, now: Instant, *, awaited: bool) -> bool:
        """Whether to sweep now. awaited: receives are parked."""
        due = self.next_awaited_sweep
        return self.has_more or (awaited and due is not None and due <= now) or now >= self.next_sweep

    def sweep_begun(self, now: Instant) -> None:
        """A sweep is in the next batch."""
        self._swept = now
        self.has_more = False

    def polls_are_due(self, now: Instant) -> bool:
        """Whether to write the counts of receives; their first interval begins with the first call."""
        if self._polled is None:
            self._polled = now
        return now - self._polled >= self._limits.polls_every_us

    def polls_begun(self, now: Instant) -> None:
        """The counts are in the next batch."""
        self._polled = now

    def swept(self, outcome: Outcome) -> None:
        """What a sweep has done."""
        self._failed = type(outcome) is not Swept
        if type(outcome) is Swept:
            self.has_more = outcome.more
            limits = self._limits
            self._sweep_every_us = limits.snapshot_every_us if outcome.unhurried else limits.sweep_every_us
