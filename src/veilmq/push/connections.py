"""The connections to one endpoint: a request goes over one that is kept or over a new one, and its status comes back.

Strategy: the address that was checked is the one connected to, whatever the name says a moment later; the name goes
into Host and TLS. No redirect is followed, no cookie kept, nothing decompressed: a few hundred bytes of gzip in gzip
are gigabytes when decoded. Of an answer only the status counts; a short body is read, so that the connection can be
used again, and what is longer or unknown is left in it and closes it.
"""

import ssl
from asyncio import timeout
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Final

import aiohttp
from yarl import URL

from veilmq.push.health import IN_FLIGHT_MAX

KEEP_ALIVE_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 4 * 1024
HEADER_BYTES_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 256
_BODY_S: Final = 1.0
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
        self, urls: Sequence[URL], host: str, headers: Mapping[str, str], body: bytes, connect_s: float
    ) -> int:
        """The status that the first address answers that a connection can be had to.

        urls: one for each address. host: the name that the certificate must have. connect_s: for all addresses
        together. Raises aiohttp.ClientError, OSError, TimeoutError; ValueError for a header that HTTP cannot carry.
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
        answer = await _first_answer(ask, urls)
        try:
            length = 0 if answer.status == 204 else answer.content_length
            if length is not None and length <= ANSWER_BYTES_MAX:
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with timeout(_BODY_S):
                        await answer.read()
        finally:
            answer.release()  # what was not read to its end closes the connection
        return answer.status

    async def close(self) -> None:
        """Let them go."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_create_start.append(_connects)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    ssl=self._context, limit=IN_FLIGHT_MAX, keepalive_timeout=KEEP_ALIVE_S, use_dns_cache=False
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_AUTOMATIC,
                auto_decompress=False,
                max_line_size=HEADER_BYTES_MAX,
                max_field_size=HEADER_BYTES_MAX,
                max_headers=HEADERS_MAX,
                trace_configs=[trace],
            )
        return self._session


async def _connects(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.new = True


async def _first_answer(ask: _Ask, urls: Sequence[URL]) -> aiohttp.ClientResponse:
    for url in urls[:-1]:
        try:
            return await _answer(ask, url)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            continue
    return await _answer(ask, urls[-1])


async def _answer(ask: _Ask, url: URL) -> aiohttp.ClientResponse:
    """The answer, over a connection that lives.

    One that was kept may have been closed by the endpoint a moment ago, which says nothing about the endpoint: then the
    request is sent again. A push may come twice anyway.
    """
    while True:
        connection = SimpleNamespace(new=False)
        try:
            return await ask(url, trace_request_ctx=connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if connection.new:
                raise
