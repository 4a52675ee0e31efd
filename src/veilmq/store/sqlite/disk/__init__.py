"""Files and connections to the database, and what SQLite's errors mean. Beside it are the redo log (redo/) and the
schema; this room knows nothing of queues.

Strategy: one connection writes, one checkpoints, a few read. Every SQLite error is either *failed* (rolled back, the
state is known) or *unknown* (after a failed write or fsync nobody knows what the disk holds, though SQLite itself would
go on). An unknown state ends the process.

Each page ends with a checksum, which SQLite's extension `cksumvfs` writes and verifies (decision 0036).
"""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, Final, TypeAlias, TypeVar

import apsw
import apsw.sqlite_extra
import msgspec

from veilmq.model.errors import StoreError, StoreFailed, StoreUnknown
from veilmq.store import Options
from veilmq.store.directory import (
    COMMITTED,
    REDO,
    DatabaseDamaged,
    DatabaseUnusable,
    NotOurs,
    SchemaOlder,
    SqliteTooOld,
)
from veilmq.store.files import Job
from veilmq.store.sqlite.disk import own_file, redo, schema
from veilmq.store.sqlite.disk.redo import last_commit
from veilmq.store.sqlite.disk.redo.file import FULL, RESTORE, ahead, is_given_up
from veilmq.store.sqlite.disk.rows import add_functions

SQLITE_OLDEST: Final = 3_051_003
"""3.51.3 fixes a corruption after a WAL reset."""
_WAIT_S: Final = 0.02
"""How long a commit waits for a running checkpoint during which the WAL grew by `checkpoint_bytes`. At twice that
growth the commit waits until the checkpoint ends."""
_REMAINDER_PAGES: Final = 256
"""At most this many pages are copied between two batches; a longer remainder is left to another bulk."""
_BULKS_MAX: Final = 4
"""After this many bulks that left a large remainder, it is copied between batches anyway: the writer is faster than the
copying."""
DAMAGE: Final = (
    apsw.CorruptError, apsw.NotADBError, apsw.SQLError, apsw.ConstraintError, apsw.MismatchError, msgspec.MsgspecError,
    ValueError, TypeError, LookupError,
)  # fmt: skip
"""Errors that our fixed statements raise only if the file does not hold what was written there."""
_READ_WRITE: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
_STATEMENTS: Final = 512
"""Size of apsw's statement cache. Each row of an executemany goes through that cache; with the default of 100, a batch
of some hundred rows would evict all other statements."""
_NOTHING_LEFT_BYTES: Final = 64 * 1024
_WHEEL: Final = "this apsw cannot write them: install it from its wheel, or with the extensions of SQLite"
SERVED: Final = "%s: a page does not match its checksum, and is served as it is: run `veilmq check`"
"""A line of the log."""
MISMATCH: Final = "a page does not match its checksum"
_KNOWN: Final = (apsw.FullError, apsw.BusyError, apsw.LockedError, apsw.TooBigError, apsw.ConstraintError)

logger = logging.getLogger("veilmq.store")

T = TypeVar("T")


def check_version() -> None:
    """Raises SqliteTooOld for SQLite before 3.51.3."""
    if apsw.SQLITE_VERSION_NUMBER < SQLITE_OLDEST:
        raise SqliteTooOld(f"SQLite {apsw.sqlite_lib_version()} may corrupt its WAL: 3.51.3 or later is needed")


def verdict(error: apsw.Error) -> StoreError:
    """What an SQLite error means for the open batch."""
    if is_mismatch(error):
        return StoreFailed(reason=MISMATCH)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, _KNOWN):
        return StoreFailed(reason=reason)
    return StoreUnknown(reason=reason)


def is_mismatch(error: BaseException | None) -> bool:
    """Whether a page that was read does not match its checksum. Nothing was written then."""
    return isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA


SqliteError: TypeAlias = apsw.Error
"""What any statement may raise, for rooms that do not import apsw."""


