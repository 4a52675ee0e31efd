"""What a kind of fault has in its hands: the server, the proxy before it, chance and the time that it has."""

import time
from collections.abc import Callable
from typing import NamedTuple

from tests.faults.suite.proxy import Proxy
from tests.faults.suite.server import Server

from veilmq.testing import Random


class Stage:
    """For one round."""

    def __init__(self, server: Server, proxy: Proxy, chance: Random, seconds: float) -> None:
        self.server = server
        self.proxy = proxy
        self.chance = chance
        self._end = time.monotonic() + seconds
        self.strikes = 0
        """How often the fault occurred."""
        self.kills = 0
        """How many lives ended by SIGKILL, from outside or at a point within."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def pause(self, low: float, high: float) -> None:
        """A random time, but not beyond the end of the round."""
        time.sleep(max(0.0, min(self.chance.uniform(low, high), self._end - time.monotonic())))

    def kill(self) -> None:
        """By SIGKILL."""
        self.server.kill()
        self.kills += 1


class Kind(NamedTuple):
    """A kind of fault."""

    name: str
    strike: Callable[[Stage], None]
    """Strikes until the stage is over; may leave the server dead."""
    weight: int = 1
    missing: Callable[[], str] = lambda: ""
    """Why it cannot be had on this machine."""
    proxied: bool = False
    """The clients go through the proxy."""
    place: str = "disk"
    """Kinds of one place share a server: `disk`, `small disk`, `moved clock`, whose data is days ahead, or
    `topics and transactions`, or those on a small disk."""
    is_long: bool = False
    """Not in the short form, which has its fault and its load in other kinds."""
