"""A clock that stands still until the test moves it."""

from typing import Final

from veilmq.model.instant import Instant

EPOCH: Final = Instant(1_700_000_000_000_000)
"""Where manual clocks start: 2023-11-14 22:13:20 UTC."""


class ManualClock:
    """`now` is what was set; it never falls."""

    def __init__(self, now: Instant = EPOCH) -> None:
        self.now = now

    def advance(self, duration_us: int) -> Instant:
        """Let `duration_us` pass (not negative); returns the new now."""
        assert duration_us >= 0, "a lease clock never runs backwards"
        self.now = Instant(self.now + duration_us)
        return self.now
