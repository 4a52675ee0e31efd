"""A network of this machine's own, in which any direction between two places can be cut without a word.

Strategy: each place is a network namespace with one address, and all are on one bridge. Where a place must not reach
another, its neighbour table names a hardware address that nobody has, so that what it sends is lost, as on a cable that
is cut: no reset, no refusal. The addresses are loopback's (127.213.0.0/24), which the namespaces route like any other:
so a server in development mode may listen there. Everything is gone with the process, which is in namespaces of its own
(`python -m tests.faults.cluster` begins under `unshare`).
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NOWHERE: Final = "02:00:00:00:00:99"
_NET: Final = "127.213.0"
_OWN: Final = 100
"""The address of whoever made the network."""


def missing() -> str:
    """Why this machine cannot have one."""
    if os.geteuid() != 0:
        return "network namespaces are root's alone"
    return "" if all(map(shutil.which, ("ip", "unshare", "nsenter"))) else "there is no ip, unshare or nsenter"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Place:
    """Where something runs: here, without a network of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = "127.0.0.1"
        self.inside: tuple[str, ...] = ()
        """What a command begins with that runs there."""


class Network:
    """Places that reach each other. This one cuts nothing: all are here."""

    can_cut = False

    def place(self, name: str) -> Place:
        """A new one."""
        return Place(name)

    def cut(self, sender: Place, receiver: Place) -> None:
        """Lose what is sent that way. Answers to what came the other way are lost, too."""
        raise NotImplementedError

    def heal(self) -> None:
        """Lose nothing any more."""

    def close(self) -> None:
        """Take it down."""


class Namespaces(Network):
    """See the module. This process must have a network namespace of its own."""

    can_cut = True

    def __init__(self) -> None:
        self._kept: list[subprocess.Popen[bytes]] = []
        self._cuts: list[tuple[Place, Place]] = []
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "bridge", "up")
        _own_loopback((), "bridge", f"{_NET}.{_OWN}")

    def place(self, name: str) -> Place:
        place = Place(name)
        kept = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._kept.append(kept)
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{kept.pid}/ns/net").readlink() == own:
            assert kept.poll() is None, "no namespace"
        place.inside = ("nsenter", f"--net=/proc/{kept.pid}/ns/net")
        place.address = f"{_NET}.{len(self._kept)}"
        link = f"to-{name}"[:15]
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(kept.pid))
        _run("ip", "link", "set", link, "master", "bridge", "up")
        _run(*place.inside, "ip", "link", "set", "lo", "up")
        _own_loopback(place.inside, "eth0", place.address)
        _run(*place.inside, "ip", "link", "set", "eth0", "up")
        return place

    def cut(self, sender: Place, receiver: Place) -> None:
        self._cuts.append((sender, receiver))
        _neighbour(sender, "replace", receiver.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")

    def heal(self) -> None:
        for sender, receiver in self._cuts:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was cut twice
                _neighbour(sender, "del", receiver.address, "dev", "eth0")
        self._cuts.clear()

    def close(self) -> None:
        for kept in self._kept:
            kept.kill()
            kept.wait()


def _neighbour(place: Place, *what: str) -> None:
    _run(*place.inside, "ip", "neigh", *what)


def _own_loopback(inside: Sequence[str], device: str, address: str) -> None:
    """Route 127.0.0.0/8 like any other network, but for 127.0.0.1 itself."""
    forwards = (
        f"echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet; echo 1 > /proc/sys/net/ipv4/conf/{device}/route_localnet"
    )
    _run(*inside, "sh", "-c", forwards)
    _run(*inside, "ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
    _run(*inside, "ip", "addr", "add", "127.0.0.1/32", "dev", "lo")
    _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
