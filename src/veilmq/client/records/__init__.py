"""Small records by key, kept in a directory or in an object store (both here), or in a table (tables.py).

Strategy: read with version, write if version. Whoever changes a record names the content that the decision was made on;
if the record changed meanwhile, nothing is written, and the decision is made again. The patterns on top (guards,
checkpoints, ordered storages) hold the decisions; a backend makes one write atomic and durable.

In a directory each record is a file, replaced whole, by rename with fsync. A change compares and writes under an flock,
which the kernel releases when its holder dies. Readers take no lock: they see the old content or the new. Meant for the
processes of one machine: on network file systems flock may not be reliable.

A directory of this user alone (`make_own`), below one that everybody may write to, such as /tmp: another user could
create it first and put files into it that this user then runs or trusts. So its name contains the user's id, its mode
is 0700, and a directory that another user owns or may write to is refused.

An `ObjectStore` is the objects below one URL, also for large messages and topic definitions. fsspec speaks to each
store; this module adds the form of keys, retries, and typed errors. A key is relative to the URL and uses a safe
alphabet, so no key can leave it. A local file is written under another name, synced and renamed, because fsspec does
neither. A table by protocol lists what a store raises besides OSError.

Before changing it: an object store cannot compare before it writes. What is kept there has a new object for each
version, and the highest number counts (docs/decisions/0015-records.md).
"""

import datetime
import errno
import fcntl
import hashlib
import importlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from veilmq.client.errors import ObjectStoreFailed
from veilmq.client.queue import options_identity
from veilmq.client.shared import checks
from veilmq.model.errors import ParameterInvalid
from veilmq.store.files import durable_write, make_directory

T = TypeVar("T")

