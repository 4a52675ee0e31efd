"""`veilmq work` and `veilmq calibrate` as processes, on a directory and on a real server, with signals and kills."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import bare

from veilmq.cli.work.command import _Collecting
from veilmq.client.adapters.connect import connect_account
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.queue import Account, Queue
from veilmq.estimate.survival import Sample
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ, ServerProcess

WAIT_S = 60.0
HANDLERS = """
import os, time
from pathlib import Path

SEEN = Path("seen")

def note(text):
    with SEEN.open("a") as file:
        file.write(f"{text}\\n")

def handle(job):
    note(job.body)

async def awaited(job):
    note(job.body)

def failing(job):
    raise RuntimeError("always")

def slow(job):
    note(job.body)
    while not Path("go").exists():
        time.sleep(0.01)

def steps(job):
    note(f"begin {job.state} {os.getpid()}")
    for at in range(job.state or 0, 6):
        if at == 3 and not Path("go").exists():
            time.sleep(600)
        job.checkpoint(at + 1)
        note(f"did {at}")

def timed(job):
    time.sleep(int(job.body) / 1_000)

number = 3
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the commands run: with a module of handlers, and some that cannot be imported."""
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "broken.py").write_text("def handle(:\n")
    for name, error in (("long", "RuntimeError"), ("missing", "ModuleNotFoundError")):
        (tmp_path / f"{name}.py").write_text(f"raise {error}('\\nthe first line\\nand the second')\n")
    return tmp_path


@pytest.fixture
def veilmq(directory: Path) -> Command:
    """Runs one command to its end."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*VEILMQ, *arguments], cwd=directory, capture_output=True, text=True, timeout=WAIT_S, env=_environment()
        )

    return run


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts commands; none outlives the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        with (directory / "log").open("a") as log:
            process = subprocess.Popen(
                [*VEILMQ, *arguments], cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment()
            )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.fixture
def account(directory: Path) -> Iterator[Account]:
    """On a server; `url` of a queue there is server_url."""
    server = ServerProcess(directory).start()
    account = connect_account(f"veil://{server.sqs.partition('//')[2].rstrip('/')}/")
    account.create("work")
    (directory / "url").write_text(f"veil://{server.sqs.partition('//')[2].rstrip('/')}/work")
    yield account
    account.close()
    server.kill()


def _environment() -> dict[str, str]:
    return bare(PYTHONUNBUFFERED="1")


def fill(directory: Path, *bodies: str) -> str:
    """A queue in a data directory with these messages; its URL."""
    account = EmbeddedAccount(directory / "data")
    account.create("work")
    account.queue("work").send_batch(bodies)
    account.close()
    return f"veil://{directory / 'data'}?queue=work"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def bodies(queue: Queue, wait: float = 0) -> list[str]:
    return sorted(each.body for each in queue.receive(10, lease=1, wait=wait))


def test_it_works_a_queue_until_it_is_empty(directory: Path, veilmq: Command) -> None:
    url = fill(directory, *map(str, range(20)))
    options = ["--until-empty", "--wait", "200ms", "--concurrency", "2", "--prefetch", "5"]
    done = veilmq("work", "handlers:handle", "--queue", url, *options)
    assert (done.returncode, done.stdout) == (0, "received 20, done 20\n"), done.stderr
    assert sorted(lines(directory / "seen")) == sorted(map(str, range(20)))


