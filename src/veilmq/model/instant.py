"""Points and spans of time: microseconds, UTC, as plain integers.

Strategy: an `Instant` is an int with a name, so that the type checker keeps instants from durations while arithmetic
costs nothing. Durations are ints whose names end in `_us`. Nothing here reads a clock.
"""

from datetime import UTC, datetime, timedelta
from typing import Final, NewType

Instant = NewType("Instant", int)

MILLISECOND_US: Final = 1_000
SECOND_US: Final = 1_000_000
MINUTE_US: Final = 60 * SECOND_US
HOUR_US: Final = 60 * MINUTE_US
DAY_US: Final = 24 * HOUR_US

FOREVER: Final = Instant(2**62)
"""An instant that never comes (Azure's message TTL of -1)."""


def after(instant: Instant, duration_us: int) -> Instant:
    """The instant `duration_us` later, at most `FOREVER`."""
    return Instant(min(instant + duration_us, FOREVER))


def from_text(text: str) -> Instant:
    """The instant that a text in ISO 8601 names; without an offset it is UTC. Raises ValueError."""
    given = datetime.fromisoformat(text)
    since = (given if given.tzinfo else given.replace(tzinfo=UTC)) - datetime.fromtimestamp(0, UTC)
    return Instant(since // timedelta(microseconds=1))


def seconds(instant: Instant) -> int:
    """Whole seconds since 1970, rounded down (SQS, MNS queue attributes)."""
    return instant // SECOND_US


def milliseconds(instant: Instant) -> int:
    """Whole milliseconds since 1970, rounded down (SQS, MNS message attributes)."""
    return instant // MILLISECOND_US
