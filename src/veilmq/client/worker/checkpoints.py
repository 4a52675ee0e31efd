"""Where the progress of a message is kept between two receives.

Strategy: where an extension can replace the body (Azure's Update Message, our own queues), the body itself carries it,
in an envelope of JSON: `{"veilmq": "checkpoint/1", "body": <the original body>, "state": <JSON>}`. Elsewhere a side
record does, in anything with the three methods of `Checkpoints`. Records are fenced: a message in hand writes under a
number above all that were there when it began, and at least its receive count, so that a worker that lost its lease
never overwrites its successor. An envelope counts only on a queue whose bodies can be replaced; its sender could have
written one too, and then decides where its own message starts.

Source: document 003, 3b ("resumed from where it is left off") and "Update Message".
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from veilmq.model.errors import LeaseTaken, ParameterInvalid
from veilmq.store.files import durable_write, make_directory

if TYPE_CHECKING:
    from veilmq.client.objects import ObjectStore

KIND: Final = "checkpoint/1"
_START: Final = '{"veilmq":"checkpoint/1",'
_DIGITS: Final = 12


class Envelope(msgspec.Struct, frozen=True):
    """A body with progress. Its members are in this order, and the first one has no space around it."""

    veilmq: str
    body: str
    state: Any


class Saved(msgspec.Struct, frozen=True):
    """A side record."""

    fence: int
    """Number of the message in hand that wrote it."""
    state: Any
    """What JSON can say."""


class Checkpoints(Protocol):
    """Side records by key (queue and message id). Any thread, any process.

    Implementations raise what their storage raises: a load that fails counts as a failed handler, so the message is
    retried; a save that fails reaches the handler.
    """

    def load(self, key: str) -> Saved | None:
        """The record with the highest fence."""
        ...

    def save(self, key: str, saved: Saved) -> None:
        """Durable when this returns. Raises LeaseTaken if a record with a higher fence is there."""
        ...

    def drop(self, key: str) -> None:
        """Forget all records of the key; none is well too."""
        ...


def encode_state(state: Any) -> bytes:
    """Raises ParameterInvalid for what JSON cannot say."""
    try:
        return msgspec.json.encode(state)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"JSON cannot say it: {error}"
        raise ParameterInvalid(parameter="state", reason=reason) from None


def wrap(body: str, state: Any) -> str:
    """The body that carries the state. Raises ParameterInvalid for what JSON cannot say."""
    return encode_state(Envelope(KIND, body, state)).decode()


def unwrap(body: str) -> tuple[str, Any]:
    """The original body and the state (None where it is no envelope)."""
    if not body.startswith(_START):
        return body, None
    try:
        envelope = msgspec.json.decode(body, type=Envelope)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return body, None  # a sender's own JSON that begins alike, however deep
    return envelope.body, envelope.state


class FileCheckpoints:
    """Side records in a directory: a folder a key, a file a fence, each written beside and renamed, with fsync."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        make_directory(self.directory, 0o700)

    def load(self, key: str) -> Saved | None:
        """See `Checkpoints.load`. Raises OSError."""
        folder = self._folder(key)
        for name in sorted(_names(folder), reverse=True):
            try:
                return msgspec.json.decode((folder / name).read_bytes(), type=Saved)
            except FileNotFoundError:
                continue  # the message was just finished
        return None

    def save(self, key: str, saved: Saved) -> None:
        """See `Checkpoints.save`. Raises OSError."""
        folder = self._folder(key)
        make_directory(folder, 0o700)
        names = _names(folder)
        mine = f"{saved.fence:0{_DIGITS}}"
        if names and max(names) > mine:
            raise LeaseTaken(sequence=0, attempt=int(max(names)))
        durable_write(folder / mine, msgspec.json.encode(saved))
        for older in names:
            if older < mine:
                (folder / older).unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        """See `Checkpoints.drop`. Raises OSError."""
        folder = self._folder(key)
        try:
            for each in os.listdir(folder):
                (folder / each).unlink(missing_ok=True)
            folder.rmdir()
        except FileNotFoundError:
            pass

    def _folder(self, key: str) -> Path:
        return self.directory / _hashed(key)


class ObjectCheckpoints:
    """Side records as objects below a URL that fsspec knows (s3://bucket/prefix, abfs://, file:///directory ...).

    An object a fence, so that no conditional write is needed. All calls raise ObjectStoreFailed. Needs the extra
    `large`.
    """

    def __init__(self, store: "ObjectStore | str") -> None:
        """store: its URL, or one with options of its own. Raises ParameterInvalid, ModuleNotFoundError."""
        from veilmq.client.objects import ObjectStore

        self._store = ObjectStore(store) if isinstance(store, str) else store

    def load(self, key: str) -> Saved | None:
        """See `Checkpoints.load`."""
        for name in sorted(self._keys(key), reverse=True):
            content = self._store.get(name)
            if content is not None:
                return msgspec.json.decode(content, type=Saved)
        return None

    def save(self, key: str, saved: Saved) -> None:
        """See `Checkpoints.save`."""
        mine = f"{_hashed(key)}/{saved.fence:0{_DIGITS}}"
        keys = self._keys(key)
        newest = max(keys, default="")
        if newest > mine:
            raise LeaseTaken(sequence=0, attempt=int(newest.rpartition("/")[2]))
        self._store.put(mine, msgspec.json.encode(saved))
        for older in keys:
            if older < mine:
                self._store.remove(older)

    def drop(self, key: str) -> None:
        """See `Checkpoints.drop`."""
        for name in self._keys(key):
            self._store.remove(name)
        self._store.remove_directory(_hashed(key))

    def _keys(self, key: str) -> list[str]:
        return [found.key for found in self._store.list(_hashed(key)) if _is_fence(found.key)]


def _hashed(key: str) -> str:
    """Any key as a name that every storage takes."""
    return hashlib.sha256(key.encode()).hexdigest()


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if _is_fence(name)]
    except FileNotFoundError:
        return []


def _is_fence(path: str) -> bool:
    name = path.rpartition("/")[2]
    return len(name) == _DIGITS and name.isdecimal()
