"""The service manager, such as systemd: it learns when the server is ready and alive, and may open its ports.

Strategy: sd_notify(3) is a datagram to the socket that NOTIFY_SOCKET names; sd_listen_fds(3) hands sockets over as file
descriptors from 3 on. Both are a few lines here, so no library of systemd is needed. If nobody listens at
NOTIFY_SOCKET, that is logged and the server serves all the same.

A socket belongs to the port of the server whose number it has: `--sqs 127.0.0.1:9324` and `ListenStream=9324`. Its own
address then counts, also for what an address beyond loopback needs. The manager keeps such a socket open while the
server restarts, so its clients wait where they would be refused.

The watchdog is notified from the event loop: a loop that hangs is ended by the manager, and started again.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from veilmq.cli.failures import Exit, Failure
from veilmq.server.config.settings import Address, SettingInvalid, Settings

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
ALIVE: Final = "WATCHDOG=1"
READY_SECONDS: Final = 30.0
"""For how long to try to send READY. It is sent only once, and without it the service manager ends the server."""
_FIRST: Final = 3
"""SD_LISTEN_FDS_START."""

log = logging.getLogger("veilmq.serve")


class Manager(NamedTuple):
    """What it wants to hear and what it gave."""

    address: str | None = None
    """Its socket: a path, or @ and an abstract name. None: nobody to notify."""
    watchdog_s: float | None = None
    """It ends a server that was silent for so long."""
    given: int = 0
    """Open sockets, as file descriptors from 3 on."""

    def notify(self, state: str, wait_s: float = 0.0) -> None:
        """Notify it, if there is one. wait_s: for how long, if others have filled its queue."""
        if not self.address:
            return
        name = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.settimeout(wait_s)
                manager.connect(name)  # what is not connected counts as writable though the queue is full
                manager.send(state.encode())
        except (OSError, ValueError) as error:
            log.warning("NOTIFY_SOCKET %s cannot be told %s: %s", self.address, state, error)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notify that the loop runs, twice in each time of the watchdog, while the body runs."""
        task = None if self.watchdog_s is None else asyncio.create_task(self._notify_alive(self.watchdog_s / 2))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _notify_alive(self, every_s: float) -> None:
        while True:
            self.notify(ALIVE)
            await asyncio.sleep(every_s)

    def ports(self, settings: Settings) -> tuple[Settings, dict[str, socket.socket]]:
        """The settings with the addresses of the sockets that it opened, and these by the names of their ports.

        Raises Failure for a socket that is no port's, and for an address that the settings do not admit.
        """
        found: dict[str, socket.socket] = {}
        for number in range(_FIRST, _FIRST + self.given):
            os.set_inheritable(number, False)
            given = socket.socket(fileno=number)
            shown, name = _port_of(given, settings)
            if name is None:
                advice = "Its ports are those of --sqs, --azure, --mns and --admin: give one of these the same number."
                raise Failure(
                    Exit.ADDRESS, f"the service manager opened {shown}, which is none of the server's", advice
                )
            if name in found:
                raise Failure(
                    Exit.ADDRESS, f"the service manager opened two sockets for --{name}", "Leave one of them."
                )
            found[name] = given
        addresses = {name: Address(*given.getsockname()[:2]) for name, given in found.items()}
        try:
            return msgspec.structs.replace(settings, **addresses), found
        except SettingInvalid as error:
            raise Failure(Exit.USAGE, f"the service manager's socket for {error}") from None


def manager_of(environment: Mapping[str, str]) -> Manager:
    """The manager that started this process, according to its environment."""
    pid = str(os.getpid())
    watchdog = environment.get("WATCHDOG_USEC", "")
    watches = watchdog.isdecimal() and int(watchdog) > 0 and environment.get("WATCHDOG_PID", pid) == pid
    given = environment.get("LISTEN_FDS", "") if environment.get("LISTEN_PID") == pid else ""
    return Manager(
        environment.get("NOTIFY_SOCKET"),
        int(watchdog) / 1_000_000 if watches else None,
        int(given) if given.isdecimal() else 0,
    )


def _port_of(given: socket.socket, settings: Settings) -> tuple[str, str | None]:
    """How to show a socket, and the name of the port with its number."""
    if given.family not in {socket.AF_INET, socket.AF_INET6} or given.type != socket.SOCK_STREAM:
        return "a socket that is not TCP's", None
    address = Address(*given.getsockname()[:2])
    names = [name for name, each in settings.addresses().items() if name != "peer" and each.port == address.port]
    return str(address), names[0] if names else None
