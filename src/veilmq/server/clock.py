"""The server's two clocks: wall time, and the lease clock, which decides everything in the store.

Strategy: the lease clock (engine/lease_clock.py) follows CLOCK_BOOTTIME, which runs on while the machine sleeps and
which nobody sets. This module reads that clock and wall time.

The store holds its expiry clock back if the lease clock is far ahead of its mark at the first batch
(store/sqlite/batch). `ClockWatch` runs that batch at the start, before the ports open. Wall time counts as right in
development mode, and once the system says that its clock is synchronised; it is asked again every second, because a
time service needs some seconds after a boot. Otherwise an operator accepts the step.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from veilmq.engine import lease_clock
from veilmq.engine.lease_clock import AHEAD_US_MAX
from veilmq.model.commands import CheckClock
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import ClockChecked, Outcome
from veilmq.store import Reader
from veilmq.store.synchronised import is_synchronised

log = logging.getLogger("veilmq.clock")

LOOK_S: Final = 1.0
AHEAD_WARNING: Final = (
    "the machine's clock is %d s ahead of what the data has accepted: nothing expires by that step until the clock is"
    " synchronised, or `veilmq clock accept`"
)

Call = Callable[[CheckClock], Awaitable[Sequence[Outcome]]]


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


class ClockWatch:
    """Watches the clock of one store from `start` to `stop`."""

    def __init__(self, call: Call, reader: Reader, clock: LeaseClock, *, trusted: bool) -> None:
        """call: carries out a command. trusted: every step is accepted (development mode)."""
        self._call = call
        self._reader = reader
        self._clock = clock
        self._trusted = trusted
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Judge the start's step before anything else happens in the store, and go on watching."""
        await self._run(CheckClock())
        await self.look()
        if self.unaccepted_us > AHEAD_US_MAX:
            log.warning(AHEAD_WARNING, self.unaccepted_us // SECOND_US)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    @property
    def unaccepted_us(self) -> int:
        """How far the expiry clock is behind wall time."""
        return self._clock.unaccepted_us(self._reader.held_us)

    async def look(self) -> None:
        """Accept what is not accepted yet, if wall time is known to be right."""
        if self.unaccepted_us > AHEAD_US_MAX and (self._trusted or self._clock.is_synchronised()):
            await self._run(self._clock.accepting())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def _run(self, command: CheckClock) -> None:
        (outcome,) = await self._call(command)
        if isinstance(outcome, ClockChecked) and outcome.accepted_us:
            log.info("the clock was %d s ahead of the data: accepted", outcome.accepted_us // SECOND_US)
