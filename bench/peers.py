"""The servers under comparison, one class each: how to install, start and describe it.

A server runs in its own session and is ended by its process group; setpriv also ends it if this program is killed. It
is ready when it has answered a CreateQueue. Every one listens on loopback only and keeps its files in a directory below
bench/.data.
"""

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import install
from measure import Target
from sqs import Caller, CallFailed, Proto

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
DATA = BENCH / ".data"
START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 20

CREDENTIALS = """\
[[account]]
id = "111111111111"
home_region = "us-east-1"

[[account.key]]
id = "{key}"
secret = "{secret}"
grants = [{{ actions = ["*"], queues = ["*"] }}]
"""


class ServerGone(Exception):
    """A server did not start, or died; the text ends with the end of its output."""


@dataclass(frozen=True)
class Place:
    """Where one server lives: its ports on 127.0.0.1, its directory, and the key that callers sign with."""

    port: int
    admin_port: int
    directory: Path
    key: str
    secret: str


class Peer:
    """One kind of server.

    `protos`: the wire forms it speaks, preferred first; `promise` stands in the report; `warm_seconds`: how long it is
    driven before a run counts.
    """

    name = ""
    version = ""
    promise = ""
    protos: tuple[Proto, ...] = ("json",)
    checks_signatures = False
    warm_seconds = 3

    def install(self) -> None:
        raise NotImplementedError

    def command(self, place: Place) -> list[str]:
        raise NotImplementedError

    def environment(self, place: Place) -> dict[str, str]:
        return {}

    def path_of(self, queue_url: str) -> str:
        """Request path for a call on this queue."""
        return "/"

    def runtime(self) -> str:
        """The interpreter or machine that it runs on, with its version."""
        return ""


