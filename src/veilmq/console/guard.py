"""What every request to the console must pass, and the headers of every answer.

Strategy: pure ASGI, around all routes. Host is compared with a list in every mode: a name that points at this machine
(DNS rebinding) is not on it, and a literal address cannot be pointed elsewhere. A POST must bear an Origin, and that of
this very host; browsers always send it, and a program sends its credentials instead. The headers forbid everything that
the pages do not need.
"""

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veilmq.server.auth import is_loopback_name
from veilmq.server.http.intake import is_host

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_SAFE: Final = frozenset({"GET", "HEAD"})


class Guard:
    """ASGI middleware. hosts: names beside loopback's, without a port; domains: names below these."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], domains: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._suffixes = tuple(f".{domain.lower()}" for domain in domains)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        wrong = self._fault(scope)
        app = self._app if wrong is None else PlainTextResponse(wrong + "\n", 403)
        await app(scope, receive, send_guarded)

    def _fault(self, scope: Scope) -> str | None:
        """Why the request is refused; None if it is not."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.takes(hosts[0]):
            return "This Host is not one of this server's: name it in --console-hosts, or use 127.0.0.1."
        if scope["method"] in _SAFE:
            return None
        if "authorization" in headers and "origin" not in headers:  # no page of another site can send that
            return None
        scheme, _, host = headers.get("origin", "").partition("://")
        if scheme not in {"http", "https"} or host != hosts[0]:
            return "Pages of this Origin may not act here."
        return None

    def takes(self, host: str) -> bool:
        """Whether a Host header names this server."""
        if not is_host(host.encode("latin-1")):
            return False
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name in self._hosts or is_loopback_name(host, self._suffixes) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
