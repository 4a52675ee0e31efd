"""The connections to one endpoint: a request goes over one that is kept or over a new one, and its status comes back.

Strategy: the address that was checked is the one connected to, whatever the name says a moment later; the name goes
into Host and TLS. No redirect is followed, no cookie kept, nothing decompressed: a few hundred bytes of gzip in gzip
are gigabytes when decoded. Of an answer only the status counts; a short body is read, so that the connection can be
used again, and what is longer or unknown is left in it and closes it. The library closes a connection when all that was
written has been read, which an endpoint may put off for ever: whatever is not kept is cut off here.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Final
from weakref import WeakSet

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from veilmq.push.health import IN_FLIGHT_MAX
from veilmq.push.shortage import shortage_of

KEEP_ALIVE_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 4 * 1024
HEADER_BYTES_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 256
_BODY_S: Final = 1.0
_REST_S: Final = 1.0
"""For an endpoint that answers before it has read the request, to read the rest."""
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the library would add: a push has those that are signed."""

_Ask = Callable[..., Awaitable[aiohttp.ClientResponse]]


class Connections:
    """Those to one endpoint."""

    __slots__ = ("_context", "_session")

    def __init__(self, context: ssl.SSLContext) -> None:
        """context: of TLS; nothing is opened yet."""
        self._context = context
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, urls: Sequence[URL], host: str, headers: Mapping[str, str], body: bytes, connect_s: float,
        answered: Callable[[], object],
    ) -> int:  # fmt: skip
        """The status that the first address answers that a connection can be had to.

        urls: one for each address. host: the name that the certificate must have. connect_s: for all addresses
        together. answered: called as the status is known; what follows takes at most two seconds, whatever the endpoint
        does. Raises aiohttp.ClientError, OSError, TimeoutError; ValueError for a header that HTTP cannot carry.
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
        """Let them go."""
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
    """What one request goes over."""

    __slots__ = ("_protocol", "_transport", "new")

    def __init__(self) -> None:
        self.new = True
        """No request went over it before, or none could be had."""
        self._protocol: ResponseHandler | None = None
        self._transport: asyncio.Transport | None = None

    def lead_over(self, connection: Connection, *, new: bool) -> None:
        """The request is about to be written to that connection."""
        self.new, self._protocol, self._transport = new, connection.protocol, connection.transport

    @property
    def has_rest(self) -> bool:
        """Whether something waits to be written."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    async def end(self, answer: aiohttp.ClientResponse) -> None:
        """Close it, and let the endpoint read the rest for a while: it may have answered first and mean to."""
        lost = self._lost()
        answer.close()
        if lost is not None:
            await asyncio.wait([lost], timeout=_REST_S)

    def cut_off(self) -> None:
        """Close it now, whatever has not been read."""
        if self._transport is not None and self._lost() is not None:  # asyncio cannot abort what is closed
            self._transport.abort()

    def _lost(self) -> asyncio.Future[None] | None:
        """Done when the connection is closed; None if it is."""
        lost = None if self._protocol is None else self._protocol.closed
        if lost is None or lost.done():
            return None
        lost.add_done_callback(_heard)
        return lost


_way: ContextVar[_Way] = ContextVar("veilmq_push_way")
"""Of the request that the running task makes."""


class _Connector(aiohttp.TCPConnector):
    """Says what each request goes over."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(ssl=context, limit=IN_FLIGHT_MAX, keepalive_timeout=KEEP_ALIVE_S, use_dns_cache=False)
        self._met: WeakSet[ResponseHandler] = WeakSet()

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 its name
    ) -> Connection:
        """A connection of the pool or a new one. Raises what that of the library does."""
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        assert protocol is not None
        _way.get().lead_over(connection, new=protocol not in self._met)
        self._met.add(protocol)
        return connection


def _heard(lost: asyncio.Future[None]) -> None:
    """By what error a connection was lost that is not kept anyway is of no interest."""
    if not lost.cancelled():
        lost.exception()


async def _was_read(answer: aiohttp.ClientResponse) -> bool:
    """Read the answer's body if it is short; whether it was read to its end."""
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
            if (shortage := shortage_of(failure)) is not None and not shortage.doubtful:
                raise
    return await _answer(ask, urls[-1])


async def _answer(ask: _Ask, url: URL) -> tuple[_Way, aiohttp.ClientResponse]:
    """The answer, over a connection that lives.

    One that was kept may have been closed by the endpoint a moment ago, which says nothing about the endpoint: then the
    request is sent again. A push may come twice anyway.
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
