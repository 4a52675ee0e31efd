"""Decides whether the file of the redo log must exist, and says what to do if it is missing or cut.

Strategy: from before the first record until the log is no longer needed, the database records the file's size. So a
file that was deleted, or cut by a copy onto a full disk, differs from a file that never existed. An operator who goes
on without the lost content writes a word into the file, which no failed copy does.
"""

from pathlib import Path
from typing import Any, Final

import apsw

_NOTE: Final = (
    "INSERT INTO redo_log VALUES (1, ?) ON CONFLICT DO UPDATE SET file_bytes = excluded.file_bytes"
    " WHERE file_bytes <> excluded.file_bytes"
)
_GIVEN_UP: Final = b"lost"


def note_size(connection: apsw.Connection, file_bytes: int) -> None:
    """Record the size of the file that the database may need; 0: it needs none, because it has everything durably."""
    connection.execute(_NOTE, (file_bytes,))


def loss(path: Path, connection: apsw.Connection) -> str | None:
    """Why the file's content is lost, and what to do; None if it is there, is not needed, or was given up."""
    if not connection.pragma("user_version"):
        return None  # a new database
    # Query this before looking at the file: a server creates the file first and records its size then.
    expected: Any = connection.execute("SELECT file_bytes FROM redo_log").get
    size = path.stat().st_size if path.exists() else None
    if not expected or (size is not None and (size >= expected or is_given_up(path))):
        return None
    what = "missing" if size is None else f"cut, to {size} of {expected} bytes"
    return f"{path} is {what}, and with it what was acknowledged last before a kill: {_advice(path)}"


def ahead(path: Path) -> str:
    """Says that the database is older than the log, and what to do."""
    return f"what was committed before the first record of {path} is missing: where is veilmq.db-wal? {_advice(path)}"


def _advice(path: Path) -> str:
    word = _GIVEN_UP.decode()
    return f"bring back all files of one moment, or a backup; to go on without, say so in it: echo {word} > {path}"


def is_given_up(path: Path) -> bool:
    """Whether the operator wrote into the file that they go on without its content."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GIVEN_UP) + 2).strip() == _GIVEN_UP
    except FileNotFoundError:
        return False
