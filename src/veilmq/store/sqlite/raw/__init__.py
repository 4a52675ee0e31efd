"""Reads the files of a data directory past SQLite, which stops at the first thing that is wrong: the database as its
last commit left it, which is the file with the frames of the WAL over it, and tables out of its pages.

Strategy: copy the file, then write the newest version of each page into the copy. Of a page whose newest version is
damaged, the damaged version is taken, because its rows can be judged one by one; its older versions are kept beside it
(`Image.older`). Where one bit flipped and the checksum admits several places, an older version of the page decides: the
flip is where nothing else changed.

To read a table, go through its B-tree from its root, and take every row that can be decoded. What cannot be read
becomes a `Gap` in the sequence of rows, and the reading goes on behind it. In a page whose parts do not fit together,
and in a cell that cannot be decoded, one flipped bit is looked for: the structure of a page, and what the caller knows
about a row, hardly ever fit by accident.

Before changing it: every number comes from a damaged file. Check it before it is used as an index, a length or a page.

Source: SQLite, "Database File Format", 1.6 (B-tree Pages), 2.1 (Record Format), 1.7 (Overflow Pages).
"""

import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import IO, Any, Final, NamedTuple, Protocol

from veilmq.store.sqlite.disk.schema import CHECKSUM_BYTES
from veilmq.store.sqlite.raw.logs import CHECKSUM_BYTES_AT, PAGE_BYTES, Frame, Mended, Wal, mend_pages, with_checksum

_PAGE_SIZE_AT: Final = 16
_SIZES: Final = frozenset({512 << power for power in range(7)})
INTERIOR: Final = 0x05
LEAF: Final = 0x0D
_SHORT: Final = Struct(">H")
_LONG: Final = Struct(">I")
_FIRST_HEADER: Final = 100
_CELL_HEAD: Final = 18
"""Bytes of a cell's length and rowid, at most."""
_MENDED_BYTES: Final = 64
"""How much of a cell's beginning is searched for a flipped bit: its head, and the types of its columns."""
_DEPTH_MAX: Final = 32
_FREE_BLOCK_BYTES: Final = 4
"""The least that a free block takes: its two numbers."""
_REAL: Final = Struct(">d")

Values = tuple[Any, ...]
Accepts = Callable[[int, Values, bool], bool]
"""Whether a table can have this row: rowid, columns, and whether it must be sure, because one bit was flipped to get
it."""


class Unreadable(Exception):
    """A part of a page makes no sense."""


class Pages(Protocol):
    """The pages of a database."""

    count: int
    usable: int
    """Bytes of a page that are used."""

    def __getitem__(self, number: int) -> bytes:
        """A page, by number from 1 on. Raises Unreadable if there is none."""


class Row(NamedTuple):
    """A row of a table."""

    rowid: int
    values: Values
    is_misplaced: bool = False
    """Its rowid is out of order, and so not what it was."""


class Gap(NamedTuple):
    """Rows may be missing here."""

    page: int


def rows(pages: Pages, root: int, accepts: Accepts, suspects: set[int], seen: set[int]) -> Iterator[Row | Gap]:
    """Every row of the table with that root page, in order. suspects: pages that may lack rows though they can be
    read. seen: gets the pages that belong to the table."""
    visited: set[int] = set()
    yield from _tree(pages, root, accepts, suspects, visited, 0)
    seen |= visited


def _tree(
    pages: Pages, number: int, accepts: Accepts, suspects: set[int], visited: set[int], depth: int
) -> Iterator[Row | Gap]:
    if number in visited or depth > _DEPTH_MAX:
        yield Gap(number)
        return
    try:
        page = Page.read(pages, number)
    except Unreadable:
        yield Gap(number)
        return
    visited.add(number)
    is_suspect = number in suspects or not page.is_whole()
    if is_suspect:
        yield Gap(number)
    if page.kind == LEAF:
        is_ours = not page.cells
        for each in page.rows(accepts):
            is_ours |= isinstance(each, Row)
            yield each
            if is_suspect:
                yield Gap(number)
        if not is_ours:
            visited.remove(number)  # another table's: a damaged number led here
        return
    for child in page.children():
        yield from _tree(pages, child, accepts, suspects, visited, depth + 1)


def leaf_rows(pages: Pages, number: int, accepts: Accepts) -> list[Row]:
    """The rows of one leaf, wherever it belongs, without looking for flipped bits; none if it is no leaf."""
    try:
        page = Page(pages, number, pages[number])
    except Unreadable:
        return []
    return [*page.plain_rows(accepts)] if page.kind == LEAF else []


