"""Numbers in an object of any store that fsspec reaches: S3, OSS, Azure, GCS, a directory.

Strategy: object stores have no compare-and-swap, but can create an object exclusively. So each holder has its own
object, `<path>.<generation>`. To take over, a process creates the next one, then reads the previous one's state. After
each save the holder checks whether a successor exists; if so, the save does not count, and it raises. Either the
successor read the state after the save, or the saver sees the successor.

Before changing it: the store must show a write to every later reader (S3 since 2020, OSS, Azure and GCS do) and refuse
to create an object that exists (`mode="create"`). A holder's silence is judged by the store's clock: the age of its
last write is compared with a new object, written to learn the time.
"""

import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import StorageHeld, StorageLost
from veilmq.client.ordered.locks import HOLD_SECONDS, Envelope, Watch, closed, opened
from veilmq.client.records.objects import modified_of

_GENERATION: Final = re.compile(r"\.(\d{12})\Z")


class ObjectStorage:
    """A storage of objects beside `url`. Raises the file system's errors (OSError)."""

    def __init__(
        self,
        url: str,
        *,
        filesystem: Any = None,
        clock: Clock = SYSTEM,
        hold_seconds: float = HOLD_SECONDS,
        **options: Any,
    ) -> None:
        """url: such as s3://bucket/orders/sender. filesystem: an existing fsspec file system; else `options` go to
        fsspec. hold_seconds: after this long without a renewal another process may take over.
        """
        self._url = url
        if filesystem is None:
            import fsspec

            filesystem, self._path = fsspec.core.url_to_fs(url, **options)
        else:
            self._path = filesystem._strip_protocol(url)
        self._files = filesystem
        self._watch = Watch(url, clock, hold_seconds)
        self._lock = threading.Lock()
        self._generation = 0
        self._state: bytes | None = None

    def __str__(self) -> str:
        return self._url

    def acquire(self) -> None:
        """See `LockedStorage.acquire`."""
        self._watch.enter()
        with self._lock:
            self._watch.enter_free()
            before = self._generations()
            with self._gone_is_held():
                latest = self._read(before[-1]) if before else Envelope()
                if latest.owner is not None:
                    self._watch.admit(latest.owner, self._age(before[-1]))
            generation = before[-1] + 1 if before else 1
            try:
                self._files.pipe_file(self._object(generation), closed(self._watch.owner(), None), mode="create")
            except FileExistsError:
                raise self._held() from None
            # A predecessor that died between its creation and its first save left no state: use the one before it.
            with self._gone_is_held():
                self._state = next(
                    (content for each in reversed(before) if (content := self._read(each).content) is not None), None
                )
            self._generation = generation
            self._write(self._state)
            for each in before:
                with suppress(FileNotFoundError):  # a successor has removed it already
                    self._files.rm_file(self._object(each))
            self._watch.start(self._renew)

    def release(self) -> None:
        """See `LockedStorage.release`."""
        if self._watch.inherited:
            return
        self._watch.stop()
        with self._lock:
            if self._generation and self._generations()[-1:] == [self._generation]:
                self._files.pipe_file(self._object(self._generation), closed(None, self._state))
            self._generation = 0

    def load(self) -> bytes | None:
        """See `Storage.load`."""
        self._watch.enter()
        with self._lock:
            if self._generation:
                return self._state
            found = (self._read(each).content for each in reversed(self._generations()))
            return next((content for content in found if content is not None), None)

    def save(self, state: bytes) -> None:
        """See `Storage.save`. Raises StorageLost, and StorageHeld in a forked child."""
        self._watch.enter()
        with self._lock:
            self._watch.check_held()
            self._write(state)
            self._state = state

    def _renew(self) -> None:
        with self._lock:
            if self._generation:
                self._write(self._state)

    def _write(self, state: bytes | None) -> None:
        self._files.pipe_file(self._object(self._generation), closed(self._watch.owner(), state))
        latest = self._generations()[-1]
        if latest != self._generation:
            raise StorageLost(storage=self._url, holder=str(self._read(latest).owner or "another process"))

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
        """Seconds since the object was written, by the store's clock; None: the store does not tell it."""
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
