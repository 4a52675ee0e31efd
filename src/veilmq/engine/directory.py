"""Opens an engine and its store on a data directory: the one place of the engine that knows SQLite."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from veilmq.engine import Limits
from veilmq.engine.engine import Engine
from veilmq.store import Store
from veilmq.store.options import Options
from veilmq.store.sqlite.disk.connections import SqliteError
from veilmq.store.sqlite.store import SqliteStore

DatabaseError: TypeAlias = SqliteError
"""What reading or closing a damaged database may raise."""


def open_directory(
    directory: Path,
    limits: Limits | None = None,
    options: Options | None = None,
    at_point: Callable[[str], None] = lambda point: None,
) -> tuple[Engine, Store]:
    """Open both; `at_point` is called at each of the store's `CRASH_POINTS`.

    Raises DirectoryHeld, DirectoryUnsafe, DatabaseUnusable, SchemaRefused (SchemaOlder: `Options.migrates`), NotOurs,
    SqliteTooOld, OSError, DatabaseError.
    """
    store = SqliteStore(directory, options, at_point)
    return Engine(limits or Limits()), store
