"""A real `veilmq serve` process, for tests that talk to one.

Strategy: free ports, found again in the directory's lock file, where the server itself announces them; ended by pid.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from select import select
from typing import Final

START_SECONDS: Final = 20
STOP_SECONDS: Final = 20
_COMMAND: Final = (sys.executable, "-c", "from veilmq.cli import main; main()", "serve")


class ServerProcess:
    """One server process on free ports; `start` it again as often as you like on the same data."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.data = directory / "data"
        self.options = options
        self.sqs = self.admin = ""

    def start(self) -> "ServerProcess":
        """Returns once both ports take connections."""
        command = [*_COMMAND, "--data", str(self.data), "--sqs", "127.0.0.1:0", "--admin", "127.0.0.1:0", *self.options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        while not (self.sqs and self.admin) or len(self.lines) < 2:
            if not select([self.process.stderr], [], [], START_SECONDS)[0]:
                raise TimeoutError("".join(self.lines))
            line = self.process.stderr.readline()
            if not line:
                raise RuntimeError("".join(self.lines))
            self.lines.append(line)
            listeners = self._listeners()
            self.sqs, self.admin = listeners.get("sqs", ""), listeners.get("admin", "")
        return self

    def _listeners(self) -> dict[str, str]:
        try:
            holder = json.loads((self.data / "lock").read_text())
        except (OSError, ValueError):
            return {}
        return dict(holder["listeners"]) if holder["pid"] == self.process.pid else {}

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
        _, rest = self.process.communicate(timeout=STOP_SECONDS)
        self.lines += rest.splitlines(keepends=True)
        return self.process.returncode
