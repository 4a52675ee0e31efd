"""Real `veilmq serve` processes, and boto3 to talk to them."""

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import boto3
import pytest
from botocore.config import Config
from tests.support.commands import Run, bare, in_process
from tests.support.ports import ANY

from veilmq.testing.local import VEILMQ

WAIT_S = 30.0
HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A process that a shell started in the background ignores SIGINT, and so do its children: the tests, and a command."""
INTERRUPTIBLE = [sys.executable, "-c", f"{HEEDING}; from veilmq.cli import main; main()"]
"""The command, to be interrupted however the tests were started."""


class Server:
    """One process; its log lines arrive as they are written."""

    def __init__(self, data: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.data = data
        self.logs: list[dict[str, Any]] = []
        self._arriving: SimpleQueue[str | None] = SimpleQueue()
        self.process = subprocess.Popen(
            [*VEILMQ, "serve", "--data", str(data), *ANY, "--log-format", "json", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._arriving.put(line)
        self._arriving.put(None)

    def wait_for(self, text: str) -> str:
        """The message of the next log line that holds the text."""
        while True:
            try:
                line = self._arriving.get(timeout=WAIT_S)
            except Empty:
                raise AssertionError(f"no {text!r} in {self.logs}") from None
            assert line is not None, f"it ended without {text!r}: {self.logs}"
            self.logs.append(json.loads(line) if line.startswith("{") else {"message": line})
            if text in self.logs[-1]["message"]:
                return str(self.logs[-1]["message"])

    def ready(self) -> "Server":
        self.admin = self.wait_for("admin listens on ").split()[-1]
        self.url = self.wait_for("sqs listens on ").split()[-1]
        return self

    def sqs(self, key: str = "any", secret: str = "any") -> Any:
        return boto3.client(
            "sqs",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(retries={"total_max_attempts": 1}),
        )

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit code, when it has ended; all its log lines are in `logs`."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        while (line := self._arriving.get(timeout=WAIT_S)) is not None:
            self.logs.append(json.loads(line) if line.startswith("{") else {"message": line})
        return code

    def stop(self) -> int:
        self.send_signal(signal.SIGTERM)
        return self.ended()

    def told(self) -> str:
        return "\n".join(str(line["message"]) for line in self.logs)


Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers on `tmp_path / "data"`; none outlives the test."""
    started: list[Server] = []

    def start(*arguments: str, data: Path | None = None, **environment: str) -> Server:
        server = Server(data or tmp_path / "data", list(arguments), bare(**environment))
        started.append(server)
        return server

    yield start
    for server in started:
        server.process.kill()
        server.process.wait(WAIT_S)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory to which every user has the way."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command in this process, in an empty directory."""
    return in_process(monkeypatch, capsys, tmp_path)


@pytest.fixture
def veilmq(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs one command to its end, in this process: how processes begin and end is tried where it matters."""

    def command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        if arguments[0] == "serve":  # sets up the logging of the whole process
            own = bare(**environment)
            return subprocess.run([*VEILMQ, *arguments], capture_output=True, text=True, timeout=WAIT_S, env=own)
        with monkeypatch.context() as variables:
            for name, value in environment.items():
                variables.setenv(name, value)
            return subprocess.CompletedProcess(arguments, *run(*arguments))

    return command
