"""The data directory: one owner, no access for other users, and disk space reserved for a full disk. Here are also the
errors of opening, reading and copying one, and the report of a check.

Strategy: an flock on `lock` decides who owns the directory; the kernel drops it however the process ends. The file's
text names the owner for others. The reserve is a fallocated file. It is deleted when the disk fills, so that receives,
deletes and clean-up go on until space returns.
"""

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from shlex import quote
from shutil import rmtree
from typing import Final
from urllib.parse import urlsplit

import msgspec

from veilmq.store.files import REAL, Disk, give_to_owner_of

_UNRELEASED_READER: Final = "73ed122d7"
"""The last revision that reads a file from before the first release."""


class DatabaseUnusable(Exception):
    """The database cannot be opened: another user's files, a full disk, an I/O error, or damage in what a start
    reads."""


class DatabaseDamaged(DatabaseUnusable):
    """What a start reads is not what was written."""


class SchemaRefused(Exception):
    """This release does not read the file's schema."""


class SchemaUnreleased(SchemaRefused):
    """The file was written before the first release."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"the data was written by a VeilMQ before the first release (its schema {found}), which this one does not "
            f"read: revision {_UNRELEASED_READER} can still export it (docs/operations.md, Upgrade)"
        )
        self.found = found


class SchemaNewer(SchemaRefused):
    """The file was written by a later release."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"the data was written by a newer VeilMQ (schema {found}; this one knows {known}): upgrade")
        self.found = found


class SchemaOlder(SchemaRefused):
    """The file was written by an earlier release, and no server of this release has opened it yet."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the data was written by an older VeilMQ (schema {found}; this one looks at {known}): "
            "start the server on it once, or use the release that wrote it"
        )
        self.found = found


class NotOurs(Exception):
    """The file is another program's database, or is missing, empty or no database although ours must be there."""


class SqliteTooOld(Exception):
    """The SQLite inside apsw has a bug that can corrupt a WAL database."""


class DestinationTaken(Exception):
    """The destination exists already."""


class DestinationBusy(DestinationTaken):
    """Another process is writing it."""


class DatabaseFailed(Exception):
    """The database cannot be read, or the copy cannot be written."""


