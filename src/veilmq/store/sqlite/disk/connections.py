"""Connections to the database, and what its errors mean.

Strategy: one connection writes, one checkpoints, a few read. Every error of SQLite is either *failed* (rolled back, the
state is known) or *unknown* (after a failed write or fsync nobody can say what the disk holds; SQLite itself would go
on): the second kind ends the process.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import apsw

from veilmq.model.errors import StoreError, StoreFailed, StoreUnknown
from veilmq.store.directory import REDO
from veilmq.store.errors import DatabaseUnusable, NotOurs, SchemaOlder, SqliteTooOld
from veilmq.store.options import Options
from veilmq.store.sqlite.disk import redo, redo_presence, schema

SQLITE_OLDEST: Final = 3_051_003
"""3.51.3 mends the corruption after a WAL reset."""
_READERS_MAX: Final = 4
_WAIT_S: Final = 0.02
"""How long a commit waits for a checkpoint in whose time the WAL grew by as much as lets one begin; after twice that
growth it waits for its end."""
_REMAINDER_PAGES: Final = 256
"""What may be copied between two batches; more is left to another bulk."""
_BULKS_MAX: Final = 4
"""So many bulks that left a large remainder, and it is copied all the same: the writer is faster than the copying."""
_STATEMENTS: Final = 512
"""The most that apsw keeps compiled. Each row of an executemany takes a turn through that cache: with its default of
100, a batch of some hundred rows would throw out every other statement."""
_KNOWN: Final = (apsw.FullError, apsw.BusyError, apsw.LockedError, apsw.TooBigError, apsw.ConstraintError)

logger = logging.getLogger("veilmq.store")


def check_version() -> None:
    """Raises SqliteTooOld before 3.51.3."""
    if apsw.SQLITE_VERSION_NUMBER < SQLITE_OLDEST:
        raise SqliteTooOld(f"SQLite {apsw.sqlite_lib_version()} may corrupt its WAL: 3.51.3 or later is needed")


def verdict(error: apsw.Error) -> StoreError:
    """What an error of SQLite says about the open batch."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, _KNOWN):
        return StoreFailed(reason=reason)
    return StoreUnknown(reason=reason)


SqliteError: TypeAlias = apsw.Error
"""What any statement may raise, by a name for the rooms that do not know SQLite."""


def open_writer(path: Path, options: Options) -> apsw.Connection:
    """The connection that writes: WAL, every commit synced, checkpoints by hand; its tables up to date.

    Raises SchemaRefused (SchemaOlder: `Options.migrates`) or NotOurs, having changed nothing; DatabaseUnusable.
    """
    wal = Path(f"{path}-wal")
    if _is_empty(path) and not _is_empty(wal):
        raise _orphaned(path, wal)  # SQLite would delete it
    try:
        connection = apsw.Connection(str(path), vfs=options.vfs, statementcachesize=_STATEMENTS)
        connection.set_busy_timeout(5_000)
        found = schema.check(connection)
        if 0 < found < schema.VERSION and not options.migrates:
            raise SchemaOlder(found, schema.VERSION)
        if not found and not redo.is_blank(path.with_name(REDO)):
            connection.close()
            raise _orphaned(path, path.with_name(REDO))
        if reason := redo_presence.loss(path.with_name(REDO), connection):
            close_unchecked(connection)
            raise NotOurs(reason)
        _configure(connection, options)
        os.chmod(path, 0o600)
        schema.migrate(connection)
    except apsw.NotADBError:
        raise NotOurs(f"{path} is not a database, or its first page is damaged: restore a backup") from None
    except apsw.Error as error:
        raise unusable(path, error) from error
    if 0 < found < schema.VERSION:
        logger.info("%s: brought from schema %d to %d; older releases refuse it now", path, found, schema.VERSION)
    return connection


def _is_empty(path: Path) -> bool:
    return not path.exists() or not path.stat().st_size


def _orphaned(path: Path, left: Path) -> NotOurs:
    return NotOurs(
        f"{path} is empty or missing, but {left} holds what was acknowledged: bring back all files of one moment, or a"
        " backup; to begin anew, move that file away"
    )


def unusable(path: Path, error: Exception) -> DatabaseUnusable:
    """Why the database cannot be opened; SQLite says little of files that belong to somebody else."""
    for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm"), path.with_name(REDO)):
        if each.exists() and not os.access(each, os.R_OK | os.W_OK):
            return DatabaseUnusable(
                f"{each} may not be read and written by this user (uid {os.geteuid()}): chown it, or chmod u+rw"
            )
    return DatabaseUnusable(
        f"{path} cannot be opened ({type(error).__name__}: {error}):"
        " free space if the disk is full; else look at it with `veilmq check`, and restore a backup if it is damaged"
    )


def close_unchecked(connection: apsw.Connection) -> None:
    """Close it as a kill would: the last connection to go would checkpoint a WAL that nobody can vouch for."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.close()


def _configure(connection: apsw.Connection, options: Options) -> None:
    connection.pragma("auto_vacuum", "INCREMENTAL")
    connection.pragma("journal_mode", "WAL")
    connection.pragma("synchronous", options.synchronous)
    connection.pragma("cache_size", -(options.cache_bytes // 1024))
    connection.pragma("mmap_size", 0)
    connection.pragma("temp_store", "MEMORY")
    connection.pragma("journal_size_limit", 4 * options.checkpoint_bytes)
    connection.wal_autocheckpoint(0)
    # Without this each execution of a select compiles it anew: its plan might depend on what is bound (decision 0003).
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


def open_checkpointer(path: Path, options: Options) -> apsw.Connection:
    """The connection that copies the WAL into the database."""
    connection = apsw.Connection(str(path), vfs=options.vfs)
    connection.pragma("synchronous", options.synchronous)
    connection.wal_autocheckpoint(0)
    return connection


def open_reader(path: Path, options: Options) -> apsw.Connection:
    """A connection that can only read."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY, vfs=options.vfs)
    connection.set_busy_timeout(5_000)
    connection.pragma("query_only", True)
    connection.wal_autocheckpoint(0)
    return connection


