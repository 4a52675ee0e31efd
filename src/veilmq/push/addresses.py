"""Which endpoints may be called: no private, link-local or metadata address unless the operator allows its network.

Strategy: look the name up once, check the answer, and connect to the address that was checked. A name that changes its
address in between (DNS rebinding) then changes nothing. Every address of a name must pass the check: one good address
does not excuse the others. If a connection to one address fails, the next one is tried.
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import quote, urlsplit

Network = IPv4Network | IPv6Network
URL_CHARACTERS_MAX = 2_048
ADDRESSES_MAX = 4
"""How many addresses of one name are tried."""
_KEPT = "/?:@!$&'()*+,;=%[]|^\\~"
"""Characters that a target may contain besides letters, digits and `-._`; all others are percent-encoded."""


class EndpointRefused(Exception):
    """The endpoint may not be called or cannot be found; the text says why."""


class Endpoint(NamedTuple):
    """Where a push goes: the addresses to connect to, and the names in the request."""

    addresses: tuple[str, ...]
    """In the order in which they are tried."""
    host: str
    port: int
    secure: bool
    target: str
    """Path and query as they go over the wire; `/notifications` where the URL has no path."""
    authority: str
    """Host header: host, and port if it is not the scheme's own."""


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """The networks that an operator allows. Raises ValueError for a text that is no network."""
    return tuple(ip_network(text) for text in texts)


@lru_cache(1_024)  # each push asks for its endpoint several times
def parse(url: str) -> tuple[str, int, bool, str, str]:
    """Host, port, whether by TLS, target, authority. Raises EndpointRefused."""
    if len(url) > URL_CHARACTERS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise EndpointRefused("the URL is too long, or has characters that are not allowed in a URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise EndpointRefused("the URL has no valid host and port") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise EndpointRefused("the URL must be http or https, with a host and without a user")
    secure = parts.scheme == "https"
    usual = 443 if secure else 80
    host = parts.hostname
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port in (None, usual) else f"{shown}:{port}"
    path = parts.path or "/notifications"
    target = _without_dots(path) + (f"?{parts.query}" if parts.query else "")
    return host, port or usual, secure, quote(target, safe=_KEPT), authority


def _without_dots(path: str) -> str:
    """The path without `.` and `..` (RFC 3986, section 5.2.4)."""
    kept: list[str] = []
    *parents, last = path.split("/")[1:]
    for segment in parents:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if last == "..":
        del kept[-1:]
    return "/" + "/".join([*kept, "" if last in {".", ".."} else last])


def choose(url: str, addresses: Sequence[str], allowed: Sequence[Network]) -> Endpoint:
    """Where a push to the URL goes; `addresses` are those of its host. Raises EndpointRefused if one of them may not be
    called."""
    host, port, secure, target, authority = parse(url)
    for address in addresses:
        check(address, allowed)
    return Endpoint(tuple(addresses[:ADDRESSES_MAX]), host, port, secure, target, authority)


def check(address: str, allowed: Sequence[Network]) -> None:
    """Raises EndpointRefused for an address that a stranger's endpoint must not lead to."""
    plain = ip_address(address.partition("%")[0])
    if isinstance(plain, IPv6Address):
        plain = plain.ipv4_mapped or plain.sixtofour or plain
    if any(plain.version == network.version and plain in network for network in allowed):
        return
    if not _is_public(plain):
        raise EndpointRefused(f"{address} is not a public address: allow its network with --push-allow")


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.is_site_local:  # RFC 3879: routers may still know it as private
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
