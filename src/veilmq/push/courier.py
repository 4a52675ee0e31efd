"""One push on its way: find the endpoint, sign, post, and read what counts of the answer.

Strategy: the address that was checked is the one connected to, whatever the name says a moment later; the name goes
into Host and TLS. Of an answer only the status counts: no redirect is followed, and what is longer than a few
kilobytes is not read. Signing is a CPU's work of half a millisecond and done by threads.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import httpx

from veilmq.model.instant import Instant
from veilmq.model.message import Delivery
from veilmq.model.topic import SubscriptionSettings, TopicKey
from veilmq.push.addresses import Endpoint, Network, choose, parse
from veilmq.push.lines import Line
from veilmq.push.lookups import Lookups
from veilmq.push.notifications import cased, push_of
from veilmq.push.signing import Signer, string_to_sign

ANSWER_BYTES_MAX: Final = 4 * 1024
_BODY_S: Final = 1.0
_SIGNERS: Final = 2
_CONNECTED: Final = "connection.connect_tcp.started"
"""The event of httpcore that a new connection begins with."""


class Courier:
    """Sends pushes."""

    def __init__(
        self,
        signer: Signer,
        certificate_url: str,
        allowed: Sequence[Network],
        documented_case: bool,
        wall: Callable[[], Instant],
        timeout_s: float,
        lookups: Lookups,
    ) -> None:
        self._signer = signer
        self._certificate_url = certificate_url
        self._allowed = allowed
        self._documented_case = documented_case
        self._wall = wall
        self._timeout_s = timeout_s
        self._lookups = lookups
        self._pool = ThreadPoolExecutor(_SIGNERS, thread_name_prefix="veilmq-push-sign")

    async def post(
        self, line: Line, topic: TopicKey, name: str, settings: SubscriptionSettings, message: Delivery
    ) -> int:
        """The status of the answer. Raises EndpointRefused, httpx.HTTPError, httpx.InvalidURL, OSError."""
        assert settings.url is not None
        addresses = await self._lookups.addresses(parse(settings.url)[0])
        endpoint = choose(settings.url, addresses, self._allowed)
        urls = [_url(endpoint, address) for address in endpoint.addresses]
        request_id = secrets.token_hex(12).upper()
        push = push_of(topic, name, settings, message, request_id, self._certificate_url, self._wall())
        # What is signed is the target on the wire: without dot segments, and with what no URL has percent-encoded.
        text = string_to_sign("POST", urls[0].raw_path.decode(), push.headers)
        signature = await asyncio.get_running_loop().run_in_executor(self._pool, self._signer.sign, text)
        named = {"host": endpoint.authority, "user-agent": "VeilMQ-Push", **cased(push.headers, self._documented_case)}
        named["Authorization" if self._documented_case else "authorization"] = signature
        headers = httpx.Headers(named, encoding="utf-8")
        timeout = dict.fromkeys(("read", "write", "pool"), self._timeout_s)
        extensions = {
            "sni_hostname": endpoint.host,
            "timeout": timeout | {"connect": self._timeout_s / len(urls)},
        }
        requests = [
            httpx.Request("POST", url, content=push.body, headers=headers, extensions=extensions) for url in urls
        ]
        answer = await _first_answer(line.transport(), requests)
        try:
            # Its body is nobody's business; a short one is read, so that the connection can be used again.
            length = answer.headers.get("content-length", "")
            if answer.status_code == 204 or (length.isdigit() and int(length) <= ANSWER_BYTES_MAX):
                with suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(_BODY_S):
                        # As it is on the wire: a few hundred bytes of gzip in gzip are gigabytes when decoded.
                        async for _ in answer.aiter_raw():
                            pass
        finally:
            await answer.aclose()
        return answer.status_code

    def close(self) -> None:
        """Nothing is sent any more."""
        self._pool.shutdown(wait=False)


def _url(endpoint: Endpoint, address: str) -> httpx.URL:
    host = f"[{address}]" if ":" in address else address
    return httpx.URL(f"{'https' if endpoint.secure else 'http'}://{host}:{endpoint.port}{endpoint.target}")


async def _first_answer(transport: httpx.AsyncHTTPTransport, requests: Sequence[httpx.Request]) -> httpx.Response:
    """The answer of the first address that a connection can be had to."""
    for request in requests[:-1]:
        try:
            return await _send(transport, request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    return await _send(transport, requests[-1])


async def _send(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
    """The answer, over a connection that lives.

    One that was kept may have been closed by the endpoint a moment ago, which says nothing about the endpoint: then the
    request is sent again. A push may come twice anyway.
    """
    while True:
        connected = False

        async def trace(event: str, _: object) -> None:
            nonlocal connected
            connected = connected or event == _CONNECTED

        request.extensions = {**request.extensions, "trace": trace}
        try:
            return await transport.handle_async_request(request)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            if connected:
                raise
