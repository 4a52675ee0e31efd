"""The file of the redo log: how it is written, and whether it must exist.

Strategy: the file is created anew at each start and filled with zeros, so that later writes only overwrite bytes: a
copied file may have holes, or share blocks with its copy. On ext4 and XFS writes bypass the page cache (`_PastCache`):
one system call writes and syncs, faster than a write and fdatasync (docs/decisions/0014-redo-log.md). Elsewhere they go
through the page cache (`_InCache`): a file system with its own server (FUSE, 9p, CIFS) accepts that system call but may
not sync.

For lack of space a write or a sync can fail also where bytes are overwritten: on btrfs, ZFS and, after a reflink, XFS.
A part of a record does not count. But if it may be there whole, perhaps without the zeros behind it, zeros are written
over its head, durably: if that succeeds, it is certainly not there, and the batch is refused as on any full disk. If
not, its state is unknown.

From before the first record until the log is no longer needed, the database records the file's size. So a file that was
deleted, or cut by a copy onto a full disk, differs from a file that never existed (`loss`). An operator who goes on
without the lost content writes a word into the file, which no failed copy does.
"""

import errno
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from veilmq.store import Options
from veilmq.store.files import Bytes, Disk, RawFile, write_whole

BLOCK_BYTES: Final = 4096
"""Writes that bypass the page cache are in whole blocks; disks need 512 bytes or this."""
_SYNC_AS_THEY_WRITE: Final = frozenset({"ext4", "xfs"})
"""File systems known to honour RWF_DSYNC with O_DIRECT."""
_NOT_HERE: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
"""Errors of a system that cannot bypass the page cache; any other is an error of the disk."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says where a disk, or a share of it, is full."""
_ZEROS: Final = bytes(1 << 20)
_VOID: Final = bytes(8)
"""As long as the head of a record: where it stands there is no record."""

logger = logging.getLogger("veilmq.store")


class RedoFile(Protocol):
    """The file that the log writes to."""

    def write(self, data: bytes, offset: int) -> None:
        """Write, and sync if the store's commits are synced.

        Raises apsw.FullError if nothing was written for lack of space, apsw.IOError if it is unknown what the disk has.
        """

    def close(self) -> None:
        """Close it and leave it as it is."""


def open_file(path: Path, options: Options, room_bytes: int) -> RedoFile:
    """Create the file anew if `room_bytes` allows, and open it. Raises OSError or apsw.Error."""
    _make(options.disk, path, options.redo_bytes, room_bytes)
    synced = options.synchronous == "FULL"
    disk = options.disk
    if synced and options.redo_bytes % BLOCK_BYTES == 0 and disk.file_system(path) in _SYNC_AS_THEY_WRITE:
        try:
            return _PastCache(disk, path, options.redo_bytes)
        except (AttributeError, NotImplementedError) as error:  # the C library lacks it
            reason: Exception = error
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            reason = error
        logger.warning("the redo log goes through the page cache: %s", reason)
    return _InCache(disk.open(path), synced)


class _PastCache:
    """Bypasses the page cache; writes from memory that mirrors the file."""

    def __init__(self, disk: Disk, path: Path, size: int) -> None:
        """Raises OSError, AttributeError or NotImplementedError if this system cannot do that."""
        self._mirror = mmap.mmap(-1, size)
        self._view = memoryview(self._mirror)
        self._file = disk.open_past_cache(path)
        try:
            self._write(0, BLOCK_BYTES)  # a trial: the zeros are there already
        except BaseException:
            self._file.close()
            raise

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        self._mirror[offset:end] = data
        at = offset - offset % BLOCK_BYTES
        end += -end % BLOCK_BYTES
        try:
            self._write(at, end)
        except OSError as error:
            if error.errno not in FULL:
                raise apsw.IOError(f"redo log: {error}") from error
            self._mirror[offset : offset + len(_VOID)] = _VOID
            with _unknown_if_it_fails():
                self._write(at, offset + len(_VOID) + -(offset + len(_VOID)) % BLOCK_BYTES)
            raise apsw.FullError(f"redo log: {error}") from error

    def _write(self, at: int, end: int) -> None:
        while at < end:
            written = self._file.write(self._view[at:end], at)
            if written < BLOCK_BYTES:
                raise OSError(errno.EIO, f"{written} bytes written")
            at += written - written % BLOCK_BYTES

    def close(self) -> None:
        self._file.close()


