"""Finds the one bit that flipped in data whose checksum is known.

Strategy: both checksums are linear, so one flipped bit changes the checksum by an amount that its place alone decides.
The difference between the stored and the computed checksum is searched among those amounts; the caller's data is then
as it was written. A difference that no single bit explains is damage of another kind: None.

Source: SQLite, "WAL File Format", 4.4 (Checksum Algorithm); CRC-32 as in zlib.
"""

from hashlib import md5
from struct import Struct, unpack
from typing import Final
from zlib import crc32

_WORD: Final = 0xFFFFFFFF
_PAIR: Final = Struct(">II")

Sums = tuple[int, int]


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

    There may be several, because a word's highest bits change the checksum alike in every third word or so.
    """
    computed = wal_sums(data, seed, order)
    lacking = ((stored[0] - computed[0]) & _WORD, (stored[1] - computed[1]) & _WORD)
    found = []
    # What an increase of one of a word adds to both sums, from the last pair of words to the first.
    of_even, of_odd = (1, 1), (0, 1)
    for at in range(len(data) - 4, -1, -8):
        for place, amount in ((at, of_odd), (at - 4, of_even)):
            bit = _bit_of(amount, lacking)
            if bit is not None:
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


def _bit_of(amount: Sums, lacking: Sums) -> int | None:
    """The bit of a word whose change, up or down, adds what is lacking."""
    for bit in range(32):
        up = ((amount[0] << bit) & _WORD, (amount[1] << bit) & _WORD)
        if lacking in (up, (-up[0] & _WORD, -up[1] & _WORD)):
            return bit
    return None


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
