"""How an endpoint is doing: one that fails again and again is called ever less often, until it answers.

Strategy: numbers only, `now` is an argument. Whose last call did not succeed gets one call at a time: what nobody knows
yet, or has just failed, must not fail by fours. After three failures in a row an endpoint is unavailable: between two
calls there is a pause, half a second at first and doubled by each failure up to a minute, and one call at a time; the
first success lets it breathe, and pauses halve with each further one (MNS's backoff: 0, 500 ms, up to 60 s).
While this server itself lacks the means to call, nothing is counted. Where that is in doubt, nothing is counted for a
minute; an endpoint whose name is still not resolved then has failed.
"""

from typing import Final

UNAVAILABLE_AFTER: Final = 3
PAUSE_SECONDS_MIN: Final = 0.5
PAUSE_SECONDS_MAX: Final = 60.0
IN_FLIGHT_MAX: Final = 4
"""Calls of one endpoint at a time."""
DOUBT_SECONDS: Final = 60.0
"""How long what may be this server's fault or the endpoint's is taken for this server's."""


class Health:
    """One endpoint."""

    __slots__ = ("answers", "doubted_at", "failures", "last_error", "pause", "ready_at")

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.pause = 0.0
        """Seconds between two calls."""
        self.ready_at = 0.0
        """No call before."""
        self.last_error = ""
        self.answers = False
        """Whether the last call succeeded."""
        self.doubted_at: float | None = None
        """Since when it has been in doubt whose fault it is; None: it is not."""

    @property
    def available(self) -> bool:
        """Whether it is called as fast as messages come."""
        return self.pause == 0.0

    @property
    def in_flight_max(self) -> int:
        """Calls at a time."""
        return IN_FLIGHT_MAX if self.available and self.answers else 1

    def hold(self, seconds: float, now: float) -> None:
        """Call it no sooner than that, and count no failure."""
        self.ready_at = max(self.ready_at, now + seconds)

    def doubts(self, now: float) -> bool:
        """A call was not made, by whose fault is not known; False if by now it counts as the endpoint's."""
        if self.doubted_at is None:
            self.doubted_at = now
        return now < self.doubted_at + DOUBT_SECONDS

    def failed(self, error: str, now: float) -> bool:
        """A call failed; True if that made it unavailable."""
        was = self.available
        self.failures += 1
        self.answers = False
        self.last_error = error
        if self.failures >= UNAVAILABLE_AFTER:
            self.pause = min(max(self.pause * 2, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX)
        self.ready_at = now + self.pause
        return was and not self.available

    def succeeded(self, now: float) -> bool:
        """A call succeeded; True if that made it available again."""
        was = self.available
        self.failures = 0
        self.answers = True
        self.pause = self.pause / 2 if self.pause / 2 >= PAUSE_SECONDS_MIN else 0.0
        self.ready_at = now + self.pause
        return not was and self.available