PROBLEMS_MAX: Final = 1_000
"""At most this many problems are listed; the rest are only counted."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, the work done and the total."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str
    """`file`, `body`, `quarantine`, `lease`, `message`, `group`, `queue`, `history` or `books`."""
    text: str


class Report(msgspec.Struct):
    """What was checked, and what was found."""

    queues: int = 0
    messages: int = 0
    leases: int = 0
    body_bytes: int = 0
    events: int = 0
    history_first_offset: int = 0
    page_checksums: bool = False
    """Whether the pages of the database have checksums, so that no flipped bit goes unnoticed."""
    books: str = "not checked: the file is damaged"
    """`balanced`, `not balanced`, or why they could not be checked."""
    problems: list[Problem] = []
    problems_count: int = 0

    def add(self, kind: str, text: str) -> None:
        """Record a problem."""
        self.problems_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(kind, text))


DATABASE: Final = "veilmq.db"
REDO: Final = "redo"
COMMITTED: Final = "committed"
_LOCK: Final = "lock"
COPY_PREFIX: Final = ".copy-"
"""Of directories in which a copy is made while the database is served."""
_RESERVE: Final = "reserve"
_LOOKERS_MAX: Final = 10_000


class Holder(msgspec.Struct, omit_defaults=True):
    """The owner of a directory: its pid and the URLs that it listens on."""

    pid: int
    listeners: dict[str, str] = {}

    def url(self, name: str) -> str | None:
        """The URL by which this machine reaches a listener; None if there is no such listener."""
        listener = self.listeners.get(name)
        return None if listener is None else reached_here(listener)


def reached_here(address: str) -> str:
    """The URL or HOST:PORT by which this machine reaches a server there: 0.0.0.0 and [::] mean all addresses of the
    machine, so loopback in their place. A server in development mode answers to no Host of that name."""
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        is_everywhere = ip_address(host).is_unspecified
    except ValueError:
        return address
    if not is_everywhere:
        return address
    return address.replace(f"[{host}]", "[::1]", 1) if ":" in host else address.replace(host, "127.0.0.1", 1)


class DirectoryHeld(Exception):
    """Another process owns the directory."""

    def __init__(self, directory: Path, holder: Holder | None) -> None:
        self.directory = directory
        self.holder = holder
        who = f"pid {holder.pid}" if holder else "another process"
        use = next(map(holder.url, holder.listeners), None) if holder else None
        super().__init__(f"{directory} is held by {who}" + (f", use {use}" if use else ""))


class DirectoryUnsafe(Exception):
    """The directory is open to other users, is not a directory, or has a name that SQLite cannot open; or its parent is
    missing, as with a mistyped path."""


class DataDirectory:
    """Owns a directory until `close`."""

    def __init__(self, path: Path, reserve_bytes: int, floor_bytes: int, disk: Disk = REAL) -> None:
        """Creates it (0700) if missing, but not its parent. Raises DirectoryHeld, DirectoryUnsafe, OSError."""
        self.path = path
        self._reserve = path / _RESERVE
        self._reserve_bytes = reserve_bytes
        self._floor_bytes = floor_bytes
        self._disk = disk
        self.pid = os.getpid()
        self._gate = threading.Lock()
        self._open = True
        """Whether it is still owned. Guarded by `_gate`: the system soon reuses the number of a closed file."""
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DirectoryUnsafe(f"{str(path)!a}: SQLite opens no file below a name that is not UTF-8") from None
        _make(path)
        if path.stat().st_mode & 0o077:
            raise DirectoryUnsafe(f"{path} is open to other users: chmod 700 {quote(str(path))}")
        self._lock = _take_lock(path)
        try:
            self._own = take_directory(path)
        except BaseException:
            os.close(self._lock)
            raise
        for left in path.glob(f"{COPY_PREFIX}*"):  # left by a process that was killed
            rmtree(left, ignore_errors=True)
        try:
            self.announce({})
        except BaseException:  # a full disk
            self.close()
            raise

    @property
    def database(self) -> Path:
        """The database file."""
        return self.path / DATABASE

    @property
    def redo(self) -> Path:
        """The redo log."""
        return self.path / REDO

    @property
    def committed(self) -> Path:
        """The file that knows the last commit."""
        return self.path / COMMITTED

    def announce(self, listeners: dict[str, str]) -> None:
        """Write the owner and its URLs into the lock file. Any thread; after `close` it does nothing."""
        text = msgspec.json.encode(Holder(self.pid, listeners))
        with self._gate:
            if self._open:
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, text, 0)

    def free_bytes(self) -> int:
        """Free space of the file system that we may use, without the reserve."""
        return self._disk.space(self.path)[0]

    def floor_bytes(self) -> int:
        """Sends and creates are refused below this much free space."""
        return free_and_floor(self.path, self._floor_bytes, self._disk)[1]

    def needed_bytes(self) -> int:
        """Refused sends are accepted again at this much free space: the floor, plus the reserve if it was given up."""
        return self.floor_bytes() + (0 if self._has_reserve() else self._reserve_bytes)

    def _has_reserve(self) -> bool:
        try:
            return not self._reserve_bytes or self._reserve.stat().st_size >= self._reserve_bytes
        except FileNotFoundError:
            return False

    def take_reserve(self) -> bool:
        """Create the reserve if there is room beyond the floor and a file can be opened; return whether it exists."""
        path = self._reserve
        if self._has_reserve():
            return True
        if self.free_bytes() < self.needed_bytes():
            return False
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                raise
            return False
        give_to_owner_of(self.path, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, self._reserve_bytes)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP}:
                raise
            path.unlink()
            return False
        finally:
            os.close(descriptor)
        return True

    def give_up_reserve(self) -> bool:
        """Free the reserve's space for the work that must go on. Returns whether there was a reserve."""
        try:
            self._reserve.unlink()
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Give up ownership of the directory."""
        with self._gate:
            self._open = False
            os.close(self._lock)
            if self._own is not None:
                os.close(self._own)


def free_and_floor(path: Path, floor_bytes: int, disk: Disk = REAL) -> tuple[int, int]:
    """Free space of the file system, and below how much sends and creates are refused, bytes: the setting, but at most
    2 % of the file system."""
    free_bytes, total_bytes = disk.space(path)
    return free_bytes, min(floor_bytes, total_bytes // 50)


def _make(path: Path) -> None:
    """Create the directory if it is missing. Raises DirectoryUnsafe if its parent is missing too, OSError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        missing = path.absolute()
        while not missing.parent.exists():
            missing = missing.parent
        parent = path.absolute().parent
        made = f"mkdir -p {quote(str(parent))}"
        raise DirectoryUnsafe(
            f"{path} is not made, because {missing} is not there: check the path, or make it first: {made}"
        ) from None


def take_directory(path: Path) -> int | None:
    """Lock the directory itself, in case somebody deletes the lock file to force a start; None where that fails. On NFS
    the lock is this machine's alone: Linux does not send a directory's lock to the server. Raises DirectoryHeld.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DirectoryHeld(path, None) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _take_lock(path: Path) -> int:
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_to_owner_of(path, descriptor)
    for _ in range(_LOOKERS_MAX):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if is_held(descriptor):
                break
    holder = read_holder(path) if is_held(descriptor) else None  # a command looks: the owner in the file has ended
    os.close(descriptor)
    raise DirectoryHeld(path, holder)


def is_held(lock: int) -> bool:
    """Whether another process owns the directory; `lock` is its open lock file.

    An owner holds the lock exclusively. A process that only checks takes it shared, and releases it at once.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def holder_of(path: Path) -> Holder | None:
    """The process that holds the directory; None if nobody does, or this user cannot see it."""
    try:
        with (path / _LOCK).open("rb") as lock:
            return (read_holder(path) or Holder(0)) if is_held(lock.fileno()) else None
    except OSError:
        return None


def holds_database(path: Path) -> bool:
    """Whether the directory contains a database. Raises PermissionError if we may not see that.

    Path.exists does not do: since Python 3.14 it reports a file that we may not see as missing.
    """
    try:
        return stat.S_ISREG((path / DATABASE).stat().st_mode)
    except PermissionError:
        raise
    except (OSError, ValueError):  # the path cannot name a directory
        return False


def read_holder(path: Path) -> Holder | None:
    """The last owner recorded in the lock file; None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((path / _LOCK).read_bytes(), type=Holder)
    except (OSError, ValueError, RecursionError):
        return None
