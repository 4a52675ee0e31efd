"""The file of the redo log, on the way to the disk.

Strategy: the file is written whole with zeros when it is made, so that later writes change nothing but bytes of it.
Where the file system can, they go past the page cache (`_PastCache`): one system call writes and syncs, in less time
than a write and fdatasync (docs/decisions/0014-redo-log.md). Else they go through it (`_InCache`).
"""

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Final, Protocol

import apsw

from veilmq.store.files import sync_directory
from veilmq.store.sqlite.options import Options

BLOCK_BYTES: Final = 4096
"""Writes past the page cache are of whole blocks; disks want 512 bytes or this."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ZEROS: Final = bytes(1 << 20)

logger = logging.getLogger("veilmq.store")


class RedoFile(Protocol):
    """What the log is written to. Raises apsw.FullError for want of space, apsw.IOError for the rest."""

    def write(self, data: bytes, offset: int) -> None:
        """Write, and sync if the store's commits are synced."""
        ...

    def close(self) -> None:
        """Let it go, as it is."""
        ...


def open_file(path: Path, options: Options, room_bytes: int) -> RedoFile:
    """The file, made if need be and if that leaves something of the room. Raises OSError or apsw.Error."""
    _make(path, options.redo_bytes, room_bytes)
    synced = options.synchronous == "FULL"
    if options.vfs:
        return _InVfs(path, options.vfs, synced)
    if synced and options.redo_bytes % BLOCK_BYTES == 0:
        try:
            return _PastCache(path, options.redo_bytes)
        except (OSError, AttributeError) as error:  # a file system or a system without
            logger.info("the redo log goes through the page cache: %s", error)
    return _InCache(path, synced)


class _PastCache:
    """Written past the page cache, out of memory that mirrors what was written since the file was opened."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError or AttributeError if that is not possible here."""
        self._flags = os.RWF_DSYNC
        self._mirror = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
        self._view = memoryview(self._mirror)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        block = [self._view[:BLOCK_BYTES]]
        try:
            os.preadv(self._descriptor, block, 0)
            os.pwritev(self._descriptor, block, 0, self._flags)  # what it has already: a try
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        self._mirror[offset:end] = data
        at = offset - offset % BLOCK_BYTES
        end += -end % BLOCK_BYTES
        try:
            while at < end:
                at += os.pwritev(self._descriptor, [self._view[at:end]], at, self._flags)
        except OSError as error:
            raise _failed(error) from error

    def close(self) -> None:
        os.close(self._descriptor)
        self._view.release()
        self._mirror.close()


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
            raise _failed(error) from error
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


def _failed(error: OSError) -> apsw.Error:
    """What a write that failed is to the store: for want of space it is a refusal, else nobody knows."""
    return (apsw.FullError if error.errno in _FULL else apsw.IOError)(f"redo log: {error}")


def _make(path: Path, size: int, room_bytes: int) -> None:
    """Make the file of that size, unless it is there: all of it written. Raises OSError; then there is none."""
    if path.exists() and path.stat().st_size == size:
        return
    if room_bytes < size:
        raise OSError(errno.ENOSPC, f"no room for {size} bytes")
    try:
        _write_zeros(path, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _write_zeros(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < size:
            at += os.pwrite(descriptor, _ZEROS[: size - at], at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)
