"""Where the numbers are kept: the interface of a storage, a local file, objects of any store, and the user's own.

Strategy: a storage has two methods, `load` and `save`; `save` is durable when it returns. A storage that can lock
itself also has `acquire` and `release`; any other gets a lock inside its state (`StateLock`). The local file is locked
with flock, which the kernel releases when the process dies. All others write their holder into what they store
(`OwnedStorage`, records/holders.py). A table is in `veilmq.client.ordered` itself.

Objects: object stores have no compare-and-swap, but can create an object exclusively. So each holder has its own
object, `<path>.<generation>`. To take over, a process creates the next one, then reads the previous one's state. After
each save the holder checks whether a successor exists; if so, the save does not count, and it raises. Either the
successor read the state after the save, or the saver sees the successor.

Before changing it: the store must show a write to every later reader (S3 since 2020, OSS, Azure and GCS do) and refuse
to create an object that exists (`mode="create"`). A holder's silence is judged by the store's clock: the age of its
last write is compared with a new object, written to learn the time.
"""

import fcntl
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, cast

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import StorageHeld, StorageLost
from veilmq.client.records import modified_of
from veilmq.client.records.holders import HOLD_SECONDS, Envelope, Watch, closed, opened
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import OfProcess, forget_in_child
from veilmq.model.errors import ParameterInvalid
from veilmq.store.files import durable_write

_GENERATION: Final = re.compile(r"\.(\d{12})\Z")


class Storage(Protocol):
    """Any object with these two methods. Called by one thread at a time."""

    def load(self) -> bytes | None:
        """The last saved state; None if there is none."""

    def save(self, state: bytes) -> None:
        """Save durably. If it raises, the state may or may not be saved."""


class LockedStorage(Storage, Protocol):
    """A storage with its own lock. Until it is acquired, `save` raises StorageLost."""

    def acquire(self) -> None:
        """Take the lock. Raises StorageHeld, also if this object has it already."""

    def release(self) -> None:
        """Release the lock. Idempotent."""


class Transactional(Protocol):
    """A storage that can save inside the application's own transaction."""

    def saving(self, state: bytes) -> AbstractContextManager[Any]:
        """Yields a cursor; its writes and the state are committed together, or rolled back together."""


class LocalFile(OfProcess):
    """One file, and `<file>.lock` beside it. Its directory must exist. Raises the file system's OSError."""

    def __init__(self, path: Path | str) -> None:
        self.path = checks.path(path, "path")
        self._lock: int | None = None
        forget_in_child(self)

    def __str__(self) -> str:
        return str(self.path)

    def acquire(self) -> None:
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode(errors="replace").strip()
            os.close(lock)
            if holder == f"pid {os.getpid()}":
                holder += ", perhaps this process: each sender and each receiver needs a storage of its own"
            raise StorageHeld(storage=str(self), holder=holder or "another process") from None
        self._lock = lock
        self._pid = self._this()
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()}\n".encode(), 0)
        except BaseException:  # the disk is full
            self.release()
            raise

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


class OwnedStorage(ABC):
    """A storage that contains its holder's name. A storage says how it takes the hold, writes and gives up; all of
    these are called with its lock held."""

    def __init__(self, storage: str, clock: Clock, hold_seconds: float) -> None:
        self._watch = Watch(storage, clock, hold_seconds)
        self._lock = threading.Lock()

    def acquire(self) -> None:
        self._watch.enter()
        with self._lock:
            self._watch.enter_free()
            self._take()
            self._watch.start(self._renew)

    def release(self) -> None:
        """See `LockedStorage.release`. Does nothing in a forked child."""
        if self._watch.inherited:
            return
        self._watch.stop()
        with self._lock:
            self._give_up()

    def load(self) -> bytes | None:
        self._watch.enter()
        with self._lock:
            return self._state_now()

    def save(self, state: bytes) -> None:
        """See `Storage.save`. Raises StorageLost, and StorageHeld in a forked child."""
        self._watch.enter()
        with self._lock:
            self._watch.check_held()
            self._write(state)

    def _renew(self) -> None:
        with self._lock:
            self._prolong()

    @abstractmethod
    def _take(self) -> None:
        """Become the holder. Raises StorageHeld."""

    @abstractmethod
    def _give_up(self) -> None:
        """Be the holder no longer, if this is the holder."""

    @abstractmethod
    def _state_now(self) -> bytes | None:
        """The state that was saved last."""

    @abstractmethod
    def _write(self, state: bytes) -> None:
        """Save the state, and the hold from now on. Raises StorageLost."""

    @abstractmethod
    def _prolong(self) -> None:
        """Write the hold from now on, with the state as it is. Raises StorageLost."""


class StateLock(OwnedStorage):
    """A lock for a storage that has only `load` and `save`.

    Two processes that acquire it at the same instant can both believe that they hold it until one of them saves; then
    the other gets StorageLost. Storages with their own lock do not have this race. Each machine judges the expiry by
    its own clock, because `load` and `save` return no time.
    """

    def __init__(self, storage: Storage, *, clock: Clock = SYSTEM, hold_seconds: float = HOLD_SECONDS) -> None:
        self.storage = storage
        super().__init__(str(self), clock, hold_seconds)

    def __str__(self) -> str:
        return type(self.storage).__name__

    def _take(self) -> None:
        found = self._read()
        self._watch.admit(found.owner)
        self.storage.save(closed(self._watch.owner(), found.content))
        self._watch.admit(self._read().owner)

    def _give_up(self) -> None:
        found = self._read()
        try:
            self._watch.check(found.owner)
        except StorageLost:
            return
        self.storage.save(closed(None, found.content))

    def _state_now(self) -> bytes | None:
        return self._read().content

    def _write(self, state: bytes) -> None:
        self._watch.check(self._read().owner)
        self.storage.save(closed(self._watch.owner(), state))

    def _prolong(self) -> None:
        found = self._read()
        self._watch.check(found.owner)
        self.storage.save(closed(self._watch.owner(), found.content))

    def _read(self) -> Envelope:
        return opened(self.storage.load(), str(self))


