"""A follower: keeps a directory as the owner's is, by applying the records of the log.

Strategy: the file is a cache of the log. So no commit is synced: after a power cut SQLite has an earlier state, whole,
and its position says which record comes next. A file that differs is not mended but replaced.
"""

from contextlib import closing
from pathlib import Path

import apsw
import msgspec

from veilmq.model.errors import StoreUnknown
from veilmq.store.directory import DataDirectory
from veilmq.store.errors import DatabaseFailed
from veilmq.store.log import Diverged, Position, checksum
from veilmq.store.options import Options
from veilmq.store.sqlite import effects
from veilmq.store.sqlite.disk.connections import Checkpointer, check_version, open_writer
from veilmq.store.sqlite.tools.backup import backup
from veilmq.store.sqlite.tools.integrity import check


class SqliteFollower:
    """See `Follower`. Opening raises as `SqliteStore`."""

    def __init__(self, path: Path, options: Options | None = None) -> None:
        """Creates the directory if it is missing; the first record then fills it."""
        check_version()
        options = msgspec.structs.replace(options or Options(), redo_bytes=0, synchronous="NORMAL")
        self._directory = DataDirectory(path, options.reserve_bytes, options.floor_bytes, options.disk)
        try:
            self._connection = open_writer(self._directory.database, options)
            self._connection.set_wal_hook(self._wal_grew)
            self._position = effects.position(self._connection) or Position(0, 0, 0)
            page_bytes = int(self._connection.pragma("page_size"))
            self._checkpointer = Checkpointer(self._directory.database, options, page_bytes)
        except BaseException:
            self._directory.close()
            raise
        self._wal_pages = 0

    @property
    def position(self) -> Position:
        """The last record that the file has."""
        return self._position

    def apply(self, lsn: int, epoch: int, record: bytes) -> None:
        """See `Follower.apply`."""
        following = Position(lsn, epoch, checksum(record))
        try:
            effects.apply(self._connection, self._position, following, record)
            self._position = following
            self._checkpointer.committed(self._wal_pages)
        except apsw.CorruptError as error:
            raise Diverged(f"record {lsn}: {error}") from error
        except apsw.Error as error:
            raise StoreUnknown(reason=f"record {lsn}: {error}") from error

    def _wal_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def copy(self, file: Path) -> Position:
        """See `Follower.copy`."""
        try:
            backup(self._directory.database, file, is_owner=True, replica=True)
            report = check(file, is_owner=True)
        except apsw.Error as error:
            raise DatabaseFailed(str(error)) from error
        if report.problems:
            raise Diverged(f"a check of the copy found: {report.problems[0].text}")
        with closing(apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
            return effects.position(connection) or Position(0, 0, 0)

    def close(self) -> None:
        """Release the files."""
        try:
            self._checkpointer.close()
            self._connection.close()
        finally:
            self._directory.close()
