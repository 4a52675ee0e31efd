"""Which endpoints may be called, the look-up of their names, and what this server lacks when it cannot call.

Strategy: no private, link-local or metadata address is called unless the operator allows its network. Look the name up
once, check the answer, and connect to the address that was checked. A name that changes its address in between (DNS
rebinding) then changes nothing. Every address of a name must pass the check: one good address does not excuse the
others. If a connection to one address fails, the next one is tried.

A name server that hangs delays nobody but its own endpoints: each name is looked up on a daemon thread of its own, once
for all who ask meanwhile, and the answer is cached for some seconds. So a thousand pushes to a name that hangs cost one
thread, and no healthy endpoint waits behind them.

Local exhaustion: this server has run out of open files, memory or threads, which says nothing about an endpoint. Trust
an error that names the missing resource. A resolver often names nothing, or something else (EAI_SYSTEM with EBUSY):
then try to open a file and a socket; if that fails, the resource was missing. An error that may be this machine's fault
or the endpoint's (`doubtful`) is first blamed on this machine, and on the endpoint if it stays (`Health.doubts`).
"""

import asyncio
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple
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
    if port == 0:
        raise EndpointRefused("the URL names port 0, where nobody can listen")
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


_AZURE_HOST: Final = IPv4Address("168.63.129.16")
"""The host of a virtual machine in Azure, which tells it secrets; public by its number alone ("What is IP address
168.63.129.16?", learn.microsoft.com)."""


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.is_site_local:  # RFC 3879: routers may still know it as private
        return False
    if address == _AZURE_HOST:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


BELIEVED_S: Final = 10.0
LOOKUPS_MAX: Final = 256
"""Names that are looked up at the same time."""
_REMEMBERED_MAX: Final = 4_096


Resolve = Callable[[str], list[str]]
"""The addresses of a name. Blocks; raises OSError, UnicodeError."""


def resolve(host: str) -> list[str]:
    """Resolve a name as this machine does."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class Lookups:
    """The look-ups of one event loop."""

    def __init__(self, resolve: Resolve = resolve, believed_s: float = BELIEVED_S) -> None:
        self._resolve = resolve
        self._believed_s = believed_s
        self._asked: dict[str, asyncio.Future[list[str]]] = {}
        self._known: dict[str, tuple[list[str], float]] = {}

    async def addresses(self, host: str) -> list[str]:
        """All addresses of the host. Raises EndpointRefused, LocalExhaustion; after a bug in the look-up, whatever it
        raised."""
        try:
            return [str(ip_address(host))]
        except ValueError:
            pass
        loop = asyncio.get_running_loop()
        known = self._known.get(host)
        if known is not None and loop.time() < known[1]:
            return known[0]
        asked = self._asked.get(host)
        if asked is None:
            if len(self._asked) >= LOOKUPS_MAX:
                raise LocalExhaustion(f"{LOOKUPS_MAX} names are being looked up")
            asked = loop.create_future()
            looking = threading.Thread(target=self._look, args=(host, loop, asked), name="veilmq-lookup", daemon=True)
            try:
                looking.start()
            except (RuntimeError, MemoryError) as error:
                raise local_exhaustion_of(error) or error from None
            self._asked[host] = asked
        # A caller that gives up must not cancel the look-up for the others.
        return await asyncio.shield(asked)

    def _look(self, host: str, loop: asyncio.AbstractEventLoop, asked: "asyncio.Future[list[str]]") -> None:
        """Runs on a thread."""
        found: list[str] = []
        wrong: Exception | None = None
        try:
            found = self._resolve(host)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            wrong = local_exhaustion_of_lookup(error) or EndpointRefused(f"{host} cannot be found: {reason}")
        except Exception as error:  # noqa: BLE001 the thread's edge: whoever asks gets the error, and may ask again
            wrong = local_exhaustion_of_lookup(error) or error
        try:
            loop.call_soon_threadsafe(self._answer, host, asked, found, wrong)
        except RuntimeError:
            pass  # the loop has ended, and with it every caller

    def _answer(self, host: str, asked: "asyncio.Future[list[str]]", found: list[str], wrong: Exception | None) -> None:
        del self._asked[host]
        if not found:
            asked.set_exception(wrong or EndpointRefused(f"{host} has no address"))
            asked.exception()  # all callers may have given up
            return
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known[host] = found, asyncio.get_running_loop().time() + self._believed_s
        asked.set_result(found)


_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_OURS_IN_LOOKUPS: Final = _OURS | {errno.EBUSY, errno.EAGAIN}
"""EBUSY is what glibc may leave behind when it could not open its files."""
_NO_THREAD: Final = "can't start new thread"
"""CPython's only sign that pthread_create failed (EAGAIN)."""
_LOG_EVERY_S: Final = 60.0

