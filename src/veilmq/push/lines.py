"""What is known of each endpoint: how it does, what it has under way, and its connections.

Strategy: an endpoint is scheme, host and port, whatever path and whichever subscription. Each has connections of its
own: the work of a shared pool grows with all that it holds, and the dead would be paid for by the healthy. Whoever
wants to call waits for a turn: at most `Health.in_flight_max` at a time, and not before the pause after a failure ends.
"""

import asyncio
import ssl
from collections.abc import Set
from typing import Final

import httpx

from veilmq.push.addresses import EndpointRefused, parse
from veilmq.push.health import IN_FLIGHT_MAX, Health

KEEP_ALIVE_S: Final = 30.0
_LIMITS: Final = httpx.Limits(
    max_connections=IN_FLIGHT_MAX, max_keepalive_connections=IN_FLIGHT_MAX, keepalive_expiry=KEEP_ALIVE_S
)


class Line:
    """One endpoint."""

    __slots__ = ("_changed", "_transport", "_verify", "health", "leased", "sending")

    def __init__(self, verify: ssl.SSLContext) -> None:
        self.health = Health()
        self.leased = 0
        """Messages that were leased for it and are not done."""
        self.sending = 0
        """Calls under way."""
        self._changed = asyncio.Event()
        self._verify = verify
        self._transport: httpx.AsyncHTTPTransport | None = None

    def transport(self) -> httpx.AsyncHTTPTransport:
        """Its connections."""
        if self._transport is None:
            self._transport = httpx.AsyncHTTPTransport(verify=self._verify, limits=_LIMITS, trust_env=False)
        return self._transport

    def free(self) -> int:
        """How many more messages may be leased for it."""
        return max(0, self.health.in_flight_max - self.leased)

    def must_wait(self, now: float) -> bool:
        """Whether a call must wait for its turn."""
        return self.sending >= self.health.in_flight_max or now < self.health.ready_at

    async def turn(self) -> None:
        """Return when it may be called; from then on the call is under way."""
        while self.must_wait(self._now()):
            pause = self.health.ready_at - self._now()
            await (asyncio.sleep(pause) if pause > 0 else self.change())
        self.sending += 1

    async def room(self) -> int:
        """Wait until a message may be leased for it; how many."""
        while not (self._now() >= self.health.ready_at and self.free()):
            pause = self.health.ready_at - self._now()
            await (asyncio.sleep(pause) if pause > 0 else self.change())
        return self.free()

    async def change(self) -> None:
        """Return when a call has ended, or a message is done."""
        self._changed.clear()
        await self._changed.wait()

    def tell(self) -> None:
        """A call has ended, or a message is done."""
        self._changed.set()

    async def close(self) -> None:
        """Let the connections go."""
        if self._transport is not None:
            await self._transport.aclose()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Lines(dict[str, Line]):
    """All of them, by endpoint."""

    def __init__(self, verify: bool) -> None:
        """verify: check certificates of TLS."""
        super().__init__()
        self._context = httpx.create_ssl_context(verify=verify, trust_env=False)

    def __missing__(self, endpoint: str) -> Line:
        return self.setdefault(endpoint, Line(self._context))

    async def keep(self, wanted: Set[str]) -> None:
        """Forget endpoints that nobody subscribes to any more, and that have nothing under way."""
        gone = [name for name in self.keys() - wanted if not self[name].leased]
        for name in gone:
            await self.pop(name).close()


def endpoint_of(url: str) -> str:
    """What is one endpoint, whatever path: scheme, host and port."""
    try:
        host, port, secure, _, _ = parse(url)
    except EndpointRefused:
        return url
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"
