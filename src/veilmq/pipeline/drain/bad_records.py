"""Keeps messages that could not be decoded, unchanged, in files beside the manifests, and counts them.

    bad_records/00000000000000000012-<token>-3.jsonl       one line per message: id, body, attributes, reason ...
    bad_records/00000000000000000012-<token>-3.sent        the same, after a dead-letter queue has them

Strategy: a task writes its file as a whole. The name depends only on the manifest and the task's place in it, so a
repeated task writes the same file again. The messages are deleted only after that. A query never fails because of a
message.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from veilmq.pipeline.drain.manifests import put
from veilmq.pipeline.places import Place, listed, make, place

FOLDER: Final = "bad_records"
_FORMER_FOLDER: Final = "quarantine"


class BadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One message that could not be decoded."""

    id: str
    body: str
    """As the queue returned it."""
    reason: str
    attributes: dict[str, str] = {}
    type: str | None = None
    group: str | None = None
    sent: float | None = None
    """Unix seconds."""
    receive_count: int = 0
    batch: int = 0
    queue: str | None = None
    """Where it came from, in a drain of many queues."""


def adopt_former(directory: Place) -> None:
    """Take over what a drain of before the first release kept, in a folder of another name. Call it under the lock."""
    if not isinstance(directory, Path):
        return
    former = directory / _FORMER_FOLDER
    if former.is_dir() and not (directory / FOLDER).exists():
        former.rename(directory / FOLDER)


def write(manifest: Place, first: int, rows: Sequence[BadRecord]) -> None:
    """The rows of one task; durable when this returns."""
    if not rows:
        return
    path = manifest.parent / FOLDER / f"{manifest.stem}-{first}.jsonl"
    if path.with_suffix(".sent").exists():
        return
    make(path.parent, 0o700)
    put(path, b"\n".join(map(msgspec.json.encode, rows)) + b"\n")


def unsent(manifest: Place) -> Iterator[tuple[Place, list[BadRecord]]]:
    """The files of one manifest that were not sent to a dead-letter queue yet."""
    for path in listed(manifest.parent / FOLDER, f"{manifest.stem}-*.jsonl"):
        yield path, _read(path)


def mark_sent(path: Place) -> None:
    """The dead-letter queue has the rows of that file. A kill amid this may let it have them twice."""
    if isinstance(path, Path):
        path.rename(path.with_suffix(".sent"))
    else:
        put(path.with_suffix(".sent"), path.read_bytes())
        path.unlink()


def read_bad_records(directory: Place | str) -> list[BadRecord]:
    """All messages that the query with that manifest directory could not decode."""
    folder = place(directory) / FOLDER
    return [each for path in listed(folder, "*.jsonl", "*.sent") for each in _read(path)]


def _read(path: Place) -> list[BadRecord]:
    return [msgspec.json.decode(line, type=BadRecord) for line in path.read_bytes().splitlines()]


def of_manifest(manifest: Place) -> list[BadRecord]:
    """The bad records of one manifest."""
    paths = listed(manifest.parent / FOLDER, f"{manifest.stem}-*.jsonl", f"{manifest.stem}-*.sent")
    return [each for path in paths for each in _read(path)]
