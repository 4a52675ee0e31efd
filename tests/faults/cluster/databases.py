"""The PostgreSQL under the faults: a primary and a standby, of which either may become the other.

Strategy: both are always told to wait for any standby, so that a promoted one acknowledges nothing until the other
follows it. What a failover leaves behind is thrown away and copied anew, as an operator would do.
"""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psycopg
from psycopg.conninfo import make_conninfo
from tests.faults.cluster.network import Network, Place
from tests.support.postgres import ROLE, Programs, Server, until

_SETTINGS: Final = {
    "synchronous_standby_names": "*", "wal_sender_timeout": "10s", "wal_receiver_timeout": "10s",
    "min_wal_size": "32MB", "max_wal_size": "64MB", "wal_keep_size": "32MB", "max_connections": "60",
    "tcp_user_timeout": "5s",
}  # fmt: skip
READY_SECONDS: Final = 60


class Databases:
    """Primary and standby."""

    def __init__(self, programs: Programs, network: Network, environment: dict[str, str], disk_bytes: int = 0) -> None:
        """environment: of both. disk_bytes: each has a small disk of its own, which only root can make."""
        self.places: dict[str, Place] = {}
        self._disks: list[Path] = []
        made: list[Server] = []
        for name in ("db1", "db2"):
            place = self.places[name] = network.place(name)
            address = place.address if network.can_cut else ""
            server = Server(programs, name, address=address, inside=place.inside, environment=environment)
            if disk_bytes:
                identity = f"uid={programs.identity['user']},gid={programs.identity['group']},mode=700"
                subprocess.run(
                    ["mount", "-t", "tmpfs", "-o", f"size={disk_bytes},{identity}", "tmpfs", server.home], check=True
                )
                self._disks.append(server.home)
            made.append(server)
        self.primary, self.standby = made
        self._made = made
        self.primary.make()
        self.start(self.primary)
        self.standby.copy(self.primary)
        self.start(self.standby)
        self.repair()

    @property
    def dsn(self) -> str:
        """Both, in the order in which they were made."""
        hosts = ",".join(server.address or str(server.home) for server in self._made)
        return make_conninfo(host=hosts, user=ROLE, dbname="postgres")

    def place(self, server: Server) -> Place:
        """Where it runs."""
        return self.places[server.name]

    def start(self, server: Server) -> None:
        """Start it, unless it runs."""
        if not self.runs(server):
            server.start(**_SETTINGS)

    def runs(self, server: Server) -> bool:
        """Whether there is a process of it that goes on."""
        with suppress(OSError, ValueError):
            return Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def kill(self, *servers: Server) -> None:
        """SIGKILL them with all their processes."""
        for server in servers:
            if self.runs(server):
                server.kill()

    def processes(self, server: Server) -> list[int]:
        """All of it."""
        with suppress(OSError, ValueError):
            pid = server.pid
            return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        return []

    def promote(self) -> None:
        """Make the standby the primary, whatever the primary does."""
        self.start(self.standby)
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def rebuild(self) -> None:
        """Throw the standby away and copy it from the primary."""
        for attempt in range(3):
            self.kill(self.standby)
            shutil.rmtree(self.standby.data, ignore_errors=True)
            (self.standby.home / "log").unlink(missing_ok=True)
            try:
                self.start(self.primary)
                self.standby.copy(self.primary)
                self.start(self.standby)
            except subprocess.CalledProcessError:  # a busy machine: its connection was ended
                if attempt == 2:
                    raise
            else:
                return

    def repair(self) -> None:
        """Bring both to where they should be: whatever does not run is started, and the standby confirms commits."""
        for server in (self.primary, self.standby):
            if not self.runs(server):
                (server.data / "postmaster.pid").unlink(missing_ok=True)
            with suppress(subprocess.CalledProcessError):  # what cannot be started is rebuilt
                self.start(server)
        end = time.monotonic() + READY_SECONDS / 3
        while not self.is_confirmed():
            if time.monotonic() > end:
                self.rebuild()
                until(self.is_confirmed, READY_SECONDS)
            time.sleep(0.05)

    def is_confirmed(self) -> bool:
        """Whether the standby confirms commits."""
        with suppress(psycopg.Error):
            states = self.primary.query("select sync_state from pg_stat_replication where state = 'streaming'")
            return states == [("sync",)]
        return False

    def ask(self, statement: str) -> list[tuple[object, ...]]:
        """What the primary answers; nothing while it does not."""
        with suppress(psycopg.Error):
            with psycopg.connect(self.primary.dsn, autocommit=True, connect_timeout=2) as connection:
                connection.execute("set statement_timeout = '2s'")
                return connection.execute(statement).fetchall()  # type: ignore[arg-type]
        return []

    def close(self) -> None:
        """End both."""
        for server in self._made:
            for pid in self.processes(server):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.kill(server)
        while self._disks:  # it may be closed twice
            subprocess.run(["umount", "--lazy", self._disks.pop()], check=True)
