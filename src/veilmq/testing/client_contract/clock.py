"""A client's clock that runs as time does, and can be moved on."""

from veilmq.client.clock import SYSTEM


class MovableClock:
    """`veilmq.client.clock.Clock`: the system's, and what was added."""

    def __init__(self) -> None:
        self._added = 0.0

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return SYSTEM.monotonic() + self._added

    def wall(self) -> float:
        """See `Clock.wall`."""
        return SYSTEM.wall() + self._added

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass (not negative)."""
        assert seconds >= 0, "no clock of ours runs backwards"
        self._added += seconds
