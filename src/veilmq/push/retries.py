"""When a push is tried again: the schedule of one message, and the health of an endpoint.

A message has one of MNS's two schedules (NotifyStrategy). BACKOFF_RETRY: 3 retries, each after a random 10 to 20 s.
EXPONENTIAL_DECAY_RETRY: 176 retries, after 1, 2, 4 ... 256 s and then 512 s each, together 86,015 s.

An endpoint that is new or whose last call failed gets one call at a time instead of four. After three failures in a
row it is unavailable: one call at a time, with a pause of half a second that doubles with each failure up to a minute.
The first success ends that, and each further one halves the pause (MNS's backoff: 0, 500 ms, up to 60 s). A
failure for which this server itself lacked the means does not count. While it is in doubt whose fault it is, nothing is
counted for a minute; an endpoint whose name is still not resolved then has failed.
"""

from typing import Final

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.topic import ATTEMPTS_MAX, RetryStrategy

BACKOFF_SECONDS: Final = (10, 20)
_DOUBLINGS: Final = 9
_LONGEST_S: Final = 512


def delay_us(strategy: RetryStrategy, attempt: int, chance: float) -> int | None:
    """How long after failure number `attempt` (from 1) the next attempt is due; None: that was the last one.

    chance: 0 to 1; the place of a random delay in its range.
    """
    if attempt >= ATTEMPTS_MAX[strategy]:
        return None
    if strategy is RetryStrategy.BACKOFF:
        shortest, longest = BACKOFF_SECONDS
        return int((shortest + (longest - shortest) * chance) * SECOND_US)
    return (1 << (attempt - 1) if attempt <= _DOUBLINGS else _LONGEST_S) * SECOND_US


UNAVAILABLE_AFTER: Final = 3
PAUSE_SECONDS_MIN: Final = 0.5
PAUSE_SECONDS_MAX: Final = 60.0
IN_FLIGHT_MAX: Final = 4
"""Calls to one endpoint at a time."""
DOUBT_SECONDS: Final = 60.0
"""How long a failure that may be this server's fault or the endpoint's is blamed on this server."""


class Health:
    """One endpoint."""

    __slots__ = ("answers", "doubted_at", "failures", "last_error", "pause", "ready_at")

    def __init__(self) -> None:
        self.failures = 0
        """Failures in a row."""
        self.pause = 0.0
        """Seconds between two calls."""
        self.ready_at = 0.0
        """No call before this instant."""
        self.last_error = ""
        self.answers = False
        """Whether the last call succeeded."""
        self.doubted_at: float | None = None
        """Since when it has been in doubt whose fault the failures are; None: no doubt."""

    @property
    def available(self) -> bool:
        """Whether it is called without a pause."""
        return self.pause == 0.0

    @property
    def in_flight_max(self) -> int:
        """Calls allowed at a time."""
        return IN_FLIGHT_MAX if self.available and self.answers else 1

    def hold(self, seconds: float, now: float) -> None:
        """Put off the next call by that long, and count no failure."""
        self.ready_at = max(self.ready_at, now + seconds)

    def doubts(self, now: float) -> bool:
        """A call could not be made, and it is not known whose fault that is. False once it counts as the endpoint's."""
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
