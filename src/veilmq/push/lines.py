"""What is known of each endpoint: how it does, what it has under way, and its connections.

Strategy: an endpoint is scheme, host and port, whatever path and whichever subscription. Each has connections of its
own: the work of a shared pool grows with all that it holds, and the dead would be paid for by the healthy. Whoever
wants to call waits for a turn: at most `Health.in_flight_max` at a time, and not before the pause after a failure ends.
Turns are given one by one and in order, since thousands of subscriptions may wait for one endpoint.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Set

import certifi

from veilmq.push.addresses import EndpointRefused, parse
from veilmq.push.connections import Connections
from veilmq.push.health import Health


class Line:
    """One endpoint."""

    __slots__ = ("_rooms", "_timer", "_turns", "connections", "health", "leased", "sending")

    def __init__(self, context: ssl.SSLContext) -> None:
        self.connections = Connections(context)
        self.health = Health()
        self.leased = 0
        """Messages that were leased for it and are not done."""
        self.sending = 0
        """Calls under way."""
        self._turns: deque[asyncio.Future[None]] = deque()
        self._rooms: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        """Set while somebody waits and the pause goes on."""

    def free(self) -> int:
        """How many more messages may be leased for it."""
        return max(0, self.health.in_flight_max - self.leased)

    def must_wait(self, now: float) -> bool:
        """Whether a call must wait for its turn."""
        return self.sending >= self.health.in_flight_max or now < self.health.ready_at

    async def turn(self) -> None:
        """Return when it may be called; from then on the call is under way."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(mine)
        self.tell()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given, and nobody takes it
                self.sending -= 1
                self.tell()
            raise

    async def room(self) -> int:
        """Wait until a message may be leased for it; how many."""
        loop = asyncio.get_running_loop()
        while not (loop.time() >= self.health.ready_at and self.free()):
            mine: asyncio.Future[None] = loop.create_future()
            self._rooms.append(mine)
            self.tell()
            await mine
        return self.free()

    def tell(self) -> None:
        """A call has ended, a message is done, or somebody waits: give what there is to give."""
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
        """`tell` again when the pause is over, which may end sooner than was thought."""
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.tell()


class Lines(dict[str, Line]):
    """All of them, by endpoint."""

    def __init__(self, verify: bool) -> None:
        """verify: check certificates of TLS, by the authorities of certifi and those that this machine trusts."""
        super().__init__()
        self._context = ssl.create_default_context(cafile=certifi.where())
        self._context.load_default_certs()  # an operator's own authority is in the machine's store alone
        if not verify:
            self._context.check_hostname = False
            self._context.verify_mode = ssl.CERT_NONE

    def __missing__(self, endpoint: str) -> Line:
        return self.setdefault(endpoint, Line(self._context))

    async def keep(self, wanted: Set[str]) -> None:
        """Forget endpoints that nobody subscribes to any more, and that have nothing under way."""
        for name in self.keys() - wanted:
            if not self[name].leased:  # asked each time: while one is closed, another may be wanted again
                await self.pop(name).connections.close()


def endpoint_of(url: str) -> str:
    """What is one endpoint, whatever path: scheme, host and port."""
    try:
        host, port, secure, _, _ = parse(url)
    except EndpointRefused:
        return url
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"
