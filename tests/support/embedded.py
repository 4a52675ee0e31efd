"""The embedded adapter as a `ClientAccount`: a data directory whose clock is moved, without sleeping."""

import itertools
from pathlib import Path

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.store import MIB, Options
from veilmq.testing.client_contract.stage import MovableClock

_SMALL = Options(reserve_bytes=0, floor_bytes=0, cache_bytes=4 * MIB, redo_bytes=32 * 1024)
"""No disk reserve: the cases open hundreds of directories."""


class EmbeddedClient:
    """See `veilmq.testing.client_contract.ClientAccount`."""

    brief = 60

    def __init__(self, directory: Path, options: Options = _SMALL) -> None:
        self.clock = MovableClock()
        self.account = EmbeddedAccount(directory, clock=self.clock, options=options)
        self._numbers = itertools.count(1)

    def pass_time(self, seconds: float) -> None:
        """Move the clock; everything due by then has happened when this returns."""
        self.clock.advance(seconds)
        self.account.apply_due()

    def name(self, prefix: str) -> str:
        """An unused queue name."""
        return f"{prefix}-{next(self._numbers)}"
