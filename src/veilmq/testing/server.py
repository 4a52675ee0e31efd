"""A real `veilmq serve` process for tests.

Strategy: the server picks free ports and announces them in the directory's lock file once they are open, where this
class finds them. Its log goes to a file beside the data; it is ended by pid.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from veilmq.store.directory import read_holder

START_SECONDS: Final = 60
STOP_SECONDS: Final = 60
PORTS: Final = ("sqs", "azure", "mns", "admin")
_LOOK_SECONDS: Final = 0.01
VEILMQ: Final = (sys.executable, "-m", "veilmq")
"""The command `veilmq` of the Python that runs the tests, whether or not its script is installed."""


class ServerProcess:
    """One server process on free ports; may be started again on the same data any number of times."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.data = directory / "data"
        self.log = directory / "server.log"
        self.options = options
        self.sqs = self.azure = self.mns = self.admin = ""
        """URLs of the ports while the server runs; empty for a protocol that it does not speak."""

    def start(self) -> "ServerProcess":
        """Returns once all ports accept connections. Raises RuntimeError with the log if they do not."""
        free = [part for name in PORTS for part in (f"--{name}", "127.0.0.1:0")]
        command = [*VEILMQ, "serve", "--data", str(self.data), *free, *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        for _ in range(int(START_SECONDS / _LOOK_SECONDS)):
            holder = read_holder(self.data)
            # The admin port is announced last.
            if holder is not None and holder.pid == self.process.pid and "admin" in holder.listeners:
                for name in PORTS:
                    setattr(self, name, holder.listeners.get(name, ""))
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
