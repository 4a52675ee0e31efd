"""Copies the database while it is in use. The copy accepts no old receipt handle.

Strategy: use SQLite's backup API over a reading connection that holds one snapshot open. The copy is then one committed
state, and never starts over, however much is written meanwhile; the WAL cannot shrink until the copy ends. The copy is
written beside its final name and renamed when it is complete and synced. Before that it gets a fresh receipt key and
epoch, because from then on the copy and the original have different histories.
"""

import glob
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from errno import EEXIST
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.instant import Instant
from veilmq.store import Options
from veilmq.store.directory import (
    DATABASE,
    DatabaseFailed,
    DatabaseUnusable,
    DestinationBusy,
    DestinationTaken,
    DirectoryHeld,
    NotOurs,
    is_held,
    take_directory,
)
from veilmq.store.files import SyncedInPieces, Writing, sync_directory, sync_tree
from veilmq.store.log import Diverged, Point, Position
from veilmq.store.sqlite.disk import (
    DAMAGE,
    check_version,
    check_writable,
    connect,
    losses_of,
    open_reader,
    own_file,
    reason_of,
    redo,
    see_checksums,
    trust_pages,
)
from veilmq.store.sqlite.disk.redo import file as redo_file
from veilmq.store.sqlite.disk.redo import last_commit
from veilmq.store.sqlite.disk.schema import VERSION, check_ours, fresh_secret, give_checksums, has_checksums
from veilmq.store.sqlite.effects import MOVE, digest, position
from veilmq.store.sqlite.tools import check

_PAGES_STEP: Final = 1_024
OWN: Final = ("console_session", "log_position", "shared")
"""Tables of the original alone: who is signed in there, and what is its cluster's."""
NO_SPACE: Final = "no space is left"
"""Text of a DatabaseFailed: there is none for the copy."""
DAMAGED: Final = "the database is damaged: "
"""How the text of a DatabaseFailed begins: free space would not help."""

Progress = Callable[[int, int], None]
"""Called with the work done and the total."""


def _unseen(_done: int, _total: int) -> None:
    """Report progress to nobody."""


def backup(
    database: Path,
    copy: Path,
    progress: Progress = _unseen,
    *,
    is_owner: bool = False,
    replica: bool = False,
    exactly: bool = False,
) -> None:
    """Copy the database to the file `copy`, mode 0600, synced. Blocks; any thread, and any process beside the owner's.

    is_owner: the caller owns the database and has applied the redo log, so nothing is lost if the log's file is
    missing. replica: the copy is to follow the same log, so it keeps its secret and its position there.
    exactly: leave out what only the redo log has; a later record will have it.

    Raises DestinationTaken (it exists), NotOurs, SchemaRefused, DatabaseFailed, OSError; then there is no `copy`.
    """
    check_version()
    part = copy.with_name(copy.name + ".part")
    if copy.exists():
        raise DestinationTaken(f"{copy} exists already")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        _copy(database, part, progress, is_owner, exactly)
        if replica:
            _single_file(part).close()
        else:
            renew(part)
            if not is_owner:
                _check_structure(part)
        os.rename(part, copy)
    except BaseException as error:
        for left in copy.parent.glob(glob.escape(part.name) + "*"):
            left.unlink()
        if isinstance(error, DatabaseUnusable):
            raise DatabaseFailed(str(error)) from error
        if isinstance(error, apsw.Error):
            # SQLite's message would be about the source database, which is fine.
            why = NO_SPACE if isinstance(error, apsw.FullError) else reason_of(error)
            raise DatabaseFailed(why) from error
        raise
    sync_directory(copy.parent)


class Reading:
    """One state of a database that others may have open, until `close`. Any thread, one at a time.

    Opening raises NotOurs, DatabaseFailed.
    """

    def __init__(self, database: Path) -> None:
        try:
            self._connection = open_reader(database, Options())
            self._connection.execute("BEGIN")
            self.position = position(self._connection) or Position(0, 0, 0)
            """The last record that it has."""
            clock: Any = self._connection.execute("SELECT clock FROM mark").get
            self.clock = Instant(clock or 0)
            """The lease clock at that record."""
        except apsw.Error as error:
            raise DatabaseFailed(reason_of(error)) from error

    def digest(self, rest: Callable[[float], object] = lambda seconds: None) -> bytes:
        """See `effects.digest`. Raises DatabaseFailed."""
        try:
            return digest(self._connection, rest)
        except (apsw.Error, UnicodeDecodeError) as error:
            raise DatabaseFailed(reason_of(error)) from error

    def close(self) -> None:
        """Let it go."""
        self._connection.close()


def format_of(database: Path) -> tuple[int, bool, list[str]]:
    """The state format of a file that a server may have open, whether it is a copy of a cluster's state, and what was
    acknowledged and is missing, for which a start refuses it.

    Raises SchemaNewer, SchemaUnreleased, NotOurs, DatabaseFailed.
    """
    try:
        with closing(open_reader(database, Options())) as connection:
            trust_pages(connection)  # a start does, too
            version = check_ours(connection)
            has_position = connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'log_position'").get
            follows = bool(has_position) and position(connection) is not None
            return version, follows, losses_of(database, connection)
    except (apsw.Error, msgspec.MsgspecError, OSError) as error:
        raise DatabaseFailed(reason_of(error)) from error


