"""The server's two clocks: wall time, and the lease clock, which decides everything in the store.

Strategy: the lease clock (engine/lease_clock.py) follows CLOCK_BOOTTIME, which runs on while the machine sleeps and
which nobody sets. This module reads that clock and wall time.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from veilmq.engine import lease_clock
from veilmq.model.instant import SECOND_US, Instant
from veilmq.store.synchronised import is_synchronised

log = logging.getLogger("veilmq.clock")


def wall() -> Instant:
    """Wall time, only for signatures and TLS."""
    return time.time_ns() // 1_000  # type: ignore[return-value]  # to call the type costs as much as the clock


# Read several times a request: a partial saves a Python call.
boot_ns: Final[Callable[[], int]] = partial(
    time.clock_gettime_ns, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)
"""Nanoseconds since some past instant, including the machine's sleep; never backwards."""


class LeaseClock(lease_clock.LeaseClock):
    """Never backwards, at most 500 ppm off the boot clock. Belongs to one thread."""

    __slots__ = ("is_synchronised",)

    def __init__(
        self,
        read_wall: Callable[[], Instant] = wall,
        read_boot_ns: Callable[[], int] = boot_ns,
        is_synchronised: Callable[[], bool] = is_synchronised,
    ) -> None:
        """is_synchronised: whether the system says that its clock is synchronised."""
        super().__init__(read_wall, read_boot_ns)
        self.is_synchronised = is_synchronised

    def start(self, mark: Instant) -> None:
        """Continue from the store's mark if that is later than now. Call once, when the store is open."""
        super().start(mark)
        if self.ahead:
            log.warning(
                "the data is %d s ahead of this machine's clock: set the clock, or leases and delays are measured from "
                "the data's time on",
                self.ahead_us // SECOND_US,
            )
