"""What a command prints, where stdout takes no more, is closed, or cannot hold every character."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import IO

import pytest
from rich.cells import cell_len
from tests.cli.conftest import WAIT_S
from tests.cli.test_top import Terminal
from tests.support.commands import bare
from tests.support.ports import ANY

import veilmq
from veilmq.cli.output import table
from veilmq.client.messages import Message
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ

BODY = "h\u00e9llo \u20ac \U0001f600"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with veilmq.connect(f"veil://{tmp_path}/data?queue=q&create=1") as queue:
        queue.send(Message(BODY, type="order"))
    return tmp_path / "data"


def run(*arguments: str | bytes, out: int | IO[bytes] = subprocess.PIPE, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*VEILMQ, *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        timeout=WAIT_S,
        env=bare(**environment),
    )
    return done.returncode, (done.stdout or b"").decode("ascii", "replace"), done.stderr.decode()


@for_each("command", [("--help",), ("queues", "list"), ("peek", "q"), ("events", "--json")], ids=" ".join)
def test_a_full_disk_is_told(data: Path, command: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        code, _, said = run(*command, out=full, VEILMQ_DATA=str(data))
    assert (code, said) == (1, "veilmq: the output could not be written: No space left on device\n")


def test_a_reader_that_has_gone_is_no_news(data: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        assert run("peek", "q", "--json", out=pipe, VEILMQ_DATA=str(data)) == (1, "", "")


def test_nobody_needs_to_hear_it(data: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *VEILMQ, "queues", "list", "--data", str(data)],
        stderr=subprocess.PIPE,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_written_as_in_json(data: Path, encoding: str) -> None:
    names = {"VEILMQ_DATA": str(data), "PYTHONIOENCODING": encoding}
    done = subprocess.run([*VEILMQ, "peek", "q", "--json"], capture_output=True, timeout=WAIT_S, env=bare(**names))
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode(encoding))["body"] == BODY
    code, out, _ = run("peek", "q", **names)
    assert code == 0
    assert "llo \\u20ac \\ud83d\\ude00" in out
    code, out, _ = run("queues", "list", **names)
    _, head, rule, row, _ = out.splitlines()
    assert (code, set(rule.strip()), len(head), row.split()[0]) == (0, {"-"}, len(row), "q")


def test_json_drives_no_terminal(tmp_path: Path) -> None:
    """U+009B is what ESC [ is, and XML 1.0 allows it."""
    strange, names = "a\x9b31mred\x7f\x85", {"VEILMQ_DATA": str(tmp_path / "data"), "PYTHONIOENCODING": "utf-8"}
    with veilmq.connect(f"veil://{tmp_path}/data?queue=q&create=1") as queue:
        queue.send(Message(strange, type=strange))
    for command in (("peek", "q", "--json"), ("events", "--json"), ("peek", "q"), ("events",)):
        done = subprocess.run([*VEILMQ, *command], capture_output=True, timeout=WAIT_S, env=bare(**names))
        lines = done.stdout.decode().splitlines()
        assert done.returncode == 0
        assert all(line.isprintable() for line in lines)
        if "--json" in command:
            assert strange in {json.loads(line)["type"] for line in lines}


def test_a_terminal_shows_a_bar_and_a_pipe_none(data: Path, tmp_path: Path) -> None:
    moved = ("bridge", f"veil://{data}?queue=q", f"veil://{tmp_path}/other?queue=q&create=1", "--until-empty", "--yes")
    for stage, end, command in (
        ("copying", "veilmq restore ", ("backup", str(tmp_path / "shown"), "--data", str(data))),
        ("messages", "moved 1", moved),
    ):
        terminal = Terminal(*command)
        terminal.until(end)
        assert terminal.end() == 0
        bar, _, after = terminal.seen.partition(end)
        assert re.search(rf"{stage} .*━.*100%", bar)
        assert "━" not in after
    assert run("backup", str(tmp_path / "piped"), "--data", str(data))[::2] == (0, "")


def test_a_table_cuts_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table(["job", "count", "body"], [["j" * 90, 12_345_678, "x" * 300]])
    shown = capsys.readouterr().out
    assert (shown.count("x"), "j" * 90 in shown, "12345678" in shown) == (300, True, True)
    table(["message", "count", "why"], [["m" * 36, 7, f"{'a word ' * 30}{'x' * 200}"], ["m" * 36, 12, "日本"]])
    _, head, rule, *lines, below = capsys.readouterr().out.splitlines()
    assert [head.index(each) for each in ("message", "count", "why")] == [1, 40, 48]
    assert {cell_len(each) for each in (head, rule, *lines)} == {200}
    assert [line[40:48].strip() for line in lines] == ["7", "", "", "", "12"]
    assert (sum(line.count("word") for line in lines), below.strip()) == (30, "")
    full = ["x" * 151, "y" * 151]
    table(["message", "count", "why"], [["m" * 36, 7, " ".join(full) + "  "]])
    assert [line[48:].strip() for line in capsys.readouterr().out.splitlines()[3:-1]] == full
    wide = [letter * 90 for letter in "abc"]
    table(wide, [[1, 2, 3]], [wide[1], wide[0]])
    out, err = capsys.readouterr()
    assert err == f"left out on a terminal as narrow as this: {wide[1]}\n"
    assert [each.split() for each in out.splitlines()[1::2]] == [[wide[0], wide[2]], ["1", "3"]]
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    table(["job", "count"], [["j" * 90, 7]])
    assert "j" * 90 in capsys.readouterr().out


def test_a_narrow_terminal_shows_ids_and_all_else(data: Path) -> None:
    _, out, _ = run("events", "--json", VEILMQ_DATA=str(data))
    event = json.loads(out.splitlines()[-1])
    terminal = Terminal("events", "--data", str(data), columns=60)
    terminal.until(event["message"])
    assert terminal.end() == 0
    assert event["kind"] in terminal.seen
    assert "…" not in terminal.seen
    for command, columns, left_out in (
        (("queues", "list"), 60, "retention, dead letters to"),
        (("queues", "list", "--rates"), 80, "retention, dead letters to, timeout"),
        (
            ("queues", "list", "--all", "--rates"),
            70,
            "retention, dead letters to, timeout, delayed, oldest, in flight, region",
        ),
        (("events",), 70, "by, held, lease, attempt, why, offset, at (UTC)"),
        (("messages", "q"), 80, "bytes, until (UTC), receives"),
        (("trace", event["message"]), 80, "offset"),
    ):
        listed = Terminal(*command, "--data", str(data), columns=columns)
        listed.until(f"narrow as this: {left_out}")
        assert listed.end() == 0
        assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", listed.seen).splitlines()[:-1])) <= columns, command


def test_a_directory_that_sqlite_cannot_open_is_refused(tmp_path: Path) -> None:
    code, _, said = run("serve", *ANY, "--data", os.fsencode(tmp_path) + b"/d\xff")
    assert code == 3
    assert "is not UTF-8" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@for_each(
    ("typed", "completed"),
    [("topi", ["topics"]), ("queues cre", ["create"]), ("queues create --del", ["--delay"]), ("nothing-such", [])],
)
def test_a_shell_completes_commands_and_options(typed: str, completed: list[str]) -> None:
    words = f"veilmq {typed}"
    asked = {"_VEILMQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code, out, said = run(**asked)
    assert (code, out.split(), said) == (0, completed, "")
