"""`veilmq check --repair`: the report, and how it ends."""

import json
import os
import shutil
from contextlib import closing
from itertools import product
from pathlib import Path

import apsw
import pytest
from tests.support.commands import Run
from tests.support.damaged import live

from veilmq.cli.failures import Exit
from veilmq.store.directory import DataDirectory
from veilmq.store.sqlite.tools.backup import made, made_beside


def test_check_names_the_command_and_the_report_is_plain(tmp_path: Path, run: Run) -> None:
    lived = live(tmp_path / "data")
    os.truncate(lived.directory / "veilmq.db-wal", 400_000)
    found = run("check", "--data", str(lived.directory))
    command = f"veilmq check --data {lived.directory} --repair NEW_DIRECTORY --backup NEWEST_BACKUP"
    assert (found.code, command in found.out) == (Exit.WRONG, True)
    ended = run("check", "--data", str(lived.directory), "--repair", str(tmp_path / "new"))
    assert ended.code == Exit.WRONG
    lines = ended.out.splitlines()
    assert any(line.startswith("queue 000000000000/us-east-1/jobs: ") and " visible" in line for line in lines), lines
    assert any(line.startswith("perhaps missing: what ") for line in lines), lines
    assert lines[-1].endswith(f"serve the new one with: veilmq serve --data {tmp_path / 'new'}")
    assert lines[-2] == "not everything is there: see above"
    assert run("check", "--data", str(tmp_path / "new")).code == Exit.DONE
    again = run("check", "--data", str(tmp_path / "new"), "--repair", str(tmp_path / "newer"))
    told = "whether everything is there is not certain: see above"
    assert (again.code, again.out.splitlines()[-2]) == (Exit.WRONG, told)


def test_a_directory_in_order_is_copied_and_the_json_says_all(tmp_path: Path, run: Run) -> None:
    lived = live(tmp_path / "data")
    ended = run("check", "--data", str(lived.directory), "--repair", str(tmp_path / "new"), "--json")
    assert ended.code == Exit.DONE
    report = json.loads(ended.out)
    assert (report["missing_count"], report["events_missing"], report["problems"]) == (0, 0, [])
    kept = sum(each["visible"] + each["delayed"] + each["in_flight"] for each in report["queues"])
    assert kept == len(lived.there)


def test_a_damaged_backup_is_named(tmp_path: Path, run: Run) -> None:
    lived, backup = live(tmp_path / "data"), tmp_path / "backup"
    assert run("backup", str(backup), "--data", str(lived.directory)).code == Exit.DONE
    os.truncate(lived.directory / "veilmq.db-wal", 400_000)
    with (backup / "veilmq.db").open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(size - 4_096)
        file.write(bytes(4_096))
        file.flush()
        ended = run("backup", str(tmp_path / "again"), "--data", str(backup))
        assert (ended.code, "removed: the database is damaged: " in ended.err) == (Exit.STORE, True), ended.err
        assert f"See what can be had: veilmq check --data {backup} --repair" in ended.err
        file.seek(8_192)
        file.write(bytes(size - 8_192))
    arguments = ("--data", str(lived.directory), "--repair", str(tmp_path / "new"))
    ended = run("check", *arguments, "--backup", str(backup))
    assert (ended.code, f"the backup {backup} cannot be read" in ended.err) == (Exit.STORE, True), ended.err
    assert run("check", *arguments).code == Exit.WRONG, "without it something can be had"


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_full_disk_is_told_as_one_whether_there_is_a_backup_or_not(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    """SQLite may add few pages to a file of the new directory, or none to one that is longer."""
    lived, new, backup = live(tmp_path / "data", body_bytes=1000), tmp_path / "new", tmp_path / "backup"
    assert run("backup", str(backup), "--data", str(lived.directory)).code == Exit.DONE
    if not is_readable:
        (lived.directory / "veilmq.db").unlink()

    def limit(connection: apsw.Connection) -> None:
        if Path(connection.filename).parent == new:
            connection.pragma("max_page_count", pages)

    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, limit])
    for pages, more in product((20, 75), ((), ("--backup", str(backup)))):  # 75: amid the rows, which SQLite rolls back
        ended = run("check", "--data", str(lived.directory), "--repair", str(new), *more)
        assert (ended.code, f"no space is left for {new}" in ended.err) == (Exit.STORE, True), (pages, ended)
        assert "Is there space for two copies" in ended.err
        assert not new.exists()


def test_wrong_uses_are_told(tmp_path: Path, run: Run) -> None:
    lived = live(tmp_path / "data")
    data, new, copy = str(lived.directory), str(tmp_path / "new"), tmp_path / "copy"
    (tmp_path / "link").symlink_to(data)
    assert run("backup", str(copy), "--data", data).code == 0
    for arguments, code, told in (
        (("--backup", data), Exit.USAGE, "--backup: it is for --repair alone"),
        (("--repair", new, "--admin", "127.0.0.1:1"), Exit.USAGE, "no server may run"),
        (("--repair", data), Exit.USAGE, "exists already"),
        (("--repair", new, "--backup", str(tmp_path)), Exit.DIRECTORY, "has no veilmq.db"),
        (("--repair", str(tmp_path / "a" / "b")), Exit.USAGE, "its parent is not there"),
        (("--repair", str(tmp_path / "link" / "new")), Exit.USAGE, f"is inside {data}, which a repair does not change"),
        (("--repair", str(copy / "new"), "--backup", str(copy)), Exit.USAGE, f"is inside {copy}, which"),
    ):
        ended = run("check", "--data", data, *arguments)
        assert (ended.code, told in ended.err) == (code, True), (arguments, ended)
    making = (
        ("check", "--repair", new, "--data", data),
        ("backup", new, "--data", data),
        ("restore", new, "--from", data),
    )
    for arguments, make in product(making, (made, made_beside)):
        with make(Path(new)):
            ended = run(*arguments)
            assert Path(new).exists() == (make is made), "a refused call leaves nothing"
        shutil.rmtree(new)
        told = f"another process is writing {new}\n  Wait until it ends"
        assert (ended.code, told in ended.err) == (Exit.DIRECTORY, True), (arguments, ended)
    with closing(DataDirectory(lived.directory, 0, 0)):
        (lived.directory / "lock").unlink()
        ended = run("check", "--data", data, "--repair", new)
    assert (ended.code, "is held by another process" in ended.err) == (Exit.DIRECTORY, True)
    assert not any(place.exists() for place in (tmp_path / "new", lived.directory / "new", copy / "new"))
