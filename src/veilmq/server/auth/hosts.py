"""Which Host and Origin headers a server without credentials accepts.

Strategy: development mode accepts any credentials, so a web page that a developer visits must not reach the queues. It
could try a name that points at loopback (DNS rebinding; the Host header reveals it), a call from its own Origin, or an
image or link, whose GET has no Origin (browsers then send Sec-Fetch-Site). Accepted names are cached, so a request
costs one look-up in a small set.
"""

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+))(?::\d{1,5})?")
_REMEMBERED_MAX: Final = 256
_OTHER_PAGES: Final = frozenset({b"cross-site", b"same-site"})
"""Values of Sec-Fetch-Site (W3C, Fetch Metadata); a typed URL is `none`, and SDKs do not send the header."""


class Hosts:
    """Loopback addresses, `localhost`, names below `domains`; Origins as listed, or the server's own."""

    def __init__(self, domains: Collection[str], origins: Collection[str] = ()) -> None:
        self._suffixes = tuple(f".{domain.lower()}" for domain in domains)
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)
        self._known: set[bytes] = set()

    def takes(self, host: bytes, origin: bytes | None, site: bytes | None = None) -> bool:
        """Whether a request with these headers may come in: Host, Origin, Sec-Fetch-Site."""
        if host not in self._known and not self._learn(host):
            return False
        if origin is None:
            return site not in _OTHER_PAGES
        return b"*" in self._origins or origin in self._origins or origin.partition(b"://")[2] == host

    def _learn(self, host: bytes) -> bool:
        if not is_loopback_name(host.decode("latin-1"), self._suffixes):
            return False
        if len(self._known) < _REMEMBERED_MAX:
            self._known.add(host)
        return True


def is_loopback_name(host: str, suffixes: tuple[str, ...] = ()) -> bool:
    """Whether a Host header (with or without a port) names this machine, or a name with one of the suffixes."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = (found[1] or found[2]).lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or f".{name}".endswith(suffixes):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
