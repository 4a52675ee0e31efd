"""Whether a log must be there: what the database knows of it at a start and a stop, on a full disk too."""

from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from tests.store.redo_stages import killed, started, unapplied
from tests.support.contract.stage import Stage, bodies
from tests.support.faults import full
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.store.directory import NotOurs
from veilmq.store.sqlite import batch
from veilmq.store.sqlite.disk import redo
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each


class Killed(BaseException):
    """In the place of a kill."""


def raising(error: BaseException) -> Any:
    def strike(*_: object, **__: object) -> None:
        raise error

    return strike


@for_each("step", ["open_file", "note_size"])
def test_a_first_start_that_ends_amid_it_needs_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(redo, step, raising(Killed()))
        with pytest.raises(Killed):
            SqliteStore(tmp_path / step, SMALL)
    (tmp_path / step / "redo").unlink(missing_ok=True)
    SqliteStore(tmp_path / step, SMALL).close()


@for_each("error", [full(), apsw.BusyError("locked")], ids=repr)
def test_a_log_that_cannot_be_noted_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(redo, "note_size", raising(error))
        stage = Stage(SqliteFactory(tmp_path / type(error).__name__))
    assert "no redo log, so every batch is a transaction" in caplog.text
    queue = started(stage)
    stage.send(queue, "acknowledged")
    assert unapplied(stage) == 0
    killed(stage).with_name("redo").unlink()
    stage.open()
    assert bodies(stage.receive(queue)) == ["acknowledged"]
    stage.store.close()


def test_a_start_that_does_without_needs_none_any_more(stage: Stage) -> None:
    started(stage)
    database = killed(stage)
    store = SqliteStore(database.parent, msgspec.structs.replace(SMALL, redo_bytes=0))
    database.with_name("redo").unlink()
    assert check(database).problems == []
    store.close()
    stage.open()


@pytest.mark.parametrize("error", [full(), apsw.BusyError("locked")], ids=repr)
def test_a_stop_that_cannot_note_it_is_a_stop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    queue = started(stage)
    stage.send(queue, "acknowledged")
    with monkeypatch.context() as patched:
        patched.setattr(batch, "note_size", raising(error))
        stage.store.close()
    assert "unclean shutdown" not in caplog.text
    stage.open()
    assert bodies(stage.receive(queue)) == ["acknowledged"]


def test_a_stop_on_a_full_disk_still_needs_the_log(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = started(stage)
    stage.send(queue, "acknowledged")
    with monkeypatch.context() as patched:
        patched.setattr(batch, "apply_log", raising(full()))
        stage.store.close()
    log = store_of(stage).directory.redo
    log.rename(log.with_suffix(".away"))
    with pytest.raises(NotOurs, match="redo is missing"):
        stage.open()
    log.with_suffix(".away").rename(log)
    stage.open()
    assert bodies(stage.receive(queue)) == ["acknowledged"]
