"""Small records by key, kept in a directory (files.py), in an object store (objects.py) or in a table (tables.py).

Strategy: read with version, write if version. Whoever changes a record names the content that the decision was made on;
if the record changed meanwhile, nothing is written, and the decision is made again. The patterns on top (guards,
checkpoints, ordered storages) hold the decisions; a backend makes one write atomic and durable.

Before changing it: an object store cannot compare before it writes. What is kept there has a new object for each
version, and the highest number counts (docs/decisions/0015-records.md).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Seen(NamedTuple):
    """A record at one moment."""

    content: bytes | None
    """None: there is no record."""
    now: float | None = None
    """Unix seconds, by the storage's own clock; None: it has none that all its users share."""


class Records(Protocol):
    """Records that change by compare and set. Safe for any thread and process. Raise their storage's errors."""

    def look(self, key: str) -> Seen:
        """The record as it is now."""
        ...

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
        """Store `after` durably if the record still is `before`; False if it is not. fence: of `after`, for backends
        that keep it beside the content."""
        ...


class Contents(Protocol):
    """Whole contents by path, which is relative and of safe characters. Any thread."""

    def get(self, path: str, /) -> bytes | None:
        """The content; None if there is none."""
        ...

    def put(self, path: str, content: bytes, /) -> None:
        """Store it durably, in place of any other."""
        ...

    def remove(self, path: str, /) -> object:
        """Remove it, if it is there."""
        ...

    def remove_directory(self, path: str, /) -> None:
        """Remove a directory that has become empty, where there are directories."""
        ...

    def keys(self, below: str, /) -> Sequence[str]:
        """The paths that begin with `below` and a slash."""
        ...
