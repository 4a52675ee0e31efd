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

A call connects to the address that was checked; the name goes into Host and TLS. It follows no redirect, keeps no
cookie, decompresses nothing (a few hundred bytes of nested gzip decode to gigabytes). Only the status of a response
counts. A short body is read, to use the connection again; after a longer one the connection is closed.

Before changing it: aiohttp closes a connection only when the peer has read all that was written, which an endpoint can
delay for ever. So a connection that is not kept is aborted here.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Final
from weakref import WeakSet

import aiohttp
import certifi
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.topic import ATTEMPTS_MAX, RetryStrategy
from veilmq.push.network import EndpointRefused, local_exhaustion_of, parse

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
IN_FLIGHT_MAX: Final = 4
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


KEEP_ALIVE_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 4 * 1024
HEADER_BYTES_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 256
_BODY_S: Final = 1.0
_REST_S: Final = 1.0
"""How long an endpoint that answers early may still read the rest of the request."""
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add. A push carries only the headers that are signed."""

_Ask = Callable[..., Awaitable[aiohttp.ClientResponse]]


class Connections:
    """The connections to one endpoint."""

    __slots__ = ("_context", "_session")

    def __init__(self, context: ssl.SSLContext) -> None:
        """context: for TLS. Opens nothing yet."""
        self._context = context
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, urls: Sequence[URL], host: str, headers: Mapping[str, str], body: bytes, connect_s: float,
        answered: Callable[[], object],
    ) -> int:  # fmt: skip
        """Post to the first address that accepts a connection; return the status.

        urls: one for each address. host: the name that the certificate must have. connect_s: for all addresses
        together. answered: called once the status is known; after that the call takes at most two seconds more,
        whatever the endpoint does. Raises aiohttp.ClientError, OSError, TimeoutError; ValueError for a header that HTTP
        cannot carry.
        """
        share = aiohttp.ClientTimeout(total=None, sock_connect=connect_s / len(urls))
        ask = partial(
            self._opened().post,
            data=body,
            headers=headers,
            server_hostname=host,
            timeout=share,
            allow_redirects=False,
        )
        way, answer = await _first_answer(ask, urls)
        answered()
        kept = False
        try:
            kept = await _was_read(answer) and not way.has_rest
            if way.has_rest:
                await way.end(answer)
        finally:
            answer.release()
            if not kept:
                way.cut_off()
        return answer.status

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(self._context),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_AUTOMATIC,
                auto_decompress=False,
                max_line_size=HEADER_BYTES_MAX,
                max_field_size=HEADER_BYTES_MAX,
                max_headers=HEADERS_MAX,
            )
        return self._session


class _Way:
    """The connection that one request uses."""

    __slots__ = ("_protocol", "_transport", "new")

    def __init__(self) -> None:
        self.new = True
        """No earlier request used this connection, or no connection was made."""
        self._protocol: ResponseHandler | None = None
        self._transport: asyncio.Transport | None = None

    def lead_over(self, connection: Connection, *, new: bool) -> None:
        """Note the connection just before the request is written to it."""
        self.new, self._protocol, self._transport = new, connection.protocol, connection.transport

    @property
    def has_rest(self) -> bool:
        """Whether part of the request is still to be written."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    async def end(self, answer: aiohttp.ClientResponse) -> None:
        """Close the connection, but give an endpoint that answered early some time to read the rest."""
        lost = self._lost()
        answer.close()
        if lost is not None:
            await asyncio.wait([lost], timeout=_REST_S)

    def cut_off(self) -> None:
        """Abort the connection, whatever the endpoint has not read."""
        if self._transport is not None and self._lost() is not None:  # asyncio cannot abort what is closed
            self._transport.abort()

    def _lost(self) -> asyncio.Future[None] | None:
        """A future that is done when the connection is closed; None if it is closed already."""
        lost = None if self._protocol is None else self._protocol.closed
        if lost is None or lost.done():
            return None
        lost.add_done_callback(_heard)
        return lost


_way: ContextVar[_Way] = ContextVar("veilmq_push_way")
"""The connection of the request that the running task makes."""


class _Connector(aiohttp.TCPConnector):
    """Notes which connection each request uses."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(ssl=context, limit=IN_FLIGHT_MAX, keepalive_timeout=KEEP_ALIVE_S, use_dns_cache=False)
        self._met: WeakSet[ResponseHandler] = WeakSet()

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 its name
    ) -> Connection:
        """A connection of the pool or a new one. Raises what aiohttp's own `connect` raises."""
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        assert protocol is not None
        _way.get().lead_over(connection, new=protocol not in self._met)
        self._met.add(protocol)
        return connection


def _heard(lost: asyncio.Future[None]) -> None:
    """Retrieve the error of a lost connection: it was not to be kept, so the error does not matter."""
    if not lost.cancelled():
        lost.exception()


async def _was_read(answer: aiohttp.ClientResponse) -> bool:
    """Read the response's body if it is short. True if it was read to its end."""
    length = 0 if answer.status == 204 else answer.content_length
    if length is None or length > ANSWER_BYTES_MAX:
        return False
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_BODY_S):
            await answer.read()
            return True
    return False


async def _first_answer(ask: _Ask, urls: Sequence[URL]) -> tuple[_Way, aiohttp.ClientResponse]:
    for url in urls[:-1]:
        try:
            return await _answer(ask, url)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as failure:
            if (lacking := local_exhaustion_of(failure)) is not None and not lacking.doubtful:
                raise
    return await _answer(ask, urls[-1])


async def _answer(ask: _Ask, url: URL) -> tuple[_Way, aiohttp.ClientResponse]:
    """The response, over a connection that works.

    The endpoint may have closed a kept connection a moment ago, which says nothing about its health: then the request
    is sent again. Receivers must expect duplicate pushes anyway.
    """
    while True:
        way = _Way()
        _way.set(way)
        answer = None
        try:
            answer = await ask(url)
            return way, answer
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if way.new:
                raise
        finally:
            if answer is None:
                way.cut_off()


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