def _load_checking() -> str | None:
    default = apsw.vfs_names()[0]
    try:
        connection = apsw.Connection(":memory:")
        apsw.sqlite_extra.load(connection, "cksumvfs")
        connection.close()
    except (apsw.Error, LookupError, OSError, apsw.sqlite_extra.NotAvailable):
        return None
    apsw.set_default_vfs(default)  # a program that uses us may have databases of its own
    return schema.CHECKING


_VFS: Final = _load_checking()
"""The VFS of pages with checksums; None: this apsw was built without SQLite's extensions. It is loaded now, while the
process may still read apsw's files."""


def connect(
    path: Path, options: Options | None = None, *, flags: int = _READ_WRITE, statements: int = 100
) -> apsw.Connection:
    """Open a file, so that checksums of its pages are kept and verified. Raises apsw.Error."""
    disk = (options or Options()).disk
    return apsw.Connection(str(path), flags=flags, vfs=disk.vfs or _VFS, statementcachesize=statements)


def may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: the disk was full, or pages are read from now on whatever their checksums say."""
    return is_mismatch(error) or isinstance(error, apsw.FullError)


def reason_of(error: Exception) -> str:
    """What an error of a database says to a user."""
    return MISMATCH if is_mismatch(error) else str(error)


def check_writable(connection: apsw.Connection) -> None:
    """Call when the first page was read, before anything is written. Raises DatabaseUnusable."""
    if connection.reserve_bytes() and connection.open_vfs != schema.CHECKING:
        raise DatabaseUnusable(f"{connection.filename} has checksums in its pages, and {_WHEEL}")


def trust_pages(connection: apsw.Connection) -> None:
    """Read pages from now on whatever their checksums say."""
    if connection.open_vfs == schema.CHECKING:
        connection.pragma("checksum_verification", "OFF")


def verifier() -> Callable[[bytes], bool] | None:
    """Whether a page has its checksum, for one thread; None if this SQLite cannot say."""
    if _VFS is None:
        return None
    cursor = apsw.Connection(":memory:").cursor()
    return lambda page: bool(cursor.execute("SELECT verify_checksum(?)", (page,)).get)


def open_writer(path: Path, options: Options, *, trusting: bool = False) -> apsw.Connection:
    """Open the writing connection: WAL, every commit synced, manual checkpoints; migrate the tables.

    trusting: read pages whatever their checksums say.

    Raises SchemaRefused (SchemaOlder: `Options.migrates`) or NotOurs, with nothing changed; DatabaseUnusable.
    """
    wal = Path(f"{path}-wal")
    if _is_empty(path) and not _is_empty(wal):
        raise _orphaned(path, wal)  # SQLite would delete it
    log, committed = path.with_name(REDO), path.with_name(COMMITTED)
    connection: apsw.Connection | None = None
    try:
        noted = last_commit.read(committed)
        part = path.with_name(f"{path.name}.part")
        if options.schema is None and part.exists() and _is_empty(path):
            raise NotOurs(f"{part} is a copy or a repair that did not end: make another, in an empty directory")
        connection = connect(path, options, statements=_STATEMENTS)
        if trusting:
            trust_pages(connection)
        connection.set_busy_timeout(5_000)
        found = schema.check(connection)
        check_writable(connection)
        if 0 < found < schema.VERSION and not options.migrates:
            raise SchemaOlder(found, schema.VERSION)
        if found:
            if losses := losses_of(path, connection, advice="" if options.schema else f": {RESTORE}"):
                raise NotOurs(losses[0])
        elif (left := _left_alone(log, committed, noted)) is not None:
            raise _orphaned(path, left)
        else:
            schema.give_checksums(connection, options.schema or schema.VERSION)
        _configure(connection, options)
        os.chmod(path, 0o600)
        if found and options.schema is not None and schema.is_unfilled(connection, options.schema):
            schema.begin_anew(connection, options.schema)
            found = options.schema
        schema.migrate(connection, found if found and options.schema is not None else options.schema)
    except BaseException as error:
        if connection is not None:
            close_unchecked(connection)  # later it might remove the WAL of another file with this name
        if isinstance(error, apsw.NotADBError):
            raise NotOurs(
                f"{path} is not a database, or its first page is damaged: see what `veilmq check --repair` brings back"
            ) from None
        if isinstance(error, (apsw.Error, *DAMAGE, OSError)):
            raise unusable(path, error) from error
        raise
    if 0 < found < schema.VERSION and options.schema is None:
        logger.info("%s: migrated from schema %d to %d; older releases cannot open it now", path, found, schema.VERSION)
    return connection


def losses_of(path: Path, connection: apsw.Connection, *, advice: str = f": {RESTORE}") -> list[str]:
    """What was acknowledged and is missing, so that a start is refused. advice: for a file that is cut. Raises
    apsw.Error, msgspec.MsgspecError, OSError."""
    with connection:  # over before `find`, which reads `committed` ahead of its own transaction
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        cut = own_file.lacks(path, connection)
    if cut is not None:
        return [cut + advice]
    if not schema.is_begun(connection):
        return []
    log = path.with_name(REDO)
    try:
        found = last_commit.find(path, connection)
        losses = last_commit.losses(path, connection, found)
        if not losses and found.is_ahead:
            losses = [ahead(log)]
    except redo.KeyMissing as error:
        losses = [] if is_given_up(log) else [str(error)]
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    return losses


def _is_empty(path: Path) -> bool:
    return not path.exists() or not path.stat().st_size


def _left_alone(log: Path, committed: Path, noted: last_commit.Noted | None) -> Path | None:
    """The file which shows that there were batches, where the database has none."""
    if not redo.is_blank(log):
        return log
    return committed if noted is not None and noted.offset else None


def _orphaned(path: Path, left: Path) -> NotOurs:
    return NotOurs(
        f"{path} is empty or missing, but {left} shows that something was acknowledged: restore all files of one"
        " moment, or see what `veilmq check --repair` brings back; to begin anew, use an empty directory"
    )


def is_full(error: BaseException | None, path: Path) -> bool:
    """Whether an error of a data directory comes of a full disk. SQLite may call that an I/O error, so where nothing is
    left, it does."""
    while error is not None:
        if isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno in FULL):
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(path if path.exists() else path.absolute().parent).free < _NOTHING_LEFT_BYTES


def unusable(path: Path, error: Exception) -> DatabaseUnusable:
    """Why the database cannot be opened. SQLite's errors say little when the files belong to another user."""
    for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm"), path.with_name(REDO), path.with_name(COMMITTED)):
        if each.exists() and not os.access(each, os.R_OK | os.W_OK):
            return DatabaseUnusable(
                f"{each} may not be read and written by this user (uid {os.geteuid()}): chown it, or chmod u+rw"
            )
    kind = DatabaseDamaged if isinstance(error, DAMAGE) or is_mismatch(error) else DatabaseUnusable
    reason = MISMATCH if is_mismatch(error) else f"{type(error).__name__}: {error}"
    if isinstance(error, apsw.CorruptError):
        reason += own_file.missing_end(path)
    check = f"veilmq check --data {quote(str(path.parent))}"
    return kind(
        f"{path} cannot be opened ({reason}):"
        f" free space if the disk is full; else look at it with `{check}`, and with `--repair` if it is damaged"
    )


