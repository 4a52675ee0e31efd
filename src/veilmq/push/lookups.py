"""Looking names up: whose name server hangs holds up nobody else.

Strategy: an address that is written out needs no look-up. A name is looked up by a thread of its own that nobody waits
for at the end, once for all who ask meanwhile, and its answer is believed for some seconds. So a thousand pushes to a
name that hangs are one thread, and a healthy endpoint is not behind them in any queue.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

from veilmq.push.addresses import EndpointRefused
from veilmq.push.shortage import Shortage, shortage_of, shortage_of_lookup

BELIEVED_S: Final = 10.0
LOOKUPS_MAX: Final = 256
"""Names that are looked up at one time."""
_REMEMBERED_MAX: Final = 4_096


Resolve = Callable[[str], list[str]]
"""The addresses of a name. Blocks; raises OSError, UnicodeError."""


def resolve(host: str) -> list[str]:
    """As this machine resolves names."""
    told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in told))


class Lookups:
    """Of one loop."""

    def __init__(self, resolve: Resolve = resolve, believed_s: float = BELIEVED_S) -> None:
        self._resolve = resolve
        self._believed_s = believed_s
        self._asked: dict[str, asyncio.Future[list[str]]] = {}
        self._known: dict[str, tuple[list[str], float]] = {}

    async def addresses(self, host: str) -> list[str]:
        """All addresses of the host. Raises EndpointRefused, Shortage; of a bug in the look-up, whatever it raised."""
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
                raise Shortage(f"{LOOKUPS_MAX} names are being looked up")
            asked = loop.create_future()
            looking = threading.Thread(target=self._look, args=(host, loop, asked), name="veilmq-lookup", daemon=True)
            try:
                looking.start()
            except (RuntimeError, MemoryError) as error:
                raise shortage_of(error) or error from None
            self._asked[host] = asked
        # One who gives up must not end it for the others.
        return await asyncio.shield(asked)

    def _look(self, host: str, loop: asyncio.AbstractEventLoop, asked: "asyncio.Future[list[str]]") -> None:
        """In a thread."""
        found: list[str] = []
        wrong: Exception | None = None
        try:
            found = self._resolve(host)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            wrong = shortage_of_lookup(error) or EndpointRefused(f"{host} cannot be found: {reason}")
        except Exception as error:  # noqa: BLE001 the thread's edge: whoever asks is told, and may ask again
            wrong = shortage_of_lookup(error) or error
        try:
            loop.call_soon_threadsafe(self._tell, host, asked, found, wrong)
        except RuntimeError:
            pass  # the loop ended meanwhile, and with it whoever asked

    def _tell(self, host: str, asked: "asyncio.Future[list[str]]", found: list[str], wrong: Exception | None) -> None:
        del self._asked[host]
        if not found:
            asked.set_exception(wrong or EndpointRefused(f"{host} has no address"))
            asked.exception()  # whoever asked may have given up
            return
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known[host] = found, asyncio.get_running_loop().time() + self._believed_s
        asked.set_result(found)
