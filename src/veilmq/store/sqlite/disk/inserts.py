"""Inserts of many rows in few statements.

Strategy: apsw lets the interpreter go at every statement, and gets it back from a thread that burns the CPU only when
that one's turn is over (`sys.setswitchinterval`). So many rows are one statement.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

_ROWS_MAX: Final = 256
"""Of one insert: more at once are no faster, and apsw keeps no text of more than 16 KiB compiled."""

Row = tuple[Any, ...]
Execute = Callable[[str, Row], Any]


def insert_rows(execute: Execute, statement: str, rows: Sequence[Row]) -> None:
    """Run an insert of one row for all of these: 256 a statement, and powers of two for the rest."""
    start = 0
    while start < len(rows):
        count = min(1 << (len(rows) - start).bit_length() - 1, _ROWS_MAX)
        values = tuple(chain.from_iterable(rows[start : start + count]))
        execute(_of_rows(statement, count), values)
        start += count


@cache
def _of_rows(statement: str, count: int) -> str:
    """An insert of one row as one of so many."""
    head, row = statement.split(" VALUES ")
    return f"{head} VALUES {','.join([row.replace(' ', '')] * count)}"
