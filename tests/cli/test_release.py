"""`veilmq version` and `veilmq upgrade --check`, on data of every release and of none."""

import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from tests.support.commands import Run
from tests.users import other_user

import veilmq
from veilmq import accelerator
from veilmq.engine.directory import STATE_FORMAT
from veilmq.store.sqlite.disk import connect, schema
from veilmq.testing.for_each import for_each

FIXTURES = Path(__file__).parents[1] / "store" / "fixtures"
Data = Callable[[int], Path]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """`data(format)`: a data directory of that format."""

    def of(version: int) -> Path:
        directory = tmp_path / f"data {version}"
        directory.mkdir(mode=0o700)
        shutil.copy(FIXTURES / f"schema-{version}.db", directory / "veilmq.db")
        shutil.copy(FIXTURES / f"schema-{version}.redo", directory / "redo")
        os.truncate(directory / "redo", 1 << 15)  # kept without the zeros at its end
        return directory

    return of


def change(data: Path, statement: str) -> None:
    connection = connect(data / "veilmq.db")
    connection.execute(statement)
    connection.close()


def test_version_tells_what_a_report_needs(run: Run, data: Data) -> None:
    there = data(STATE_FORMAT)
    found = json.loads(run("version", "--data", str(there), "--json").out)
    assert found["veilmq"].startswith(f"{veilmq.__version__} (state format {STATE_FORMAT}) in ")
    assert found["sqlite"] == f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})"
    assert found["data"] == f"state format {STATE_FORMAT} in {there}"
    assert {each.partition(":")[0] for each in found["extras"]} >= {"server", "sqs", "azure", "cluster", "pipeline"}
    assert not any(each.startswith(("dev:", "test:")) for each in found["extras"])
    shown = run("version", "--data", "nowhere").out
    assert [line.split()[0] for line in shown.splitlines()] == list(found)
    assert "none in nowhere" in shown
    assert found["accelerator"] == accelerator.status
    assert run("--version").out == f"veilmq {veilmq.__version__}, accelerator {accelerator.status}\n"


def test_each_older_format_is_brought_up_to_date_at_the_start(run: Run, data: Data) -> None:
    for number in range(1, STATE_FORMAT):
        there = data(number)
        before = {path: path.read_bytes() for path in (there / "veilmq.db", there / "redo")}
        done = run("upgrade", "--check", "--data", str(there), "--json")
        plan = done.json[0]
        assert (done.code, plan["format"], plan["migrates"], plan["way_back"]) == (0, number, True, False)
        assert {path: path.read_bytes() for path in before} == before
        shown = run("upgrade", "--check", "--data", str(there)).out
        assert f"the start brings format {number} to {STATE_FORMAT}" in shown
        assert f"`veilmq backup DEST --data '{there}'`" in shown


def test_the_same_format_needs_nothing_and_has_a_way_back(run: Run, data: Data) -> None:
    done = run("upgrade", "--check", "--data", str(data(STATE_FORMAT)))
    assert done.code == 0
    assert "nothing: the format is the same" in done.out
    assert "the older release starts on the data as it is" in done.out


@for_each(
    ("pragma", "value", "told"),
    [("user_version", 999, "newer VeilMQ"), ("application_id", 0x5645494C, "before the first")],
)
def test_what_this_release_does_not_read_is_told(run: Run, data: Data, pragma: str, value: int, told: str) -> None:
    there = data(STATE_FORMAT if pragma == "user_version" else 1)
    change(there, f"PRAGMA {pragma} = {value}")
    done = run("upgrade", "--check", "--data", str(there))
    assert done.code == 3
    assert told in done.out
    assert "way back" not in done.out


def test_a_full_disk_and_a_lost_file_stand_in_the_way(
    run: Run,
    veilmq: Callable[..., "subprocess.CompletedProcess[str]"],
    data: Data,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = data(STATE_FORMAT)
    change(killed, "UPDATE mark SET offset = 1")  # as if the WAL had been left behind
    for told in ("before the first record of", "redo is missing, and with it the last acknowledged batches"):
        for command, code in (("upgrade", 1), ("serve", 3)):  # the check says what the start says
            ended = veilmq(command, *["--check"] * (command == "upgrade"), "--data", str(killed))
            assert ended.returncode == code
            assert told in ended.stdout + ended.stderr
        (killed / "redo").unlink(missing_ok=True)
    for remains, state in (("redo", "missing"), ("committed", "empty")):
        (killed / "veilmq.db").unlink()
        (killed / remains).write_bytes(b"x")
        if state == "empty":
            (killed / "veilmq.db").touch()
        for command in (("upgrade", "--check"), ("check",), ("doctor",), ("backup", str(killed / "copy"))):
            done = run(*command, "--data", str(killed))
            assert done.code
            assert f"veilmq.db is {state}, but other files of it exist" in done.out + done.err
            assert f"veilmq check --data '{killed}' --repair" in done.out + done.err
        (killed / "veilmq.db").touch()
        (killed / remains).unlink()
    there = data(1)
    with (there / "veilmq.db-aside").open("wb") as sparse:
        sparse.truncate(shutil.disk_usage(there).free + (1 << 30))  # without blocks
    done = run("upgrade", "--check", "--data", str(there))
    assert done.code == 1
    assert "free space" in done.out
    with (there / "veilmq.db").open("r+b") as file:
        file.seek(100)
        file.write(bytes(1000))
    command = ("upgrade", "--check", "--data", str(there))
    assert "Free space if the disk is full; else see what can be had" in run(*command).err
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)  # a mount for reading alone
    assert f"{there} cannot be written by this user, or is read-only" in run(*command).err


def test_what_is_no_data_directory_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    sqlite3.connect(tmp_path / "other" / "veilmq.db").execute("create table t (a)").connection.close()
    for directory, code, told in (("nowhere", 2, "has no data of VeilMQ"), ("other", 3, "is another program's")):
        done = run("upgrade", "--check", "--data", str(tmp_path / directory))
        assert done.code == code
        assert told in done.err
    assert run("upgrade").code == 2
    assert "when it starts" in run("upgrade").err
    assert not os.listdir(tmp_path / "other")[1:]


def test_data_that_this_user_may_not_see_is_told(run: Run, data: Data) -> None:
    """As that of a service, asked for by whoever reports a bug."""
    there = data(STATE_FORMAT)
    there.chmod(0)
    assert run("version", "--data", "nowhere").code == 0  # with root's rights, for what is imported late
    with other_user():
        found = json.loads(run("version", "--data", str(there), "--json").out)
        refused = run("upgrade", "--check", "--data", str(there))
    assert "cannot be read: " in found["data"]
    assert "is closed to this user" in found["data"]
    assert refused.code == 3
    assert "is closed to this user" in refused.err
    assert "as the server's user" in refused.err
    there.chmod(0o700)


def test_a_path_that_cannot_be_one_is_told(run: Run) -> None:
    assert "cannot be read: " in run("version", "--data", "x" * 5_000).out


@pytest.mark.slow
def test_an_upgrade_does_what_was_told(run: Run, data: Data, serve: Callable[..., object]) -> None:
    there = data(schema.VERSION - 1)
    server = serve(data=there).ready()  # type: ignore[attr-defined]
    done = run("upgrade", "--check", "--data", str(there), "--json")
    assert (done.json[0]["format"], done.json[0]["migrates"]) == (STATE_FORMAT, False)
    assert server.stop() == 0
