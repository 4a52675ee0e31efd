"""Ctrl-C: once Python itself has started, the command ends whenever it comes, and prints no traceback; nor do the
processes that it started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import HEEDING, WAIT_S
from tests.support.ports import ANY

import veilmq
from veilmq import accelerator
from veilmq.testing.local import VEILMQ

HANDLERS = "import time\n\ndef handle(job):\n    time.sleep(60)\n"
PROGRAM = f"{HEEDING}; from veilmq.__main__ import main; print('begun', flush=True); main()"
QUIET = {0, 130, -signal.SIGINT}


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "veilmq", "--version"], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, f"veilmq {veilmq.__version__}, accelerator {accelerator.status}\n")


WATCHED = """
import builtins, signal, veilmq
signal.signal(signal.SIGINT, signal.default_int_handler)
real = builtins.__import__
def watched(name, *rest):
    print(name, signal.getsignal(signal.SIGINT) is signal.SIG_DFL)
    return real(name, *rest)
builtins.__import__ = watched
import veilmq.__main__
veilmq.__main__.main()
"""


def test_nothing_that_takes_time_is_imported_while_an_interrupt_would_be_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, "--version"], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    imports = [line.split() for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    loud = {name for name, is_quiet in imports[: imports.index(["veilmq.cli", "True"])] if is_quiet == "False"}
    assert loud == {"veilmq.__main__", "_io", "_signal"}  # built in; the second one reads the module's own file
    assert ["sys", "True"] in imports
    assert ["typer", "True"] in imports


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    """As of a command in a shell's background."""
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import veilmq.__main__; "
    program += "veilmq.__main__.signal.raise_signal(2); veilmq.__main__.main()"
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")


def interrupted(arguments: list[str], directory: Path, after_s: float) -> tuple[int, str]:
    """Exit code and stderr of a command that gets Ctrl-C so long after its first line, with all its processes."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            time.sleep(after_s)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            _, told = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    return process.returncode, told


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["queues", "list"],
        ["events", "--from", "first"],
        ["work", "handlers:handle", "--drain", "0s", "--concurrency", "2"],
        ["work", "handlers:handle", "--drain", "0s", "--kind", "processes"],
        ["serve", *ANY],
        ["pipeline", "timeouts", "--path", "nothing"],
    ],
    ids=["list", "events", "work", "processes", "serve", "pipeline"],
)
def test_an_interrupt_at_any_moment_is_quiet(tmp_path: Path, arguments: list[str]) -> None:
    def stays_quiet(step: int) -> None:
        place, after_s = tmp_path / str(step), 0.02 + 0.3 * step
        place.mkdir()
        with veilmq.connect(f"veil://{place}/data?queue=q&create=1") as queue:
            queue.send("hello")
        (place / "handlers.py").write_text(HANDLERS)
        where = {"work": ["--queue", f"veil://{place}/data?queue=q"], "pipeline": []}
        code, told = interrupted(arguments + where.get(arguments[0], ["--data", "data"]), place, after_s)
        assert not [word for word in ("Traceback", "Exception ignored", "Fatal") if word in told], (after_s, told)
        assert code in QUIET or "holds no exported events" in told, (after_s, code, told)

    with ThreadPoolExecutor(2) as pool:  # most of it is waiting for the moment
        list(pool.map(stays_quiet, range(8)))


class Contained:
    """`veilmq serve` as process 1, as in a container: the system leaves out its own handling of signals there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def wait_for(self, text: str) -> str:
        """The next line of its log that holds the text."""
        assert self.process.stderr is not None
        return next(line for line in self.process.stderr if text in line)

    def send_signal(self, number: signal.Signals) -> None:
        kept = self.process.pid
        (child,) = Path(f"/proc/{kept}/task/{kept}/children").read_text().split()
        os.kill(int(child), number)


@contextmanager
def contained(*arguments: str) -> Iterator[Contained]:
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", "--pid", "--fork", "--kill-child", *own, *VEILMQ, "serve", *ANY, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Contained(process)
        finally:
            process.kill()


def test_process_1_ends_by_a_signal_that_comes_while_it_starts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.toml")
    with contained("--config", str(tmp_path / "settings.toml")) as server, (tmp_path / "settings.toml").open("w"):
        server.send_signal(signal.SIGTERM)  # it reads the file
        assert server.process.wait(WAIT_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_process_1_ends_at_once_by_a_second_signal(tmp_path: Path, second: signal.Signals) -> None:
    waits = ("--body-deadline-s", "600", "--shutdown-deadline-s", "600")
    with contained("--data", str(tmp_path / "data"), *waits) as server:
        port = int(server.wait_for("sqs listens on").rpartition(":")[2])
        server.wait_for("mns listens on")
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nAction")
            server.send_signal(signal.SIGTERM)
            server.wait_for("shutting down")
            server.send_signal(second)
            assert server.process.wait(WAIT_S) == 128 + second
