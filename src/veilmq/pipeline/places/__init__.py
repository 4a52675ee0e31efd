"""Directories that the pipeline writes: local ones, and those below the URL of an object store.

Strategy: `place` makes a path of what the user gave: a `Path`, or for a URL an `ObjectPath`, which has the methods of
`Path` that the pipeline uses, over the client's `ObjectStore` with its retries. So code that lists, reads whole files
and removes them works on both. What differs is here: a durable write, and the lock. A local lock is an flock, which the
kernel releases when its process ends. On an object store it is a hold (`client.ordered.storage`): objects that only one
process can create, because the store creates none that exists (If-None-Match), and that expire unless they are renewed.

A hold that expired while its process slept is noticed late. So names make a late write harmless: an exported file is
named by its offsets, and two files of the same offsets hold the same events; a manifest by the number of its hold.

Before changing it: credentials come from the environment or fsspec's configuration, on the driver and on executors. An
option would show them in Spark's logs and event history.
"""

import fcntl
import io
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import ObjectStoreFailed, StorageHeld, StorageLost
from veilmq.client.records import Found, ObjectStore, is_key
from veilmq.model.errors import ParameterInvalid
from veilmq.pipeline.errors import OptionInvalid, PipelineError
from veilmq.store.files import durable_write, give_to_owner_of, locked, make_directory, take_name, unlock

LOCK: Final = "lock"
"""The file of a `FileLock`."""
HOLD_SECONDS: Final = 30.0
"""How long a directory of an object store stays taken after its process died on another machine."""
_LOOK_SECONDS: Final = 0.05
_LOOK_SECONDS_FAR: Final = 1.0
_AHEAD_BYTES: Final = 4 << 20
_LOCAL: Final = ("file://", "file:")


class PlaceFailed(PipelineError):
    """The object store did not do it. Running again may help."""


class PlaceTaken(PipelineError):
    """Another process holds the lock; `wrong` names it."""


