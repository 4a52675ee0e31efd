"""What a fault has in its hands: PostgreSQL, the servers, the network between them, clocks and chance.

Strategy: a fault strikes once, and need not clean up: `calm` brings everything to where it should be, and says what
does not come back by itself. Who owns the queues is asked for when a fault strikes.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from tests.faults.cluster.clocks import WallClock
from tests.faults.cluster.databases import READY_SECONDS, Databases
from tests.faults.cluster.network import Network, Place
from tests.faults.suite.server import Server

from veilmq.testing import Random

LEASE_SECONDS: Final = 3.0
SNAPSHOT_BYTES: Final = 1 << 20
"""Of the log, and at least as many as the state: so there is a snapshot every minute or two."""


class Member(Server):
    """A server of the cluster."""

    def __init__(
        self,
        name: str,
        place: Place,
        directory: Path,
        log: Path,
        dsn: str,
        clock: WallClock | None,
        ports: tuple[int, int],
    ) -> None:
        """ports: of admin and peers."""
        self.name = name
        self.place = place
        admin, peer = (f"{place.address}:{port}" for port in ports)
        self.admin = f"http://{admin}"
        self.disk = directory
        self.ballast = directory / "ballast"
        super().__init__(
            directory, log, "--cluster", dsn, "--cluster-name", name, "--peer", peer, "--admin", admin,
            "--reserve-bytes", "4194304", "--floor-bytes", "262144",
            address=place.address, inside=place.inside, environment=clock and clock.environment,
        )  # fmt: skip

    def ready(self) -> str:
        """Empty if it is; else what it says."""
        try:
            answer = httpx.get(f"{self.admin}/health/ready", timeout=2)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}"
        return "" if answer.status_code == 200 else answer.text


class Stage:
    """For one run."""

    def __init__(
        self, databases: Databases, network: Network, members: list[Member], database_clock: WallClock | None
    ) -> None:
        self.databases = databases
        self.network = network
        self.members = members
        self.database_clock = database_clock
        self.chance = Random(0)
        """Of the present fault."""
        self.strikes: Counter[str] = Counter()
        self.kills = 0
        self.ended: Counter[str] = Counter()
        """Servers that ended themselves, by their last words."""
        self.unbalanced: list[Path] = []
        """Files that fill a disk."""
        self._killed: set[str] = set()
        self._owner = ""

    # Who and when.

    @property
    def owner(self) -> Member:
        """Who owns the queues, or did when it could be asked last."""
        for (name,) in self.databases.ask("select owner from veilmq.shard where holder is not null"):
            self._owner = str(name)
        return next((each for each in self.members if each.name == self._owner), self.members[0])

    def follower(self) -> Member:
        """Any other one."""
        owner = self.owner
        return self.chance.choice([each for each in self.members if each is not owner])

    def pause(self, low: float, high: float) -> None:
        """A random time."""
        time.sleep(self.chance.uniform(low, high))

    # What is done to servers.

    def kill(self, *members: Member) -> None:
        """By SIGKILL, all at once."""
        for each in members:
            self._killed.add(each.name)
            each.send(signal.SIGKILL)
        for each in members:
            each.kill()
            self.kills += 1

    def terminate(self, member: Member, seconds: float = 30) -> None:
        """By SIGTERM: it hands over."""
        self._killed.add(member.name)
        member.send(signal.SIGTERM)
        if not member.ended(seconds):
            self.ended[f"{member.name} does not end after SIGTERM"] += 1
            member.kill()

    def begin(self, *members: Member) -> None:
        """Start them, without waiting."""
        for each in members:
            if not each.alive:
                self._note_end(each)
                each.spawn(snapshot_bytes=SNAPSHOT_BYTES)

    def _note_end(self, member: Member) -> None:
        if member.lives and member.name not in self._killed:
            lines = member.log.read_text(errors="replace").strip().splitlines()
            last = [line for line in lines if "Error" in line or "error" in line.lower() or "CRITICAL" in line][-2:]
            self.ended[f"{member.name}: {' / '.join(last or lines[-1:])}"[:600]] += 1
        self._killed.discard(member.name)

    def stop(self, member: Member, seconds: float) -> None:
        """SIGSTOP, then SIGCONT."""
        member.send(signal.SIGSTOP)
        time.sleep(seconds)
        member.send(signal.SIGCONT)

    def fill(self, disk: Path) -> None:
        """All of it, but sometimes for the last pieces."""
        ballast = disk / "ballast"
        self.unbalanced.append(ballast)
        left = self.chance.choice((0, 0, 65_536))
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while _free(disk) > left:
                file.write(bytes(65_536))
            while not left:
                file.write(bytes(4_096))

    def empty(self) -> None:
        """Give the disks their space back."""
        for ballast in self.unbalanced:
            ballast.unlink(missing_ok=True)
        self.unbalanced.clear()

    # The end of trouble.

    def calm(self) -> list[str]:
        """Bring everything back; what does not come back by itself."""
        self.network.heal()
        self.empty()
        for each in self.members:
            each.send(signal.SIGCONT)
        for server in (self.databases.primary, self.databases.standby):
            for pid in self.databases.processes(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.databases.repair()
        self.begin(*self.members)
        return self.wait_ready()

    def wait_ready(self, seconds: float = READY_SECONDS) -> list[str]:
        """Until every server's calls reach an owner. Returns who is not ready in time, and all that is known of why."""
        end = time.monotonic() + seconds
        trouble: list[tuple[Member, str]] = []
        while time.monotonic() < end:
            trouble = [(each, said) for each in self.members if (said := each.ready())]
            if not trouble:
                return []
            self.begin(*self.members)
            time.sleep(0.1)
        return [f"{each.name} is not ready after {seconds} s: {said}; {each.last_words()}" for each, said in trouble]

    def close(self) -> None:
        """End everything."""
        self.network.heal()
        for each in self.members:
            each.close()
        self.databases.close()
        self.network.close()


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


class Fault(NamedTuple):
    """A kind of fault."""

    name: str
    strike: Callable[[Stage], None]
    weight: int = 1
    needs: str = ""
    """`cuts`, `disks` or `clocks`: what the machine must be able to do."""
