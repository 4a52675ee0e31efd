"""A faulty disk: it tracks what was synced, cuts the power, refuses writes, fills up, and can be slow.

Strategy: `FaultDisk` is an apsw VFS and a store's `Disk` in one, over real files. Every file has an image of what the
disk certainly holds (everything written before its last sync) and the writes since; every name has the file that it
certainly leads to, and the changes since its directory was synced. `power_cut` builds a directory as a real disk might
leave it: of the names, a prefix of the changes; of each file, the image and, chosen by the seed, none, a prefix or any
subset of the writes since, in any order, each whole or torn into sectors. The wal-index is memory and is never there.
Failures are set to occur at the n-th call from now on. A disk that is `dead` is that of a killed process: nothing
reaches it any more.
"""

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from veilmq import testing
from veilmq.store.directory import COMMITTED
from veilmq.store.files import REAL, Bytes, Job, RawFile

SECTOR_BYTES: Final = 512


class Write(NamedTuple):
    """One write that no sync followed; `data` None: the file was cut to `offset` bytes."""

    offset: int
    data: bytes | None


class Renamed(NamedTuple):
    """One change of the names in a directory."""

    path: str
    image: "Image | None"
    """The file that the name leads to from now on; None: to none."""
    source: str = ""
    """The name that it had before, and loses in the same step."""


class Image:
    """What the disk holds of one file."""

    def __init__(self, content: bytes) -> None:
        self.synced = bytearray(content)
        self.pending: list[Write] = []
        self.size = len(content)
        """With the writes since."""

    def write(self, offset: int, data: bytes) -> None:
        """Not yet durable."""
        self.pending.append(Write(offset, data))
        end = offset + len(data)
        if end > self.size:
            self.size = end

    def cut(self, size: int) -> None:
        """Not yet durable."""
        self.pending.append(Write(size, None))
        self.size = min(self.size, size)

    def sync(self) -> None:
        """All that was written is on the disk."""
        put(self.synced, self.pending)
        self.pending = []

    def after_cut(self, chance: testing.Random) -> bytes:
        """What may be there when the power comes back."""
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
        content = bytearray(self.synced)
        put(content, survivors)
        return bytes(content)


