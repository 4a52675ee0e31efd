"""The doctor's check of the server's ports: who listens on them, or whether a server could.

Strategy: a port is tried by opening it. Who has it is read from /proc, as far as this user may see.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from veilmq.cli.doctor import Finding, Level
from veilmq.server.config.settings import Address, Settings
from veilmq.store.directory import Holder

_PRIVILEGED: Final = 1_024
_LISTENS: Final = "0A"
"""TCP_LISTEN in /proc/net/tcp."""
_SOCKET_UNIT: Final = "(systemd)"
"""End of `listener_of` for the port of a socket unit."""


def ports(settings: Settings, holder: Holder | None) -> Iterator[Finding]:
    """Whether the server listens, or whether one could."""
    if holder is not None:
        for name, url in holder.listeners.items():
            yield Finding("ports", Level.OK, f"{name} listens on {url}")
        if not holder.listeners:
            yield Finding("ports", Level.WARNING, f"pid {holder.pid} has opened none yet", "Look at its log.")
        return
    for name, address in settings.addresses().items():
        yield _bindable(name, address)


def _bindable(name: str, address: Address) -> Finding:
    flag = f"--{name}"
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"{flag} {address}: this machine does not know that name: {error.strerror}"
        return Finding("ports", Level.ERROR, text, f"{flag} 127.0.0.1:{address.port}")
    family, kind, protocol, _, place = places[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(place)
        except OSError as error:
            return _refused(name, address, error)
    return Finding("ports", Level.OK, f"{name}: {address} is free")


def _refused(name: str, address: Address, error: OSError) -> Finding:
    flag, other = f"--{name}", f"{address.host}:0"
    if error.errno == errno.EADDRINUSE:
        owner = listener_of(address.port)
        if owner.endswith(_SOCKET_UNIT):
            text = f"{name}: {owner} holds {address}, and starts the server when a client comes"
            return Finding("ports", Level.OK, text)
        text = f"{flag}: {address} is in use" + (f" by {owner}" if owner else "")
        fix = f"End that program, or choose another port: {flag} {other}"
        if not owner:
            look = f"See who has it: sudo ss -ltnp sport = :{address.port} (systemd, for veilmq.socket: all is well)"
            fix = f"{look}. {fix}"
        return Finding("ports", Level.ERROR, text, fix)
    if error.errno == errno.EACCES and address.port < _PRIVILEGED:
        text = f"{flag}: {address} may be opened by root alone"
        return Finding(
            "ports", Level.ERROR, text, f"AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit, or {flag} {other}"
        )
    text = f"{flag}: {address}: {error.strerror}"
    return Finding("ports", Level.ERROR, text, f"Name an address of this machine: {flag} 127.0.0.1:{address.port}")


def listener_of(port: int) -> str:
    """`pid N (NAME)` of the process that listens on a port, as far as this user may see; else empty."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net", table), port)}
    if not inodes:
        return ""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # another user's, or just ended
            if any(_link_of(each) in inodes for each in (process / "fd").iterdir()):
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _link_of(descriptor: Path) -> str:
    """The inode of an open socket; else empty."""
    try:
        return os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
    except OSError:  # closed meanwhile
        return ""


def _listening(table: Path, port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on the port."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        _, local, _, state, *rest = line.split()
        if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
            yield rest[5]
