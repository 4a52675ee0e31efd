"""The state of each endpoint: its health, its calls in progress, and its connections; and when a push is tried again.

Strategy: an endpoint is scheme, host and port, whatever the path and the subscription. Each endpoint has its own
connections: the work of a shared pool grows with its size, so healthy endpoints would pay for dead ones. A caller waits
for its turn: at most `Health.in_flight_max` calls run at a time, and none before the pause after a failure ends. Turns
are given one by one and in order, because thousands of subscriptions may wait for one endpoint.

A message has one of MNS's two schedules (NotifyStrategy). BACKOFF_RETRY: 3 retries, each after a random 10 to 20 s.
EXPONENTIAL_DECAY_RETRY: 176 retries, after 1, 2, 4 ... 256 s and then 512 s each, together 86,015 s.

An endpoint that is new or whose last call failed gets one call at a time instead of four. After three failures in a
row it is unavailable: one call at a time, with a pause of half a second that doubles with each failure up to a minute.
The first success ends that, and each further one halves the pause (MNS's backoff: 0, 500 ms, up to 60 s). A
failure for which this server itself lacked the means does not count. While it is in doubt whose fault it is, nothing is
counted for a minute; an endpoint whose name is still not resolved then has failed.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Set
from typing import Final

import certifi

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.topic import ATTEMPTS_MAX, RetryStrategy
from veilmq.push.endpoints.connections import IN_FLIGHT_MAX, Connections
from veilmq.push.network import EndpointRefused, parse

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


class EndpointState:
    """One endpoint."""

    __slots__ = ("_rooms", "_timer", "_turns", "connections", "health", "leased", "sending")

    def __init__(self, context: ssl.SSLContext) -> None:
        self.connections = Connections(context)
        self.health = Health()
        self.leased = 0
        """Messages leased for this endpoint that are not finished."""
        self.sending = 0
        """Calls in progress."""
        self._turns: deque[asyncio.Future[None]] = deque()
        self._rooms: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        """Set while a caller waits for the pause to end."""

    def free(self) -> int:
        """How many more messages may be leased for this endpoint."""
        return max(0, self.health.in_flight_max - self.leased)

    def must_wait(self, now: float) -> bool:
        """Whether a call must wait for its turn."""
        return self.sending >= self.health.in_flight_max or now < self.health.ready_at

    async def turn(self) -> None:
        """Wait until the endpoint may be called; from then on the call counts as in progress."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(mine)
        self.hand_out()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the turn was given, but its caller is gone
                self.sending -= 1
                self.hand_out()
            raise

    async def room(self) -> int:
        """Wait until messages may be leased for this endpoint; return how many."""
        loop = asyncio.get_running_loop()
        while not (loop.time() >= self.health.ready_at and self.free()):
            mine: asyncio.Future[None] = loop.create_future()
            self._rooms.append(mine)
            self.hand_out()
            await mine
        return self.free()

    def hand_out(self) -> None:
        """Hand out free turns. Call it when a call or message has ended, or when somebody begins to wait."""
        loop = asyncio.get_running_loop()
        if loop.time() < self.health.ready_at:
            if self._turns or self._rooms:
                self._wake_at(loop, self.health.ready_at)
            return
        while self._turns and self.sending < self.health.in_flight_max:
            first = self._turns.popleft()
            if not first.done():
                self.sending += 1
                first.set_result(None)
        if self._rooms and self.free():
            rooms, self._rooms = self._rooms, []
            for each in rooms:
                if not each.done():
                    each.set_result(None)

    def _wake_at(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Call `hand_out` again when the pause ends; an earlier end replaces a later one."""
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.hand_out()


class EndpointStates(dict[str, EndpointState]):
    """All endpoints, by name."""

    def __init__(self, verify: bool) -> None:
        """verify: check TLS certificates against the authorities of certifi and of this machine."""
        super().__init__()
        self._context = ssl.create_default_context(cafile=certifi.where())
        self._context.load_default_certs()  # an operator's own authority is only in the machine's store
        if not verify:
            self._context.check_hostname = False
            self._context.verify_mode = ssl.CERT_NONE

    def __missing__(self, endpoint: str) -> EndpointState:
        return self.setdefault(endpoint, EndpointState(self._context))

    def pauses(self) -> dict[str, float]:
        """Seconds between two calls to the endpoints that are called seldom."""
        return {name: each.health.pause for name, each in self.items() if not each.health.available}

    def resume(self, pauses: Mapping[str, float]) -> None:
        """Go on with the pauses of a server that pushed before."""
        for name, pause in pauses.items():
            health = self[name].health
            health.pause, health.failures, health.last_error = pause, UNAVAILABLE_AFTER, "it failed before"
            health.ready_at = asyncio.get_running_loop().time() + pause

    async def keep(self, wanted: Set[str]) -> None:
        """Forget endpoints without a subscription and without a message in progress."""
        for name in self.keys() - wanted:
            if not self[name].leased:  # checked each time: while one closes, another may be needed again
                await self.pop(name).connections.close()


def endpoint_of(url: str) -> str:
    """The endpoint of a URL: scheme, host and port."""
    try:
        host, port, secure, _, _ = parse(url)
    except EndpointRefused:
        return url
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"
