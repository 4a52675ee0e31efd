"""A follower: keeps a directory as the owner's is, by applying the records of the log.

Strategy: the file is a cache of the log. So no commit is synced: after a power cut SQLite has an earlier state, whole,
and its position says which record comes next. A file that differs, or cannot be read, is not mended but replaced.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.errors import StoreFailed, StoreUnknown
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey
from veilmq.store import Options
from veilmq.store.directory import DatabaseDamaged, DataDirectory, NotOurs
from veilmq.store.log import Changed, Diverged, Entry, Point, Position
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER
from veilmq.store.sqlite.disk import (
    DAMAGE,
    MISMATCH,
    Checkpointer,
    check_version,
    close_unchecked,
    is_mismatch,
    open_writer,
    schema,
)
from veilmq.store.sqlite.disk.readers import Readers
from veilmq.store.sqlite.effects import position
from veilmq.store.sqlite.follower.applying import Applier
from veilmq.store.sqlite.reading import SqliteView
from veilmq.store.sqlite.tools.backup import copy_checked

_QUEUE: Final = "SELECT incarnation, account, region, name, created, modified, deleted, settings FROM queue"


class SqliteFollower:
    """See `Follower`. Opening raises as `SqliteStore`, and Diverged if the file is damaged."""

    def __init__(self, path: Path, options: Options | None = None) -> None:
        """Creates the directory if it is missing; the first record then fills it."""
        check_version()
        options = msgspec.structs.replace(
            options or Options(), redo_bytes=0, synchronous="NORMAL", schema=schema.OLDEST_SERVED
        )
        self._directory = DataDirectory(path, options.reserve_bytes, options.floor_bytes, options.disk)
        with ExitStack() as opened, _judged("the file"):
            opened.callback(self._directory.close)
            self._connection = open_writer(self._directory.database, options)
            opened.callback(close_unchecked, self._connection)
            self._connection.set_wal_hook(self._wal_grew)
            self._applier = Applier(self._connection, position(self._connection) or Position(0, 0, 0))
            page_bytes = int(self._connection.pragma("page_size"))
            self._checkpointer = Checkpointer(self._directory.database, options, page_bytes)
            self._readers = Readers(self._directory.database, options, self._refuse_closed)
            opened.pop_all()
        self._closed = False
        self._wal_pages = 0

    @property
    def directory(self) -> DataDirectory:
        return self._directory

    @property
    def format(self) -> int:
        return int(self._connection.pragma("user_version"))

    @property
    def position(self) -> Position:
        """The last record that the file has."""
        return self._applier.position

    @property
    def clock(self) -> Instant:
        with _judged("the clock"):
            clock: Any = self._connection.execute("SELECT clock FROM mark").get
        return Instant(clock or 0)

    def apply(self, entries: Sequence[Entry], *, forced: int = 0, alone: Collection[int] = ()) -> Changed:
        if self._readers.trusting:
            raise Diverged(f"the file: {MISMATCH}")
        with _judged(f"records from {self.position.lsn + 1} on"):
            changed = self._applier.apply(entries, forced, alone)
            self._checkpointer.committed(self._wal_pages)
            return changed

    def look_again(self) -> None:
        self._checkpointer.look_again()

    def queues(self, incarnations: Iterable[int] | None = None) -> dict[int, QueueInfo | None]:
        found: dict[int, QueueInfo | None] = dict.fromkeys(incarnations or ())
        row: Any
        with _judged("the queues"):
            if incarnations is None:
                rows = self._connection.execute(f"{_QUEUE} WHERE deleted IS NULL").fetchall()
            else:
                each = (self._connection.execute(f"{_QUEUE} WHERE incarnation = ?", (one,)) for one in incarnations)
                rows = [row for cursor in each for row in cursor]
            for row in rows:
                incarnation, account, region, name, created, modified, deleted, packed = row
                if deleted is None:
                    key, settings = QueueKey(account, region, name), SETTINGS_DECODER.decode(packed)
                    found[incarnation] = QueueInfo(key, incarnation, created, modified, settings, QueueCounts())
        return found

    def shared(self) -> dict[str, bytes]:
        with _judged("what the servers share"):
            if not self._connection.table_exists("main", "shared"):
                return {}  # the log begins with an older format
            return dict(self._connection.execute("SELECT name, value FROM shared").fetchall())  # type: ignore[arg-type]

    @contextmanager
    def look(self) -> Iterator[SqliteView]:
        try:
            with self._readers.lend() as connection:
                yield SqliteView(connection)
        except (apsw.Error, NotOurs) as error:
            raise StoreFailed(reason=f"this server's copy: {error}") from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreFailed(reason="this server's copy is not open now")

    def _wal_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def copy(self, file: Path) -> Point:
        return copy_checked(self._directory.database, file, is_owner=True)

    def close(self) -> None:
        """Release the files."""
        self._closed = True
        self._readers.close()
        try:
            self._checkpointer.close()
            # A checkpoint here would hold up a take-over.
            close_unchecked(self._connection)
        finally:
            self._directory.close()


@contextmanager
def _judged(what: str) -> Iterator[None]:
    """Raises Diverged if the file is damaged, StoreUnknown if SQLite failed otherwise."""
    try:
        yield
    except (DatabaseDamaged, NotOurs) as error:
        raise Diverged(str(error)) from error
    except DAMAGE as error:
        raise Diverged(f"{what}: {type(error).__name__}: {error}") from error
    except apsw.Error as error:
        if is_mismatch(error):
            raise Diverged(f"{what}: {MISMATCH}") from error
        raise StoreUnknown(reason=f"{what}: {error}") from error
