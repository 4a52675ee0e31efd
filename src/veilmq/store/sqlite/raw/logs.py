"""Reads a WAL beyond its bad frames, and a redo log beyond its bad records; puts pages of the database right.

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

Strategy, database: each page ends with a checksum of the WAL's kind. One flipped bit is flipped back in place, if the
checksum admits only one place.

One flipped bit: both checksums are linear, so it changes the checksum by an amount that its place alone decides. The
difference between the stored and the computed checksum is searched among those amounts; the data is then as it was
written. A difference that no single bit explains is damage of another kind.

Source: SQLite, "WAL File Format", 4.4 (Checksum Algorithm), and "Database File Format", 4; CRC-32 as in zlib.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import md5
from itertools import count, islice
from pathlib import Path
from struct import Struct, pack, unpack
from typing import Final, NamedTuple
from zlib import crc32

from veilmq.store.sqlite.disk import verifier
from veilmq.store.sqlite.disk.redo import ENTRY, HEAD, Entry, record_at
from veilmq.store.sqlite.disk.rows import read_extras, with_sum
from veilmq.store.sqlite.disk.schema import CHECKSUM_BYTES

_HEADER: Final = Struct(">IIIIIIII")
"""Magic number, version, page size, number of the checkpoint, two salts, two checksums of these."""
_FRAME: Final = Struct(">IIIIII")
"""Page, size of the database in pages after a commit (else 0), two salts, two checksums."""
_PAIR: Final = Struct(">II")
_WORD: Final = 0xFFFFFFFF
_COVERED: Final = 8
"""Bytes of a frame's header that its checksum covers, before the page."""
_SUMMED: Final = 24
"""Bytes of the WAL's header that its checksum covers."""
_MAGIC: Final = 0x377F0682
"""The lowest bit says that checksums are of big-endian words."""
_VERSION: Final = 3_007_000


Sums = tuple[int, int]


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
    """What the key was if one bit flipped: it is stored in the database, which may have no checksums."""
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


def wal_sums(data: bytes, seed: Sums, order: str) -> Sums:
    """SQLite's checksum of data whose length is a multiple of 8. order: `<` or `>`, of its words."""
    first, second = seed
    words = iter(unpack(f"{order}{len(data) // 4}I", data))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & _WORD
        second = (second + odd + first) & _WORD
    return first, second


def mended_by_sums(data: bytes, seed: Sums, stored: Sums, order: str) -> list[bytes]:
    """The data with one bit flipped back that makes its checksum the stored one: every way.

    There may be several, because a word's highest bits change the checksum alike in every third word or so, and two of
    them in one word.
    """
    computed = wal_sums(data, seed, order)
    lacking = ((stored[0] - computed[0]) & _WORD, (stored[1] - computed[1]) & _WORD)
    found = []
    # What an increase of one of a word adds to both sums, from the last pair of words to the first.
    of_even, of_odd = (1, 1), (0, 1)
    for at in range(len(data) - 4, -1, -8):
        for place, amount in ((at, of_odd), (at - 4, of_even)):
            for bit in _bits_of(amount, lacking):
                mended = bytearray(data)
                byte = bit // 8 if order == "<" else 3 - bit // 8
                mended[place + byte] ^= 1 << bit % 8
                if wal_sums(bytes(mended), seed, order) == stored:
                    found.append(bytes(mended))
        of_even, of_odd = _step(of_even), _step(of_odd)
    return found


def _step(amount: Sums) -> Sums:
    """The same increase, one pair of words earlier."""
    first, second = amount
    return (first + second) & _WORD, (first + 2 * second) & _WORD


def _bits_of(amount: Sums, lacking: Sums) -> Iterator[int]:
    """The bits of a word of which a change, up or down, adds what is lacking."""
    for bit in range(32):
        up = ((amount[0] << bit) & _WORD, (amount[1] << bit) & _WORD)
        if lacking in (up, (-up[0] & _WORD, -up[1] & _WORD)):
            yield bit


PAGE_BYTES: Final = 4096
CHECKSUM_BYTES_AT: Final = 20
"""Where the first page says how many bytes each page keeps free for its checksum."""
_TRIED_MAX: Final = 1_000
"""After so many pages without one flipped bit no more are searched for one: that takes 20 ms each."""


class Mended(NamedTuple):
    """The pages of a database that did not match their checksums, by their numbers."""

    mended: list[int]
    """One bit had flipped, and was flipped back."""
    left: list[int]
    """Others. A free page needs no checksum."""


