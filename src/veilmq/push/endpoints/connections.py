"""The connections to one endpoint, over which pushes are posted.

Strategy: a call connects to the address that was checked; the name goes into Host and TLS. It follows no redirect,
keeps no cookie, decompresses nothing (a few hundred bytes of nested gzip decode to gigabytes). Only the status of a
response counts. A short body is read, to use the connection again; after a longer one the connection is closed.

Before changing it: aiohttp closes a connection only when the peer has read all that was written, which an endpoint can
delay for ever. So a connection that is not kept is aborted here.
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
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader
from aiohttp.tracing import Trace
from yarl import URL

from veilmq.push.network import local_exhaustion_of

IN_FLIGHT_MAX: Final = 4
"""Calls to one endpoint at a time, at most."""
KEEP_ALIVE_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 4 * 1024
HEADER_BYTES_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 256
_INTERIM_MAX: Final = 16
"""Interim answers (102, 103 ...) before the final one."""
_FINAL: Final = 200
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


class _Answers(ResponseHandler):
    """What reads answers. aiohttp keeps any number of interim ones (RFC 9110, 15.2), on the loop of all ports, and
    takes what came between two requests as the answer to the second, which RFC 9112, 9.2, forbids."""

    _interim = 0
    _answered = False

    def asked(self) -> None:
        """A request follows."""
        self._answered = False

    def data_received(self, data: bytes) -> None:
        """See `ResponseHandler`. Between two requests the connection is aborted: a load balancer may send a 408 before
        it closes an idle one, and a 200 would count as the delivery of the next push."""
        unasked = self._answered and (self._payload is None or self._payload.is_eof())
        if not unasked or not data.strip(b"\r\n"):
            super().data_received(data)
        elif self.transport is not None:
            self.transport.abort()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """See `ResponseHandler`; called for each head of an answer."""
        if self._interim > _INTERIM_MAX:
            return  # the connection is being aborted
        self._answered = data[0].code >= _FINAL
        self._interim = 0 if self._answered else self._interim + 1
        if self._interim <= _INTERIM_MAX:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.abort()


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
        self._factory = partial(_Answers, loop=asyncio.get_running_loop())  # type: ignore[assignment] # as its own
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
        assert isinstance(protocol, _Answers)
        protocol.asked()
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
