"""A real server for tests: `ServerProcess` is the process, `LocalServer` serves programs that use queues.

Strategy: the server picks free ports and announces them in the directory's lock file once they are open, where
`ServerProcess` finds them. Its log goes to a file beside the data; it is ended by pid.

`LocalServer` is one `veilmq serve` process in development mode for a whole test run. `reset` deletes all queues and
topics, so that each test starts empty. `advance` moves the server's clock, so a timeout of six hours is tested in
milliseconds without mocks. veilmq/testing/plugin.py makes it a pytest fixture.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from veilmq.store.directory import read_holder

if TYPE_CHECKING:
    from veilmq.client.queue import Account, Queue

START_SECONDS: Final = 60
STOP_SECONDS: Final = 60
PORTS: Final = ("sqs", "azure", "mns", "admin")
_INTERRUPTED_SECONDS: Final = 5
"""How long a server that no longer answers may take to end after Ctrl-C."""
_LOOK_SECONDS: Final = 0.01
_GONE: Final = 404
VEILMQ: Final = (sys.executable, "-P", "-m", "veilmq")
"""The command `veilmq` of the Python that runs the tests, whether or not its script is installed. -P: modules of the
current directory, such as a project's own queue.py, must not hide Python's."""
_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The server is on this machine: no proxy of the environment gets the request, and its token."""


