"""An idempotency guard in a directory.

Strategy: a file a key, written beside and renamed with fsync; an flock on one of 256 lock files makes reading and
writing one step. For the processes of one machine: on network file systems flock is what they make of it.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from veilmq.client.worker.files import locked, make_folder
from veilmq.client.worker.guard import Answer, Begun, Claim, Record, abandoned, finished, judge, prolonged
from veilmq.store.files import replace_file


class DirectoryGuard:
    """See `Guard`. All calls raise OSError. Done records stay until `sweep`."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        make_folder(self.directory)

    def begin(self, key: str, claim: Claim) -> Answer:
        """See `Guard.begin`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            answer = judge(_read(path), claim)
            if not isinstance(answer, Record):
                return answer
            replace_file(path, msgspec.json.encode(answer))
            return Begun(answer.fence)

    def finish(self, key: str, fence: int, result: Any) -> None:
        """See `Guard.finish`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            replace_file(path, msgspec.json.encode(finished(_read(path), key, fence, result)))

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """See `Prolonging.prolong`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            record = prolonged(_read(path), key, fence, until)
            if record is not None:
                replace_file(path, msgspec.json.encode(record))

    def abandon(self, key: str, fence: int) -> None:
        """See `Guard.abandon`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            record = abandoned(_read(path), fence)
            if record is not None:
                replace_file(path, msgspec.json.encode(record))

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
        make_folder(folder)
        return folder / name


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
