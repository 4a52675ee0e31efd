"""Where a message's progress is kept between two receives.

Strategy: if an extension can replace the body (Azure's Update Message, our own queues), the body carries the progress
in a JSON envelope: `{"veilmq": "checkpoint/1", "body": <the original body>, "state": <JSON>}`. Elsewhere a side record
does, in any object with the three methods of `Checkpoints`. Side records are fenced: each receive writes under a number
above all that were stored when it began, and at least its receive count. So a worker that lost its lease never
overwrites its successor's progress.

Before changing it: envelopes count only on queues whose bodies can be replaced. The sender can write an envelope too,
and then chooses where its own message starts.

Source: document 003, 3b ("resumed from where it is left off") and "Update Message".
"""

import math
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from veilmq.client.records import Contents, Directory, ObjectStore, hashed
from veilmq.model.errors import LeaseTaken, ParameterInvalid

KIND: Final = "checkpoint/1"
_START: Final = '{"veilmq":"checkpoint/1",'
_DIGITS: Final = 12


class Envelope(msgspec.Struct, frozen=True):
    """A body with progress. The order of its members is fixed, and there is no space around the first one."""

    veilmq: str
    body: str
    state: Any


class Saved(msgspec.Struct, frozen=True):
    """A side record."""

    fence: int
    """Number of the receive that wrote it."""
    state: Any
    """Any JSON value."""


class Checkpoints(Protocol):
    """Side records by key (queue and message id). Safe for any thread and process.

    Implementations raise their storage's errors: a failed load counts as a failed handler, so the message is retried; a
    failed save is raised in the handler.
    """

    def load(self, key: str) -> Saved | None:
        """The record with the highest fence."""

    def save(self, key: str, saved: Saved) -> None:
        """Save durably. Raises LeaseTaken if there is a record with a higher fence."""

    def drop(self, key: str) -> None:
        """Delete all records of the key, if there are any."""


def encode_state(state: Any) -> bytes:
    """The state as JSON. Raises ParameterInvalid if JSON cannot represent it."""
    try:
        encoded = msgspec.json.encode(state)
        if b"null" in encoded and not _is_finite(msgspec.to_builtins(state)):
            raise ValueError("NaN or infinity")
        return encoded
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"JSON cannot say it: {error}"
        raise ParameterInvalid(parameter="state", reason=reason) from None


def _is_finite(value: Any) -> bool:
    """Whether no number in it is NaN or infinite, which msgspec writes as null."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def wrap(body: str, state: Any) -> str:
    """The body that carries the state. Raises ParameterInvalid if JSON cannot represent it."""
    return encode_state(Envelope(KIND, body, state)).decode()


def unwrap(body: str) -> tuple[str, Any]:
    """The original body and the state (None if the body is no envelope)."""
    if not body.startswith(_START):
        return body, None
    try:
        envelope = msgspec.json.decode(body, type=Envelope)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return body, None  # a sender's own JSON that starts in the same way, at whatever nesting depth
    return envelope.body, envelope.state


class NumberedCheckpoints:
    """Side records in a directory or an object store: one content for each fence, below the hash of the key. So no
    conditional write is needed. All calls raise the storage's errors."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def load(self, key: str) -> Saved | None:
        for path in sorted(self._fences(key), reverse=True):
            content = self._contents.get(path)
            if content is not None:  # else the message was finished in the meantime
                return msgspec.json.decode(content, type=Saved)
        return None

    def save(self, key: str, saved: Saved) -> None:
        mine = f"{hashed(key)}/{saved.fence:0{_DIGITS}}"
        paths = self._fences(key)
        newest = max(paths, default="")
        if newest > mine:
            raise LeaseTaken(sequence=0, attempt=int(newest.rpartition("/")[2]))
        self._contents.put(mine, msgspec.json.encode(saved))
        for older in paths:
            if older < mine:
                self._contents.remove(older)

    def drop(self, key: str) -> None:
        for path in self._contents.keys(hashed(key)):
            self._contents.remove(path)
        self._contents.remove_directory(hashed(key))

    def _fences(self, key: str) -> list[str]:
        return [path for path in self._contents.keys(hashed(key)) if _is_fence(path)]


class FileCheckpoints(NumberedCheckpoints):
    """Side records in a directory: a folder for each key, a file for each fence, written by atomic rename with fsync.
    All calls raise OSError."""

    def __init__(self, directory: Path | str) -> None:
        files = Directory(directory)
        self.directory = files.directory
        super().__init__(files)


class ObjectCheckpoints(NumberedCheckpoints):
    """Side records as objects below a URL that fsspec knows (s3://bucket/prefix, abfs://, file:///directory ...).

    All calls raise ObjectStoreFailed. Needs the extra `large`.
    """

    def __init__(self, store: ObjectStore | str) -> None:
        """store: its URL, or an `ObjectStore` with its own options. Raises ParameterInvalid, ModuleNotFoundError."""
        super().__init__(store if isinstance(store, ObjectStore) else ObjectStore(store))


def _is_fence(path: str) -> bool:
    name = path.rpartition("/")[2]
    return len(name) == _DIGITS and name.isdecimal()
