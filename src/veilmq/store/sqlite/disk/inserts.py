"""Inserts many rows with few statements.

Strategy: apsw releases the interpreter lock at every statement. While another thread is busy, getting it back takes up
to `sys.setswitchinterval`. So many rows go into one statement.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

_ROWS_MAX: Final = 256
"""Rows in one insert. More are no faster, and apsw does not cache statements longer than 16 KiB."""

Row = tuple[Any, ...]
Execute = Callable[[str, Row], Any]


def insert_rows(execute: Execute, statement: str, rows: Sequence[Row]) -> None:
    """Run a one-row insert for all rows: 256 rows a statement, and powers of two for the rest."""
    start = 0
    while start < len(rows):
        count = min(1 << (len(rows) - start).bit_length() - 1, _ROWS_MAX)
        values = tuple(chain.from_iterable(rows[start : start + count]))
        execute(_of_rows(statement, count), values)
        start += count


@cache
def _of_rows(statement: str, count: int) -> str:
    """The one-row insert, rewritten for `count` rows."""
    head, row = statement.split(" VALUES ")
    return f"{head} VALUES {','.join([row.replace(' ', '')] * count)}"
