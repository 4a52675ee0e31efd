"""Reads a WAL beyond its bad frames, and a redo log beyond its bad records.

Strategy, WAL: SQLite stops at the first frame whose checksum is wrong, because each checksum continues the one before.
But each frame stores its own, so a frame behind a bad one is judged by what the bad one stored, or should have stored.
One flipped bit is flipped back. The newest good version of a page is the page, as long as it was committed; a page
whose newest version is bad is listed (`Wal.stale`).

Frames with other salts are left from before the WAL restarted, and mean nothing. A transaction that lost its commit
frame was committed if another one follows: SQLite writes a transaction over one that was not committed. For the same
reason frames behind a destroyed one (not only by one bit) are in doubt: they may be the rest of a transaction that was
never committed, and was overwritten in part. Use them only if something is known to be missing (`Wal.firm`).

Strategy, redo log: a start reads the records one after the other, and stops at the first that is incomplete. Here the
whole file is searched for records: behind the last one, else wherever one can begin. One flipped bit is flipped back.
Records are told apart by the offset of their first event, whichever run of the log they belong to: the file may still
hold batches of an earlier run, which help if the database lost them.

Source: SQLite, "WAL File Format" and "Database File Format", 4.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from veilmq.store.sqlite.disk.redo import ENTRY, HEAD, Entry, record_at
from veilmq.store.sqlite.raw.flips import Sums, is_one_bit, mend_crc32, mended_by_sums, wal_sums

_HEADER: Final = Struct(">IIIIIIII")
"""Magic number, version, page size, number of the checkpoint, two salts, two checksums of these."""
_FRAME: Final = Struct(">IIIIII")
"""Page, size of the database in pages after a commit (else 0), two salts, two checksums."""
_PAIR: Final = Struct(">II")
_COVERED: Final = 8
"""Bytes of a frame's header that its checksum covers, before the page."""
_SUMMED: Final = 24
"""Bytes of the WAL's header that its checksum covers."""
_MAGIC: Final = 0x377F0682
"""The lowest bit says that checksums are of big-endian words."""
_VERSION: Final = 3_007_000


class Frame(NamedTuple):
    """A version of a page."""

    number: int
    """Its place in the WAL, from 0 on."""
    page: int
    size: int
    """Pages of the database after the commit that this frame ends; 0: it ends none."""
    content: bytes
    is_good: bool
    candidates: "list[Frame]"
    """Of a bad one: what it was if one bit flipped, in all the places that its checksum admits."""


class Wal(NamedTuple):
    """What a WAL holds."""

    page_bytes: int
    frames: list[Frame]
    """Up to the last commit."""
    mended: int
    """Frames in which one bit was flipped back."""
    lost: int
    """Frames before the last commit of which not even the page is known."""
    unfinished: int
    """Frames behind the last commit: of a transaction that was not acknowledged, or of one whose end is bad."""

    def firm(self) -> "Wal":
        """The same without what is in doubt: up to the last commit before the first destroyed frame."""
        until = min(
            (at for at, each in enumerate(self.frames) if each.number != at or not (each.is_good or each.candidates)),
            default=len(self.frames),
        )
        ends = [at for at, each in enumerate(self.frames[:until]) if each.is_good and each.size]
        frames = self.frames[: ends[-1] + 1] if ends else []
        return self._replace(frames=frames, lost=0)

    @property
    def pages(self) -> int:
        """The size of the database in pages."""
        return next((frame.size for frame in reversed(self.frames) if frame.is_good and frame.size), 0)

    def versions(self, page: int) -> Iterator[Frame]:
        """The frames with that page, newest first."""
        return (frame for frame in reversed(self.frames) if frame.page == page)

    def newest(self) -> dict[int, Frame]:
        """The newest version of each page, good or bad."""
        return {frame.page: frame for frame in self.frames}


NO_WAL: Final = Wal(0, [], 0, 0, 0)