class Page:
    """A page of a table's B-tree."""

    def __init__(self, pages: Pages, number: int, content: bytes) -> None:
        """Raises Unreadable if the content is no such page."""
        self._pages = pages
        self.number = number
        self.content = content
        self._head = _FIRST_HEADER if number == 1 else 0
        self.kind = content[self._head]
        if self.kind not in (INTERIOR, LEAF):
            raise Unreadable
        self._array = self._head + (8 if self.kind == LEAF else 12)
        count = _SHORT.unpack_from(content, self._head + 3)[0]
        if self._array + 2 * count > pages.usable:
            raise Unreadable
        self.cells: list[int] = [_SHORT.unpack_from(content, self._array + 2 * at)[0] for at in range(count)]

    @classmethod
    def read(cls, pages: Pages, number: int) -> "Page":
        """The page; with one bit flipped back if only that makes its parts fit together. Raises Unreadable."""
        content = pages[number]
        try:
            found = cls(pages, number, content)
        except Unreadable:
            found = None
        if found is not None and found.is_whole():
            return found
        mended = [each for each in cls._mends(pages, number, content, found) if each.is_whole()]
        if len(mended) == 1:
            return mended[0]
        if found is None:
            raise Unreadable
        return found

    @classmethod
    def _mends(cls, pages: Pages, number: int, content: bytes, found: "Page | None") -> Iterator["Page"]:
        head = _FIRST_HEADER if number == 1 else 0
        for at in sorted(found.structure() if found is not None else range(head, head + 12)):
            for bit in range(8):
                tried = bytearray(content)
                tried[at] ^= 1 << bit
                try:
                    yield cls(pages, number, bytes(tried))
                except Unreadable:
                    continue

    def structure(self) -> set[int]:
        """The bytes that say where things are."""
        places = set(range(self._head, self._array + 2 * len(self.cells)))
        for cell in self.cells:
            places.update(range(cell, min(cell + _CELL_HEAD, self._pages.usable)))
        block = _SHORT.unpack_from(self.content, self._head + 1)[0]
        while block and block + 4 <= self._pages.usable and block not in places:
            places.update(range(block, block + 4))
            block = _SHORT.unpack_from(self.content, block)[0]
        return {place for place in places if place < self._pages.usable}

    def is_whole(self) -> bool:
        """Whether cells and free blocks fill the page exactly, as SQLite leaves it."""
        try:
            spans = sorted([*((cell, cell + self._size(cell)) for cell in self.cells), *self._free_blocks()])
        except (Unreadable, IndexError):
            return False
        content = self.content
        start = _SHORT.unpack_from(content, self._head + 5)[0] or 65_536
        end, fragments = start, 0
        if start < self._array + 2 * len(self.cells) or start > self._pages.usable:
            return False
        for begin, finish in spans:
            if begin < end:
                return False
            fragments += begin - end
            end = finish
        fragments += self._pages.usable - end
        return end <= self._pages.usable and fragments == content[self._head + 7]

    def _free_blocks(self) -> Iterator[tuple[int, int]]:
        block = _SHORT.unpack_from(self.content, self._head + 1)[0]
        while block:
            if block + _FREE_BLOCK_BYTES > self._pages.usable:
                raise Unreadable
            following, size = Struct(">HH").unpack_from(self.content, block)
            if size < _FREE_BLOCK_BYTES or (following and following < block + size):
                raise Unreadable  # so each block lies behind the one before, and the chain ends
            yield block, block + size
            block = following

    def _size(self, cell: int) -> int:
        """Bytes of the cell in this page."""
        if self.kind == INTERIOR:
            _, end = varint(self.content, cell + 4)
            return end - cell
        length, at = varint(self.content, cell)
        _, at = varint(self.content, at)
        local = _local(length, self._pages.usable)
        return max(4, at - cell + local + (4 if local < length else 0))

    def children(self) -> Iterator[int]:
        """The pages below an interior page, in order."""
        for cell in self.cells:
            if cell + 4 <= self._pages.usable:
                yield _LONG.unpack_from(self.content, cell)[0]
        yield _LONG.unpack_from(self.content, self._head + 8)[0]

    def rows(self, accepts: Accepts) -> Iterator[Row | Gap]:
        """The rows of a leaf."""
        found = [self._row(cell, accepts) for cell in self.cells]
        in_order = _ascending([each.rowid for each in found if each is not None])
        for each in found:
            if each is None:
                yield Gap(self.number)
            elif each.rowid in in_order:
                yield each
            else:
                yield Gap(self.number)
                yield each._replace(is_misplaced=True)

    def plain_rows(self, accepts: Accepts) -> Iterator[Row]:
        """The rows of a leaf that can be read as they are."""
        for cell in self.cells:
            row = self._decoded(self.content, cell)
            if row is not None and accepts(*row, False):
                yield Row(*row)

    def _row(self, cell: int, accepts: Accepts) -> Row | None:
        row = self._decoded(self.content, cell)
        if row is not None and accepts(*row, False):
            return Row(*row)
        found = []
        for at in range(cell, min(cell + _MENDED_BYTES, self._pages.usable)):
            for bit in range(8):
                tried = bytearray(self.content)
                tried[at] ^= 1 << bit
                mended = self._decoded(bytes(tried), cell)
                if mended is not None and accepts(*mended, True):
                    found.append(Row(*mended))
        return found[0] if len(found) == 1 else None

    def _decoded(self, content: bytes, cell: int) -> tuple[int, Values] | None:
        try:
            length, at = varint(content, cell)
            rowid, at = varint(content, at)
            payload = self._payload(content, at, length)
            return rowid, record(payload)
        except (Unreadable, IndexError):
            return None

    def _payload(self, content: bytes, at: int, length: int) -> bytes:
        usable = self._pages.usable
        local = _local(length, usable)
        if at + local + (4 if local < length else 0) > usable or length > self._pages.count * usable:
            raise Unreadable
        parts = [content[at : at + local]]
        left = length - local
        following = _LONG.unpack_from(content, at + local)[0] if left else 0
        while left > 0:
            page = self._pages[following]
            following = _LONG.unpack_from(page)[0]
            parts.append(page[4 : 4 + min(left, usable - 4)])
            left -= usable - 4
        return b"".join(parts)