def test_coroutines_need_no_option(directory: Path, veilmq: Command) -> None:
    url = fill(directory, "a", "b")
    done = veilmq("work", "handlers:awaited", "--queue", url, "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"received": 2, "done": 2}
    assert sorted(lines(directory / "seen")) == ["a", "b"]
    for line in done.stderr.splitlines():
        assert json.loads(line)["logger"].startswith("veilmq.")


@pytest.mark.slow
def test_child_processes_and_poison(directory: Path, veilmq: Command) -> None:
    url = fill(directory, "a")
    account = EmbeddedAccount(directory / "data")
    account.create("dead")
    account.close()
    options = ["--kind", "processes", "--poison-after", "2", "--dead-letter-queue", "dead", "--retry-first", "1ms"]
    done = veilmq("work", "handlers:failing", "--queue", url, "-n", "2", *options)
    assert (done.returncode, done.stdout) == (0, "received 2, failed 1, dead_lettered 1\n"), done.stderr
    assert "RuntimeError: always" in done.stderr


@for_each(
    ("arguments", "code", "said"),
    [
        (["nomodule:handle"], 2, "No module named 'nomodule'\n  Modules are looked for in /"),
        (["handlers.py:handle"], 2, "cannot be imported: name the module as `import` does, handlers:handle"),
        (["handlers:nothing"], 2, "'handlers:nothing' cannot be imported"),
        (["broken:handle"], 2, "'broken:handle' cannot be imported: SyntaxError: invalid syntax (broken.py, line 1)"),
        (["long:handle"], 2, "'long:handle' cannot be imported: RuntimeError: the first line\n  To see where: "),
        (["missing:handle"], 2, "'missing:handle' cannot be imported: the first line\n"),
        (["handlers:number"], 2, "cannot be called"),
        (["handlers"], 2, "expected MODULE:HANDLER"),
        (["./handlers.py:handle"], 2, "name it as `import` does"),
        ([".handlers:handle"], 2, "name it as `import` does"),
        (["handlers:handle", "--lease", "soon"], 2, "--lease: expected a time"),
        (["handlers:handle", "--concurrency", "0"], 2, "--concurrency: must be a whole number from 1 to 10000, not 0"),
        (["handlers:handle", "--kind", "fibres"], 2, "--kind: 'fibres'"),
        (["handlers:handle", "--poison-after", "2"], 2, "--dead-letter-queue: --poison-after needs one"),
        (["handlers:awaited", "--kind", "threads"], 2, "MODULE:HANDLER: is a coroutine function: --kind async runs it"),
        (["handlers:handle", "--count", "0"], 2, "--count: must be a whole number from 1 on, not 0"),
        (["handlers:handle", "--poison-after", "2", "--dead-letter-queue", "nowhere"], 1, "no queue nowhere"),
        (["handlers:handle", "--no-keeper", "--max-hold", "1h"], 2, "--max-hold: is the keeper's"),
        (["handlers:handle", "--retry-first", "10m"], 2, "--retry-longest: 300 s is below --retry-first 600 s"),
        (["handlers:handle", "--metrics", "9000"], 2, "--metrics: expected HOST:PORT"),
        (["handlers:handle", "--metrics", "a..b:1"], 4, "--metrics: a..b:1: "),
        (["handlers:handle", "--checkpoints", "nothing://here"], 2, "--checkpoints: "),
    ],
)
def test_what_is_wrong_is_said(directory: Path, veilmq: Command, arguments: list[str], code: int, said: str) -> None:
    done = veilmq("work", *arguments, "--queue", fill(directory))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "the second" not in done.stderr, "one line says it"
    assert ("looked for in" in done.stderr) == (arguments[0] in {"nomodule:handle", "handlers.py:handle"})


@for_each(
    ("url", "code", "said"),
    [
        ("veil:///nowhere/at/all?queue=work", 2, "holds no queues"),
        ("veil://key:hidden@127.0.0.1:1/work", 4, "Start a server with `veilmq serve`"),
        ("sqs://key:hidden@127.0.0.1:1/work", 4, ""),
        ("mns://key:hidden@127.0.0.1:1/work", 4, ""),
        ("nonsense://key:hidden@host/work", 2, "must begin with"),
    ],
)
def test_a_queue_that_is_not_there(veilmq: Command, url: str, code: int, said: str) -> None:
    done = veilmq("work", "handlers:handle", "--queue", url)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "hidden" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_is_held(directory: Path, veilmq: Command) -> None:
    url = fill(directory)
    holder = EmbeddedAccount(directory / "data")
    done = veilmq("work", "handlers:handle", "--queue", url)
    holder.close()
    assert done.returncode == 3
    assert "held by" in done.stderr


@pytest.mark.slow
class TestSignals:
    def test_sigterm_drains(self, directory: Path, account: Account, started: Any) -> None:
        queue = account.queue("work")
        queue.send_batch([str(number) for number in range(10)])
        url = (directory / "url").read_text()
        process = started(
            "work", "handlers:slow", "--queue", url, "--concurrency", "2", "--prefetch", "6", "--lease", "1h"
        )
        wait_for(lambda: len(lines(directory / "seen")) == 2)
        process.send_signal(signal.SIGTERM)
        # What had not begun is visible at once, though its lease was an hour, and while handlers still run.
        back: set[str] = set()
        wait_for(lambda: back.update(bodies(queue)) or len(back) == 8)
        assert process.poll() is None
        assert len(lines(directory / "seen")) == 2
        (directory / "go").touch()
        out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "done 2" in out
        assert back | set(lines(directory / "seen")) == set(map(str, range(10)))
        wait_for(lambda: (stats := queue.stats()).visible + (stats.in_flight or 0) == 8)

    def test_a_second_sigint_stops_now(self, directory: Path, account: Account, started: Any) -> None:
        queue = account.queue("work")
        queue.send_batch(["a", "b"])
        process = started(
            "work", "handlers:slow", "--queue", (directory / "url").read_text(), "--lease", "1h", "--drain", "1h",
            "--concurrency", "1", "--prefetch", "2",
        )  # fmt: skip
        wait_for(lambda: lines(directory / "seen") == ["a"] and queue.stats().in_flight == 2)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: queue.stats().visible == 1)  # it has heard the first: what had not begun is back
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "received 2, stopped 2" in out
        wait_for(lambda: bodies(queue) == ["a", "b"])

    def test_one_that_comes_while_it_is_frozen_stops_it(self, directory: Path, account: Account, started: Any) -> None:
        """Then the kernel gives the signal to whichever thread wakes first, and the main thread sleeps on."""
        account.queue("work").send("a")
        url = (directory / "url").read_text()
        process = started("work", "handlers:handle", "--queue", url, "--concurrency", "20")
        wait_for(lambda: lines(directory / "seen") == ["a"])
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            process.send_signal(number)
        out, _ = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, "received 1, done 1\n")

    @pytest.mark.parametrize("kind", ["threads", "processes"])
    def test_after_a_kill_the_message_comes_back_and_goes_on(
        self, directory: Path, account: Account, started: Any, veilmq: Command, kind: str
    ) -> None:
        queue = account.queue("work")
        queue.send("a")
        url = (directory / "url").read_text()
        process = started("work", "handlers:steps", "--queue", url, "--lease", "4s", "--kind", kind)
        seen = directory / "seen"
        wait_for(lambda: "did 2" in lines(seen))
        time.sleep(4.5)  # longer than the lease: only the keeper holds the message
        assert queue.receive() == []
        pid = int(lines(seen)[0].split()[-1])
        process.kill()
        process.wait(WAIT_S)
        wait_for(lambda: gone(pid))
        (directory / "go").touch()
        done = veilmq("work", "handlers:steps", "--queue", url, "-n", "1", "--wait", "20s", "--kind", kind)
        assert done.stdout == "received 1, done 1\n", done.stderr
        told = [re.sub(r" \d+$", "", line) if line.startswith("begin") else line for line in lines(seen)]
        assert told == ["begin None", "did 0", "did 1", "did 2", "begin 3", "did 3", "did 4", "did 5"]
        assert queue.receive(wait=0) == []