class _InCache:
    """Writes to the page cache, then syncs."""

    def __init__(self, file: RawFile, synced: bool) -> None:
        self._file = file
        self._synced = synced

    def write(self, data: Bytes, offset: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:], offset + written)
            self._sync()
        except OSError as error:
            if error.errno not in FULL:
                raise apsw.IOError(f"redo log: {error}") from error
            if written and written >= len(data) - len(_VOID):  # else its checksum is wrong
                with _unknown_if_it_fails():
                    self._file.write(_VOID, offset)
                    self._sync()
            raise apsw.FullError(f"redo log: {error}") from error

    def _sync(self) -> None:
        if self._synced:
            self._file.sync()

    def close(self) -> None:
        self._file.close()


@contextmanager
def _unknown_if_it_fails() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise apsw.IOError(f"redo log: {error}") from error


def _make(disk: Disk, path: Path, size: int, room_bytes: int) -> None:
    """Create the file anew at that size, all written and synced. Raises OSError; the old file then remains, and the
    database has its records."""
    if room_bytes < size:
        raise OSError(errno.ENOSPC, f"no room for {size} bytes")
    write_whole(disk, path, path.with_suffix(".part"), _zeros(size))


def _zeros(size: int) -> Iterator[bytes]:
    for at in range(0, size, len(_ZEROS)):
        yield _ZEROS[: size - at]


_NOTE: Final = (
    "INSERT INTO redo_log VALUES (1, ?) ON CONFLICT DO UPDATE SET file_bytes = excluded.file_bytes"
    " WHERE file_bytes <> excluded.file_bytes"
)
GIVEN_UP: Final = b"lost"
"""What an operator writes into a file to go on without its content."""
RESTORE: Final = "restore all files of one moment, or see what `veilmq check --repair` brings back"
"""What to do where files of a server alone do not have all; one of a cluster fills its copy again."""


def note_size(connection: apsw.Connection, file_bytes: int) -> None:
    """Record the size of the file that the database may need; 0: it needs none, because it has everything durably."""
    connection.execute(_NOTE, (file_bytes,))


def loss(path: Path, connection: apsw.Connection) -> str | None:
    """Why the file's content is lost, and what to do; None if it is there, is not needed, or was given up."""
    if not connection.pragma("user_version"):
        return None  # a new database
    # Query this before looking at the file: a server creates the file first and records its size then.
    expected: Any = connection.execute("SELECT file_bytes FROM redo_log").get
    size = path.stat().st_size if path.exists() else None
    if not expected or (size is not None and (size >= expected or is_given_up(path))):
        return None
    what = "missing" if size is None else f"cut, to {size} of {expected} bytes"
    return f"{path} is {what}, and with it the last acknowledged batches before a crash: {advice(path)}"


def is_same_file(path: Path, inode: int | None) -> bool:
    """Whether the file there is still the one with that inode: neither deleted nor replaced. Raises OSError."""
    try:
        return path.stat().st_ino == inode
    except FileNotFoundError:
        return False


def ahead(path: Path) -> str:
    """Says that the database is older than the log, and what to do."""
    return f"what was committed before the first record of {path} is missing: where is veilmq.db-wal? {advice(path)}"


def keyless(path: Path) -> str:
    """Says that the database lacks the key of the log, and what to do."""
    return f"the table `secret` is empty, so nothing can tell what {path} holds: {advice(path)}"


def advice(path: Path) -> str:
    """What to do where the content of one of the files is lost."""
    return f"{RESTORE}; to go on without, stop the server and say so in it: echo {GIVEN_UP.decode()} > {path}"


def is_given_up(path: Path) -> bool:
    """Whether the operator wrote into the file that they go on without its content."""
    try:
        with path.open("rb") as file:
            return file.read(len(GIVEN_UP) + 2).strip() == GIVEN_UP
    except FileNotFoundError:
        return False