def copy_checked(
    database: Path,
    copy: Path,
    *,
    is_owner: bool = False,
    exactly: bool = False,
    step: Callable[[], None] = lambda: None,
) -> Point:
    """Copy the database to a file that a follower can open, and check it. Any thread, and any process.

    The copy may have messages in quarantine: that is in the log, so every other copy has them there, too.

    exactly: see `backup`. step: called now and then; what it raises ends the work.

    Raises Diverged if the check found anything else, and as `backup`.
    """
    try:
        backup(database, copy, lambda done, total: step(), is_owner=is_owner, replica=True, exactly=exactly)
        report = check(copy, lambda stage, done, total: step(), is_owner=True)
        if problems := [each for each in report.problems if each.kind != "quarantine"]:
            raise Diverged(f"a check of the copy found: {problems[0].text}")
    except apsw.Error as error:
        raise DatabaseFailed(str(error)) from error
    with closing(Reading(copy)) as reading:
        return Point(reading.position, reading.clock)


def copy_exactly(database: Path, copy: Path, step: Callable[[], None]) -> Point:
    """See `Copying` (store/archive/shipping.py). The caller owns the database. Raises as `copy_checked`."""
    return copy_checked(database, copy, is_owner=True, exactly=True, step=step)


def set_position(database: Path, to: Position | None) -> None:
    """Let a database that nobody has open follow a log from that position on; None: no log. It keeps its secret.

    Raises DatabaseFailed.
    """
    try:
        with closing(connect(database)) as connection:
            connection.pragma("synchronous", "EXTRA")
            position(connection)  # reads the first page
            check_writable(connection)
            connection.execute("DELETE FROM log_position" if to is None else MOVE, to)
    except (apsw.Error, DatabaseUnusable) as error:
        raise DatabaseFailed(reason_of(error)) from error


def checkpoint(database: Path) -> None:
    """Bring what a follower has left in the WAL into a database that nobody has open any more, for who takes the file
    alone. Raises DatabaseFailed."""
    try:
        with closing(connect(database)) as connection:
            see_checksums(connection)
            position(connection)  # before a first read there is no WAL to copy
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.Error as error:
        raise DatabaseFailed(reason_of(error)) from error


def backup_directory(database: Path, destination: Path, progress: Progress = _unseen) -> int:
    """Copy the database into a new data directory, ready to be served; returns its size in bytes.

    Raises as `backup` does; DestinationTaken also for a directory that is not empty, FileNotFoundError if the parent is
    missing.
    """
    with made(destination):
        backup(database, destination / DATABASE, progress)
    sync_directory(destination.parent)
    return (destination / DATABASE).stat().st_size


def receive_directory(destination: Path, write: Callable[[Writing], None]) -> int:
    """Create a data directory from a copy that `write` writes; returns its size in bytes.

    Raises DestinationTaken, OSError, and what `write` raises; then there is no database.
    """
    with made(destination) as part:
        with part.open("wb") as file:
            write(SyncedInPieces(file))
            file.flush()
            os.fsync(file.fileno())
        part.rename(destination / DATABASE)
    sync_directory(destination)
    sync_directory(destination.parent)
    return (destination / DATABASE).stat().st_size


def check_vacant(destination: Path) -> None:
    """Raises DestinationTaken if anything but an empty directory is there, DestinationBusy if `made` is writing it."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        if _part_of(destination).exists() and _is_locked(destination):
            raise _busy(destination)
        is_left = _part_of(destination).exists() and not (destination / DATABASE).exists()
        why = ": a backup or a repair into it did not end" if is_left else ""
        raise DestinationTaken(f"{destination} exists already{why}")


def _part_of(directory: Path) -> Path:
    return directory / f"{DATABASE}.part"


def _beside(place: Path) -> Path:
    place = place.resolve()
    return place.with_name(f".{place.name}.part")


@contextmanager
def made(destination: Path) -> Iterator[Path]:
    """Create the directory, for this process alone; if the body fails, remove it, unless it existed before.

    Yields an empty file in it, because of which no server starts there. The body renames it or removes it. Raises
    DestinationTaken, OSError.
    """
    check_vacant(destination)
    is_new = not destination.exists()
    with _alone_in(destination, destination):
        part, is_ours = _part_of(destination), False
        try:
            check_vacant(destination)  # another process may have ended since
            if _is_locked(_beside(destination)):
                raise _busy(destination)
            destination.chmod(0o700)
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            is_ours = True
            yield part
        except BaseException:
            if is_ours:
                part.unlink(missing_ok=True)
            if is_new and not any(destination.iterdir()):
                destination.rmdir()
            raise


@contextmanager
def made_beside(place: Path) -> Iterator[Path]:
    """A new directory, mode 0700, that takes the name `place` durably when the body ends; if it fails, nothing is
    left. `place` is missing, or an empty directory (a link to one, too), and no mount point. Raises DestinationTaken,
    OSError."""
    check_vacant(place)
    part = _beside(place)
    place = place.resolve()
    with _alone_in(part, place):
        _check_own(part)
        beside = part / place.name
        try:
            check_vacant(place)  # another process may have ended since
            if _is_locked(place):
                raise _busy(place)
            for left in part.iterdir():  # of a process that died; 0.1.0 wrote the files here
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            beside.mkdir(mode=0o700)
            yield beside
            sync_tree(beside)
            check_vacant(place)  # a server may have started there
            beside.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    sync_directory(place.parent)


@contextmanager
def _alone_in(directory: Path, destination: Path) -> Iterator[None]:
    """Create the directory if it is missing, and let no other process write there meanwhile. Raises DestinationBusy,
    OSError."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        own = take_directory(directory)
    except (DirectoryHeld, FileNotFoundError):  # the other one may have ended since
        raise _busy(destination) from None
    try:
        if own is not None and not _is_there(directory, own):
            raise _busy(destination)
        yield
    finally:
        if own is not None:
            os.close(own)