class ServerProcess:
    """One server process on free ports; may be started again on the same data any number of times."""

    program: tuple[str, ...] = VEILMQ
    """What is started; a test may name another release."""

    def __init__(self, directory: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        """environment: of the process; None: this one's."""
        self._environment = environment
        self.data = directory / "data"
        self.log = directory / "server.log"
        self.options = options
        self.sqs = self.azure = self.mns = self.admin = ""
        """URLs of the ports while the server runs; empty for a protocol that it does not speak."""

    def start(self) -> "ServerProcess":
        """Returns once all ports accept connections. Raises RuntimeError with the log if they do not."""
        return self.begin().opened()

    def begin(self) -> "ServerProcess":
        """Start it without waiting: a server of a cluster opens its ports when it owns the queues."""
        free = [part for name in PORTS for part in (f"--{name}", "127.0.0.1:0")]
        command = [*self.program, "serve", "--data", str(self.data), *free, *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=self._environment)
        return self

    def opened(self) -> "ServerProcess":
        """Wait until all ports accept connections. Raises as `start`."""
        for _ in range(int(START_SECONDS / _LOOK_SECONDS)):
            holder = read_holder(self.data)
            # The admin port is announced last.
            if holder is not None and holder.pid == self.process.pid and "admin" in holder.listeners:
                for name in PORTS:
                    setattr(self, name, holder.url(name) or "")
                return self
            if self.process.poll() is not None:
                break
            time.sleep(_LOOK_SECONDS)
        self.process.kill()
        raise RuntimeError(self.log.read_text())

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self._ended()

    def _ended(self) -> int:
        self.sqs = self.azure = self.mns = self.admin = ""
        return self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def port_kept(port: int) -> Iterator[None]:
    """Reserve the port while its server is down: connections are refused, and only the next server may take the
    port."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", port))
        yield


_TIMEOUT_S = 60
_INHERITED: Final = "VEILMQ_ACCELERATOR"
"""The only variable of VeilMQ that a `LocalServer` takes from the shell."""


class LocalServer:
    """A running server on free ports of this machine."""

    def __init__(self, directory: Path, *options: str) -> None:
        """Start it; `options` are further flags of `veilmq serve`. Raises RuntimeError with the log if the start
        fails."""
        # The shell's settings are another server's: with VEILMQ_CLUSTER this one would join it, and `reset` empty it.
        own = {
            name: value for name, value in os.environ.items() if not name.startswith("VEILMQ_") or name == _INHERITED
        }
        self.process = ServerProcess(directory, *options, environment=own).start()
        self._opened: list[Queue | Account] = []

    @property
    def sqs_url(self) -> str:
        """Endpoint for SQS clients (any credentials)."""
        return self.process.sqs

    @property
    def azure_url(self) -> str:
        """Endpoint for Azure Queue Storage (account devstoreaccount1)."""
        return self.process.azure

    @property
    def mns_url(self) -> str:
        """Endpoint for MNS clients (any credentials)."""
        return self.process.mns

    @property
    def admin_url(self) -> str:
        """The admin port."""
        return self.process.admin

    def queue_url(self, name: str) -> str:
        """The URL of a queue of this server, for `veilmq.connect` and `veilmq work`."""
        return f"veil://{urlsplit(self.sqs_url).netloc}/{quote(name)}"

    def account(self) -> "Account":
        """The account that the server's queues belong to."""
        from veilmq.client.adapters.connect import connect_account

        account = connect_account(f"veil://{urlsplit(self.sqs_url).netloc}")
        self._opened.append(account)
        return account

    def connect(self, name: str, *, create: bool = True) -> "Queue":
        """A queue of this server, created if missing. Raises QueueMissing without `create`."""
        import veilmq

        queue = veilmq.connect(self.queue_url(name) + ("?create=1" if create else ""))
        self._opened.append(queue)
        return queue

    def advance(self, **duration: float) -> None:
        """Let time pass: `advance(hours=6)`, with the argument names of datetime.timedelta.

        When this returns, every lease, delay and expiry in that time has ended, in order, and every waiting receiver
        has its message. Clients' own clocks do not move.
        """
        passed = datetime.timedelta(**duration)
        self._ask("POST", "/api/v1/clock", {"advance_us": passed // datetime.timedelta(microseconds=1)})

    @property
    def now(self) -> float:
        """Unix seconds by the server's clock."""
        return float(self._ask("GET", "/api/v1/clock")["now"]) / 1e6

    def reset(self) -> None:
        """Delete every topic, and every queue with its messages. The clock keeps its time, and Azure its service
        properties."""
        # Topics first: their push queues go with them, and have no name to delete them by.
        for noun in ("topics", "queues"):
            more = True
            while more:
                page = self._ask("GET", f"/api/v1/{noun}?account=*")
                for each in page[noun]:
                    name = quote(each["name"], safe="")
                    try:
                        self._ask("DELETE", f"/api/v1/{noun}/{each['account']}/{each['region']}/{name}")
                    except urllib.error.HTTPError as error:
                        if error.code != _GONE:  # the program under test may delete it, too
                            raise
                more = page["more"]

    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the server: a terminal sends it to the test run and to the server."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.process.wait(_INTERRUPTED_SECONDS) == 0
        return False

    def disconnect(self) -> None:
        """Close everything that `connect` and `account` returned."""
        opened, self._opened = self._opened, []
        for each in opened:
            each.close()

    def stop(self) -> None:
        """Stop the server."""
        self.disconnect()
        self.process.stop()

    @classmethod
    @contextmanager
    def temporary(cls, *options: str) -> "Iterator[LocalServer]":
        """A server on a temporary directory: for examples and scripts."""
        with tempfile.TemporaryDirectory(prefix="veilmq-") as directory:
            server = cls(Path(directory), *options)
            try:
                yield server
            finally:
                server.stop()

    def _ask(self, method: str, path: str, members: dict[str, Any] | None = None) -> dict[str, Any]:
        token = (self.process.data / "admin-token").read_text().strip()
        request = urllib.request.Request(
            self.admin_url + path,
            None if members is None else json.dumps(members).encode(),
            {"Authorization": f"Bearer {token}"},
            method=method,
        )
        try:
            with _DIRECTLY.open(request, timeout=_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:  # Python 3.14 warns of one that nobody closed
                error.msg += f": {error.read().decode(errors='replace')}"
            raise
        return found
