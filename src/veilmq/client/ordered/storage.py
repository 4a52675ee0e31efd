"""Where the numbers are kept: the interface of a storage, and the local file.

Strategy: a storage has two methods, `load` and `save`; `save` is durable when it returns. A storage that can lock
itself also has `acquire` and `release`; any other gets a lock inside its state (locks.py). The local file is written to
a temporary file, synced and renamed, and locked with flock, which the kernel releases when the process dies.
"""

import fcntl
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from veilmq.client.errors import StorageHeld, StorageLost, TransportError
from veilmq.client.queue import Queue
from veilmq.client.threads import Closing, OfProcess, forget_in_child
from veilmq.store.files import durable_write


class Storage(Protocol):
    """Any object with these two methods. Called by one thread at a time."""

    def load(self) -> bytes | None:
        """The last saved state; None if there is none."""
        ...

    def save(self, state: bytes) -> None:
        """Save durably. If it raises, the state may or may not be saved."""
        ...


class LockedStorage(Storage, Protocol):
    """A storage with its own lock. Until it is acquired, `save` raises StorageLost."""

    def acquire(self) -> None:
        """Take the lock. Raises StorageHeld, also if this object has it already."""
        ...

    def release(self) -> None:
        """Release the lock. Idempotent."""
        ...


class Transactional(Protocol):
    """A storage that can save inside the application's own transaction."""

    def saving(self, state: bytes) -> AbstractContextManager[Any]:
        """Yields a cursor; its writes and the state are committed together, or rolled back together."""
        ...


class LocalFile(OfProcess):
    """One file, and `<file>.lock` beside it. Its directory must exist. Raises the file system's OSError."""

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
        """See `LockedStorage.release`. Does nothing in a forked child."""
        if self.inherited:
            return
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child that is just being forked may still have it open
        self._pid = 0
        self.forget()

    def forget(self) -> None:
        """In a forked child: leave the lock to the parent."""
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
    """The sending or the receiving side of an ordered queue."""

    queue: Queue
    _storage: LockedStorage
    _role: str
    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _enter(self) -> None:
        """Call it before anything else, including locks. Raises StorageHeld in a forked child: its parent has the
        storage."""
        if self.inherited:
            raise StorageHeld(storage=str(self._storage), holder=f"pid {self._pid}")

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> TransportError:
        reason = f"the ordered {self._role} of queue {self.queue.name} is closed"
        return TransportError(reason=reason, may_have_happened=False)
