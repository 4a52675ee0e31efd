"""A user's own command, which kills a server and starts it again, run while the clients run."""

import subprocess
import sys
import threading
from random import Random
from typing import Final

_SECONDS_MAX: Final = 120


class Kills:
    """Runs a shell command at random intervals."""

    def __init__(self, command: str | None, every: float, seed: int) -> None:
        self._command = command
        self._every = every
        self._chance = Random(seed)
        self.done = 0
        self.failed = 0
        self.last = ""
        """How the last failure ended."""

    def during(self, stop: threading.Event) -> None:
        """For `Run.round`."""
        while self._command is not None and not stop.wait(self._chance.uniform(0.5, 1.5) * self._every):
            self.done += 1
            try:
                ended = subprocess.run(
                    self._command, check=False, shell=True, stdin=subprocess.DEVNULL, stdout=sys.stderr,
                    timeout=_SECONDS_MAX,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.failed, self.last = self.failed + 1, f"it took more than {_SECONDS_MAX} s"
                continue
            if ended.returncode:
                self.failed, self.last = self.failed + 1, f"exit code {ended.returncode}"