log = logging.getLogger("veilmq.push")


class LocalExhaustion(Exception):
    """No call could be made. doubtful: it may also be the endpoint's fault."""

    def __init__(self, reason: str, *, doubtful: bool = False) -> None:
        super().__init__(reason)
        self.doubtful = doubtful


def local_exhaustion_of(error: Exception) -> LocalExhaustion | None:
    """The resource that this server lacked, if that caused the error of a call; else None."""
    if isinstance(error, MemoryError):
        return LocalExhaustion("out of memory")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return LocalExhaustion(_NO_THREAD)
    if not isinstance(error, OSError):
        return _probed()  # for example a module that could not be read
    if error.errno in _OURS:
        return LocalExhaustion(_text(error))
    if error.errno == errno.EADDRNOTAVAIL:  # no local port is left, or the machine has no address to call from
        return LocalExhaustion(_text(error), doubtful=True)
    return None


def local_exhaustion_of_lookup(error: Exception) -> LocalExhaustion | None:
    """The resource that this server lacked, if that caused the error of a name look-up; else None."""
    if isinstance(error, socket.gaierror):
        if error.errno == socket.EAI_MEMORY:
            return LocalExhaustion("the resolver is out of memory")
        if error.errno == socket.EAI_AGAIN:  # no name server answered: either ours or the name's are down
            return _probed() or LocalExhaustion(_text(error), doubtful=True)
        return _probed()
    if isinstance(error, OSError):  # EAI_SYSTEM: no name server says that
        return LocalExhaustion(_text(error), doubtful=error.errno not in _OURS_IN_LOOKUPS and _probed() is None)
    return local_exhaustion_of(error)


def _probed() -> LocalExhaustion | None:
    """The resource that is missing right now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as lacking:
        return LocalExhaustion(_text(lacking))
    return None


def _text(error: OSError) -> str:
    return error.strerror or str(error)


class LocalExhaustions:
    """Counts the calls that local exhaustion put off, and reports the latest cause while it is fresh."""

    def __init__(self, fresh_s: float) -> None:
        """fresh_s: how long a cause counts as present after it put off a call."""
        self.count = 0
        self._fresh_s = fresh_s
        self._latest = ""
        self._fresh_until = 0.0
        self._logged_until = 0.0
        self._end_awaited = False

    def at(self, now: float) -> str | None:
        """The missing resource, if one is missing now."""
        return self._latest if now < self._fresh_until else None

    def met(self, endpoint: str, shortage: LocalExhaustion, now: float) -> None:
        """A call to the endpoint was put off."""
        self.count += 1
        self._latest = f"{endpoint}: {shortage}" if shortage.doubtful else str(shortage)
        self._fresh_until = now + self._fresh_s
        if now >= self._logged_until:
            self._logged_until = now + _LOG_EVERY_S
            self._end_awaited = True
            log.error("pushes wait, because this server cannot call: %s", self._latest)

    def over(self) -> None:
        """A call was answered."""
        if self._end_awaited:
            self._end_awaited = False
            self._fresh_until = 0.0
            log.info("pushes resume")
