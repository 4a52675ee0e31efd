"""The rows of a message: in the tables, and before it has any; and how many rows are inserted at once.

Strategy: apsw releases the interpreter lock at every statement. While another thread is busy, getting it back takes up
to `sys.setswitchinterval`. So many rows go into one statement.
"""

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import md5 as md5_of
from itertools import chain
from typing import Any, Final

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.message import NO_EXTRAS, Extras


class Contents(msgspec.Struct, array_like=True, gc=False):
    """A row of `message`."""

    sequence: int
    generation: int
    line: int | None
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


class Unflushed(msgspec.Struct, gc=False, eq=False):
    """An unflushed message, and its first lease if it has been received."""

    contents: Contents
    extras: Extras
    leased: bool = False
    """Under its first lease. A message that is given back has been flushed."""
    due: Instant = Instant(0)
    granted: Instant = Instant(0)
    origin: int = 0
    """The client that holds the lease."""

    def expires(self, retention_us: int) -> int:
        """The instant at which the message expires."""
        own_expiry = self.contents.own_expiry
        return self.contents.sent + retention_us if own_expiry is None else own_expiry


INSERT_MESSAGE: Final = "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


LEASE_COLUMNS: Final = (
    "sequence, generation, priority, line, hidden, due, attempt, rotation, granted, first, origin, turn"
)
"""The columns given for a new row of `lease`; the others have defaults."""


INSERT_LEASE: Final = f"INSERT INTO lease ({LEASE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


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
pack_extras: Final = msgspec.msgpack.Encoder().encode
"""Encodes the column `extras` of a message that has some; NULL stands for `NO_EXTRAS`."""
_FAILURE: Final = msgspec.msgpack.Decoder(tuple[str, str]).decode


def read_extras(packed: bytes | None) -> Extras | None:
    """The stored extras, or the shared empty ones; None if they are damaged."""
    if packed is None:
        return NO_EXTRAS
    try:
        return _decode(packed)
    except (ValueError, RecursionError):  # msgspec's errors, and UnicodeDecodeError for text that is no longer UTF-8
        return None


def intact(body: bytes, md5: bytes, packed: bytes | None) -> Extras | None:
    """The extras of an undamaged message; None if its body does not match its MD5, or its extras are damaged."""
    return read_extras(packed) if md5_of(body, usedforsecurity=False).digest() == md5 else None


def pack_failure(error_type: str, error: str) -> bytes:
    """Encode the column `lease.failure`."""
    return pack_extras((error_type, error))


def with_failure(extras: Extras, packed: bytes) -> Extras:
    """The extras, with the error from the column `lease.failure`."""
    error_type, error = _FAILURE(packed)
    return msgspec.structs.replace(extras, error_type=error_type, error=error)