def mend_pages(path: Path, pages: int | None = None, *, finishing: bool = False) -> Mended:
    """Flip the bit back, in place, in each page of which one flipped. Nobody has the database open. Raises OSError.

    pages: look only at so many, from the first on. finishing: let the others match, too, with what they hold.
    """
    matches = verifier()
    found = Mended([], [])
    with path.open("r+b") as file:
        first = bytearray(file.read(PAGE_BYTES))
        if matches is None or len(first) < PAGE_BYTES or not _has_checksums(first, matches):
            return found
        file.seek(0)
        for number in islice(count(1), pages):
            page = file.read(PAGE_BYTES)
            if len(page) < PAGE_BYTES:
                break
            if matches(page) or not any(page):  # a free page may never have been written
                continue
            right = _mended_page(page) if len(found.left) < _TRIED_MAX else None
            (found.left if right is None else found.mended).append(number)
            if right is not None or finishing:
                file.seek((number - 1) * PAGE_BYTES)
                file.write(right or with_checksum(page))
        if found.mended or finishing:
            file.flush()
            os.fsync(file.fileno())
    return found


def _has_checksums(first: bytearray, matches: Callable[[bytes], bool]) -> bool:
    """Whether a database's pages have checksums, by its first page, in which a bit may have flipped."""
    if first[CHECKSUM_BYTES_AT] == CHECKSUM_BYTES:
        return True
    first[CHECKSUM_BYTES_AT] = CHECKSUM_BYTES
    return matches(bytes(first))


def with_checksum(page: bytes) -> bytes:
    """The page with its checksum. SQLite writes it when it copies a page from the WAL into the database."""
    data = page[:-CHECKSUM_BYTES]
    return data + pack("<II", *wal_sums(data, (0, 0), "<"))


def _mended_page(page: bytes) -> bytes | None:
    data, stored = page[:-CHECKSUM_BYTES], unpack("<II", page[-CHECKSUM_BYTES:])
    found = mended_by_sums(data, (0, 0), stored, "<")
    if is_one_bit(wal_sums(data, (0, 0), "<"), stored):
        found.append(data)  # the bit flipped in the checksum
    return with_checksum(found[0] + page[-CHECKSUM_BYTES:]) if len(found) == 1 else None


def is_one_bit(left: Sums, right: Sums) -> bool:
    """Whether the two differ in one bit."""
    a, b = (int.from_bytes(_PAIR.pack(*each)) for each in (left, right))
    return (a ^ b).bit_count() == 1


_TABLE: Final = tuple(crc32(bytes([index])) ^ crc32(b"\0") for index in range(256))
_INDEX_BY_TOP: Final = {entry >> 24: index for index, entry in enumerate(_TABLE)}
_OF_LAST_BYTE: Final = {_TABLE[1 << bit]: bit for bit in range(8)}


def mend_crc32(data: bytes, seed: int, stored: int) -> bytes | None:
    """The data with at most one bit flipped back, so that `crc32(data, seed)` is the stored one; or as it is, if a bit
    of the stored one flipped."""
    difference = crc32(data, seed) ^ stored
    if difference.bit_count() <= 1:
        return data  # the bit flipped in the stored checksum
    for at in range(len(data) - 1, -1, -1):
        bit = _OF_LAST_BYTE.get(difference)
        if bit is not None:
            mended = bytearray(data)
            mended[at] ^= 1 << bit
            return bytes(mended)
        index = _INDEX_BY_TOP[difference >> 24]
        difference = ((difference ^ _TABLE[index]) << 8 | index) & _WORD
    return None


_TRIED_BYTES_MAX: Final = 4096
"""A body this long takes a second: each bit needs another MD5."""


def mend_body(body: bytes, digest: bytes) -> bytes | None:
    """The body with the one bit flipped back that makes its MD5 the digest; None also for one that is too long."""
    if len(body) > _TRIED_BYTES_MAX:
        return None
    tried = bytearray(body)
    for at in range(len(tried)):
        for bit in range(8):
            tried[at] ^= 1 << bit
            if md5(tried, usedforsecurity=False).digest() == digest:
                return bytes(tried)
            tried[at] ^= 1 << bit
    return None


def is_whole(body: bytes, digest: bytes, extras: bytes | None) -> bool:
    """Whether a message can be delivered."""
    return md5(body, usedforsecurity=False).digest() == digest and read_extras(extras) is not None


def mended_message(extras: bytes | None, digest: bytes, body: bytes) -> tuple[bytes | None, bytes, bytes] | None:
    """Extras, MD5 and body of a damaged message as they were before one bit flipped."""
    found = md5(body, usedforsecurity=False).digest()
    if (int.from_bytes(found) ^ int.from_bytes(digest)).bit_count() == 1:
        digest = found
    elif found != digest:
        body = mend_body(body, digest) or body
    elif extras is not None:
        mended = mend_crc32(extras[:-4], 0, int.from_bytes(extras[-4:], "little"))
        extras = extras if mended is None else with_sum(mended)
    return (extras, digest, body) if is_whole(body, digest, extras) else None