def put(content: bytearray, writes: list[Write]) -> None:
    """Change the content by the writes, in their order."""
    for offset, data in writes:
        if data is None:
            del content[offset:]
            continue
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data


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
    """Open stores with `Options(disk=disk)`; `close` it when the last one is closed."""

    def __init__(self, name: str) -> None:
        self.vfs = name
        self.lock = threading.RLock()
        self.files: dict[str, Image] = {}
        """By path, as a process sees them."""
        self.named: dict[str, Image] = {}
        """By path, as the disk certainly has them."""
        self.renamed: list[Renamed] = []
        """Changes of names that no sync of a directory followed."""
        self.failure: Failure | None = None
        self.calls: Counter[str] = Counter()
        self.writes_after_failure = 0
        self.struck = False
        self.dead = False
        self.capacity: int | None = None
        """Bytes of files for which there is room; None: that of the real disk."""
        self.kind = ""
        """The type of file system that it says it is."""
        self.syncing: Callable[[str], None] = lambda path: None
        """Called before each sync with the file's path, in the thread that syncs: wait in it for a slow disk."""
        self.whole: set[int] = set()
        """Hashes of what SQLite has written at once, in place of checksums in the pages."""
        super().__init__(name, "")
        apsw.connection_hooks.append(self._opened)

    def _opened(self, connection: apsw.Connection) -> None:
        if connection.open_vfs == self.vfs:
            connection.create_scalar_function("verify_checksum", self._is_whole, 1)

    def _is_whole(self, *values: Any) -> bool:
        return hash(values[0]) in self.whole

    def unregister(self) -> None:
        """Call when the last store is closed."""
        apsw.connection_hooks.remove(self._opened)
        super().unregister()

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> Any:
        """Open a file and remember what it holds."""
        path = "" if name is None else str(name.filename() if isinstance(name, apsw.URIFilename) else name)
        return FaultFile(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        """Delete a file."""
        self.count("delete")
        super().xDelete(filename, syncdir)
        self.name(filename, None)
        if syncdir:
            self.sync_names(Path(filename).parent)

    def image(self, path: str) -> Image:
        """That of a file that is there; what was there before this disk is durable."""
        with self.lock:
            image = self.files.get(path)
            if image is None:
                image = self.files[path] = self.named[path] = Image(Path(path).read_bytes())
            return image

    def name(self, path: str, image: Image | None) -> None:
        """Let a name lead to a file, or to none."""
        with self.lock:
            self.renamed.append(Renamed(path, image))
            if image is None:
                self.files.pop(path, None)
            else:
                self.files[path] = image

    def sync_names(self, directory: Path) -> None:
        """The names in a directory are on the disk."""
        with self.lock:
            _rename(self.named, [each for each in self.renamed if Path(each.path).parent == directory])
            self.renamed = [each for each in self.renamed if Path(each.path).parent != directory]

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
            if self.dead:
                raise io_error()
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

    def take_room(self, image: Image, end: int) -> None:
        """The file is to be at least that long. Raises apsw.FullError."""
        if self.capacity is not None and end > image.size and end - image.size > self.capacity - self.used():
            raise full()

    def used(self) -> int:
        """Bytes of all files."""
        with self.lock:
            return sum(image.size for image in self.files.values())

    def after_cut(self, directory: Path, seed: int) -> dict[str, bytes]:
        """What a power cut at this instant may leave of the files in a directory, by name."""
        chance = testing.chance(seed)
        with self.lock:
            named = dict(self.named)
            here = [each for each in self.renamed if Path(each.path).parent == directory]
            _rename(named, here[: chance.randint(0, len(here))])
            found = {Path(path).name: image for path, image in sorted(named.items()) if Path(path).parent == directory}
            return {name: image.after_cut(chance) for name, image in found.items()}

    def power_cut(self, source: Path, target: Path, seed: int) -> None:
        """Build in `target` what a power cut at this instant may leave of the databases in `source`."""
        target.mkdir(mode=0o700)
        for name, content in self.after_cut(source, seed).items():
            (target / name).write_bytes(content)

    def make(self, path: Path) -> RawFile:
        """See `Disk.make`."""
        with _as_of_the_system():
            self.count("make")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        image = Image(b"")
        self.name(str(path), image)
        return RawFault(self, path, descriptor, image, "make")

    def open(self, path: Path) -> RawFile:
        """See `Disk.open`."""
        return RawFault(self, path, os.open(path, os.O_RDWR | os.O_CLOEXEC), self.image(str(path)))

    def open_past_cache(self, path: Path) -> RawFile:
        """See `Disk.open_past_cache`."""
        return RawFault(self, path, os.open(path, os.O_RDWR | os.O_CLOEXEC), self.image(str(path)), synced=True)

    def map(self, path: Path, size: int) -> RawFile:
        """See `Disk.map`."""
        return self.open(path)

    def rename(self, path: Path, target: Path) -> None:
        """See `Disk.rename`."""
        with _as_of_the_system():
            self.count("rename")
        image = self.image(str(path))
        path.replace(target)
        with self.lock:
            del self.files[str(path)]
            self.renamed.append(Renamed(str(target), image, str(path)))
            self.files[str(target)] = image

    def remove(self, path: Path) -> None:
        """See `Disk.remove`."""
        with _as_of_the_system():
            self.count("delete")
        path.unlink()
        self.name(str(path), None)

    def sync_directory(self, path: Path) -> None:
        """See `Disk.sync_directory`."""
        with _as_of_the_system():
            self.count("sync names")
        self.sync_names(path)

    def file_system(self, path: Path) -> str:
        """See `Disk.file_system`."""
        return self.kind

    def space(self, path: Path) -> tuple[int, int]:
        """See `Disk.space`."""
        if self.capacity is None:
            return REAL.space(path)
        return max(0, self.capacity - self.used()), self.capacity

    def beside(self, work: Callable[[], None], name: str) -> Job:
        """See `Disk.beside`."""
        return REAL.beside(work, name)


def _rename(named: dict[str, Image], changes: list[Renamed]) -> None:
    for path, image, source in changes:
        named.pop(source, None)
        if image is None:
            named.pop(path, None)
        else:
            named[path] = image


@contextmanager
def _as_of_the_system() -> Iterator[None]:
    """Raise SQLite's errors as those of a system call."""
    try:
        yield
    except (apsw.FullError, apsw.IOError) as error:
        number = errno.ENOSPC if isinstance(error, apsw.FullError) else errno.EIO
        raise OSError(number, os.strerror(number)) from error


class RawFault:
    """One open file of a `FaultDisk` that is not SQLite's."""

    def __init__(
        self, disk: FaultDisk, path: Path, descriptor: int, image: Image, call: str = "", *, synced: bool = False
    ) -> None:
        """call: how its writes and syncs are counted, if not as SQLite's. synced: each write is synced."""
        self._disk, self._path, self._descriptor, self._image, self._synced = disk, path, descriptor, image, synced
        own = call or ("note" if path.name == COMMITTED else "")
        self._writing, self._syncing = own or "xWrite", own or "xSync"

    def write(self, data: Bytes, offset: int) -> int:
        with _as_of_the_system():
            self._disk.count(self._writing)
            self._disk.take_room(self._image, offset + len(data))
        written = os.pwrite(self._descriptor, data, offset)
        with self._disk.lock:
            self._image.write(offset, bytes(data[:written]))
        if self._synced:
            self.sync()
        return written

    def sync(self) -> None:
        self._disk.syncing(str(self._path))
        with _as_of_the_system():
            self._disk.count(self._syncing)
        with self._disk.lock:
            self._image.sync()

    def close(self) -> None:
        os.close(self._descriptor)


class FaultFile(apsw.VFSFile):
    """One open file of a `FaultDisk` that is SQLite's."""

    def __init__(self, disk: FaultDisk, path: str, name: Any, flags: list[int]) -> None:
        self._disk = disk
        self._path = path
        self._is_log = path.endswith(("-wal", "-journal"))
        self._has_name = False
        is_new = not path or not Path(path).exists()
        super().__init__("", name, flags)
        self._image = Image(b"") if is_new else disk.image(path)
        if path and is_new:
            disk.name(path, self._image)

    def xWrite(self, data: Any, offset: int) -> None:
        """Write, not yet durable."""
        disk, image = self._disk, self._image
        disk.count("xWrite")
        if offset + len(data) > image.size:
            disk.take_room(image, offset + len(data))
        super().xWrite(data, offset)
        with disk.lock:
            image.write(offset, bytes(data))
            disk.whole.add(hash(bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        """Cut, not yet durable."""
        self._disk.count("truncate")
        super().xTruncate(newsize)
        with self._disk.lock:
            self._image.cut(newsize)

    def xSync(self, flags: int) -> None:
        """What was written before the sync began is durable when it has ended. With the first sync of a new WAL or
        journal SQLite syncs the directory."""
        self._disk.syncing(self._path)
        self._disk.count("xSync")
        super().xSync(flags)
        with self._disk.lock:
            self._image.sync()
        if self._is_log and not self._has_name:
            self._has_name = True
            self._disk.sync_names(Path(self._path).parent)
