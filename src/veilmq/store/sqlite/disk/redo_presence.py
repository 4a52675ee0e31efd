"""Whether the file of the redo log must be there, and what to say if it is not, or not whole.

Strategy: the database says how large the file is, from before its first record until nothing needs it any more. So one
that was deleted, or cut by a copy onto a full disk, is told from one that never was. Whoever goes on without what it
held writes a word into it, which no failing copy does.
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
    """Let the database know how large the file is that it may need; 0: it has all for good."""
    connection.execute(_NOTE, (file_bytes,))


def loss(path: Path, connection: apsw.Connection) -> str | None:
    """Why what the file held cannot be had, and what to do; None if it can, is not needed, or was given up."""
    if not connection.pragma("user_version"):
        return None  # a file that is new
    # Asked before the file: a server makes that first, and notes it then.
    expected: Any = connection.execute("SELECT file_bytes FROM redo_log").get
    size = path.stat().st_size if path.exists() else None
    if not expected or (size is not None and (size >= expected or is_given_up(path))):
        return None
    what = "missing" if size is None else f"cut, to {size} of {expected} bytes"
    return f"{path} is {what}, and with it what was acknowledged last before a kill: {_advice(path)}"


def ahead(path: Path) -> str:
    """The database is older than the log, and what to do."""
    return f"what was committed before the first record of {path} is missing: where is veilmq.db-wal? {_advice(path)}"


def _advice(path: Path) -> str:
    word = _GIVEN_UP.decode()
    return f"bring back all files of one moment, or a backup; to go on without, say so in it: echo {word} > {path}"


def is_given_up(path: Path) -> bool:
    """Whether somebody wrote into the file that he goes on without it."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GIVEN_UP) + 2).strip() == _GIVEN_UP
    except FileNotFoundError:
        return False
