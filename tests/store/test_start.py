"""What the store says when it opens: what an operator wants to have read."""

import logging
import shutil
from pathlib import Path

import pytest

from veilmq.store.sqlite.options import Options
from veilmq.store.sqlite.schema import VERSION
from veilmq.store.sqlite.store import SqliteStore

FIXTURES = Path(__file__).parent / "fixtures"


def said(data: Path, options: Options, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "veilmq.store"):
        SqliteStore(data, options).close()
    return [record.getMessage() for record in caplog.records]


def test_a_migration_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    shutil.copy(FIXTURES / "schema-1.db", data / "veilmq.db")
    options = Options(reserve_bytes=0)
    (told,) = said(data, options, caplog)
    assert f"from schema 1 to {VERSION}" in told
    assert said(data, options, caplog) == []


def test_a_new_directory_is_no_migration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert said(tmp_path / "data", Options(reserve_bytes=0), caplog) == []


def test_a_reserve_that_has_no_room_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = said(tmp_path / "data", Options(reserve_bytes=1 << 60), caplog)
    assert told.startswith(f"no room for the reserve of {1 << 60} bytes")
