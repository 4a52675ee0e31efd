"""Small records by key, kept in a directory (here), in an object store (objects.py) or in a table (tables.py).

Strategy: read with version, write if version. Whoever changes a record names the content that the decision was made on;
if the record changed meanwhile, nothing is written, and the decision is made again. The patterns on top (guards,
checkpoints, ordered storages) hold the decisions; a backend makes one write atomic and durable.

In a directory each record is a file, replaced whole, by rename with fsync. A change compares and writes under an flock,
which the kernel releases when its holder dies. Readers take no lock: they see the old content or the new. Meant for the
processes of one machine: on network file systems flock may not be reliable.

A directory of this user alone (`make_own`), below one that everybody may write to, such as /tmp: another user could
create it first and put files into it that this user then runs or trusts. So its name contains the user's id, its mode
is 0700, and a directory that another user owns or may write to is refused.

Before changing it: an object store cannot compare before it writes. What is kept there has a new object for each
version, and the highest number counts (docs/decisions/0015-records.md).
"""

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from veilmq.store.files import durable_write, make_directory


class Seen(NamedTuple):
    """A record at one moment."""

    content: bytes | None
    """None: there is no record."""
    now: float | None = None
    """Unix seconds, by the storage's own clock; None: it has none that all its users share."""


class Records(Protocol):
    """Records that change by compare and set. Safe for any thread and process. Raise their storage's errors."""

    def look(self, key: str) -> Seen:
        """The record as it is now."""
        ...

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
        """Store `after` durably if the record still is `before`; False if it is not. fence: of `after`, for backends
        that keep it beside the content."""
        ...


class Contents(Protocol):
    """Whole contents by path, which is relative and of safe characters. Any thread."""

    def get(self, path: str, /) -> bytes | None:
        """The content; None if there is none."""
        ...

    def put(self, path: str, content: bytes, /) -> None:
        """Store it durably, in place of any other."""
        ...

    def remove(self, path: str, /) -> object:
        """Remove it, if it is there."""
        ...

    def remove_directory(self, path: str, /) -> None:
        """Remove a directory that has become empty, where there are directories."""
        ...

    def keys(self, below: str, /) -> Sequence[str]:
        """The paths that begin with `below` and a slash."""
        ...


_LOCK = ".lock"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def hashed(key: str) -> str:
    """The key as a name that every storage accepts."""
    return hashlib.sha256(key.encode()).hexdigest()


class Directory:
    """Files by relative path. All calls raise OSError."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        make_directory(self.directory, 0o700)

    def get(self, path: str) -> bytes | None:
        """The file's content; None if it does not exist."""
        try:
            return (self.directory / path).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, path: str, content: bytes) -> None:
        """Write the whole file, durably."""
        place = self.directory / path
        make_directory(place.parent, 0o700)
        durable_write(place, content)

    def remove(self, path: str) -> None:
        """Remove the file, if it exists."""
        (self.directory / path).unlink(missing_ok=True)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory, if it exists."""
        try:
            (self.directory / path).rmdir()
        except FileNotFoundError:
            pass

    def keys(self, below: str) -> Sequence[str]:
        """The paths of the files in that directory; none if it does not exist."""
        try:
            return [f"{below}/{name}" for name in os.listdir(self.directory / below)]
        except FileNotFoundError:
            return []


class FileRecords(Directory):
    """Records in 256 directories, each with a lock file; a record's file has the hash of its key as name."""

    def look(self, key: str) -> Seen:
        """See `Records.look`."""
        return Seen(self.get(_path(key)))

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
        """See `Records.replace`."""
        path = _path(key)
        folder = (self.directory / path).parent
        make_directory(folder, 0o700)
        with locked(folder / _LOCK):
            if self.get(path) != before:
                return False
            self.put(path, after)
            return True

    def prune(self, is_over: Callable[[bytes], bool], before: float) -> int:
        """Delete the records that are over and were last written before `before` (Unix seconds); returns how many."""
        pruned = 0
        for folder in self.directory.iterdir():
            for path in folder.glob("[0-9a-f]*"):
                with locked(folder / _LOCK):
                    content = self.get(f"{folder.name}/{path.name}")
                    if content is not None and path.stat().st_mtime < before and is_over(content):
                        path.unlink()
                        pruned += 1
        return pruned


def _path(key: str) -> str:
    name = hashed(key)
    return f"{name[:2]}/{name}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on this file, among all threads and processes of the machine."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        # Closing it does not unlock it: a child forked in the meantime has it open too.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def own_path(name: str) -> Path:
    """Where this user's directory of that name is, or will be."""
    return Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}"


def make_own(path: Path) -> None:
    """Make the directory (0700) if there is none. Raises OSError: PermissionError if it is not this user's alone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "is not a directory that this user alone may write to", str(path))