def read_wal(path: Path, page_bytes: int) -> Wal:
    """Read the WAL. page_bytes: the database's page size, for a WAL whose header is damaged. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return NO_WAL
    if len(content) < _HEADER.size:
        return NO_WAL
    judge = _Judge(content, page_bytes)
    return judge.wal()


class _Judge:
    """Goes through the frames of one WAL."""

    def __init__(self, content: bytes, page_bytes: int) -> None:
        self._content = content
        header = _whole_header(content)
        magic, _, size, _, *rest = _HEADER.unpack(header or content[: _HEADER.size])
        self._order = ">" if header is not None and magic & 1 else "<"
        self._page_bytes = size if header is not None else page_bytes
        self._step = _FRAME.size + self._page_bytes
        self._count = (len(content) - _HEADER.size) // self._step
        self._seeds: list[Sums] = [(rest[2], rest[3])] if header is not None else []
        self._salts = (rest[0], rest[1]) if header is not None else self._commonest_salts()
        self._follows = header is not None
        """Whether the frame before was good, so that one with a damaged salt still shows that it follows."""
        self._mended = 0

    def wal(self) -> Wal:
        """Judge all frames."""
        frames: list[Frame | None] = [self._frame(number) for number in range(self._count)]
        last = max((at for at, frame in enumerate(frames) if frame and frame.is_good and frame.size), default=-1)
        committed = frames[: last + 1]
        found = [frame for frame in committed if frame is not None]
        unfinished = sum(frame is not None for frame in frames[last + 1 :])
        return Wal(self._page_bytes, found, self._mended, len(committed) - len(found), unfinished)

    def _fields(self, number: int) -> tuple[int, ...]:
        return _FRAME.unpack_from(self._content, _HEADER.size + number * self._step)

    def _covered(self, number: int) -> bytes:
        at = _HEADER.size + number * self._step
        return self._content[at : at + _COVERED] + self._content[at + _FRAME.size : at + self._step]

    def _commonest_salts(self) -> tuple[int, int]:
        salts = Counter((fields[2], fields[3]) for fields in map(self._fields, range(self._count)))
        return max(salts, key=lambda each: salts[each], default=(0, 0))

    def _frame(self, number: int) -> Frame | None:
        """The frame; None: it is of an earlier run of the WAL, or destroyed."""
        _, _, *salts, first, second = self._fields(number)
        is_ours = tuple(salts) == self._salts
        if not is_ours and not self._follows:
            self._seeds = [(first, second)]
            return None
        covered, stored = self._covered(number), (first, second)
        sums = [wal_sums(covered, seed, self._order) for seed in self._seeds]
        if stored in sums:
            return self._good(number, covered, stored)
        for each in sums:
            if is_ours and is_one_bit(each, stored) and self._leads(number, each):
                self._mended += 1
                return self._good(number, covered, each)
        candidates: list[bytes] = []
        if is_ours:
            for seed in self._seeds:
                candidates += mended_by_sums(covered, seed, stored, self._order)
        if len(candidates) == 1:
            self._mended += 1
            return self._good(number, candidates[0], stored)
        self._follows = bool(candidates)
        self._seeds = [stored] if candidates else [stored, *sums]
        if not is_ours:
            return None
        return _frame(number, covered)._replace(is_good=False, candidates=[_frame(number, each) for each in candidates])

    def _good(self, number: int, covered: bytes, sums: Sums) -> Frame:
        self._seeds, self._follows = [sums], True
        return _frame(number, covered)

    def _leads(self, number: int, sums: Sums) -> bool:
        """Whether the next frame continues these sums; also if there is none."""
        if number + 1 >= self._count:
            return True
        *_, first, second = self._fields(number + 1)
        return wal_sums(self._covered(number + 1), sums, self._order) == (first, second)


def _frame(number: int, covered: bytes) -> Frame:
    page, size = _PAIR.unpack_from(covered)
    return Frame(number, page, size, covered[_COVERED:], True, [])


def _whole_header(content: bytes) -> bytes | None:
    """The header as it was written; None if it is damaged in more than one bit."""
    covered = content[:_SUMMED]
    sums = _HEADER.unpack_from(content)[6:]
    for order in "<>":
        computed = wal_sums(covered, (0, 0), order)
        mended = [covered] if computed == sums else mended_by_sums(covered, (0, 0), sums, order)
        if not mended and is_one_bit(computed, sums):
            mended, sums = [covered], computed
        for each in mended:
            if each[:8] == _PAIR.pack(_MAGIC + (order == ">"), _VERSION):
                return each + _PAIR.pack(*sums)
    return None


_BEGINNING: Final = re.compile(rb"\x9a[\xce\xcf]")
"""How the MessagePack of an `Entry` begins: ten members, the first of 64 or 32 bits."""


class Log(NamedTuple):
    """The records of a file."""

    entries: dict[int, Entry]
    """By the offset of their first event."""
    mended: int
    """Records in which one bit was flipped back."""
    gaps: int
    """Places between two records that hold none. One is usual: behind the last record, before those of earlier runs."""

    def following(self, offset: int) -> list[Entry]:
        """The consecutive entries from that offset on."""
        found: list[Entry] = []
        while offset in self.entries:
            found.append(self.entries[offset])
            offset = found[-1].following
        return found


def read_log(path: Path, keys: list[bytes]) -> Log:
    """Read the file. keys: the receipt keys with which it may have been written. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Log({}, 0, 0)
    for mends in (True, False):
        for key in keys:
            for each in (key,) if mends else _flipped(key):
                log = _read(content, crc32(each), mends=mends)
                if log.entries:
                    return log
    return Log({}, 0, 0)


