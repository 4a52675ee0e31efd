"""`veilmq top`: once, and in a terminal of its own until q."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.conftest import HEEDING
from tests.support.commands import Run, reaching

from veilmq.cli.remote import workers
from veilmq.testing.local import LocalServer, ServerProcess

WAIT_S = 20
# Keys such as Ctrl-C are for the session whose terminal it is.
_PROGRAM = (
    f"{HEEDING}; import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from veilmq.cli import main; main()"
)


@pytest.fixture
def veilmq(run: Run, tmp_path: Path) -> Iterator[Run]:
    with reaching("http", run, tmp_path / "data") as reached:
        yield reached


def test_once_shows_queues_and_workers_the_deepest_first(veilmq: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for queue, count in (("few", 1), ("many", 3)):
        veilmq("queues", "create", queue)
        for number in range(count):
            veilmq("send", queue, f"a{number}")
    veilmq("receive", "few")
    shown = veilmq("top", "--once")
    assert shown.code == 0
    assert re.search(r"2 queues  3 visible  1 in flight  0 delayed  1 worker\n", shown.out)
    assert shown.out.index(" many ") < shown.out.index(" few ")
    assert re.search(r"command line\S* .* 1 ", shown.out)
    (found,) = veilmq("top", "--json").json
    assert [queue["name"] for queue in found["queues"]] == ["many", "few"]
    assert (found["workers"]["workers"][0]["holds"], found["more"]) == (1, False)
    assert "by name" not in shown.out
    monkeypatch.setattr(workers, "QUEUES_MAX", 1)
    last = veilmq("top", "--once").out.splitlines()[-1]
    assert last.rstrip() == "of the first 1 queues by name; the deepest of all: veilmq queues worst --by depth"
    assert veilmq("top", "--json").json[0]["more"]
    many = [queue | {"name": f"{number:02} {'x' * 50}"} for number in range(40) for queue in found["queues"][:1]]
    for width in (80, 110, 200):
        console = Console(width=width, height=24, file=io.StringIO())
        drawn = workers._fitting(console, workers.Look(many, False, found["workers"]), "no answer")
        lines = ["".join(part.text for part in line) for line in console.render_lines(drawn, pad=False)]
        assert (len(lines), any(re.match(r"and \d+ queues, 0 workers more", line) for line in lines)) == (24, True)


def test_bad_input_is_told(veilmq: Run) -> None:
    refused = veilmq("top", "--every", "soon")
    assert refused.code == 2
    assert "--every" in refused.err


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *words: str, columns: int = 120) -> None:
        master, slave = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "LINES": "30", "COLUMNS": str(columns)}
        command = [sys.executable, "-c", _PROGRAM, *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.keys = master
        self.seen = ""

    def until(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2_000:]
            if select.select([self.keys], [], [], 0.2)[0]:
                self.seen += os.read(self.keys, 65_536).decode(errors="replace")

    def end(self) -> int:
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.keys)


@pytest.mark.slow
def test_a_terminal_shows_what_changes_until_q(veilmq_server: LocalServer) -> None:
    queue = veilmq_server.connect("orders")
    data = str(veilmq_server.process.data)
    terminal = Terminal("top", "--data", data, "--every", "100ms")
    terminal.until("orders")
    terminal.until("0 visible")
    queue.send_batch(["a", "b"])
    terminal.until("2 visible")
    os.write(terminal.keys, b"x")
    queue.receive()
    terminal.until("1 in flight")
    os.write(terminal.keys, b"q")
    assert terminal.end() == 0
    narrow = Terminal("workers", "--data", data, columns=80)
    narrow.until("UTC\r\n")
    assert narrow.end() == 0
    *lines, left_out, _ = re.sub(r"\x1b\[[0-9;]*m", "", narrow.seen).splitlines()
    assert max(map(len, lines)) <= 80
    assert left_out == "left out on a terminal as narrow as this: a minute, waits, received"
    veilmq_server.connect("a-rather-long-name-of-a-queue")
    once = Terminal("top", "--once", "--data", data, columns=80)
    once.until("narrow as this: received/s")
    assert once.end() == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", once.seen)
    assert "…" not in shown
    assert re.search(r"visible +flight +oldest +sent/s +deleted/s", shown)


@pytest.mark.slow
def test_ctrl_c_ends_it_and_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    terminal = Terminal("top", "--data", str(server.data), "--every", "100ms")
    try:
        terminal.until("0 queues")
        server.stop()
        terminal.until("no answer")
    finally:
        os.write(terminal.keys, b"\x03")
        assert terminal.end() == 0