def close_last(connection: apsw.Connection) -> None:
    """Close the connection that may be the last, which then copies the WAL into the database."""
    try:
        see_checksums(connection)
    except apsw.Error:
        close_unchecked(connection)
    else:
        connection.close()


def see_checksums(connection: apsw.Connection) -> None:
    """Call before a checkpoint: it writes checksums only if its connection has seen in the file that pages have them.
    Raises apsw.Error."""
    if connection.open_vfs == schema.CHECKING:
        connection.read("main", 0, 0, int(connection.pragma("page_size")))


def close_unchecked(connection: apsw.Connection) -> None:
    """Close without a checkpoint, as a kill would: the WAL may hold something wrong, and closing the last connection
    would checkpoint it."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.close()


def _configure(connection: apsw.Connection, options: Options) -> None:
    add_functions(connection)
    connection.pragma("auto_vacuum", "INCREMENTAL")
    connection.pragma("journal_mode", "WAL")
    connection.pragma("synchronous", options.synchronous)
    connection.pragma("cache_size", -(options.cache_bytes // 1024))
    connection.pragma("mmap_size", 0)
    connection.pragma("temp_store", "MEMORY")
    connection.pragma("journal_size_limit", 4 * options.checkpoint_bytes)
    connection.wal_autocheckpoint(0)
    # Without this SQLite compiles a select anew at each execution, as its plan might depend on bound values (decision
    # 0003).
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


def open_checkpointer(path: Path, options: Options) -> apsw.Connection:
    """Open the connection that copies the WAL into the database."""
    connection = connect(path, options)
    trust_pages(connection)  # it copies them as they are
    connection.pragma("synchronous", options.synchronous)
    connection.wal_autocheckpoint(0)
    return connection


def open_reader(path: Path, options: Options) -> apsw.Connection:
    """Open a read-only connection. Raises NotOurs for an empty file: SQLite would delete its WAL."""
    if _is_empty(path):
        raise NotOurs(f"{path} is empty or missing")
    connection = connect(path, options, flags=apsw.SQLITE_OPEN_READONLY)
    add_functions(connection)
    connection.set_busy_timeout(5_000)
    connection.pragma("query_only", True)
    connection.wal_autocheckpoint(0)
    return connection


Folded = Callable[[int, int], None]
"""Gets the offset of the next event and the lease clock that the database's own file has, durably."""