KEY: Final = re.compile(r"[A-Za-z0-9._=@+-]+(?:/[A-Za-z0-9._=@+-]+)*\Z")
KEY_CHARACTERS_MAX: Final = 900
"""S3 allows 1,024 bytes, our own prefix included."""
_DOTS: Final = re.compile(r"(?:\A|/)\.{1,2}(?:/|\Z)")
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([^?#]+)\Z")

_FAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError", "aiohttp.ClientError"),
    "gs": ("aiohttp.ClientError", "gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError"),
    "abfs": ("azure.core.exceptions.AzureError",),
    "oss": ("oss2.exceptions.OssError",),
}
"""Exceptions of a store's fsspec implementation besides OSError."""
_ALIASES: Final = {"s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs", "adl": "abfs"}
_FINAL: Final = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors that a retry cannot fix."""
_MODIFIED: Final = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""The names under which implementations report when an object was written."""


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

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
        """Store `after` durably if the record still is `before`; False if it is not. fence: of `after`, for backends
        that keep it beside the content."""


class Contents(Protocol):
    """Whole contents by path, which is relative and of safe characters. Any thread."""

    def get(self, path: str, /) -> bytes | None:
        """The content; None if there is none."""

    def put(self, path: str, content: bytes, /) -> None:
        """Store it durably, in place of any other."""

    def remove(self, path: str, /) -> object:
        """Remove it, if it is there."""

    def remove_directory(self, path: str, /) -> None:
        """Remove a directory that has become empty, where there are directories."""

    def keys(self, below: str, /) -> Sequence[str]:
        """The paths that begin with `below` and a slash."""


_LOCK = ".lock"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def hashed(key: str) -> str:
    """The key as a name that every storage accepts."""
    return hashlib.sha256(key.encode()).hexdigest()


class Directory:
    """Files by relative path. The directory is made if it is missing, but not the one above it: a mistyped path would
    become a new tree without a record in it. All calls raise OSError."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = checks.path(directory, "directory")
        above = self.directory.absolute().parent
        if not above.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such directory, make it first", str(above))
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
        return Seen(self.get(_path(key)))

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
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


class Found(msgspec.Struct, frozen=True):
    """One object of a listing."""

    key: str
    size_bytes: int
    modified: float | None
    """Unix seconds, by the store's clock; None if it does not report it."""


class ObjectStore:
    """The objects below `url`. Any thread.

    All calls but the constructor raise ObjectStoreFailed once all `attempts` failed, ParameterInvalid for an invalid
    key.
    """

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        attempts: int = 4,
        pause: float = 0.2,
        faults: tuple[type[Exception], ...] = (),
    ) -> None:
        """url: `scheme://bucket/prefix`, e.g. s3://, oss://, abfs://, gs://, file:///directory, memory://. options: for
        the fsspec implementation, e.g. `endpoint_url` or credentials. attempts: per call, including the first. pause:
        seconds before the second attempt; doubles each time. faults: further exceptions of the implementation to retry
        after.

        Raises ParameterInvalid (an invalid URL, a scheme whose package is missing), ModuleNotFoundError (without the
        extra `large`).
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        split = _URL.match(str(url))
        if split is None or "::" in url or not split[2].strip("/") or _DOTS.search(split[2]):
            reason = "must be scheme://bucket/prefix, as in s3://bucket/large or file:///var/large"
            raise ParameterInvalid(parameter="url", reason=reason)
        options = checks.mapping({} if options is None else options, "options")
        checks.at_least(attempts, "attempts", 1)
        checks.not_negative(pause, "pause")
        self.url = url.rstrip("/")
        self.scheme = split[1]
        try:
            # A cached listing would show a sweep the state of an hour ago. A URL may name an account, too (abfs).
            self._files: Any = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)[0]
        except (ImportError, ValueError) as error:
            raise ParameterInvalid(parameter="url", reason=f"{self.scheme}://: {error}") from None
        named = options_identity(options)
        self.identity = None if named is None else ("objects", self.url, named, attempts, pause, faults)
        """See `veilmq.client.queue`."""
        self._root: str = self._files._strip_protocol(self.url)
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._attempts, self._pause = attempts, pause
        self.faults: tuple[type[BaseException], ...] = (OSError, EOFError, *faults, *_faults(self.scheme))
        """What the implementation raises."""

    @property
    def bucket(self) -> str:
        """First part of the path."""
        return self._root.strip("/").partition("/")[0]

    @property
    def prefix(self) -> str:
        """The rest of the path with a trailing slash, or empty."""
        rest = self._root.strip("/").partition("/")[2]
        return f"{rest}/" if rest else ""

    def put(self, key: str, content: bytes) -> None:
        """Write the whole object. When this returns it is durable, in the sense of a remote store where it is one."""
        path = self._path(key)
        if self._is_local:
            self._try("put", lambda: _put_local(path, content))
        else:
            self._try("put", lambda: self._files.pipe_file(path, content))

    def create(self, key: str, content: bytes) -> bool:
        """Write the object unless it exists; False if it does. Atomic for local files, memory and Amazon S3.

        content: must be unique to the writer, e.g. by a token: after a lost answer, we recognise our own write by it.
        """
        path = self._path(key)
        attempts = 0

        def write() -> None:
            nonlocal attempts
            attempts += 1
            if self._is_local:
                _put_local(path, content, exclusive=True)
            else:
                self._files.pipe_file(path, content, mode="create")

        try:
            self._try("create", write)
        except FileExistsError:
            return attempts > 1 and self.get(key) == content
        return True

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes from `start` up to, not including, `stop`, or fewer if the object ends before; None if it does not
        exist."""
        path = self._path(key)
        if stop is not None and stop <= start:
            return b""
        try:
            content = self._try("get", lambda: self._files.cat_file(path, start=start or None, end=stop))
        except FileNotFoundError:
            return None
        return bytes(content)

    def size_bytes(self, key: str) -> int | None:
        """Its size; None if it does not exist."""
        found = self.found(key)
        return None if found is None else found.size_bytes

    def found(self, key: str) -> Found | None:
        """The object as a listing shows it; None if it does not exist."""
        path = self._path(key)
        try:
            entry = self._try("size", lambda: self._files.info(path))
        except FileNotFoundError:
            return None
        if entry.get("type") == "directory":
            return None
        return Found(key, int(entry.get("size") or 0), modified_of(entry))

    def remove(self, key: str) -> bool:
        """Remove the object; False if the store reports that it did not exist."""
        path = self._path(key)
        try:
            self._try("remove", lambda: self._files.rm_file(path))
        except FileNotFoundError:
            return False
        return True

    def remove_directory(self, key: str) -> None:
        """Remove an empty directory, where the store has directories; nobody may be writing into it."""
        if self._is_local:
            try:
                os.rmdir(self._path(key))
            except OSError:
                pass

    def list(self, below: str) -> Iterator[Found]:
        """The objects whose keys begin with `below` and a slash; all if it is empty."""
        path = self._path(below) if below else self._root
        try:
            found: Any = self._try("list", lambda: self._files.find(path, detail=True))
        except FileNotFoundError:
            return
        # `find` also returns an object whose key is `below` itself; then adlfs returns its name, and no dict.
        for name, entry in found.items() if isinstance(found, dict) else ():
            if not name.startswith(f"{path}/"):
                continue
            yield Found(name[len(self._root) + 1 :], int(entry.get("size") or 0), modified_of(entry))

    def keys(self, below: str) -> Sequence[str]:
        """The keys that `list` finds."""
        return [found.key for found in self.list(below)]

    def key_of(self, url: str) -> str | None:
        """The key of the object with this URL; None if it is not below ours."""
        key = url[len(self.url) + 1 :]
        return key if url.startswith(f"{self.url}/") and is_key(key) else None

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def _path(self, key: str) -> str:
        if not is_key(key):
            raise ParameterInvalid(parameter="key", reason="is none of this store")
        return f"{self._root}/{key}"

    def _try(self, operation: str, call: Callable[[], T]) -> T:
        """The result of the call. FileNotFoundError and FileExistsError are raised unchanged, except for a put."""
        pause = self._pause
        for number in range(1, self._attempts + 1):
            try:
                return call()
            except FileNotFoundError:
                if operation not in {"put", "create"}:
                    raise
                raise ObjectStoreFailed(operation=operation, reason="the bucket is missing", refused=True) from None
            except self.faults as error:
                if operation == "create" and _is_conflict(error):
                    raise FileExistsError from None
                if number == self._attempts or isinstance(error, _FINAL):
                    # Only the error's type: its text may quote the store's address, with a secret in it.
                    reason = f"{type(error).__name__} after {number} attempts"
                    raise ObjectStoreFailed(
                        operation=operation, reason=reason, refused=isinstance(error, _FINAL)
                    ) from error
            time.sleep(pause)
            pause *= 2
        raise AssertionError("attempts ran out")


