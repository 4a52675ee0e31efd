"""The client's clocks: the one place of the client that reads them.

Strategy: everything that measures a lease takes a `Clock`; tests bring their own. `monotonic` judges leases, `wall`
only stamps what people and other processes read.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds."""

    def monotonic(self) -> float:
        """Never goes back; counts while the machine sleeps."""
        ...

    def wall(self) -> float:
        """Unix time."""
        ...


class SystemClock:
    """CLOCK_BOOTTIME where there is one, so that a suspended laptop knows that its leases ended."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def wall(self) -> float:
        return time.time()


SYSTEM = SystemClock()
