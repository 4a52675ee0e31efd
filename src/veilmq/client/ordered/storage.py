"""Where the numbers live: the shape of a storage, and the local file.

Strategy: a storage is two methods, `load` and `save`; `save` is durable when it returns. One that can lock itself has
`acquire` and `release` as well; one that cannot gets its lock inside its state (locks.py). The file is written
beside itself, synced and renamed, and locked with flock, which the kernel lets go when its process dies.
"""

import fcntl
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from veilmq.client.closing import Closing
from veilmq.client.errors import StorageHeld, StorageLost, TransportError
from veilmq.client.forked import OfProcess, forget_in_child
from veilmq.client.queue import Queue
from veilmq.store.files import durable_write


class Storage(Protocol):
    """Any object with these two methods. Called by one thread at a time."""

    def load(self) -> bytes | None:
        """What was saved last; None if nothing ever was."""
        ...

    def save(self, state: bytes) -> None:
        """Durable when this returns; raising says that it may or may not be saved."""
        ...


class LockedStorage(Storage, Protocol):
    """A storage that keeps others out by itself. Unless it is acquired, `save` raises StorageLost."""

    def acquire(self) -> None:
        """Take it. Raises StorageHeld, also if this object has it already."""
        ...

    def release(self) -> None:
        """Let others take it. Twice is once."""
        ...


class Transactional(Protocol):
    """A storage that can save in a transaction of the application's own."""

    def saving(self, state: bytes) -> AbstractContextManager[Any]:
        """Yields a cursor; what it writes and the state are committed together, or rolled back together."""
        ...


class LocalFile(OfProcess):
    """One file, and `<file>.lock` beside it. Its directory must exist. Raises OSError as the file system does."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        forget_in_child(self)

    def __str__(self) -> str:
        return str(self.path)

    def acquire(self) -> None:
        """See `LockedStorage.acquire`."""
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode(errors="replace").strip()
            os.close(lock)
            raise StorageHeld(storage=str(self), holder=holder or "another process") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()}\n".encode(), 0)
        self._lock = lock
        self._pid = self._this()

    def release(self) -> None:
        """See `LockedStorage.release`. Nothing happens in a forked child."""
        if self.inherited:
            return
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child that is being forked may have it open still
        self._pid = 0
        self.forget()

    def forget(self) -> None:
        """In a forked child: let the parent's lock be the parent's alone."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self) -> bytes | None:
        """See `Storage.load`."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def save(self, state: bytes) -> None:
        """See `Storage.save`. Raises StorageLost without the lock, StorageHeld in a forked child."""
        if self.inherited:
            raise StorageHeld(storage=str(self), holder=f"pid {self._pid}")
        if self._lock is None:
            raise StorageLost(storage=str(self), holder="nobody")
        durable_write(self.path, state, alone=True)


class Side(Closing, OfProcess):
    """One end of an ordered queue."""

    queue: Queue
    _storage: LockedStorage
    _role: str
    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _enter(self) -> None:
        """Before anything else, locks included. Raises StorageHeld in a forked child: the storage is its parent's."""
        if self.inherited:
            raise StorageHeld(storage=str(self._storage), holder=f"pid {self._pid}")

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> TransportError:
        reason = f"the ordered {self._role} of queue {self.queue.name} is closed"
        return TransportError(reason=reason, may_have_happened=False)
