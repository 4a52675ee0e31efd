"""What the machine must have: versions, clock, open files, a way to its own ports, disk.

Strategy: each check is a generator of findings; it reads /proc where Linux has no other call.
"""

import errno
import importlib.metadata
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final
from urllib import request

import veilmq
from veilmq.cli.doctor import Finding, Level
from veilmq.cli.output import time_text
from veilmq.server.config.settings import Address, Settings
from veilmq.store import MIB, Options
from veilmq.store.directory import Holder
from veilmq.store.disk import REAL
from veilmq.store.files import sync_file
from veilmq.store.synchronised import is_synchronised

_TESTED: Final = ((3, 11), (3, 14))
_SYNCS: Final = 9
_SYNC_BYTES: Final = 4_096
_SLOW_S: Final = 0.02
_VERY_SLOW_S: Final = 0.2
_LOW_TIMES: Final = 4
"""Less free space than so many times the floor is a warning."""
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_REMOTE: Final = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "gluster")
_PRIVILEGED: Final = 1_024
_LISTENS: Final = "0A"
"""TCP_LISTEN in /proc/net/tcp."""
_SOCKET_UNIT: Final = "(systemd)"
"""End of `listener_of` for the port of a socket unit."""
_THROUGH: Final = ("127.0.0.1", "localhost")


def versions() -> Iterator[Finding]:
    """Python, SQLite (inside apsw) and ours."""
    have = ".".join(map(str, sys.version_info[:3]))
    text = f"VeilMQ {veilmq.__version__}, Python {have}, SQLite {importlib.metadata.version('apsw')}"
    if not _TESTED[0] <= sys.version_info[:2] <= _TESTED[1]:
        least, most = (".".join(map(str, each)) for each in _TESTED)
        yield Finding("versions", Level.WARNING, text, f"VeilMQ is tested with Python {least} to {most}.")
    else:
        yield Finding("versions", Level.OK, text)


def clock() -> Iterator[Finding]:
    """Whether a time service keeps the clock: leases do not depend on it, signatures and expiry do."""
    if is_synchronised():
        yield Finding("clock", Level.OK, "a time service keeps it")
        return
    text = "no time service keeps it: signed requests are refused and messages expire wrongly when it drifts"
    yield Finding("clock", Level.WARNING, text, "timedatectl set-ntp true, or run chrony; in a container, on its host.")


def open_files(settings: Settings, holder: Holder | None) -> Iterator[Finding]:
    """One file a connection: of the running server, else of this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if holder is not None:
        hard = _limit_of(holder.pid, hard)
    if hard != resource.RLIM_INFINITY and hard < settings.connections_max:
        text = f"at most {hard} may be open, and --connections-max is {settings.connections_max}"
        yield Finding("open files", Level.WARNING, text, "LimitNOFILE=65536 in the unit, or ulimit -n 65536.")
    else:
        yield Finding("open files", Level.OK, "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}")


def _limit_of(pid: int, otherwise: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return otherwise
    words = next((line.split() for line in lines if line.startswith("Max open files")), [])
    return int(words[4]) if len(words) > 4 and words[4].isdecimal() else otherwise


def proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    """SDKs send even requests to this machine to a proxy, unless they are told not to."""
    found = request.getproxies_environment()
    if not any(found.get(kind) for kind in ("http", "https", "all")):
        yield Finding("proxy", Level.OK, "none is set")
        return
    swallowed = [host for host in _THROUGH if not _passes_by(host, found)]
    if not swallowed:
        yield Finding("proxy", Level.OK, "one is set, and leaves out this machine")
        return
    names = sorted(name for name in environment if name.lower() in {"http_proxy", "https_proxy", "all_proxy"})
    text = f"{', '.join(names)}: SDKs send requests for {' and '.join(swallowed)} to that proxy"
    yield Finding("proxy", Level.WARNING, text, "export NO_PROXY=localhost,127.0.0.1 no_proxy=localhost,127.0.0.1")


def _passes_by(host: str, found: Mapping[str, str]) -> bool:
    """Whether requests for the host go around the proxy. typeshed does not know the function."""
    return bool(request.proxy_bypass_environment(host, found))  # type: ignore[attr-defined]


def space(directory: Path) -> Iterator[Finding]:
    """Free space against the floor below which sends are refused, and the kind of file system."""
    free_bytes, total_bytes = REAL.space(directory)
    floor_bytes = min(Options().floor_bytes, total_bytes // 50)
    text = f"{free_bytes // MIB} MiB free at {directory}"
    if free_bytes < floor_bytes:
        yield Finding("disk", Level.ERROR, f"{text}: sends are refused below {floor_bytes // MIB}", "Free some space.")
    elif free_bytes < _LOW_TIMES * floor_bytes:
        text += f", and sends are refused below {floor_bytes // MIB}"
        yield Finding("disk", Level.WARNING, text, "Free some space, or give the data a disk of its own.")
    else:
        yield Finding("disk", Level.OK, text)
    kind = REAL.file_system(directory)
    if kind in _IN_MEMORY:
        text = f"{directory} is in memory ({kind}): everything is gone after a restart of the machine"
        yield Finding("disk", Level.WARNING, text, "Name a directory on a disk: --data DIR.")
    elif kind.startswith(_REMOTE):
        text = f"{directory} is on {kind}: a sync and a lock are as good as that server and its options"
        yield Finding("disk", Level.WARNING, text, "Use a local disk; for a second machine, docs/cluster.md.")


def sync_speed(directory: Path) -> Iterator[Finding]:
    """How long a small write takes to be durable. Nothing is answered before that."""
    path = directory / f".veilmq-doctor.{os.getpid()}"
    times = []
    try:
        for _ in range(_SYNCS):
            path.write_bytes(os.urandom(_SYNC_BYTES))
            begun = perf_counter()
            sync_file(path)
            times.append(perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)
    middle = median(times)
    text = f"{time_text(middle)} (the longest of {_SYNCS}: {time_text(max(times))})"
    fix = "Use an SSD with power-loss protection, or a volume with more IOPS; nothing else should write to it."
    if middle > _VERY_SLOW_S:
        yield Finding("fsync", Level.ERROR, f"{text}: each request waits for one", fix)
    elif middle > _SLOW_S:
        yield Finding("fsync", Level.WARNING, f"{text}: each request waits for one", fix)
    else:
        yield Finding("fsync", Level.OK, text)


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
