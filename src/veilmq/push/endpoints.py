"""The state of each endpoint: its health, its calls in progress, and its connections.

Strategy: an endpoint is scheme, host and port, whatever the path and the subscription. Each endpoint has its own
connections: the work of a shared pool grows with its size, so healthy endpoints would pay for dead ones. A caller waits
for its turn: at most `Health.in_flight_max` calls run at a time, and none before the pause after a failure ends. Turns
are given one by one and in order, because thousands of subscriptions may wait for one endpoint.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Set

import certifi

from veilmq.push.addresses import EndpointRefused, parse
from veilmq.push.connections import Connections
from veilmq.push.health import Health


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
