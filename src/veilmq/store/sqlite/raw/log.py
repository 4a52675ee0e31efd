"""Reads a redo log beyond its bad records.

Strategy: a start reads the records one after the other, and stops at the first that is incomplete. Here the whole file
is searched for records: behind the last one, else wherever one can begin. One flipped bit is flipped back. Records are
told apart by the offset of their first event, whichever run of the log they belong to: the file may still hold batches
of an earlier run, which help if the database lost them.
"""

import re
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from veilmq.store.sqlite.disk.redo import ENTRY, HEAD, Entry, record_at
from veilmq.store.sqlite.raw.flips import mend_crc32

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


def read(path: Path, keys: list[bytes]) -> Log:
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
