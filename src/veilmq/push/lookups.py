"""Name look-ups: a name server that hangs delays nobody but its own endpoints.

Strategy: an address needs no look-up. Each name is looked up on a daemon thread of its own, once for all who ask
meanwhile, and the answer is cached for some seconds. So a thousand pushes to a name that hangs cost one thread, and no
healthy endpoint waits behind them.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

from veilmq.push.addresses import EndpointRefused
from veilmq.push.local_exhaustion import LocalExhaustion, local_exhaustion_of, local_exhaustion_of_lookup

BELIEVED_S: Final = 10.0
LOOKUPS_MAX: Final = 256
"""Names that are looked up at the same time."""
_REMEMBERED_MAX: Final = 4_096


Resolve = Callable[[str], list[str]]
"""The addresses of a name. Blocks; raises OSError, UnicodeError."""


def resolve(host: str) -> list[str]:
    """Resolve a name as this machine does."""
    told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in told))


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
        except Exception as error:  # noqa: BLE001 the thread's edge: whoever asks is told, and may ask again
            wrong = local_exhaustion_of_lookup(error) or error
        try:
            loop.call_soon_threadsafe(self._tell, host, asked, found, wrong)
        except RuntimeError:
            pass  # the loop has ended, and with it every caller

    def _tell(self, host: str, asked: "asyncio.Future[list[str]]", found: list[str], wrong: Exception | None) -> None:
        del self._asked[host]
        if not found:
            asked.set_exception(wrong or EndpointRefused(f"{host} has no address"))
            asked.exception()  # all callers may have given up
            return
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known[host] = found, asyncio.get_running_loop().time() + self._believed_s
        asked.set_result(found)