class VeilMQ(Peer):
    name = "veilmq"
    promise = "durable (fsync before every answer), every signature checked"
    protos = ("json", "query")
    checks_signatures = True

    def __init__(self) -> None:
        self.program = Path(sys.executable).parent / "veilmq"

    def install(self) -> None:
        if not self.program.is_file():
            raise install.Missing("veilmq is not installed beside this Python: start the benchmark with `make bench`")
        described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=9"]
        self.version = install.output_of(described).strip() or "no commit yet"

    def command(self, place: Place) -> list[str]:
        credentials = place.directory / "credentials.toml"
        if not credentials.exists():
            with open(os.open(credentials, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(CREDENTIALS.format(key=place.key, secret=place.secret))
        return [
            str(self.program), "serve", "--data", str(place.directory / "data"),
            "--sqs", f"127.0.0.1:{place.port}", "--admin", f"127.0.0.1:{place.admin_port}",
            "--azure", "127.0.0.1:0", "--mns", "127.0.0.1:0", "--credentials", str(credentials),
        ]  # fmt: skip

    def runtime(self) -> str:
        return f"Python {sys.version.split()[0]}"


class PlainVeilMQ(VeilMQ):
    """The same checkout without the accelerator."""

    name = "veilmq-python"
    promise = f"{VeilMQ.promise}, without the accelerator"

    def environment(self, place: Place) -> dict[str, str]:
        return {"VEILMQ_ACCELERATOR": "off"}


class Fauxqs(Peer):
    name = "fauxqs"
    version = "2.4.1"
    promise = "in memory, checks no signature; its request log off"
    protos = ("json",)

    def install(self) -> None:
        self.package = install.npm_package("fauxqs", self.version)
        self.node = install.node()

    def command(self, place: Place) -> list[str]:
        return [self.node, str(BENCH / "fauxqs.mjs"), str(self.package / "dist" / "app.js")]

    def environment(self, place: Place) -> dict[str, str]:
        return {"FAUXQS_PORT": str(place.port), "FAUXQS_HOST": "127.0.0.1"}

    def runtime(self) -> str:
        return f"node {install.output_of([self.node, '--version']).strip()}"


class ElasticMQ(Peer):
    name = "elasticmq"
    version = "0.7.1"
    promise = "in memory, checks no signature"
    protos = ("query",)
    warm_seconds = 15  # the JVM's compilers

    def install(self) -> None:
        self.jar = install.npm_package("elasticmq", self.version) / f"elasticmq-server-{self.version}.jar"
        self.java = install.java()

    def command(self, place: Place) -> list[str]:
        opened = ("java.base/java.util.regex", "java.base/java.lang", "java.base/sun.nio.ch")
        settings = {
            "rest-sqs.bind-hostname": "127.0.0.1",
            "rest-sqs.bind-port": place.port,
            "node-address.host": "127.0.0.1",
            "node-address.port": place.port,
        }
        return [
            self.java,
            *(part for name in opened for part in ("--add-opens", f"{name}=ALL-UNNAMED")),
            *(f"-D{name}={value}" for name, value in settings.items()),
            "-jar", str(self.jar),
        ]  # fmt: skip

    def path_of(self, queue_url: str) -> str:
        return "/" + queue_url.split("/", 3)[3]

    def runtime(self) -> str:
        return install.output_of([self.java, "-version"]).splitlines()[0]


class Ministack(Peer):
    name = "ministack"
    version = "1.5.0"
    promise = "in memory, checks no signature"
    protos = ("json", "query")

    def install(self) -> None:
        self.python = install.python_package("ministack", self.version)

    def command(self, place: Place) -> list[str]:
        return [self.python, "-m", "ministack"]

    def environment(self, place: Place) -> dict[str, str]:
        return {
            "GATEWAY_PORT": str(place.port),
            "BIND_HOST": "127.0.0.1",
            "MINISTACK_HOST": "127.0.0.1",
            "SERVICES": "sqs",
            "LOG_LEVEL": "ERROR",
            "TMPDIR": str(place.directory),
        }

    def runtime(self) -> str:
        return install.output_of([self.python, "--version"]).strip()


KINDS: dict[str, type[Peer]] = {kind.name: kind for kind in (VeilMQ, PlainVeilMQ, Fauxqs, ElasticMQ, Ministack)}


@dataclass
class Server:
    """A running server. `restart` after a stop or a kill keeps ports, directory and keys."""

    peer: Peer
    place: Place
    process: subprocess.Popen[bytes] | None = None
    _queues: int = field(default=0)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def caller(self, proto: Proto) -> Caller:
        return Caller(self.place.port, self.place.key, self.place.secret, proto)

    def target(self, proto: Proto, queue_url: str) -> Target:
        path = self.peer.path_of(queue_url)
        return Target(proto, self.caller(proto).authority, path, queue_url, self.place.key, self.place.secret)

    def new_queue(self, proto: Proto) -> str:
        self._queues += 1
        return self.caller(proto).create_queue(f"bench-{self._queues}")

    def drop_queue(self, proto: Proto, queue_url: str) -> None:
        self.caller(proto).call("DeleteQueue", {"QueueUrl": queue_url}, self.peer.path_of(queue_url))

    def launch(self) -> None:
        """Start the process and return at once."""
        assert self.process is None
        self.place.directory.mkdir(parents=True, exist_ok=True)
        command = self.peer.command(self.place)
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        with open(self.place.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **self.peer.environment(self.place)},
                cwd=self.place.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _running.append(self)

    def wait_ready(self, pause_s: float = 0.02) -> None:
        """Return at the first answer to a CreateQueue; raises ServerGone."""
        caller = self.caller(self.peer.protos[0])
        deadline = time.monotonic() + START_SECONDS_MAX
        reason = "no answer"
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                reason = f"it ended with exit code {self.process.returncode}"
                break
            try:
                caller.create_queue("ready")
                return
            except (OSError, http.client.HTTPException, CallFailed) as error:
                reason = str(error) or type(error).__name__
            time.sleep(pause_s)
        self.stop()
        raise ServerGone(f"{self.peer.name} did not start: {reason}\n{self.last_words()}")

    def still_there(self) -> None:
        """Raises ServerGone if the process has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            raise ServerGone(f"{self.peer.name} ended with exit code {self.process.returncode}\n{self.last_words()}")

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self.place.directory / "log").read_text(errors="replace")[-2000:]
        return ""

    def stop(self, first: signal.Signals = signal.SIGTERM) -> float:
        """End the process group, with SIGKILL if it does not go; seconds that it took."""
        process, self.process = self.process, None
        if process is None:
            return 0.0
        start = time.perf_counter()
        if process.poll() is not None:  # ended by itself: its pid may belong to another process by now
            _running.remove(self)
            return 0.0
        try:
            _signal_group(process.pid, first)
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            print(f"{self.peer.name} did not end within {STOP_SECONDS_MAX} s: killed", file=sys.stderr)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _running.remove(self)
        return time.perf_counter() - start

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def remove(self) -> None:
        """Stop, and delete everything it has written."""
        self.stop()
        shutil.rmtree(self.place.directory, ignore_errors=True)


_running: list[Server] = []


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def stop_all() -> None:
    for server in list(_running):
        server.kill()


def prepare(peer: Peer, run: str) -> Server:
    """A server that is not started yet, with free ports and its own empty directory below bench/.data."""
    directory = DATA / f"{os.getpid()}-{run}"
    shutil.rmtree(directory, ignore_errors=True)
    port, admin_port = free_ports()
    return Server(peer, Place(port, admin_port, directory, "AKIDBENCH0000000001", secrets.token_hex(20)))


S = TypeVar("S", bound=Server)


@contextlib.contextmanager
def running(server: S) -> Iterator[S]:
    """The prepared server, started; everything it has written is deleted at the end. Raises ServerGone."""
    try:
        server.launch()
        server.wait_ready()
        yield server
    finally:
        server.remove()


def started(peer: Peer, run: str) -> contextlib.AbstractContextManager[Server]:
    return running(prepare(peer, run))


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
