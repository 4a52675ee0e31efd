"""An idempotency guard in a directory.

Strategy: a file a key, written beside and renamed with fsync; an flock on one of 256 lock files makes reading and
writing one step. For the processes of one machine: on network file systems flock is what they make of it.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from veilmq.client.worker.guard import Answer, Begun, Claim, Record, abandoned, finished, judge, prolonged
from veilmq.store.files import durable_write, make_directory


class DirectoryGuard:
    """See `Guard`. All calls raise OSError. Done records stay until `sweep`."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        make_directory(self.directory, 0o700)

    def begin(self, key: str, claim: Claim) -> Answer:
        """See `Guard.begin`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            answer = judge(_read(path), claim)
            if not isinstance(answer, Record):
                return answer
            durable_write(path, msgspec.json.encode(answer))
            return Begun(answer.fence)

    def finish(self, key: str, fence: int, result: Any) -> None:
        """See `Guard.finish`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            durable_write(path, msgspec.json.encode(finished(_read(path), key, fence, result)))

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """See `Prolonging.prolong`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            record = prolonged(_read(path), key, fence, until)
            if record is not None:
                durable_write(path, msgspec.json.encode(record))

    def abandon(self, key: str, fence: int) -> None:
        """See `Guard.abandon`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            record = abandoned(_read(path), fence)
            if record is not None:
                durable_write(path, msgspec.json.encode(record))

    def sweep(self, before: float) -> int:
        """Forget records last written before `before` (Unix seconds) that are done or overdue; how many."""
        swept = 0
        for folder in self.directory.iterdir():
            for path in folder.glob("[0-9a-f]*"):
                with locked(folder / ".lock"):
                    record = _read(path)
                    if record is None or path.stat().st_mtime >= before or not (record.done or record.until < before):
                        continue
                    path.unlink()
                    swept += 1
        return swept

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        folder = self.directory / name[:2]
        make_directory(folder, 0o700)
        return folder / name


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with this file, among all threads and processes of the machine."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        # To close it is not enough: a child that was forked meanwhile has it open, too.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
