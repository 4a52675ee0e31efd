"""A faulty disk: an apsw VFS that tracks what was synced, cuts the power, refuses writes, and can be slow.

Strategy: every file has an image of what the disk certainly holds (everything written before its last sync) and the
writes since. `power_cut` builds a directory as a real disk might leave it: the image and, chosen by the seed, none, a
prefix or any subset of the writes since, in any order, each whole or torn into sectors. The wal-index is memory and is
never there. SQLite syncs the directory when it creates a file, so a file that was once synced exists. Failures are set
to occur at the n-th call from now on.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from veilmq.testing import seeded

SECTOR_BYTES: Final = 512


class Write(NamedTuple):
    """One write that no sync followed; `data` None: the file was cut to `offset` bytes."""

    offset: int
    data: bytes | None


class Image:
    """What the disk holds of one file."""

    def __init__(self, content: bytes) -> None:
        self.synced = bytearray(content)
        self.pending: list[Write] = []
        self.exists = bool(content)

    def sync(self) -> None:
        """All that was written is on the disk."""
        self.synced = put(self.synced, self.pending)
        self.pending = []
        self.exists = True

    def after_cut(self, chance: seeded.Random) -> bytes | None:
        """What may be there when the power comes back; None: no file."""
        if not self.exists and chance.random() < 0.5:
            return None
        survivors: list[Write] = []
        match chance.choice(("none", "prefix", "subset", "torn")):
            case "prefix":
                survivors = self.pending[: chance.randint(0, len(self.pending))]
            case "subset":
                survivors = [write for write in self.pending if chance.random() < 0.5]
                chance.shuffle(survivors)
            case "torn":
                survivors = [part for write in self.pending for part in _sectors(write) if chance.random() < 0.5]
                chance.shuffle(survivors)
            case _:
                pass
        return bytes(put(self.synced, survivors))


def put(content: bytearray, writes: list[Write]) -> bytearray:
    """The content after the writes, in their order."""
    content = bytearray(content)
    for offset, data in writes:
        if data is None:
            del content[offset:]
            continue
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
    return content


def _sectors(write: Write) -> list[Write]:
    """The write in pieces that a disk writes atomically."""
    if write.data is None:
        return [write]
    pieces = []
    at = 0
    while at < len(write.data):
        length = SECTOR_BYTES - (write.offset + at) % SECTOR_BYTES
        pieces.append(Write(write.offset + at, write.data[at : at + length]))
        at += length
    return pieces


class Failure(NamedTuple):
    """The error, after how many more calls it occurs, and how often."""

    call: str
    error: Callable[[], apsw.Error]
    skip: int
    for_good: bool


def io_error() -> apsw.Error:
    """EIO."""
    return apsw.IOError("disk I/O error")


def full() -> apsw.Error:
    """ENOSPC."""
    return apsw.FullError("database or disk is full")


class FaultDisk(apsw.VFS):
    """A VFS over the default one. Open stores with `Options(vfs=disk.name)`; `close` when the last one is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.images: dict[str, Image] = {}
        self.failure: Failure | None = None
        self.calls: dict[str, int] = {"xWrite": 0, "xSync": 0}
        self.writes_after_failure = 0
        self.struck = False
        self.syncing: Callable[[str], None] = lambda path: None
        """Called before each sync with the file's path, in the thread that syncs: wait in it for a slow disk."""
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> Any:
        """Open a file and remember what it holds."""
        path = "" if name is None else str(name.filename() if isinstance(name, apsw.URIFilename) else name)
        return FaultFile(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        """Delete a file; the deletion is taken as durable."""
        with self.lock:
            self.images.pop(filename, None)
        super().xDelete(filename, syncdir)

    def fail(self, call: str, error: Callable[[], apsw.Error], *, skip: int = 0, for_good: bool = False) -> None:
        """Let the call ("xWrite" or "xSync") fail after `skip` more that succeed, once or from then on."""
        self.failure = Failure(call, error, skip, for_good)
        self.struck = False

    def mend(self) -> None:
        """Nothing fails any more."""
        self.failure = None

    def count(self, call: str) -> None:
        """A call is about to be made. Raises the failure that is due."""
        with self.lock:
            self.calls[call] += 1
            if self.struck and call == "xWrite":
                self.writes_after_failure += 1
            failure = self.failure
            if failure is None or failure.call != call:
                return
            if failure.skip:
                self.failure = failure._replace(skip=failure.skip - 1)
                return
            self.struck = True
            if not failure.for_good:
                self.failure = None
        raise failure.error()

    def power_cut(self, source: Path, target: Path, seed: int) -> None:
        """Build in `target` what a power cut at this instant may leave of the databases in `source`."""
        chance = seeded.chance(seed)
        target.mkdir(mode=0o700)
        with self.lock:
            for path, image in sorted(self.images.items()):
                file = Path(path)
                content = image.after_cut(chance) if file.parent == source else None
                if content is not None:
                    (target / file.name).write_bytes(content)


class FaultFile(apsw.VFSFile):
    """One open file of a `FaultDisk`."""

    def __init__(self, disk: FaultDisk, path: str, name: Any, flags: list[int]) -> None:
        before = Path(path).read_bytes() if path and Path(path).exists() else b""
        super().__init__("", name, flags)
        self._disk = disk
        with disk.lock:
            self._image = disk.images.setdefault(path, Image(before)) if path else Image(b"")

    def xWrite(self, data: bytes, offset: int) -> None:
        """Write, not yet durable."""
        self._disk.count("xWrite")
        super().xWrite(data, offset)
        with self._disk.lock:
            self._image.pending.append(Write(offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        """Cut, not yet durable."""
        super().xTruncate(newsize)
        with self._disk.lock:
            self._image.pending.append(Write(newsize, None))

    def xSync(self, flags: int) -> None:
        """What was written before the sync began is durable when it has ended."""
        self._disk.syncing("")
        self._disk.count("xSync")
        super().xSync(flags)
        with self._disk.lock:
            self._image.sync()
