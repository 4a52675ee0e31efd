"""Why a data directory cannot be opened, read or copied, and what a check found in one."""

from collections.abc import Callable
from typing import Final

import msgspec

_UNRELEASED_READER: Final = "73ed122d7"
"""The last revision that reads a file from before the first release."""


class DatabaseUnusable(Exception):
    """The database cannot be opened: another user's files, a full disk, an I/O error, or damage in what a start
    reads."""


class SchemaRefused(Exception):
    """This release does not read the file's schema."""


class SchemaUnreleased(SchemaRefused):
    """The file was written before the first release."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"the data was written by a VeilMQ before the first release (its schema {found}), which this one does not "
            f"read: revision {_UNRELEASED_READER} can still export it (docs/operations.md, Upgrade)"
        )
        self.found = found


class SchemaNewer(SchemaRefused):
    """The file was written by a later release."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"the data was written by a newer VeilMQ (schema {found}; this one knows {known}): upgrade")
        self.found = found


class SchemaOlder(SchemaRefused):
    """The file was written by an earlier release, and no server of this release has opened it yet."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the data was written by an older VeilMQ (schema {found}; this one looks at {known}): "
            "start the server on it once, or use the release that wrote it"
        )
        self.found = found


class NotOurs(Exception):
    """The file is another program's database, or is missing, empty or no database although ours must be there."""


class SqliteTooOld(Exception):
    """The SQLite inside apsw has a bug that can corrupt a WAL database."""


class DestinationTaken(Exception):
    """The destination exists already."""


class DatabaseFailed(Exception):
    """The database cannot be read, or the copy cannot be written."""


PROBLEMS_MAX: Final = 1_000
"""At most this many problems are listed; the rest are only counted."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, the work done and the total."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str
    """`file`, `body`, `quarantine`, `lease`, `message`, `group`, `queue`, `history` or `books`."""
    text: str


class Report(msgspec.Struct):
    """What was checked, and what was found."""

    queues: int = 0
    messages: int = 0
    leases: int = 0
    body_bytes: int = 0
    events: int = 0
    history_first_offset: int = 0
    books: str = ""
    """`balanced`, `not balanced`, or why they could not be checked."""
    problems: list[Problem] = []
    problems_count: int = 0

    def add(self, kind: str, text: str) -> None:
        """Record a problem."""
        self.problems_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(kind, text))
