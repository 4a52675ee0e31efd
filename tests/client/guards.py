"""The guards that there are, for tests that hold for each."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.client.clocks_apart import by

from veilmq.client.worker import DirectoryGuard, Guard, TableGuard

KINDS = ["directory", "table"]


@contextmanager
def guard_of(kind: str, place: Path, wall: Callable[[], float]) -> Iterator[Guard]:
    """One of that kind, in that place; `wall` is the time of the table's database, Unix seconds."""
    if kind == "directory":
        yield DirectoryGuard(place / "guard")
        return
    made = []

    def connect() -> sqlite3.Connection:
        there = sqlite3.connect(place / "guard.db", timeout=30, check_same_thread=False)
        made.append(by(wall, there))
        return made[-1]

    yield TableGuard(connect)
    for connection in made:
        connection.close()