def _local(length: int, usable: int) -> int:
    """How many bytes of a record are in the leaf; the others are in overflow pages."""
    if length <= usable - 35:
        return length
    least = (usable - 12) * 32 // 255 - 23
    local = least + (length - least) % (usable - 4)
    return local if local <= usable - 35 else least


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at byte `at`, and the byte behind it. Raises IndexError."""
    value = 0
    for place in range(at, at + 8):
        byte = data[place]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + 1
    value = value << 8 | data[at + 8]
    return value - (1 << 64 if value >> 63 else 0), at + 9


_INTEGERS: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Bytes of an integer, by its type."""


def record(payload: bytes) -> Values:
    """The columns of a record. Bytes that are not UTF-8 become lone surrogates. Raises Unreadable, IndexError."""
    head, at = varint(payload, 0)
    types = []
    while at < head:
        kind, at = varint(payload, at)
        types.append(kind)
    if at != head:
        raise Unreadable
    values: list[Any] = []
    for kind in types:
        value, size = _column(payload, at, kind)
        values.append(value)
        at += size
    if at != len(payload):
        raise Unreadable
    return tuple(values)


def _column(payload: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == 0:
        return None, 0
    if kind in _INTEGERS:
        size = _INTEGERS[kind]
        return int.from_bytes(payload[at : at + size], signed=True), size
    if kind == 7:
        return _REAL.unpack_from(payload.ljust(at + 8, b"\0"), at)[0], 8
    if kind in (8, 9):
        return kind - 8, 0
    if kind < 12 or at + (kind - 12) // 2 > len(payload):
        raise Unreadable
    content = payload[at : at + (kind - 12) // 2]
    return content if kind % 2 == 0 else content.decode(errors="surrogateescape"), len(content)


def _ascending(numbers: Sequence[int]) -> set[int]:
    """The longest strictly ascending part of the numbers."""
    if all(a < b for a, b in pairwise(numbers)):
        return set(numbers)
    ending: list[list[int]] = []
    """For each number, the longest ascending part that ends with it."""
    for number in numbers:
        longest: list[int] = []
        for each in ending:
            if each[-1] < number and len(each) > len(longest):
                longest = each
        ending.append([*longest, number])
    return set(sorted(ending, key=len)[-1])


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
        if self.count and self[1][CHECKSUM_BYTES_AT] == CHECKSUM_BYTES:
            self.usable -= CHECKSUM_BYTES
        self.pages = Mended([], [])
        """Pages that did not match their checksums."""
        self.suspects: set[int] = set()
        """Pages whose newest version is damaged."""
        self.older: dict[int, list[bytes]] = {}
        """Older versions of pages with a damaged version, newest first."""

    def __getitem__(self, number: int) -> bytes:
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
        versions = wal.newest()
        file.seek(0)
        first = versions[1].content if 1 in versions else file.read(PAGE_BYTES)
        finished = with_checksum if first[CHECKSUM_BYTES_AT:][:1] == bytes([CHECKSUM_BYTES]) else bytes
        for newest in versions.values():
            frame = newest
            if not newest.is_good:
                chosen = _chosen(newest, partial(_before, database, wal, newest.number, size))
                frame = chosen or newest
                older[newest.page] = [*_older(database, wal, newest.page, newest.number, size)]
                if chosen is None or chosen.page != newest.page:
                    suspects.add(newest.page)
            file.seek((frame.page - 1) * size)
            file.write(frame.content if frame.page in suspects else finished(frame.content))
        if wal.pages:
            file.truncate(wal.pages * size)
    found = mend_pages(path, finishing=True)
    image = Image(path, size)
    image.pages = found
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
    """Whether the flip gives the byte its old value back, which it lacks in the damaged page."""
    at = _flip(candidate, damaged)
    return candidate[at] == old[at] != damaged[at]


def _leaves(candidate: bytes, damaged: bytes, old: bytes) -> bool:
    """Whether the flip changes a byte that still has its old value in the damaged page."""
    at = _flip(candidate, damaged)
    return candidate[at] != old[at] == damaged[at]
