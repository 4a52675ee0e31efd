"""Push requests: find the endpoint, make the request, sign it, post it.

Strategy: sign the request exactly as it goes over the wire. Signing takes a third of a millisecond of CPU, so threads
do it.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from yarl import URL

from veilmq.model.instant import Instant
from veilmq.model.message import Delivery
from veilmq.model.topic import SubscriptionSettings, TopicKey
from veilmq.push.addresses import Endpoint, Network, choose, parse
from veilmq.push.endpoints import EndpointState
from veilmq.push.lookups import Lookups
from veilmq.push.notifications import cased, push_of
from veilmq.push.signing import Signer, string_to_sign

_SIGNERS: Final = 2


class PushRequests:
    """Sends push requests."""

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
        self, state: EndpointState, topic: TopicKey, name: str, settings: SubscriptionSettings, message: Delivery,
        answered: Callable[[], object],
    ) -> int:  # fmt: skip
        """The status of the answer; answered: see `Connections.post`.

        Raises EndpointRefused, LocalExhaustion and what `Connections.post` raises.
        """
        assert settings.url is not None
        addresses = await self._lookups.addresses(parse(settings.url)[0])
        endpoint = choose(settings.url, addresses, self._allowed)
        urls = [_url(endpoint, address) for address in endpoint.addresses]
        request_id = secrets.token_hex(12).upper()
        push = push_of(topic, name, settings, message, request_id, self._certificate_url, self._wall())
        text = string_to_sign("POST", urls[0].raw_path_qs, push.headers)
        signature = await asyncio.get_running_loop().run_in_executor(self._pool, self._signer.sign, text)
        headers = {
            "host": endpoint.authority,
            "user-agent": "VeilMQ-Push",
            **cased(push.headers, self._documented_case),
        }
        headers["Authorization" if self._documented_case else "authorization"] = signature
        return await state.connections.post(urls, endpoint.host, headers, push.body, self._timeout_s, answered)

    def close(self) -> None:
        """Stop the signing threads; nothing is sent afterwards."""
        self._pool.shutdown(wait=False)


def _url(endpoint: Endpoint, address: str) -> URL:
    host = f"[{address}]" if ":" in address else address
    return URL(f"{'https' if endpoint.secure else 'http'}://{host}:{endpoint.port}{endpoint.target}", encoded=True)