def _flipped(key: bytes) -> list[bytes]:
    """What the key was if one bit flipped: it is stored in the database, which has no checksums."""
    number, size = int.from_bytes(key), len(key)
    return [(number ^ 1 << bit).to_bytes(size) for bit in range(8 * size)]


def _read(content: bytes, seed: int, *, mends: bool) -> Log:
    entries: dict[int, Entry] = {}
    mended = gaps = at = 0
    last: Entry | None = None
    while 0 <= at < len(content):
        record = record_at(content, at, seed)
        if mends and record is None and (record := _mended(content, at, seed, last)) is not None:
            mended += 1
        if record is None:
            at = _next(content, at + 1, seed)
            gaps += at >= 0
            continue
        last, at = record
        entries.setdefault(last.offset, last)
    return Log(entries, mended, gaps)


def _next(content: bytes, at: int, seed: int) -> int:
    """Where the next whole record begins, from byte `at` on; -1: nowhere."""
    for found in _BEGINNING.finditer(content, at + HEAD.size):
        if record_at(content, found.start() - HEAD.size, seed) is not None:
            return found.start() - HEAD.size
    return -1


def _mended(content: bytes, at: int, seed: int, last: Entry | None) -> tuple[Entry, int] | None:
    """The record at byte `at` as it was before one bit flipped, and where it ends."""
    if at + HEAD.size > len(content):
        return None
    length, checksum = HEAD.unpack_from(content, at)
    begin = at + HEAD.size
    for each in (length, *(length ^ 1 << bit for bit in range(32))):
        packed = content[begin : begin + each]
        if not each or len(packed) < each:
            continue
        if each == length:
            right = mend_crc32(packed, seed, checksum)
        else:
            right = packed if crc32(packed, seed) == checksum else None
        entry = None if right is None else _decoded(right)
        if entry is not None and (last is None or (entry.run, entry.offset) == (last.run, last.following)):
            return entry, begin + each
    return None


def _decoded(packed: bytes) -> Entry | None:
    try:
        return ENTRY.decode(packed)
    except (ValueError, RecursionError):
        return None
