"""Durable writes of files and directories, and large files written so that they do not delay commits; and the disk
under a store, with what the store writes there beside SQLite.

Strategy: a file is written whole or not at all, and survives a power cut: write a temporary file beside the target,
fsync it, rename it, fsync the directory. A reader sees the old content or the new. No other module calls `os.fsync`
(tests/house/test_rooms.py).

A directory is replaced the same way, but one rename cannot do it: between the two renames the old one is called
`.NAME.old`, and `restore` brings it back. Until the last sync, remove nothing and write no state that relies on the new
content. The lock is an flock on a file in the directory: the kernel releases it when the process ends, however that
happens.

A large file beside the database is written and freed in pieces: a commit's fdatasync waits until the file system has
journalled all earlier changes, which are blocks that another file gained or lost, and the data in them. For a whole
copy that takes 50 to 100 ms; for a piece, 2 or 3 ms.

The disk is a port of the few calls that decide what a kill or a power cut leaves, so that tests can put one faulty disk
under SQLite, the redo log and the file of the last commit. Reads go to the files directly: a test's disk keeps what
was written in real files, and remembers separately what was synced. `RealDisk` passes each call on to the
system. Work beside the batches starts here too, so that a test can decide when it happens.

See docs/decisions/0019-simulation.md.
"""

import fcntl
import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, Protocol

Bytes = bytes | memoryview