class ObjectPath:
    """An object or a directory below an `ObjectStore`; the methods are those of `pathlib.Path`.

    Raises PlaceFailed where a `Path` raises OSError, but for FileNotFoundError.
    """

    __slots__ = ("key", "store")

    def __init__(self, store: ObjectStore, key: str = "") -> None:
        self.store, self.key = store, key

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: "ObjectPath") -> bool:
        return self.key < other.key

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.store, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def parent(self) -> "ObjectPath":
        """The directory, within the store's URL."""
        return ObjectPath(self.store, self.key.rpartition("/")[0])

    def with_suffix(self, suffix: str) -> "ObjectPath":
        return self.parent / f"{self.stem}{suffix}"

    def exists(self) -> bool:
        """Whether there is an object, or anything below."""
        return (bool(self.key) and self._try(self.store.found, self.key) is not None) or self.is_dir()

    def is_dir(self) -> bool:
        """Whether there is anything below."""
        return next(iter(self._below()), None) is not None

    def iterdir(self) -> "Iterator[ObjectPath]":
        return self.glob("*")

    def glob(self, pattern: str) -> "Iterator[ObjectPath]":
        """See `Path.glob`; `**` is not known. One listing of everything below."""
        wanted = pattern.split("/")
        seen: dict[str, None] = {}
        for found in self._below():
            parts = found.key[len(self.key) :].lstrip("/").split("/")[: len(wanted)]
            if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
                seen["/".join(parts)] = None
        return (self / each for each in seen)

    def everything(self) -> "Iterator[ObjectPath]":
        """All objects below."""
        return (ObjectPath(self.store, found.key) for found in self._below())

    def read_bytes(self) -> bytes:
        content = self._try(self.store.get, self.key)
        if content is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return bytes(content)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, content: Any) -> None:
        """The whole object, durably."""
        self._try(self.store.put, self.key, content)

    def create(self, content: bytes) -> bool:
        """The whole object; False if it exists."""
        return bool(self._try(self.store.create, self.key, content))

    def unlink(self, missing_ok: bool = False) -> None:
        """See `Path.unlink`; a missing object is no error."""
        self._try(self.store.remove, self.key)

    def size_bytes(self) -> int:
        """Its size. Raises FileNotFoundError."""
        return self._found().size_bytes

    def modified(self) -> float:
        """When it was written: Unix seconds, by the store's clock. Raises FileNotFoundError."""
        return self._found().modified or SYSTEM.wall()

    def _found(self) -> Found:
        found: Found | None = self._try(self.store.found, self.key)
        if found is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return found

    def _below(self) -> list[Found]:
        listed: list[Found] = self._try(lambda key: list(self.store.list(key)), self.key)
        return listed

    def _try(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except ObjectStoreFailed as error:
            raise _failed(self, error) from error


Place = Path | ObjectPath


def _failed(place: object, error: BaseException) -> PlaceFailed:
    return PlaceFailed(f"{place} cannot be used: {error}.", "Is its store there, and may this process use it?")


def place(given: "Path | str | ObjectPath") -> Place:
    """The directory or file that the user means. Raises OptionInvalid for a URL that cannot be used."""
    if isinstance(given, Path | ObjectPath):
        return given
    local = here(given)
    if local is not None:
        return local
    if given.startswith("memory:"):
        mend = "Name an absolute path, or a URL such as s3://bucket/directory."
        raise OptionInvalid(f"{given} cannot be: only one process sees it.", mend)
    parent, _, name = given.rstrip("/").rpartition("/")
    try:
        # Of a bucket, and of a name that is no key, only what is below can be named.
        is_split = not parent.endswith(":/") and is_key(name)
        return ObjectPath(ObjectStore(parent), name) if is_split else ObjectPath(ObjectStore(given))
    except ModuleNotFoundError as error:
        mend = "pip install 'veilmq[pipeline]', and the store's own: s3fs, adlfs, gcsfs or ossfs."
        raise OptionInvalid(f"{given}: the package {error.name} is missing.", mend) from None
    except ParameterInvalid as error:
        raise OptionInvalid(f"{given!r} cannot be: {error.reason}.", "It looks like s3://bucket/directory.") from None


def is_url(given: object) -> bool:
    """Whether it names an object store."""
    return "://" in str(given) and not str(given).startswith(_LOCAL[0])


def here(given: Path | str) -> Path | None:
    """The path that a text or a file URI names; None for a URL. As for Spark, a file URI has no encoded letters."""
    return None if is_url(given) else Path(str(given).removeprefix(_LOCAL[0]).removeprefix(_LOCAL[1]))


def make(directory: Place, mode: int = 0o777) -> None:
    """Create a local directory; a store has none."""
    if isinstance(directory, Path):
        make_directory(directory, mode)


def listed(directory: Place, *patterns: str) -> list[Place]:
    """What is there, in the order of names."""
    found: list[Place] = [path for pattern in patterns for path in directory.glob(pattern)]
    return sorted(found, key=str)


def put(path: Place, content: Any) -> None:
    """Write a file whole and durably. Raises OSError for a local one, else PlaceFailed."""
    if isinstance(path, Path):
        durable_write(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else bytes(content))


def remove(directory: Place) -> None:
    """A directory and all in it, or a file."""
    if isinstance(directory, ObjectPath):
        for each in directory.everything():
            each.unlink()
        directory.unlink()
    elif directory.is_dir():
        shutil.rmtree(directory)
    else:
        directory.unlink(missing_ok=True)


def modified(path: Place) -> float:
    """Unix seconds, by the clock of the store or file system."""
    return path.stat().st_mtime if isinstance(path, Path) else path.modified()


@contextmanager
def whole(path: Place) -> Iterator[Any]:
    """What pyarrow writes a file to, which takes its name durably when the body ends; if it fails, nothing does."""
    if isinstance(path, Path):
        make_directory(path.parent)
        part = path.with_name(f".{path.name}.part")
        yield part
        take_name(part, path)
        return
    sink = pa.BufferOutputStream()
    yield sink
    put(path, sink.getvalue())


def source(path: Place) -> Any:
    """What pyarrow reads: the path, or a file of ranged reads."""
    return path if isinstance(path, Path) else io.BufferedReader(_Ranges(path), _AHEAD_BYTES)


class _Ranges(io.RawIOBase):
    """An object, read by ranges."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._at, self._size_bytes = path, 0, path.size_bytes()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size_bytes)
        try:
            content = self._path.store.get(self._path.key, self._at, stop)
        except ObjectStoreFailed as error:
            raise _failed(self._path, error) from error
        if content is None:
            raise FileNotFoundError(2, "No such object", str(self._path))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class FileLock:
    """An flock on `lock` in a directory, which also keeps one small state beside it. Released by the kernel."""

    number: Final = 0
    """Of a hold, which grows with each holder; local locks need none."""

    def __init__(self, directory: Path, state: str, mode: int = 0o600) -> None:
        self._directory, self._state, self._mode = directory, directory / state, mode
        self._file = self._pid = -1

    def try_take(self) -> None:
        """Raises PlaceTaken, with the holder's process."""
        path, flags = self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags | os.O_EXCL, 0o600)
            give_to_owner_of(self._directory, file)  # not a file that is there: it may be a link to another one
        except FileExistsError:
            file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip()
            os.close(file)
            raise PlaceTaken(f"process {holder or 'unknown'}", "") from None
        except OSError:  # the file system has no locks
            os.close(file)
            raise
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        self._file, self._pid = file, os.getpid()

    def release(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            unlock(self._file, self._pid)
            os.close(self._file)
            self._file = -1

    def load(self) -> bytes | None:
        """The state; None if there is none."""
        try:
            return self._state.read_bytes()
        except FileNotFoundError:
            return None

    def save(self, state: bytes) -> None:
        """Durable when it returns. Raises OSError."""
        durable_write(self._state, state, mode=self._mode, alone=True)


class ObjectLock:
    """A hold on a directory of an object store, whose objects keep the state: `<state>.<number>`."""

    def __init__(self, directory: ObjectPath, state: str, clock: Clock = SYSTEM) -> None:
        self._directory = directory
        from veilmq.client.ordered.storage import ObjectStorage

        self._storage = ObjectStorage(str(directory / state), clock=clock, hold_seconds=HOLD_SECONDS)
        self._is_checked = False

    @property
    def number(self) -> int:
        return self._storage.generation

    def try_take(self) -> None:
        """Raises PlaceTaken; OptionInvalid if the store cannot lock."""
        if not self._is_checked:
            check_creates(self._directory)
            self._is_checked = True
        with self._failing():
            try:
                self._storage.acquire()
            except StorageHeld as error:
                raise PlaceTaken(error.holder, "") from None

    def release(self) -> None:
        """Idempotent. If the store cannot be reached, the hold expires."""
        try:
            with self._failing():
                self._storage.release()
        except PlaceFailed:
            pass

    def load(self) -> bytes | None:
        with self._failing():
            return self._storage.load()

    def save(self, state: bytes) -> None:
        """Raises PlaceTaken if another process has taken over meanwhile, whatever this one wrote."""
        with self._failing():
            try:
                self._storage.save(state)
            except StorageLost as error:
                raise PlaceTaken(error.holder, "") from None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise PlaceTaken("another process", "") from None
        except self._directory.store.faults as error:
            raise _failed(self._directory, error) from error


def check_creates(directory: ObjectPath) -> None:
    """Raises OptionInvalid if its store overwrites what it was asked to create: two processes would have it."""
    store = directory.store
    key = (directory / f".lock-{secrets.token_hex(8)}").key
    try:
        can = store.create(key, b"1") and not store.create(key, b"2")
    except (TypeError, NotImplementedError):
        can = False
    except ObjectStoreFailed as error:
        raise _failed(directory, error) from error
    finally:
        with suppress(ObjectStoreFailed):
            store.remove(key)
    if not can:
        wrong = f"{directory}: its store cannot lock, as it overwrites an object that exists."
        raise OptionInvalid(wrong, "Name one with conditional writes (If-None-Match), or a local directory.")


Lock = FileLock | ObjectLock


class Patience(NamedTuple):
    """How long a lock is waited for."""

    seconds: float
    clock: Clock = SYSTEM


def lock_of(directory: Place, state: str, patience: Patience, mode: int = 0o600) -> Lock:
    """Take the directory's lock. mode: of a local state's file.

    Raises PlaceTaken, OptionInvalid, PlaceFailed; OSError for a local directory."""
    if isinstance(directory, Path):
        lock: Lock = FileLock(directory, state, mode)
        seconds, pause = patience.seconds, _LOOK_SECONDS
    else:
        lock = ObjectLock(directory, state, patience.clock)
        seconds, pause = patience.seconds, _LOOK_SECONDS_FAR
    end = patience.clock.monotonic() + seconds
    while True:
        try:
            lock.try_take()
            return lock
        except PlaceTaken:
            if patience.clock.monotonic() >= end:
                raise
        time.sleep(pause)


def kept(directory: Place, state: str) -> bytes | None:
    """The state that the lock keeps, also while another process holds it."""
    lock = FileLock(directory, state) if isinstance(directory, Path) else ObjectLock(directory, state)
    return lock.load()


Taken = Callable[[str, str], Exception]
"""Makes the error of what is wrong and what to do."""


@contextmanager
def alone(directory: Place, name: str, taken: Taken, who: str) -> Iterator[Callable[[], None]]:
    """Hold the directory's lock `name`. If it is held already, raises `taken`, as `veilmq.store.files.locked` does.

    Yields what checks that it is held still; it raises `taken` too.
    """
    if isinstance(directory, Path):
        with locked(directory / name, taken, who):
            yield lambda: None
        return
    mend = "Wait until it ends, or give this one a directory of its own."

    def failed(error: PlaceTaken) -> Exception:
        return taken(f"{who} works in {directory} ({error.wrong}).", mend)

    try:
        lock = lock_of(directory, name, Patience(0))
    except PlaceTaken as error:
        raise failed(error) from None

    def check() -> None:
        try:
            lock.save(b"{}")
        except PlaceTaken as error:
            raise failed(error) from None

    try:
        yield check
    finally:
        lock.release()
