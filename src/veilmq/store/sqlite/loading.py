"""Loads an opened database into memory."""

import os
from typing import Any, Final

import apsw

from veilmq.model.receipt import KEY_BYTES, ReceiptKey
from veilmq.store.directory import DataDirectory
from veilmq.store.options import Options
from veilmq.store.sqlite.batch import queues, topics
from veilmq.store.sqlite.batch.writer import Mark, Writer
from veilmq.store.sqlite.disk import redo
from veilmq.store.sqlite.settings import plans
from veilmq.store.sqlite.upkeep import snapshots
from veilmq.store.sqlite.upkeep.snapshots import Snapshots

_EPOCH_BYTES: Final = 16


def _row(connection: apsw.Connection, query: str) -> tuple[Any, ...]:
    (row,) = connection.execute(query).fetchall()
    return row


def load(connection: apsw.Connection, directory: DataDirectory, options: Options) -> tuple[Writer, Snapshots]:
    """Load all state that is kept in memory. Raises apsw.Error, ValueError, TypeError or LookupError if the file does
    not hold what was written; NotOurs, OSError."""
    _give_birth(connection)
    (key,) = _row(connection, "SELECT receipts FROM secret")
    redo.recover(directory.redo, connection, key)
    mark = Mark(*_row(connection, "SELECT clock, sequence, generation, offset FROM mark"))
    loaded = queues.load(connection)
    plans.load(connection, loaded)
    log = redo.Redo(directory.redo, options, key)
    writer = Writer(connection, loaded, topics.load(connection), mark, ReceiptKey(key), log)
    writer.memtable.count(loaded)
    return writer, snapshots.load(connection)


def _give_birth(connection: apsw.Connection) -> None:
    """Insert the rows that exist once into a new file."""
    with connection:
        connection.execute("INSERT OR IGNORE INTO mark VALUES (1, 0, 0, 0, 0)")
        connection.execute(
            "INSERT OR IGNORE INTO secret VALUES (1, ?, ?)", (os.urandom(KEY_BYTES), os.urandom(_EPOCH_BYTES))
        )
