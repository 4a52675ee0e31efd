"""`veilmq verify` against servers that are killed, one that keeps its data and one that loses it, and against another
server; and what it refuses."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import INTERRUPTIBLE
from tests.support.azurite import azurite
from tests.support.commands import Run
from tests.support.ports import kept_ports

from veilmq.testing.for_each import for_each

WAIT_S = 120
HISTORY = (
    '{"promises":{"dead_letters":{"jobs":"dead"}}}\n'
    '{"number":1,"client":"a","kind":"send","queue":"jobs","invoked":0,"returned":1,"outcome":"ok","message":"m1"}\n'
    '{"number":2,"client":"a","kind":"drain","queue":"jobs","invoked":2,"returned":3,"outcome":"ok"}\n'
)
DRAIN = '{"number":3,"client":"a","kind":"drain","queue":"dead","invoked":4,"returned":5,"outcome":"ok"}\n'

Restart = Callable[..., tuple[Path, str]]


@pytest.fixture
def restart(tmp_path: Path) -> Iterator[Restart]:
    """Write a script that kills and starts a server on one port, and run it once: the script, and host and port."""
    pid, kept = tmp_path / "pid", contextlib.ExitStack()

    def written(between: str = "") -> tuple[Path, str]:
        (port,) = kept.enter_context(kept_ports(1))
        place = f"127.0.0.1:{port}"
        others = " ".join(f"--{name} 127.0.0.1:0" for name in ("azure", "mns", "admin"))
        script = tmp_path / "restart.sh"
        script.write_text(
            f"#!/bin/sh\ncd {tmp_path}\n[ -f pid ] && kill -9 $(cat pid) && echo >>kills\n{between}\n"
            f"{sys.executable} -m veilmq serve --data data --sqs {place} {others} >server.log 2>&1 &\necho $! >pid\n"
        )
        script.chmod(0o700)
        subprocess.run([script], check=True)
        return script, place

    with kept:
        yield written
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def verifying(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([*INTERRUPTIBLE, "verify", *arguments], stdout=subprocess.PIPE, text=True)


def succeeded(log: Path) -> set[str]:
    """The kinds of calls that did."""
    return set(re.findall(r'"kind":"(\w+)".*"outcome":"ok"', log.read_text()))


@pytest.mark.slow
def test_a_server_that_is_killed_keeps_its_promises(restart: Restart, tmp_path: Path, run: Run) -> None:
    """FIFO with dead letters; Ctrl-C ends the load early, and what was done is drained and checked."""
    script, place = restart()
    endpoint, log = f"sqs://key:s3cret@{place}/?tls=0", tmp_path / "log"
    process = verifying(
        "--endpoint", endpoint, "--fifo", "--dead-letters", "--minutes", "9", "--json",
        "--kill", str(script), "--kill-every", "2s", "--log", str(log),
    )  # fmt: skip
    kills, end = tmp_path / "kills", time.monotonic() + WAIT_S
    calls = {"send", "receive", "extend", "release", "delete"}  # chance chooses what a client does with a message
    while not (kills.exists() and kills.stat().st_size >= 3 and calls <= succeeded(log)):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    told: dict[str, Any] = json.loads(process.communicate(timeout=WAIT_S)[0])
    assert process.returncode == 0, told["stories"]
    assert told["kills"] >= 3
    assert (told["undrained"], told["rounds"], told["queue_recreated"]) == ("", 1, 0)
    assert all(told["calls"][kind]["ok"] for kind in calls)
    assert set(told["errors"]) <= {
        "refused: TransportError", "unknown: TransportError", "refused: LeaseTaken", "refused: LeaseExpired",
        "refused: MessageGone", "refused: ReceiptInvalid",
    }  # fmt: skip
    assert "s3cret" not in log.read_text()
    again = run("verify", "--endpoint", endpoint, "--log", str(log))
    assert (again.code, again.err) == (2, f"veilmq: --log: {log}: File exists\n")
    checked = run("verify", "--check", str(log), "--json")
    assert checked.code == 0
    assert checked.json[0]["operations"] == told["operations"]


@pytest.mark.slow
def test_a_server_that_loses_its_data_is_found_out(restart: Restart) -> None:
    script, place = restart("rm -r data")
    process = verifying(
        "--endpoint", f"veil://{place}/", "--minutes", "0.1", "--json", "--kill", str(script), "--kill-every", "3s"
    )
    told = json.loads(process.communicate(timeout=WAIT_S)[0])
    assert process.returncode == 1
    assert told["queue_recreated"] > 0
    assert told["violations"]["acknowledged message lost"] > 0


@pytest.mark.slow
def test_another_server_without_faults_keeps_its_promises() -> None:
    """Azurite: nothing here is ours but the clients and the checker."""
    with azurite("queue") as url:
        endpoint = f"{url.replace('http', 'azure', 1)}/devstoreaccount1/?tls=0"
        process = verifying("--endpoint", endpoint, "--minutes", "0.1", "--json")
        told = json.loads(process.communicate(timeout=WAIT_S)[0])
    assert (process.returncode, told["stories"], told["undrained"]) == (0, [], "")
    assert all(told["calls"][kind]["ok"] for kind in ("send", "receive", "extend", "delete"))
    assert not told["errors"].keys() - {"refused: LeaseTaken", "refused: LeaseExpired", "refused: MessageGone"}


@for_each(
    ("arguments", "said"),
    [
        ((), "--endpoint: which account? Give its URL, or a log with --check"),
        (("--endpoint", "sqs://a:s3cret@host:1/jobs"), "--endpoint: it makes a queue of its own"),
        (("--endpoint", "sqs://:s3cret@host/"), "--endpoint: before the host it takes key:secret@"),
        (("--endpoint", "azure:///account/", "--fifo"), "--fifo: not over azure"),
        (("--endpoint", "mns://a:s3cret@host/", "--dead-letters"), "--dead-letters: not over mns"),
        (("--endpoint", "veil://host/", "--clients", "0"), "--clients: expected at least 1, not 0"),
        (("--endpoint", "veil://host/", "--minutes", "-1"), "--minutes: expected more than 0"),
        (("--endpoint", "veil://host/", "--log", "none/log"), "--log: none/log: No such file or directory"),
        (("--check", "none"), "--check: none: No such file or directory"),
        (("--check", "none", "--dead-letters"), "--dead-letters: --check drives nothing, leave it out"),
        (("--check", "none", "--rate", "0"), "--rate: --check drives nothing, leave it out"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str, run: Run) -> None:
    ended = run("verify", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "s3cret" not in ended.err


def test_a_log_knows_what_its_queues_promised(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(HISTORY)
    assert run("verify", "--check", str(log)).code == 0  # it may be among the dead letters
    log.write_text(HISTORY + DRAIN)
    ended = run("verify", "--check", str(log))
    assert ended.code == 1
    assert "1 violation (acknowledged message lost: 1)" in ended.out
    log.write_text(HISTORY.replace("jobs", "\\q", 1))
    assert "line 1 of the log" in run("verify", "--check", str(log)).err
    log.write_text("not a log")
    assert "line 1 of the log" in run("verify", "--check", str(log)).err
