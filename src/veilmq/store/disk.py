"""The disk under a store: what the store writes beside SQLite, and how SQLite itself is given another disk.

Strategy: a port of the few calls that decide what a kill or a power cut leaves, so that tests can put one faulty disk
under SQLite, the redo log and the file of the last commit. Reads and looks go to the files directly: a test's disk
keeps what was written in real files, and knows beside them what was synced. `RealDisk` passes each call on to the
system. Work beside the batches starts here too, so that a test can decide when it happens.

See docs/decisions/0019-simulation.md.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from veilmq.store.files import give_to_owner_of, sync_directory

Bytes = bytes | memoryview


class RawFile(Protocol):
    """An open file. Offsets and lengths are in bytes; all calls raise OSError."""

    def write(self, data: Bytes, offset: int) -> int:
        """Write, and return how many bytes were written."""
        ...

    def sync(self) -> None:
        """Make the content durable."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Job(Protocol):
    """Work that runs beside the batches."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for `timeout` seconds."""
        ...


class Disk(Protocol):
    """What a store's files are written to. All calls with a path raise OSError."""

    @property
    def vfs(self) -> str | None:
        """Name of the apsw VFS that opens the database; None: SQLite's own."""
        ...

    def make(self, path: Path) -> RawFile:
        """Create a file of mode 0600, or empty an existing one, and open it."""
        ...

    def open(self, path: Path) -> RawFile:
        """Open an existing file."""
        ...

    def open_past_cache(self, path: Path) -> RawFile:
        """Open an existing file so that each write is durable when it returns; of whole blocks, from aligned memory.

        Raises AttributeError or NotImplementedError too, if this system cannot do that.
        """
        ...

    def map(self, path: Path, size: int) -> RawFile:
        """Open an existing file of that size so that a write is no system call."""
        ...

    def rename(self, path: Path, target: Path) -> None:
        """Give the file another name, and replace a file of that name. `sync_directory` makes it durable."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file. `sync_directory` makes it durable."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def file_system(self, path: Path) -> str:
        """Type of the file system that holds the file; "" if unknown."""
        ...

    def space(self, path: Path) -> tuple[int, int]:
        """Free bytes, and all bytes, of the file system."""
        ...

    def beside(self, work: Callable[[], None], name: str) -> Job:
        """Begin work that may run beside the batches. Raises RuntimeError if no thread can be started."""
        ...


class RealDisk:
    """The machine's disk."""

    vfs = None

    def make(self, path: Path) -> RawFile:
        """See `Disk.make`."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        give_to_owner_of(path.parent, descriptor)
        return _Cached(descriptor)

    def open(self, path: Path) -> RawFile:
        """See `Disk.open`."""
        return _Cached(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def open_past_cache(self, path: Path) -> RawFile:
        """See `Disk.open_past_cache`."""
        flags = os.RWF_DSYNC
        return _Direct(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), flags)

    def map(self, path: Path, size: int) -> RawFile:
        """See `Disk.map`."""
        return _Mapped(os.open(path, os.O_RDWR | os.O_CLOEXEC), size)

    def rename(self, path: Path, target: Path) -> None:
        """See `Disk.rename`."""
        path.replace(target)

    def remove(self, path: Path) -> None:
        """See `Disk.remove`."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """See `Disk.sync_directory`."""
        sync_directory(path)

    def file_system(self, path: Path) -> str:
        """See `Disk.file_system`."""
        device = os.stat(path).st_dev
        try:
            mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
        except OSError:
            return ""
        return kind_of(mounts, f"{os.major(device)}:{os.minor(device)}")

    def space(self, path: Path) -> tuple[int, int]:
        """See `Disk.space`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def beside(self, work: Callable[[], None], name: str) -> Job:
        """See `Disk.beside`."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


def kind_of(mounts: str, number: str) -> str:
    """Type of the file system on that device, from the text of proc_pid_mountinfo(5)."""
    for mount in mounts.split("\n"):  # a path may contain characters at which splitlines splits
        place, _, kind = mount.partition(" - ")
        if number in place.split()[2:3]:
            return kind.split()[0]
    return ""


class _Cached:
    """Writes to the page cache."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Bytes, offset: int) -> int:
        return os.pwrite(self._descriptor, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _Direct(_Cached):
    """Bypasses the page cache: one system call writes and syncs."""

    __slots__ = ("_flags",)

    def __init__(self, descriptor: int, flags: int) -> None:
        super().__init__(descriptor)
        self._flags = flags

    def write(self, data: Bytes, offset: int) -> int:
        return os.pwritev(self._descriptor, (data,), offset, self._flags)


class _Mapped(_Cached):
    """Writes to the page cache by way of memory."""

    __slots__ = ("_map",)

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(descriptor)
        try:
            self._map = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, data: Bytes, offset: int) -> int:
        self._map[offset : offset + len(data)] = data
        return len(data)

    def close(self) -> None:
        self._map.close()
        super().close()


def write_whole(disk: Disk, path: Path, part: Path, content: Iterable[bytes]) -> None:
    """Replace a file by `content`, in pieces; durable when this returns. part: a name for the unfinished file.

    Raises OSError; the old file then remains.
    """
    try:
        file = disk.make(part)
        try:
            at = 0
            for piece in content:
                end = at + len(piece)
                while at < end:
                    at += file.write(piece[at - end :], at)
            file.sync()
        finally:
            file.close()
        disk.rename(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    disk.sync_directory(path.parent)


REAL = RealDisk()