class TestCalibrate:
    def test_programs_get_json(self, directory: Path, veilmq: Command) -> None:
        url = fill(directory, *["5"] * 9, "400")
        done = veilmq("calibrate", "handlers:timed", "--queue", url, "-n", "10", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["finished"], found["failed"]) == (10, 0)
        assert 0.005 <= found["percentiles"]["p50"] < 0.4 <= found["longest"]
        assert sum(bucket["finished"] for bucket in found["histogram"]) == 10
        assert found["timeout"] >= 1

    def test_people_get_bars(self, directory: Path, veilmq: Command) -> None:
        done = veilmq("calibrate", "handlers:timed", "--queue", fill(directory, "5", "5"), "--wait", "100ms")
        assert done.returncode == 0, done.stderr
        assert "2 finished, 0 failed" in done.stdout
        assert "##" in done.stdout
        assert "With a lease keeper: lease " in done.stdout

    def test_an_empty_queue_says_so(self, directory: Path, veilmq: Command) -> None:
        done = veilmq("calibrate", "handlers:timed", "--queue", fill(directory), "--wait", "100ms")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no message came" in done.stderr

    @for_each("outcome", ["failed", "dead_lettered", "lost", "unsettled"])
    def test_only_a_done_message_is_a_finished_run(self, outcome: str) -> None:
        meter = _Collecting()
        meter.ended("orders", outcome, 0.2)
        meter.ended("orders", "done", 3.0)
        assert meter.samples == [Sample(0.2, False), Sample(3.0, True)]
