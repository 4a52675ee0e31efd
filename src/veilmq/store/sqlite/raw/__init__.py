"""Reads the files of a data directory past SQLite, which stops at the first thing that is wrong: here the database as
its last commit left it, which is the file with the frames of the WAL over it.

Strategy: copy the file, then write the newest version of each page into the copy. Of a page whose newest version is
damaged, the damaged version is taken, because its rows can be judged one by one; its older versions are kept beside it
(`Image.older`). Where one bit flipped and the checksum admits several places, an older version of the page decides: the
flip is where nothing else changed.
"""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Final

from veilmq.store.sqlite.raw.logs import Frame, Wal
from veilmq.store.sqlite.raw.pages import Unreadable

PAGE_BYTES: Final = 4096
_PAGE_SIZE_AT: Final = 16
_SIZES: Final = frozenset({512 << power for power in range(7)})


def page_bytes(database: Path) -> int:
    """The page size of the file, by its header; the usual one if that says nothing. Raises OSError."""
    with _opened(database) as file:
        file.seek(_PAGE_SIZE_AT)
        size = int.from_bytes(file.read(2))
    return size if size in _SIZES else PAGE_BYTES


def _opened(database: Path) -> IO[bytes]:
    """The file; an empty one if it is missing."""
    try:
        return database.open("rb")
    except FileNotFoundError:
        return io.BytesIO()


class Image:
    """A database file, as `Pages`."""

    def __init__(self, path: Path, size: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = self.usable = size
        self.count = 0
        self.refresh()
        self.suspects: set[int] = set()
        """Pages whose newest version is damaged."""
        self.older: dict[int, list[bytes]] = {}
        """Older versions of pages with a damaged version, newest first."""

    def __getitem__(self, number: int) -> bytes:
        """See `Pages`."""
        if not 1 <= number <= self.count:
            raise Unreadable
        return os.pread(self._descriptor, self._size, (number - 1) * self._size)

    def refresh(self) -> None:
        """Call after the file changed its size."""
        self.count = os.fstat(self._descriptor).st_size // self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def assemble(database: Path, wal: Wal, path: Path) -> Image:
    """Write the database into `path`, mode 0600. Raises OSError."""
    size = wal.page_bytes or page_bytes(database)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "r+b") as file:
        with _opened(database) as source:
            shutil.copyfileobj(source, file, 1 << 20)
        suspects: set[int] = set()
        older: dict[int, list[bytes]] = {}
        for newest in wal.newest().values():
            frame = newest
            if not newest.is_good:
                chosen = _chosen(newest, partial(_before, database, wal, newest.number, size))
                frame = chosen or newest
                older[newest.page] = [*_older(database, wal, newest.page, newest.number, size)]
                if chosen is None or chosen.page != newest.page:
                    suspects.add(newest.page)
            file.seek((frame.page - 1) * size)
            file.write(frame.content)
        if wal.pages:
            file.truncate(wal.pages * size)
    image = Image(path, size)
    image.suspects, image.older = suspects, older
    return image


def _older(database: Path, wal: Wal, page: int, before: int, size: int) -> Iterator[bytes]:
    yield from (each.content for each in wal.versions(page) if each.number < before)
    with _opened(database) as file:
        file.seek((page - 1) * size)
        content = file.read(size)
    if len(content) == size:
        yield content


def _before(database: Path, wal: Wal, number: int, size: int, page: int) -> bytes | None:
    return next(_older(database, wal, page, number, size), None)


def _chosen(damaged: Frame, before: Callable[[int], bytes | None]) -> Frame | None:
    """What the frame was, if it can be told which bit of it flipped. before: an older version of a page."""
    old = before(damaged.page)
    candidates = [each for each in damaged.candidates if each.content != damaged.content]
    others = [each for each in damaged.candidates if each.content == damaged.content]  # another page, or size
    if others:
        likely = [each for each in others if _alike(before(each.page), each) > _alike(old, damaged)]
        return likely[0] if len(likely) == 1 else None
    if old is not None:
        returned = [each for each in candidates if _returns(each.content, damaged.content, old)]
        if len(returned) == 1:
            return returned[0]
        candidates = returned or [each for each in candidates if not _leaves(each.content, damaged.content, old)]
    return candidates[0] if len(candidates) == 1 else None


def _alike(old: bytes | None, frame: Frame) -> int:
    """How many bytes of the page are what they were before."""
    return sum(a == b for a, b in zip(old or b"", frame.content, strict=False))


def _flip(candidate: bytes, damaged: bytes) -> int:
    return next(at for at, (a, b) in enumerate(zip(candidate, damaged, strict=True)) if a != b)


def _returns(candidate: bytes, damaged: bytes, old: bytes) -> bool:
    """Whether the byte is again what it was before, and is not so in the damaged page."""
    at = _flip(candidate, damaged)
    return candidate[at] == old[at] != damaged[at]


def _leaves(candidate: bytes, damaged: bytes, old: bytes) -> bool:
    """Whether the byte would differ from what it was before, and does not in the damaged page."""
    at = _flip(candidate, damaged)
    return candidate[at] != old[at] == damaged[at]