class ObjectStorage(OwnedStorage):
    """A storage of objects beside `url`. Raises the file system's errors (OSError)."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        filesystem: Any = None,
        clock: Clock = SYSTEM,
        hold_seconds: float = HOLD_SECONDS,
        **options: Any,
    ) -> None:
        """url: such as s3://bucket/orders/sender. filesystem: an existing fsspec file system; else `options` go to
        fsspec. hold_seconds: after this long without a renewal another process may take over.
        """
        self._url = url = checks.text(os.fspath(url) if isinstance(url, os.PathLike) else url, "url")
        if filesystem is None:
            import fsspec

            filesystem, self._path = fsspec.core.url_to_fs(url, **options)
        else:
            self._path = filesystem._strip_protocol(url)
        self._files = filesystem
        super().__init__(url, clock, hold_seconds)
        self._generation = 0
        self._state: bytes | None = None

    def __str__(self) -> str:
        return self._url

    @property
    def generation(self) -> int:
        """The number of this hold, greater than that of every earlier one; 0: it is not held."""
        return self._generation

    def _take(self) -> None:
        before = self._generations()
        with self._gone_is_held():
            latest = self._read(before[-1]) if before else Envelope()
            if latest.owner is not None:
                self._watch.admit(latest.owner, self._age(before[-1]))
        generation = before[-1] + 1 if before else 1
        try:
            self._files.pipe_file(self._object(generation), closed(self._watch.owner(), None), mode="create")
        except Exception as error:  # a store may raise anything, also after it has created the object
            if not self._has_created(generation):
                if isinstance(error, FileExistsError):
                    raise self._held() from None
                raise
        # A predecessor that died between its creation and its first save left no state: use the one before it.
        with self._gone_is_held():
            self._state = self._newest(before)
        self._generation = generation
        self._put(self._state)
        for each in before:
            with suppress(FileNotFoundError):  # a successor has removed it already
                self._files.rm_file(self._object(each))

    def _has_created(self, generation: int) -> bool:
        """Whether the object is this holder's: the answer to its creation was lost, and perhaps it was tried again."""
        try:
            self._watch.check(self._read(generation).owner)
        except (StorageLost, FileNotFoundError):
            return False
        return True

    def _give_up(self) -> None:
        if self._generation and self._generations()[-1:] == [self._generation]:
            self._files.pipe_file(self._object(self._generation), closed(None, self._state))
        self._generation = 0

    def _state_now(self) -> bytes | None:
        return self._state if self._generation else self._newest(self._generations())

    def _write(self, state: bytes) -> None:
        self._put(state)
        self._state = state

    def _prolong(self) -> None:
        if self._generation:
            self._put(self._state)

    def _put(self, state: bytes | None) -> None:
        self._files.pipe_file(self._object(self._generation), closed(self._watch.owner(), state))
        latest = self._generations()[-1]
        if latest != self._generation:
            raise StorageLost(storage=self._url, holder=str(self._read(latest).owner or "another process"))

    def _newest(self, generations: list[int]) -> bytes | None:
        """The state of the newest of these that has one."""
        found = (self._read(each).content for each in reversed(generations))
        return next((content for content in found if content is not None), None)

    @contextmanager
    def _gone_is_held(self) -> Iterator[None]:
        """Raises StorageHeld if an object that existed a moment ago is missing: somebody took over."""
        try:
            yield
        except FileNotFoundError:
            raise self._held() from None

    def _held(self) -> StorageHeld:
        return StorageHeld(storage=self._url, holder="another process")

    def _read(self, generation: int) -> Envelope:
        return opened(self._files.cat_file(self._object(generation)), self._url)

    def _age(self, generation: int) -> float | None:
        """Seconds since the object was written, by the store's clock; None: the store does not report it."""
        probe = f"{self._path}.{secrets.token_hex(8)}.now"
        self._files.pipe_file(probe, b"now")
        try:
            self._files.invalidate_cache()
            written, now = (modified_of(self._files.info(path)) for path in (self._object(generation), probe))
        finally:
            self._files.rm_file(probe)
        return None if written is None or now is None else now - written

    def _generations(self) -> list[int]:
        """All generations, in rising order."""
        parent, _, name = self._path.rpartition("/")
        self._files.invalidate_cache()
        try:
            names = self._files.ls(parent, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        found = (_GENERATION.search(each) for each in names if each.rpartition("/")[2][:-13] == name)
        return sorted(int(each[1]) for each in found if each is not None)

    def _object(self, generation: int) -> str:
        return f"{self._path}.{generation:012d}"


def locked(storage: Storage, clock: Clock) -> LockedStorage:
    """The storage itself if it has a lock, else wrapped in a StateLock. Raises ParameterInvalid."""
    for method in ("load", "save"):
        if not callable(getattr(storage, method, None)):
            reason = f"{type(storage).__name__} has no method {method}: it takes a storage, such as LocalFile(path)"
            raise ParameterInvalid(parameter="storage", reason=reason)
    if hasattr(storage, "acquire") and hasattr(storage, "release"):
        return cast(LockedStorage, storage)
    return StateLock(storage, clock=clock)
