"""Accepts steps of the clock that are known to be right, and warns of the others.

Strategy: the store holds its expiry clock back if the lease clock is far ahead of its mark at the first batch
(store/sqlite/batch). The watch runs that batch at the start, before the ports open. Wall time counts as right
in development mode, and once the system says that its clock is synchronised; it is asked again every second, because a
time service needs some seconds after a boot. Otherwise an operator accepts the step.
"""

import asyncio
import logging
from typing import Final

from veilmq.engine.lease_clock import AHEAD_US_MAX
from veilmq.model.commands import CheckClock
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import ClockChecked
from veilmq.server.clock import LeaseClock
from veilmq.server.shell import Shell
from veilmq.store import Reader

LOOK_S: Final = 1.0
WARNING: Final = (
    "the machine's clock is %d s ahead of what the data has accepted: nothing expires by that step until the clock is"
    " synchronised, or `veilmq clock accept`"
)

log = logging.getLogger("veilmq.clock")


class ClockWatch:
    """Watches one shell's clock from `start` to `stop`."""

    def __init__(self, shell: Shell, reader: Reader, clock: LeaseClock, *, trusted: bool) -> None:
        """trusted: every step is accepted (development mode)."""
        self._shell = shell
        self._reader = reader
        self._clock = clock
        self._trusted = trusted
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Judge the start's step before anything else happens in the store, and go on watching."""
        await self._run(CheckClock())
        await self.look()
        if self.unaccepted_us > AHEAD_US_MAX:
            log.warning(WARNING, self.unaccepted_us // SECOND_US)
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
        (outcome,) = await self._shell.call(command)
        if isinstance(outcome, ClockChecked) and outcome.accepted_us:
            log.info("the clock was %d s ahead of the data: accepted", outcome.accepted_us // SECOND_US)