def durable_write(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    alone: bool = False,
    exclusive: bool = False,
    keeps_owner: bool = False,
) -> None:
    """Replace a file; durable when this returns.

    mode: before the umask. alone: nobody else writes this file at the same time; the temporary file then has a fixed
    name, so that repeated kills leave at most one behind. exclusive: raise FileExistsError if the file exists.
    keeps_owner: give the new file the old one's owner, where the system allows it.

    Raises OSError.
    """
    beside = path.with_name(f".{path.name}.part" if alone else f".{path.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if alone else os.O_EXCL)
    try:
        with open(os.open(beside, flags, mode), "wb") as file:
            if keeps_owner:
                give_to_owner_of(path, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(beside, path)
            beside.unlink()
        else:
            beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def take_name(part: Path, path: Path) -> None:
    """Rename a complete file to `path`, durably, replacing any file there. Raises OSError."""
    sync_file(part)
    part.replace(path)
    sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o777, parents_mode: int = 0o777) -> None:
    """Create a directory and its parents, durably; do nothing if it exists. Modes are before the umask. Raises
    OSError."""
    if path.is_dir():
        return
    make_directory(path.parent, parents_mode, parents_mode)
    path.mkdir(mode=mode, exist_ok=True)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make a file's content durable. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path | str) -> None:
    """Make the directory's entries durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_to_owner_of(path: Path, descriptor: int) -> None:
    """Give an open file the owner of `path`, where the system allows it: root may add a key to a file that a service's
    user reads, or a file to its data directory (as SQLite does with its own files)."""
    with suppress(OSError):
        found = path.stat()
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, found.st_uid, found.st_gid)


def sync_tree(directory: Path) -> None:
    """Make a directory, everything below it and its name durable. Raises OSError."""
    for place, _, files in os.walk(directory):
        for name in files:
            with suppress(FileNotFoundError):  # somebody writes there, and has renamed it
                sync_file(Path(place, name))
        sync_directory(place)
    sync_directory(directory.parent)


def replace_directory(beside: Path, place: Path) -> None:
    """Replace the directory `place` with the complete directory `beside`. Raises OSError."""
    sync_tree(beside)
    old = place.with_name(f".{place.name}.old")
    if place.exists():
        # The old one may be the only copy.
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    beside.rename(place)
    sync_directory(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore(directory: Path) -> None:
    """Undo an unfinished `replace_directory` of a process that died between its two renames."""
    for old in directory.glob(".*.old"):
        place = directory / old.name.removeprefix(".").removesuffix(".old")
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)
            sync_directory(directory)


@contextmanager
def locked(lock: Path, taken: Callable[[str, str], Exception], who: str) -> Iterator[None]:
    """Hold the lock, a file in the directory. If it is held already, raises `taken(what is wrong, what to do)`. who:
    the program that works there, for that text."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mend = "Wait until it ends, or give this one a directory of its own."
            raise taken(f"{who} works in {lock.parent}.", mend) from None
        pid = os.getpid()
        try:
            yield
        finally:
            unlock(file.fileno(), pid)


def unlock(file: int, pid: int) -> None:
    """Release an flock that the process `pid` took; nothing happens in another process. To close the file is not
    enough: a process that was forked meanwhile has it open, too."""
    if os.getpid() == pid:
        fcntl.flock(file, fcntl.LOCK_UN)


PIECE_BYTES: Final = 4 << 20


class Writing(Protocol):
    """Anything with a `write` method."""

    def write(self, data: bytes, /) -> int:
        """Write all of the data. Raises OSError."""


class SyncedInPieces:
    """Writes to a file, and syncs it after each piece. The caller syncs the last, incomplete piece if needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unsynced_bytes = 0

    def write(self, data: bytes, /) -> int:
        """Write all of the data. Raises OSError."""
        self._file.write(data)
        self._unsynced_bytes += len(data)
        if self._unsynced_bytes >= PIECE_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unsynced_bytes = 0
        return len(data)


def close_in_pieces(file: IO[bytes]) -> None:
    """Close an unlinked, writable file, truncating it piece by piece from its end first."""
    size = os.fstat(file.fileno()).st_size
    for left in range(size - PIECE_BYTES, 0, -PIECE_BYTES):
        os.ftruncate(file.fileno(), left)
        os.fdatasync(file.fileno())
    file.close()


class RawFile(Protocol):
    """An open file. Offsets and lengths are in bytes; all calls raise OSError."""

    def write(self, data: Bytes, offset: int) -> int:
        """Write, and return how many bytes were written."""

    def sync(self) -> None:
        """Make the content durable."""

    def close(self) -> None:
        """Close it."""


class Job(Protocol):
    """Work that runs beside the batches."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for `timeout` seconds."""


class Disk(Protocol):
    """What a store's files are written to. All calls with a path raise OSError."""

    @property
    def vfs(self) -> str | None:
        """Name of the apsw VFS that opens the database; None: SQLite's own."""

    def make(self, path: Path) -> RawFile:
        """Create a file of mode 0600, or empty an existing one, and open it."""

    def open(self, path: Path) -> RawFile:
        """Open an existing file."""

    def open_past_cache(self, path: Path) -> RawFile:
        """Open an existing file so that each write is durable when it returns; of whole blocks, from aligned memory.

        Raises AttributeError or NotImplementedError too, if this system cannot do that.
        """

    def map(self, path: Path, size: int) -> RawFile:
        """Open an existing file of that size so that a write is no system call."""

    def rename(self, path: Path, target: Path) -> None:
        """Give the file another name, and replace a file of that name. `sync_directory` makes it durable."""

    def remove(self, path: Path) -> None:
        """Remove a file. `sync_directory` makes it durable."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def file_system(self, path: Path) -> str:
        """Type of the file system that holds the file; "" if unknown."""

    def space(self, path: Path) -> tuple[int, int]:
        """Free bytes, and all bytes, of the file system."""

    def beside(self, work: Callable[[], None], name: str) -> Job:
        """Begin work that may run beside the batches. Raises RuntimeError if no thread can be started."""


class RealDisk:
    """The machine's disk. See `Disk`."""

    vfs = None

    def make(self, path: Path) -> RawFile:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        give_to_owner_of(path.parent, descriptor)
        return _Cached(descriptor)

    def open(self, path: Path) -> RawFile:
        return _Cached(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def open_past_cache(self, path: Path) -> RawFile:
        flags = os.RWF_DSYNC
        return _Direct(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), flags)

    def map(self, path: Path, size: int) -> RawFile:
        return _Mapped(os.open(path, os.O_RDWR | os.O_CLOEXEC), size)

    def rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        sync_directory(path)

    def file_system(self, path: Path) -> str:
        device = os.stat(path).st_dev
        try:
            mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
        except OSError:
            return ""
        return kind_of(mounts, f"{os.major(device)}:{os.minor(device)}")

    def space(self, path: Path) -> tuple[int, int]:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def beside(self, work: Callable[[], None], name: str) -> Job:
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
