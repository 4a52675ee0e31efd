"""Why a data directory cannot be opened, read or copied."""

from typing import Final

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
