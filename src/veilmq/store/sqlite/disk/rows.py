"""The rows of a message: in the tables, and before it has any; and how many rows are inserted at once.

Strategy: a `MessageRow` is a row of `message`, a `LeaseRow` a new row of `lease`, and an `Unflushed` a message that has
no rows yet. What is read of a stored message is a `Place` or a `StoredMessage` (messages/places.py). What readers are
shown is a `HeldMessage` (veilmq.model.events) or a `ListedMessage` (veilmq.store.reader). No other shape is in
the store.

apsw releases the interpreter lock at every statement. While another thread is busy, getting it back takes up
to `sys.setswitchinterval`. So many rows go into one statement.
"""

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import md5 as md5_of
from itertools import chain
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.messages.message import NO_EXTRAS, Extras


class MessageRow(msgspec.Struct, array_like=True, gc=False):
    """A row of `message`."""

    sequence: int
    generation: int
    line: int
    """A priority, or the number of a group, which is greater than any priority."""
    in_line: int
    """1: it has its place in the line, by sequence. 0: it is beside the line, and only its lease says where; or it is
    in quarantine."""
    priority: int
    id: bytes
    sent: Instant
    own_expiry: Instant | None
    sender: str
    group: str | None
    type: str | None
    packed: bytes | None
    md5: bytes
    body: bytes

    @property
    def size_bytes(self) -> int:
        """About how many bytes it takes in the journal."""
        return len(self.body) + len(self.packed or b"")

    def expires(self, retention_us: int) -> int:
        """The instant at which the message expires."""
        return self.sent + retention_us if self.own_expiry is None else self.own_expiry


class Unflushed(msgspec.Struct, gc=False, eq=False):
    """An unflushed message, and its first lease if it has been received."""

    row: MessageRow
    extras: Extras
    leased: bool = False
    """Under its first lease. A message that is given back has been flushed."""
    due: Instant = Instant(0)
    granted: Instant = Instant(0)
    origin: int = 0
    """The client that holds the lease."""

    def expires(self, retention_us: int) -> int:
        """The instant at which the message expires."""
        return self.row.expires(retention_us)


class LeaseRow(NamedTuple):
    """A new row of `lease`; the columns `ending` and `failure` have defaults."""

    sequence: int
    generation: int
    line: int
    in_line: int
    hidden: int
    due: int
    attempt: int
    rotation: int
    granted: int
    first: int | None
    origin: int
    turn: int = 0


INSERT_MESSAGE: Final = "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
MESSAGE_COLUMNS: Final = (
    "m.sequence, m.generation, m.line, m.in_line, m.priority, m.id, m.sent, m.expires, m.sender, m.group_id, m.type,"
    " m.extras, m.md5, m.body"
)
"""What a `MessageRow` is made of."""
LEASE_COLUMNS: Final = ", ".join(LeaseRow._fields)
INSERT_LEASE: Final = f"INSERT INTO lease ({LEASE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
HELD_COLUMNS: Final = (
    "m.sequence, m.id, m.priority, m.sent, m.expires, m.group_id, m.type, length(m.body),"
    " l.attempt, l.rotation, l.hidden, l.due, l.granted, l.first"
)
"""What a `HeldMessage` (veilmq.model.events) is made of, but for the instant of its quarantine."""


_ROWS_MAX: Final = 256
"""Rows in one insert. More are no faster, and apsw does not cache statements longer than 16 KiB."""

Row = tuple[Any, ...]
Execute = Callable[[str, Row], Any]


def insert_rows(execute: Execute, statement: str, rows: Sequence[Row]) -> None:
    """Run a one-row insert for all rows: 256 rows a statement, and powers of two for the rest."""
    start = 0
    while start < len(rows):
        count = min(1 << (len(rows) - start).bit_length() - 1, _ROWS_MAX)
        values = tuple(chain.from_iterable(rows[start : start + count]))
        execute(_of_rows(statement, count), values)
        start += count


@cache
def _of_rows(statement: str, count: int) -> str:
    """The one-row insert, rewritten for `count` rows."""
    head, row = statement.split(" VALUES ")
    return f"{head} VALUES {','.join([row.replace(' ', '')] * count)}"


_decode: Final = msgspec.msgpack.Decoder(Extras).decode
_encode: Final = msgspec.msgpack.Encoder().encode
_FIELDS: Final = len(Extras.__struct_fields__)
_BEGINNING: Final = bytes([0x90 | _FIELDS + 1])
"""How the MessagePack of an array with one more member begins."""
_MARK: Final = b"\xd6\x43"
"""MessagePack of an extension of 4 bytes: the last member of stored extras is the CRC-32 of what is before it. What was
stored without one ends with a text, and no text contains these two bytes."""
_RESIDUE: Final = 0x2144DF1C
"""The CRC-32 of any bytes that end with their own."""
_FAILURE: Final = msgspec.msgpack.Decoder(tuple[str, str]).decode


def pack_extras(extras: Extras) -> bytes:
    """Encode the column `extras` of a message that has some; NULL stands for `NO_EXTRAS`."""
    return with_sum(_BEGINNING + _encode(extras)[1:] + _MARK)


def with_sum(packed: bytes) -> bytes:
    """Extras with the last four bytes, the checksum of all before them."""
    return packed + crc32(packed).to_bytes(4, "little")


def read_extras(packed: bytes | None) -> Extras | None:
    """The stored extras, or the shared empty ones; None if they are damaged."""
    if packed is None:
        return NO_EXTRAS
    if crc32(packed) != _RESIDUE and packed[-6:-4] == _MARK:
        return None
    try:
        return _decode(packed)
    except (ValueError, RecursionError):  # msgspec's errors, and UnicodeDecodeError for text that is no longer UTF-8
        return None


def intact(body: bytes, md5: bytes, packed: bytes | None) -> Extras | None:
    """The extras of an undamaged message; None if its body does not match its MD5, or its extras are damaged."""
    return read_extras(packed) if md5_of(body, usedforsecurity=False).digest() == md5 else None


def pack_failure(error_type: str, error: str) -> bytes:
    """Encode the column `lease.failure`."""
    return _encode((error_type, error))


def with_failure(extras: Extras, packed: bytes) -> Extras:
    """The extras, with the error from the column `lease.failure`."""
    error_type, error = _FAILURE(packed)
    return msgspec.structs.replace(extras, error_type=error_type, error=error)
