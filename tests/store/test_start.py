"""What the store says when it opens: what an operator wants to have read."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from veilmq.store import Options
from veilmq.store.directory import DataDirectory, DirectoryHeld, is_held, read_holder
from veilmq.store.sqlite.store import SqliteStore


def said(data: Path, options: Options, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "veilmq.store"):
        SqliteStore(data, options).close()
    return [record.getMessage() for record in caplog.records]


def test_a_migration_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    data = tmp_path / "data"
    options = Options(reserve_bytes=0)
    SqliteStore(data, options).close()
    version = request.getfixturevalue("next_schema")
    (told,) = said(data, options, caplog)
    assert f"from schema {version - 1} to {version}" in told
    assert said(data, options, caplog) == []


@pytest.mark.parametrize("raw", [b"nonsense", b'{"pid":1,"listeners":{"sqs":"\xff"}}'])
def test_an_announcement_that_cannot_be_read_is_none(tmp_path: Path, raw: bytes) -> None:
    SqliteStore(tmp_path / "data", Options(reserve_bytes=0)).close()
    (tmp_path / "data" / "lock").write_bytes(raw)
    assert read_holder(tmp_path / "data") is None


def test_a_new_directory_is_no_migration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = said(tmp_path / "data", Options(reserve_bytes=0), caplog)
    assert told == f"created data directory {tmp_path / 'data'}"


def test_a_reserve_that_has_no_room_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told, _ = said(tmp_path / "data", Options(reserve_bytes=1 << 60), caplog)
    assert told.startswith(f"no room for the reserve of {1 << 60} bytes")


def test_whoever_looks_whether_it_is_held_keeps_no_server_from_starting(tmp_path: Path) -> None:
    """As every command does that finds its server through the directory."""
    DataDirectory(tmp_path / "data", 0, 0).close()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            lock = os.open(tmp_path / "data" / "lock", os.O_RDONLY)
            is_held(lock)
            os.close(lock)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(500):
            DataDirectory(tmp_path / "data", 0, 0).close()
    finally:
        ended.set()
        looker.join()


def test_an_owner_is_seen_and_keeps_others_out(tmp_path: Path) -> None:
    owner = DataDirectory(tmp_path / "data", 0, 0)
    lock = os.open(tmp_path / "data" / "lock", os.O_RDONLY)
    assert is_held(lock)
    with pytest.raises(DirectoryHeld, match=f"held by pid {os.getpid()}"):
        DataDirectory(tmp_path / "data", 0, 0)
    owner.close()
    assert not is_held(lock)
    os.close(lock)


def test_whoever_deletes_the_lock_gets_no_second_owner(tmp_path: Path) -> None:
    owner = DataDirectory(tmp_path / "data", 0, 0)
    (tmp_path / "data" / "lock").unlink()
    for _ in range(2):
        with pytest.raises(DirectoryHeld, match="is held by another process"):
            DataDirectory(tmp_path / "data", 0, 0)
    owner.close()
    DataDirectory(tmp_path / "data", 0, 0).close()


SOMEBODY_ELSE = 65534
AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from veilmq.store.directory import DatabaseUnusable
from veilmq.store import Options
from veilmq.store.sqlite.store import SqliteStore
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setuid(int(sys.argv[2]))
try:
    SqliteStore(Path("data"), Options(reserve_bytes=0))
except DatabaseUnusable as unusable:
    print(unusable)
"""


@pytest.mark.parametrize("name", ["veilmq.db", "veilmq.db-wal", "redo"])
def test_a_file_of_another_user_is_named(tmp_path: Path, name: str) -> None:
    """As a restore by root leaves it, if its chown was forgotten."""
    data = tmp_path / "data"
    SqliteStore(data, Options(reserve_bytes=0)).close()
    (data / name).touch()
    (data / name).chmod(0o400)
    if os.getuid() == 0:
        tmp_path.chmod(0o711)
        for each in (data, *data.iterdir()):
            os.chown(each, SOMEBODY_ELSE, SOMEBODY_ELSE)
        os.chown(data / name, 0, 0)
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(tmp_path), str(SOMEBODY_ELSE)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"data/{name} may not be read and written by this user (uid ")
