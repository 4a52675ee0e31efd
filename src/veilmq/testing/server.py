"""A real `veilmq serve` process, for tests that talk to one.

Strategy: free ports, found in the directory's lock file, where the server itself announces them once they are open; its
log goes to a file beside the data; ended by pid.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from veilmq.store.sqlite.directory import read_holder

START_SECONDS: Final = 20
STOP_SECONDS: Final = 20
_LOOK_SECONDS: Final = 0.01
_COMMAND: Final = (sys.executable, "-c", "from veilmq.cli import main; main()", "serve")


class ServerProcess:
    """One server process on free ports; `start` it again as often as you like on the same data."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.data = directory / "data"
        self.log = directory / "server.log"
        self.options = options
        self.sqs = self.admin = ""
        """URLs of the ports, while the server runs."""

    def start(self) -> "ServerProcess":
        """Returns once both ports take connections. Raises RuntimeError with the log if that does not come."""
        command = [*_COMMAND, "--data", str(self.data), "--sqs", "127.0.0.1:0", "--admin", "127.0.0.1:0", *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        for _ in range(int(START_SECONDS / _LOOK_SECONDS)):
            holder = read_holder(self.data)
            if holder is not None and holder.pid == self.process.pid and len(holder.listeners) == 2:
                self.sqs, self.admin = holder.listeners["sqs"], holder.listeners["admin"]
                return self
            if self.process.poll() is not None:
                break
            time.sleep(_LOOK_SECONDS)
        self.process.kill()
        raise RuntimeError(self.log.read_text())

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._ended()

    def _ended(self) -> int:
        self.sqs = self.admin = ""
        return self.process.wait(STOP_SECONDS)
