"""The engine, without I/O: batches, waiting receives, and timers.

Strategy: a shell (asyncio in server/, a thread in client/) owns the clock and the threads. It submits commands, takes a
batch, lets the store apply and commit it, hands the result back, and delivers the answers. The engine never calls the
store and never reads a clock. `open_directory` is the one place here that knows SQLite.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from veilmq.engine.engine import Answer, Batch, Engine
from veilmq.engine.limits import Limits
from veilmq.store import Store
from veilmq.store.options import Options
from veilmq.store.sqlite.disk.connections import SqliteError
from veilmq.store.sqlite.store import SqliteStore

__all__ = ["Answer", "Batch", "DatabaseError", "Engine", "Limits", "open_directory"]

DatabaseError: TypeAlias = SqliteError
"""What reading or closing a damaged database may raise."""


def open_directory(
    directory: Path,
    limits: Limits | None = None,
    options: Options | None = None,
    at_point: Callable[[str], None] = lambda point: None,
) -> tuple[Engine, Store]:
    """Open an engine and its store on a data directory; `at_point` is called at each of the store's `CRASH_POINTS`.

    Raises DirectoryHeld, DirectoryUnsafe, DatabaseUnusable, SchemaRefused (SchemaOlder: `Options.migrates`), NotOurs,
    SqliteTooOld, OSError, DatabaseError.
    """
    store = SqliteStore(directory, options, at_point)
    return Engine(limits or Limits()), store