def is_key(key: str) -> bool:
    """Whether it is a relative path of safe characters without `.` and `..`."""
    return len(key) <= KEY_CHARACTERS_MAX and bool(KEY.match(key)) and not _DOTS.search(key)


def _is_conflict(error: BaseException) -> bool:
    """S3 answers 412 PreconditionFailed, which reaches us as some OSError."""
    return isinstance(error, FileExistsError) or "PreconditionFailed" in repr(error) or "pre-condition" in repr(error)


def _faults(scheme: str) -> Iterator[type[Exception]]:
    for name in _FAULTS.get(_ALIASES.get(scheme, scheme), ()):
        module, _, kind = name.rpartition(".")
        try:
            yield getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):
            continue


def modified_of(entry: Mapping[str, Any]) -> float | None:
    """When the object was written, from fsspec's entry of it: Unix seconds, by the store's clock."""
    for name in _MODIFIED:
        written = entry.get(name)
        if isinstance(written, datetime.datetime):
            return (written if written.tzinfo else written.replace(tzinfo=datetime.UTC)).timestamp()
        if isinstance(written, int | float):
            return float(written)
        if isinstance(written, str):
            try:
                return datetime.datetime.fromisoformat(written).timestamp()
            except ValueError:
                continue
    return None


def _put_local(path: str, content: bytes, *, exclusive: bool = False) -> None:
    place = Path(path)
    make_directory(place.parent, 0o700, 0o700)
    durable_write(place, content, exclusive=exclusive)
