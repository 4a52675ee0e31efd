"""The file of the redo log, on the way to the disk.

Strategy: the file is made anew at each start and written whole with zeros, so that later writes change nothing but
bytes of it: one that was copied may have holes, or share its blocks with the copy. On ext4 and XFS they go past the
page cache (`_PastCache`): one system call writes and syncs, in less time than a write and fdatasync
(docs/decisions/0014-redo-log.md). Elsewhere they go through it (`_InCache`): a file system of a server of its own
(FUSE, 9p, CIFS) takes such a call and need not sync.
"""

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Final, Protocol

import apsw

from veilmq.store.files import sync_directory
from veilmq.store.options import Options

BLOCK_BYTES: Final = 4096
"""Writes past the page cache are of whole blocks; disks want 512 bytes or this."""
_SYNC_AS_THEY_WRITE: Final = frozenset({"ext4", "xfs"})
"""File systems that are known to honour RWF_DSYNC past the page cache."""
_NOT_HERE: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
"""What a system says that cannot write past its cache; any other error is one of the disk."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ZEROS: Final = bytes(1 << 20)

logger = logging.getLogger("veilmq.store")


class RedoFile(Protocol):
    """What the log is written to."""

    def write(self, data: bytes, offset: int) -> None:
        """Write, and sync if the store's commits are synced.

        Raises apsw.FullError if it is certain that there was no space, apsw.IOError if nobody knows what the disk has.
        """
        ...

    def close(self) -> None:
        """Let it go, as it is."""
        ...


def open_file(path: Path, options: Options, room_bytes: int) -> RedoFile:
    """The file, empty, if making it leaves something of the room. Raises OSError or apsw.Error."""
    _make(path, options.redo_bytes, room_bytes)
    synced = options.synchronous == "FULL"
    if options.vfs:
        return _InVfs(path, options.vfs, synced)
    if synced and options.redo_bytes % BLOCK_BYTES == 0 and _file_system(path) in _SYNC_AS_THEY_WRITE:
        try:
            return _PastCache(path, options.redo_bytes)
        except (AttributeError, NotImplementedError) as error:  # a C library without
            reason: Exception = error
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            reason = error
        logger.warning("the redo log goes through the page cache: %s", reason)
    return _InCache(path, synced)


def _file_system(path: Path) -> str:
    """Of what kind it is that holds the file; "" if nobody knows."""
    device = os.stat(path).st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return ""
    return _kind(mounts, f"{os.major(device)}:{os.minor(device)}")


def _kind(mounts: str, number: str) -> str:
    """Of the file system of that device, by proc_pid_mountinfo(5)."""
    for mount in mounts.split("\n"):  # a name may hold what splitlines would split at
        place, _, kind = mount.partition(" - ")
        if number in place.split()[2:3]:
            return kind.split()[0]
    return ""


class _PastCache:
    """Written past the page cache, out of memory that mirrors the file."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError, AttributeError or NotImplementedError if that is not possible here."""
        self._flags = os.RWF_DSYNC
        self._mirror = mmap.mmap(-1, size)
        self._view = memoryview(self._mirror)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        try:
            self._write(0, BLOCK_BYTES)  # zeros, as it has already: a try
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        self._mirror[offset:end] = data
        at = offset - offset % BLOCK_BYTES
        end += -end % BLOCK_BYTES
        try:
            self._write(at, end)
        except OSError as error:  # want of space too: what was written and not synced may be there after a kill
            raise apsw.IOError(f"redo log: {error}") from error

    def _write(self, at: int, end: int) -> None:
        while at < end:
            written = os.pwritev(self._descriptor, [self._view[at:end]], at, self._flags)
            if written < BLOCK_BYTES:
                raise OSError(errno.EIO, f"{written} bytes written")
            at += written - written % BLOCK_BYTES

    def close(self) -> None:
        os.close(self._descriptor)


class _InCache:
    """Written to the page cache and synced from there."""

    def __init__(self, path: Path, synced: bool) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._synced = synced

    def write(self, data: bytes, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise (apsw.FullError if error.errno in _FULL else apsw.IOError)(f"redo log: {error}") from error
        if self._synced:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                raise apsw.IOError(f"redo log: {error}") from error

    def close(self) -> None:
        os.close(self._descriptor)


class _InVfs:
    """Written through the VFS of a test, which can make it fail."""

    _SYNC: Final = apsw.SQLITE_SYNC_NORMAL | apsw.SQLITE_SYNC_DATAONLY

    def __init__(self, path: Path, vfs: str, synced: bool) -> None:
        self._file = apsw.VFSFile(vfs, str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])
        self._synced = synced

    def write(self, data: bytes, offset: int) -> None:
        self._file.xWrite(data, offset)
        if self._synced:
            self._file.xSync(self._SYNC)

    def close(self) -> None:
        self._file.xClose()


def _make(path: Path, size: int, room_bytes: int) -> None:
    """Make the file of that size anew, all of it written and synced. Raises OSError; then the old one is still there,
    whose records the database has."""
    if room_bytes < size:
        raise OSError(errno.ENOSPC, f"no room for {size} bytes")
    part = path.with_suffix(".part")
    try:
        _write_zeros(part, size)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _write_zeros(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < size:
            at += os.pwrite(descriptor, _ZEROS[: size - at], at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
