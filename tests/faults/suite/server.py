"""The server that the faults strike: one data directory, the same ports in every life.

Strategy: the fork server starts most lives (fork_server.py); a life under strace is a program of its own. The process
table shows when a life has ended: no process here is the server's parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tests.faults.suite.fork_server import Asked, ends_of
from tests.support.ports import kept_ports

from veilmq.store.directory import read_holder
from veilmq.testing.local import VEILMQ

START_SECONDS = 120
_LOOK_SECONDS = 0.01


class Server:
    """`start` it again after each `kill`."""

    def __init__(
        self,
        directory: Path,
        log: Path,
        *options: str,
        address: str = "127.0.0.1",
        inside: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """inside: a command that enters a network namespace, in which it listens. environment: beside its parent's."""
        self.data = directory / "data"
        self.log = log
        self.address = address
        self._kept = contextlib.ExitStack()
        self.ports = self._kept.enter_context(kept_ports(3))
        self.options = [
            "--data", str(self.data), "--admin", f"{address}:0", "--history-s-max", "60",
            *(part for name, port in self._named() for part in (f"--{name}", f"{address}:{port}")), *options,
        ]  # fmt: skip
        self.pid = 0
        self.lives = 0
        self._fork_server = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.faults.suite.fork_server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | (environment or {}),
        )  # fmt: skip
        self._strace: subprocess.Popen[bytes] | None = None

    def _named(self) -> list[tuple[str, int]]:
        return list(zip(("sqs", "azure", "mns"), self.ports, strict=True))

    def urls(self, ports: list[int] | None = None) -> dict[str, str]:
        """An account's URL by protocol; `ports`: of a proxy before the server."""
        sqs, azure, mns = (f"{self.address}:{port}" for port in ports or self.ports)
        return {
            "veil": f"veil://{sqs}/?retries=0",
            "sqs": f"sqs://x:y@{sqs}/?tls=0&retries=0",
            "azure": f"azure://{azure}/devstoreaccount1/?tls=0&retries=0",
            "mns": f"mns://x:y@{mns}/?retries=0",
        }

    def spawn(self, **how: object) -> None:
        """Begin a life and return at once. `how`: fields of `Asked`."""
        asked = Asked(options=self.options, log=str(self.log), data=str(self.data), ports=self.ports)
        asked = msgspec.structs.replace(asked, **how)
        pipe_in, pipe_out = self._fork_server.stdin, self._fork_server.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(msgspec.json.encode(asked) + b"\n")
        pipe_in.flush()
        self.pid = int(pipe_out.readline())
        self.lives += 1

    def start(self, **how: object) -> bool:
        """Begin a life; whether it listens, or has ended before it did."""
        self.spawn(**how)
        return self.listening(lambda pid: pid == self.pid)

    def start_under(self, *command: str) -> bool:
        """Begin a life under strace."""
        with self.log.open("ab") as log:
            self._strace = subprocess.Popen([*command, *VEILMQ, "serve", *self.options], stderr=log)
        self.lives += 1
        self.pid = self._strace.pid
        found = self.listening(lambda pid: pid != self.pid and _exists(pid))
        holder = read_holder(self.data)
        if found and holder is not None:
            self.pid = holder.pid
        return found

    def listening(self, is_mine: Callable[[int], bool]) -> bool:
        """Whether it listens; waits for that or its end."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            holder = read_holder(self.data)
            if holder is not None and is_mine(holder.pid) and "mns" in holder.listeners:
                return True
            if not self.alive:
                return False
            time.sleep(_LOOK_SECONDS)
        raise RuntimeError(f"the server does not listen after {START_SECONDS} s: {self.last_words()}")

    def last_words(self) -> str:
        """How its lives have ended, as far as that is known, and the end of its log."""
        ends, log = (
            file.read_text(errors="replace").strip().splitlines() if file.exists() else []
            for file in (ends_of(self.log), self.log)
        )
        how = f"life {self.lives} goes on" if self.alive else f"life {self.lives} is over"
        return f"{how}; ended so far, by pid: {', '.join(ends[-5:]) or 'none'}; its log ends:\n" + "\n".join(log[-12:])

    @property
    def alive(self) -> bool:
        """Whether the present life goes on."""
        if self._strace is not None and self._strace.poll() is not None:
            return False
        return _exists(self.pid)

    @property
    def exit_code(self) -> int | None:
        """Of a life under strace that has ended."""
        return None if self._strace is None else self._strace.wait(START_SECONDS)

    def ended(self, seconds: float) -> bool:
        """Whether its life ends within that time."""
        end = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End its life."""
        self.send(signal.SIGKILL)
        assert self.ended(START_SECONDS), "SIGKILL did not end it"
        if self._strace is not None:
            self._strace.kill()
            self._strace.wait()
            self._strace = None

    def close(self) -> None:
        """No more lives."""
        if self.lives:
            self.kill()
        assert self._fork_server.stdin is not None
        assert self._fork_server.stdout is not None
        self._fork_server.stdin.close()
        self._fork_server.wait(START_SECONDS)
        self._fork_server.stdout.close()
        self._kept.close()


def _exists(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it until its parent looks."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
