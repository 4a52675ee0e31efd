"""What the tests of the redo log share."""

from pathlib import Path

import apsw
import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, store_of

from veilmq.model.settings.queue import QueueKey
from veilmq.store.directory import DatabaseFailed, DatabaseUnusable, NotOurs
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import backup

BATCHES = 12
WAL_HEADER_BYTES = 32
FRAME_BYTES = 24 + 4096
"""Of a WAL's page with its header (SQLite, "WAL File Format")."""


def unapplied(stage: Stage) -> int:
    """Batches that the database does not have."""
    return len(store_of(stage)._writer.redo.unapplied)


def wal_pages(stage: Stage) -> int:
    """What was written by transactions."""
    return store_of(stage)._writer.wal_pages


def started(stage: Stage) -> QueueKey:
    """A queue, and all that the first use of a store writes into tables."""
    queue = stage.create()
    stage.send(queue, "first")
    stage.delete(queue, stage.take(queue).handle)
    stage.sweep()
    return queue


def killed(stage: Stage) -> Path:
    """The files after a kill; returns the database."""
    stage.factory.kill(stage.store)
    return store_of(stage).directory.database


def in_the_wal(stage: Stage) -> Path:
    """A killed directory whose acknowledged messages are in the WAL; returns the database."""
    queue = stage.create()
    store_of(stage)._writer.redo.close()  # each batch is a transaction
    for number in range(BATCHES):
        stage.send(queue, f"acknowledged {number}")
    return killed(stage)


def refused(database: Path, tmp_path: Path) -> None:
    """Assert that a start, `check` and `backup` all say so, and change nothing."""
    before = {
        path.name: path.read_bytes() for path in database.parent.iterdir() if path.name in ("veilmq.db-wal", "redo")
    }
    with pytest.raises((NotOurs, DatabaseUnusable)):
        SqliteStore(database.parent, SMALL)
    try:
        assert check(database).problems
    except DatabaseFailed:
        pass
    with pytest.raises((NotOurs, DatabaseFailed)):
        backup(database, tmp_path / "copy.db")
    assert before == {name: (database.parent / name).read_bytes() for name in before}


def execute(database: Path, statement: str) -> None:
    """Change the database of a store that is not open, and nothing beside it."""
    connection = connect(database)
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.execute(statement)
    connection.close()