def _busy(destination: Path) -> DestinationBusy:
    return DestinationBusy(f"another process is writing {destination}")


def _is_locked(directory: Path) -> bool:
    """Whether a process of this machine has locked it; no, if it is missing or closed to this user."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_held(descriptor)
    except OSError:  # a file system without locks, see `take_directory`
        return False
    finally:
        os.close(descriptor)


def _check_own(directory: Path) -> None:
    """Raises FileExistsError if somebody else made the directory, or could write to it, or it is a link: what is in it
    will be removed."""
    status = directory.lstat()
    if not S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise FileExistsError(EEXIST, os.strerror(EEXIST), str(directory))


def _is_there(directory: Path, own: int) -> bool:
    """Whether the open directory still has its name: another process may have removed it before it was locked."""
    try:
        return os.path.samestat(os.fstat(own), directory.stat())
    except FileNotFoundError:
        return False


def _copy(database: Path, part: Path, progress: Progress, is_owner: bool, exactly: bool) -> None:
    source = open_reader(database, Options())
    target = connect(part)
    descriptor = os.open(part, os.O_RDWR)  # closed last: closing it drops SQLite's locks on that file
    try:
        check_ours(source)
        check_writable(source)  # the copy is like it
        found = last_commit.find(database, source)  # from here on the snapshot is fixed
        if not is_owner:
            cut = own_file.lacks(database, source)
            if losses := [f"{cut}: {redo_file.RESTORE}"] if cut else last_commit.losses(database, source, found):
                raise NotOurs(losses[0])
        if has_checksums(source):
            # The first page of a file says that pages have checksums, and others may be written before it.
            give_checksums(target, VERSION)
            target.pragma("user_version", VERSION)
        with target.backup("main", source, "main") as copying:
            while not copying.done:
                copying.step(_PAGES_STEP)
                os.fdatasync(descriptor)  # in pieces, see store/files.py
                progress(copying.page_count - copying.remaining, copying.page_count)
        with target:
            if found.missing and not exactly:
                redo.apply_log(target.execute, found.missing)
            redo_file.note_size(target, 0)
    finally:
        target.close()
        source.close()
        os.close(descriptor)


def renew(part: Path) -> None:
    """Give the copy its own secret, sign everybody out of the console there, take it out of its cluster, make it a
    single file, and give its pages checksums if there is room."""
    connection = _single_file(part)
    try:
        connection.pragma("synchronous", "EXTRA")
        connection.pragma("secure_delete", True)
        connection.execute("INSERT OR REPLACE INTO secret VALUES (1, ?, ?)", fresh_secret())
        for table in OWN:
            if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone():
                connection.execute(f"DELETE FROM {table}")
        if not has_checksums(connection):
            give_checksums(connection, int(connection.pragma("user_version")))
            if has_checksums(connection):
                connection.pragma("journal_mode", "WAL")  # which writes the first page first, see `_copy`
                with suppress(apsw.FullError, *DAMAGE):  # then the copy has none, as its source
                    connection.execute("VACUUM")
                connection.pragma("journal_mode", "DELETE")
    finally:
        connection.close()


def _check_structure(part: Path) -> None:
    """Raises DatabaseFailed if pages are zeros, which match their checksums, or were cut off: zeros in the copy."""
    with closing(connect(part)) as connection:
        found = str(connection.execute("PRAGMA quick_check(1)").get)
    if found != "ok":
        raise DatabaseFailed(f"{DAMAGED}{found.rpartition(chr(10))[2]}")


def _single_file(part: Path) -> apsw.Connection:
    """Open the copy, which is in WAL mode, and whose -wal would carry the part's name."""
    connection = connect(part)
    connection.pragma("journal_mode", "DELETE")
    return connection
