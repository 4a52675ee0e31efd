"""What a keeper counts, for metrics and for policies that learn from it.

Strategy: plain numbers, copied as one frozen value.
"""

from typing import Final

import msgspec

LATENESS_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the lateness buckets, in seconds; one more bucket is above."""


class KeeperStats(msgspec.Struct, frozen=True):
    """Counts since the keeper was made; `leases` is now."""

    leases: int
    """Messages held at the moment."""
    registered: int
    extensions: int
    """Extensions that the keeper itself made and the queue kept."""
    failures: int
    """Extensions that failed on their way and were tried again."""
    losses: dict[str, int]
    """Lost leases by the name of their Reason, e.g. `TAKEN`."""
    late: tuple[int, ...]
    """Extensions by how long after they were due the answer came: one count for each of LATENESS_BOUNDS, and above."""
    late_seconds: float
    """Sum of those times."""
    late_seconds_max: float
    senders: int
    """Sender threads that were started."""
