"""SQLite as a driver of paramstyle `numeric`: `:1` takes the first of a sequence (PEP 249).

Strategy: the standard library's driver takes `:1` for a name, so the sequence is handed on under such names. (Up to
Python 3.13 it counted a sequence through instead; from 3.14 on it refuses to.)
"""

import sqlite3
from collections.abc import Sequence
from typing import Any


class _Cursor(sqlite3.Cursor):
    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return super().execute(statement, {str(place): value for place, value in enumerate(values, 1)})


class Numeric(sqlite3.Connection):
    """A connection whose cursors bind by number."""

    def cursor(self) -> sqlite3.Cursor:
        return super().cursor(_Cursor)
