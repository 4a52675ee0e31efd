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
from veilmq.push.addresses import Network, choose, parse
from veilmq.push.lines import Line
from veilmq.push.lookups import Lookups
from veilmq.push.notifications import cased, push_of
from veilmq.push.signing import Signer, string_to_sign

ANSWER_BYTES_MAX: Final = 4 * 1024
_BODY_S: Final = 1.0
_SIGNERS: Final = 2


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
        self._timeout = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        self._lookups = lookups
        self._pool = ThreadPoolExecutor(_SIGNERS, thread_name_prefix="veilmq-push-sign")

    async def post(
        self, line: Line, topic: TopicKey, name: str, settings: SubscriptionSettings, message: Delivery
    ) -> int:
        """The status of the answer. Raises EndpointRefused, httpx.HTTPError, OSError."""
        assert settings.url is not None
        addresses = await self._lookups.addresses(parse(settings.url)[0])
        endpoint = choose(settings.url, addresses, self._allowed)
        request_id = secrets.token_hex(12).upper()
        push = push_of(topic, name, settings, message, request_id, self._certificate_url, self._wall())
        text = string_to_sign("POST", endpoint.target, push.headers)
        signature = await asyncio.get_running_loop().run_in_executor(self._pool, self._signer.sign, text)
        headers = cased(push.headers, self._documented_case)
        headers["Authorization" if self._documented_case else "authorization"] = signature
        address = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        request = httpx.Request(
            "POST",
            f"{'https' if endpoint.secure else 'http'}://{address}:{endpoint.port}{endpoint.target}",
            content=push.body,
            headers={"host": endpoint.authority, "user-agent": "VeilMQ-Push", **headers},
            extensions={"sni_hostname": endpoint.host, "timeout": self._timeout},
        )
        answer = await line.transport().handle_async_request(request)
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