def fold(connection: apsw.Connection, folded: Folded | None) -> tuple[int, int]:
    """Copy the WAL into the database, as far as readers let it. Returns how many pages the WAL has, and how many are
    copied. Raises apsw.Error."""
    mark: Any = None
    with suppress(apsw.Error):  # then it is not noted; the copying does not need it
        mark = folded and connection.execute("SELECT offset, clock FROM mark").get
    pages = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    if mark and pages[0] == pages[1]:
        # SQLite syncs the file only if nothing was committed meanwhile, as the second call shows.
        before, pages = pages, connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        if folded is not None and pages == before:
            folded(*mark)
    return pages


class Checkpointer:
    """Copies the WAL into the database while the writer works, and lets the WAL restart between two batches.

    A passive checkpoint never waits for the writer, so it never finishes while the writer is busy. Therefore the bulk
    is copied in a thread of its own, and the short remainder after a commit, when no batch is open. A long read keeps
    the WAL from being copied beyond the point where the read began; what has gathered when it ends is copied as a bulk
    again, whatever its size.
    """

    def __init__(self, path: Path, options: Options, page_bytes: int, folded: Folded | None = None) -> None:
        self._path = path
        self._folded = folded
        self._disk = options.disk
        self._pages_max = max(1, options.checkpoint_bytes // page_bytes)
        self.page_bytes = page_bytes
        self.wal_pages = 0
        # Open it now: the process may have no file descriptor left later, and the store would fail.
        self._connection = open_checkpointer(path, options)
        self._bulk: Job | None = None
        self._began = 0
        """WAL pages when the latest bulk began."""
        self._copied = 0
        """WAL pages copied as of the latest step."""
        self._ended = False
        """A bulk ended and its remainder is not handled yet."""
        self._ahead = False
        """Whether the latest bulk copied anything."""
        self._bulks = 0
        self._full = False
        self.failed: apsw.Error | None = None

    @property
    def wal_bytes(self) -> int:
        """Size of the WAL as last seen."""
        return self.wal_pages * self.page_bytes

    @property
    def is_behind(self) -> bool:
        """Whether the next `committed` may wait for the bulk, or copy its remainder."""
        if self._ended or self.failed is not None:
            return True
        return self._is_copying and self.wal_pages - self._began >= self._pages_max // 2

    @property
    def _is_copying(self) -> bool:
        """Whether a bulk is under way."""
        return self._bulk is not None and self._bulk.is_alive()

    def committed(self, wal_pages: int, *, was_behind: bool = True) -> None:
        """Call after each commit and before the next batch opens; in the commit's thread if `is_behind` was true.

        was_behind: `is_behind` from before the commit. If it was not, the commit may be on the loop: what a bulk that
        ended during the commit left is then for the next one.
        """
        self.wal_pages = wal_pages
        if self.failed is not None:
            error, self.failed = self.failed, None
            raise error
        if self._bulk is not None and self._bulk.is_alive():
            growth = wal_pages - self._began
            if growth < self._pages_max or not was_behind:
                return
            # Keep the WAL within what the reserve can take.
            self._bulk.join(_WAIT_S if growth < 2 * self._pages_max else None)
            if self._bulk.is_alive():
                return
        if self._ended:
            if was_behind:
                self._follow(wal_pages)
        elif wal_pages >= self._pages_max:
            self._begin(wal_pages)

    def give_back(self) -> None:
        """Truncate the file by the pages that the database has freed, however short the WAL is. Call when no batch is
        open.

        Only a checkpoint truncates it. A checkpoint with nothing to truncate would only let the file grow, so none is
        run then.
        """
        if self._is_copying:
            return
        if os.stat(self._path).st_size > int(self._connection.pragma("page_count")) * self.page_bytes:
            self._bulks = 0
            self._begin(self.wal_pages)

    def look_again(self) -> None:
        """Copy what gathered behind a long read, if that has ended: where little is written, no commit asks for long.
        Call now and then, when no batch is open."""
        if self._is_copying:
            return
        if self._ended and self.wal_pages - self._copied > _REMAINDER_PAGES:
            self._begin(self.wal_pages)

    def _follow(self, wal_pages: int) -> None:
        """After a bulk: copy the remainder, or start another bulk for it."""
        is_much = wal_pages - self._copied > _REMAINDER_PAGES
        if is_much and not self._ahead and wal_pages - self._began < _REMAINDER_PAGES:
            return  # a long read; checking whether it has ended would cost a thread per commit
        if is_much and not (self._ahead and self._bulks >= _BULKS_MAX):
            self._begin(wal_pages)
            return
        self._ended = False
        self._bulks = 0
        self._run()

    def _begin(self, wal_pages: int) -> None:
        """Copy a bulk. Call when none is under way: two would use the connection at once, which breaks the store."""
        self._began = wal_pages
        self._ended = False
        self._bulk = self._disk.beside(self._run_bulk, "veilmq-checkpoint")

    def _run_bulk(self) -> None:
        before = self._copied
        try:
            self._run()
            self._ended, self._full, self._ahead = True, False, self._copied != before
            self._bulks += self._ahead
        except apsw.FullError:
            if not self._full:  # every commit tries again, so warn once
                logger.warning("checkpoint: the disk is full; the WAL keeps growing until space returns")
            self._full = True
        except apsw.Error as error:
            self.failed = error

    def _run(self) -> None:
        _, self._copied = fold(self._connection, self._folded)

    def finish(self) -> None:
        """Copy the whole WAL, so that it restarts. Call when no batch is open and the disk is full."""
        if self._bulk is not None:
            self._bulk.join()
        self._ended = False
        self._run()

    def close(self) -> None:
        """Wait for a running bulk, then close."""
        if self._bulk is not None:
            self._bulk.join()
        self._connection.close()
