"""The TLS handshakes of one port: how many may be under way, and which one is dropped for a newcomer.

Strategy: the port accepts plain TCP; `_Handshake` starts TLS on it, and gives the connection to the port's own protocol
once the handshake is done. So handshakes are counted apart from connections. At their bound the oldest one is dropped:
if the newest were, strangers who never finish theirs could keep everybody else out. An address that has an eighth of
them loses its own oldest one, so that one stranger cannot drop those of others.

Before changing it: TLS must have started when `connection_made` returns. uvloop then reads at once, and a task would
begin later, so this runs the coroutine of `start_tls` itself. A loop may deliver what came with the end of a handshake,
the end of the input with it, in the same turn, before the coroutine has gone on: `data_received` lets it go on first.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from socket import AF_INET6, inet_pton
from typing import Any, Final, TypeAlias, cast

from veilmq.server.logs import RefusalLog

Factory: TypeAlias = Callable[[], asyncio.Protocol]

_SHARES: Final = 8
"""An address that has an eighth of the handshakes, and eight of them, loses its own oldest one."""
_PLAIN: Final = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
"""OpenSSL's reasons for a request without TLS."""
_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
_NETWORK_BYTES: Final = 8

log = logging.getLogger("veilmq.tls")


class Handshakes:
    """Those of one port that are under way, on the loop that opened it."""

    def __init__(
        self,
        context: ssl.SSLContext,
        name: str,
        deadline_s: float,
        bound: Callable[[], int],
        *,
        shutdown_s: float | None = None,
    ) -> None:
        """name: of the port, for the log. deadline_s: for one handshake. bound: how many may be under way now; with 0
        or less newcomers are dropped. shutdown_s: how long the client has to end TLS after a close; None: the loop's
        own time."""
        self._context, self._name = context, name
        self._deadline_s, self._shutdown_s, self._bound = deadline_s, shutdown_s, bound
        self._refusals = RefusalLog(name, log)
        self._all: dict[_Handshake, None] = {}
        """The oldest first, as in each dict of the next."""
        self._by_network: dict[bytes, dict[_Handshake, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def before(self, factory: Factory) -> Factory:
        """What the port accepts connections with. factory: makes the protocol of one whose handshake is done."""
        return lambda: _Handshake(self, factory)

    def drop_all(self) -> None:
        """The port is closed."""
        for each in list(self._all):
            self.end(each)
            each.transport.abort()

    # What the handshakes call.

    def begin(self, handshake: _Handshake) -> Coroutine[Any, Any, asyncio.Transport | None] | None:
        """Make room for it and start TLS; None if there is no room."""
        bound = self._bound()
        if bound <= 0:
            self._drop(handshake, "too many connections")
            return None
        while len(self._all) >= bound:
            own = self._by_network.get(handshake.network, {})
            oldest = next(iter(own if len(own) >= max(bound // _SHARES, _SHARES) else self._all))
            self.end(oldest)
            self._drop(oldest, "its TLS handshake was the oldest of too many")
        self._all[handshake] = None
        self._by_network.setdefault(handshake.network, {})[handshake] = None
        return asyncio.get_running_loop().start_tls(
            handshake.transport,
            handshake,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._deadline_s,
            ssl_shutdown_timeout=self._shutdown_s,
        )

    def end(self, handshake: _Handshake) -> None:
        """It is not under way any more."""
        if handshake in self._all:
            del self._all[handshake]
            own = self._by_network[handshake.network]
            del own[handshake]
            if not own:
                del self._by_network[handshake.network]

    def _drop(self, handshake: _Handshake, reason: str) -> None:
        if self._refusals.takes(reason):
            log.info("%s: dropped the connection of %s: %s", self._name, handshake.host or "a client", reason)
        handshake.transport.abort()

    def failed(self, error: OSError) -> None:
        """A client without TLS gets no answer that it could read: say why."""
        if getattr(error, "reason", None) in _PLAIN and self._refusals.takes("plain HTTP"):
            log.info("%s: refused a client that speaks plain HTTP: its URL needs https:// or tls=1", self._name)


class _Handshake(asyncio.Protocol):
    """One connection until its handshake is done."""

    transport: asyncio.Transport
    host = ""
    network = b""

    def __init__(self, handshakes: Handshakes, factory: Factory) -> None:
        self._handshakes, self._factory = handshakes, factory
        self._coroutine: Coroutine[Any, Any, asyncio.Transport | None] | None = None
        self._next: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if peer:
            self.host = peer[0]
            self.network = network_of(self.host)
        self._coroutine = self._handshakes.begin(self)
        if self._coroutine is not None:
            self._step()

    def _step(self, _: Any = None) -> None:
        """Run the coroutine until it waits again, or to its end. It may have ended in `data_received`."""
        if self._coroutine is None:
            return
        try:
            awaited = self._coroutine.send(None)
        except StopIteration as done:
            self._handshakes.end(self)
            self._coroutine = None
            self._hand_over(done.value)
        except OSError as error:  # ssl.SSLError is one
            self._handshakes.end(self)
            self._coroutine = None
            self._handshakes.failed(error)
        else:
            awaited.add_done_callback(self._step)

    def _hand_over(self, secure: asyncio.Transport | None) -> None:
        """secure: None or closing if the client left, or was dropped."""
        if secure is not None and not secure.is_closing():
            self._next = self._factory()
            secure.set_protocol(self._next)
            self._next.connection_made(secure)

    def data_received(self, data: bytes) -> None:
        """The handshake is done, and this came with its end. It is passed on at once: the end of the input may follow
        in the same turn, and ends the connection."""
        self._step()
        if self._next is not None:
            self._next.data_received(data)


def network_of(host: str) -> bytes:
    """An IPv4 address, or the first 64 bits of one of IPv6: a single client has all of the rest."""
    if ":" not in host:
        return host.encode()
    packed = inet_pton(AF_INET6, host.partition("%")[0])
    return packed if packed.startswith(_IPV4_MAPPED) else packed[:_NETWORK_BYTES]