class Readers:
    """A few read-only connections, lent to threads."""

    def __init__(self, path: Path, options: Options, before: Callable[[], None]) -> None:
        """before: called in the thread that reads, so that the database has all that is committed."""
        self._path = path
        self._options = options
        self._before = before
        self._idle: list[apsw.Connection] = []
        self._free = threading.BoundedSemaphore(_READERS_MAX)
        self._closed = False

    @contextmanager
    def lend(self) -> Iterator[apsw.Connection]:
        """A connection in a read transaction: one consistent, committed state. Waits while all are lent."""
        with self._free:
            self._before()
            connection = self._idle.pop() if self._idle else open_reader(self._path, self._options)
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if self._closed:
                    connection.close()
                else:
                    self._idle.append(connection)

    def close(self) -> None:
        """Close the idle ones; a lent one closes when it comes back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


class Checkpointer:
    """Copies the WAL into the database beside the writer, and lets the WAL start anew between two batches.

    A passive checkpoint never waits for the writer, and so never finishes while it writes: the bulk is copied in a
    thread of its own, then the short remainder after a commit, when no batch is open. A long read keeps the WAL from
    being copied beyond where the read began; what has gathered when it ends is a bulk again, however much it is.
    """

    def __init__(self, path: Path, options: Options, page_bytes: int) -> None:
        self._path = path
        self._pages_max = max(1, options.checkpoint_bytes // page_bytes)
        self.page_bytes = page_bytes
        self.wal_pages = 0
        # Opened now: later the process may have no file left to open, and the store would fail of that.
        self._connection = open_checkpointer(path, options)
        self._bulk: threading.Thread | None = None
        self._began = 0
        """Pages of the WAL when the latest bulk began."""
        self._copied = 0
        """Of the WAL's pages, as the latest step left them."""
        self._ended = False
        """A bulk ended, and nothing followed yet."""
        self._ahead = False
        """It copied something."""
        self._bulks = 0
        self._full = False
        self.failed: apsw.Error | None = None

    @property
    def wal_bytes(self) -> int:
        """Size of the WAL as last seen."""
        return self.wal_pages * self.page_bytes

    @property
    def is_behind(self) -> bool:
        """Whether the next `committed` may wait for the bulk, or copy what it left."""
        if self._ended or self.failed is not None:
            return True
        bulk = self._bulk
        return bulk is not None and bulk.is_alive() and self.wal_pages - self._began >= self._pages_max // 2

    def committed(self, wal_pages: int) -> None:
        """Call after each commit, in its thread if `is_behind` was true, before the next batch opens."""
        self.wal_pages = wal_pages
        if self.failed is not None:
            error, self.failed = self.failed, None
            raise error
        if self._bulk is not None and self._bulk.is_alive():
            growth = wal_pages - self._began
            if growth < self._pages_max:
                return
            # The WAL stays within what the reserve can take.
            self._bulk.join(_WAIT_S if growth < 2 * self._pages_max else None)
            if self._bulk.is_alive():
                return
        if self._ended:
            self._follow(wal_pages)
        elif wal_pages >= self._pages_max:
            self._begin(wal_pages)

    def give_back(self) -> None:
        """Cut from the file what the database gave up, however short the WAL is. Call when no batch is open.

        Only a checkpoint cuts it. One that has nothing to cut would let the file grow, so it waits for its turn.
        """
        if self._bulk is not None and self._bulk.is_alive():
            return
        if os.stat(self._path).st_size > int(self._connection.pragma("page_count")) * self.page_bytes:
            self._bulks = 0
            self._begin(self.wal_pages)

    def _follow(self, wal_pages: int) -> None:
        """A bulk ended: copy the remainder, or let another bulk do it."""
        is_much = wal_pages - self._copied > _REMAINDER_PAGES
        if is_much and not self._ahead and wal_pages - self._began < _REMAINDER_PAGES:
            return  # a long read: to ask after each commit whether it has ended would be a thread a commit
        self._ended = False
        if is_much and not (self._ahead and self._bulks >= _BULKS_MAX):
            self._begin(wal_pages)
            return
        self._bulks = 0
        self._run()

    def _begin(self, wal_pages: int) -> None:
        self._began = wal_pages
        self._bulk = threading.Thread(target=self._run_bulk, name="veilmq-checkpoint", daemon=True)
        self._bulk.start()

    def _run_bulk(self) -> None:
        before = self._copied
        try:
            self._run()
            self._ended, self._full, self._ahead = True, False, self._copied != before
            self._bulks += self._ahead
        except apsw.FullError:
            if not self._full:  # every commit tries again
                logger.warning("checkpoint: the disk is full; the WAL keeps growing until space returns")
            self._full = True
        except apsw.Error as error:
            self.failed = error

    def _run(self) -> None:
        _, self._copied = self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def finish(self) -> None:
        """Copy all of the WAL, so that it starts anew. Call when no batch is open, and the disk is full."""
        if self._bulk is not None:
            self._bulk.join()
        self._ended = False
        self._run()

    def close(self) -> None:
        """Wait for a running bulk and close."""
        if self._bulk is not None:
            self._bulk.join()
        self._connection.close()
