"""The rows of a message: in the tables, and before it has any; how they are read, and how many are inserted at once;
and the rows of origins, each with the number by which leases and events name it.

Strategy: a `MessageRow` is a row of `message`, a `LeaseRow` a new row of `lease`, and an `Unflushed` a message that has
no rows yet. What is read of a stored message is a `Place` or a `StoredMessage` (messages/). What readers are shown is a
`HeldMessage` (veilmq.model.events) or a `ListedMessage` (veilmq.store.reader). No other shape is in the store.

apsw releases the interpreter lock at every statement. While another thread is busy, getting it back takes up to
`sys.setswitchinterval`. So many rows go into one statement.

A damaged disk may leave text that is not UTF-8, and then apsw returns no row of the statement. The same statement is
run again `leniently`: its texts have escapes in place of the wrong bytes, and the extras of such a message read as
damaged, so that callers that set messages apart do so.

An origin's number is assigned at its first use, and never twice. A client name is whatever a client says, so with many
of them new ones are recorded with less of it. Which go again, is trimming's affair (upkeep/trimming).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import md5 as md5_of
from itertools import chain
from typing import Any, Final, NamedTuple
from zlib import crc32

import apsw
import msgspec

from veilmq.model.commands import Origin
from veilmq.model.instant import Instant
from veilmq.model.messages import NO_EXTRAS, Extras

ORIGINS_MAX: Final = 100_000
"""Beyond this many distinct clients, new clients are recorded without their user agent."""
PROCESSES_MAX: Final = 50_000
"""Beyond this many, new clients are recorded without their process id, which changes at each restart of a worker."""
_PROCESS: Final = re.compile(r"; pid \d+")
"""The process id in a client name (veilmq.client.adapters.cloud)."""


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
    lease: tuple[Instant, Instant, int] | None = None
    """Its first lease: when it ends, when it was granted, and the client that holds it. The messages of a receive share
    one. A message that is given back has been flushed."""

    @property
    def leased(self) -> bool:
        """Whether it is under its first lease."""
        return self.lease is not None

    @property
    def due(self) -> Instant:
        """When its lease ends."""
        return self._held[0]

    @property
    def granted(self) -> Instant:
        """When its lease was granted."""
        return self._held[1]

    @property
    def origin(self) -> int:
        """The client that holds its lease."""
        return self._held[2]

    @property
    def _held(self) -> tuple[Instant, Instant, int]:
        assert self.lease is not None
        return self.lease

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
HELD_LEASE_COLUMNS: Final = (
    "l.due, m.sequence, m.id, l.attempt, l.rotation, l.granted, l.first, m.group_id, m.type, l.origin, l.ending"
)
"""What a `HeldLease` (veilmq.model.messages.states) is made of."""
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


ORIGINS: Final = "SELECT o.id, o.protocol, o.principal, o.client FROM origin o"
_TEXT: Final = re.compile(r"\b(?:m\.(?:sender|group_id|type)|o\.(?:protocol|principal|client))\b")
_EXTRAS: Final = "m.extras, m.md5"
_TEXTS: Final = tuple(f"CAST(m.{column} AS BLOB)" for column in ("sender", "group_id", "type"))


@cache
def leniently(statement: str) -> str:
    """The statement for rows with text that is not UTF-8. It must name columns of `message` with
    `m.`, and of `origin` with `o.`."""
    lenient = _TEXT.sub(r"readable(CAST(\g<0> AS BLOB))", statement)
    return lenient.replace(_EXTRAS, f"iif(is_utf8({', '.join(_TEXTS)}), m.extras, x''), m.md5")


def add_functions(connection: apsw.Connection) -> None:
    """Give a connection the functions that `leniently` needs."""
    connection.create_scalar_function("readable", readable, 1, deterministic=True)
    connection.create_scalar_function("is_utf8", is_utf8, 3, deterministic=True)


def readable(*text: Any) -> Any:
    """The bytes as text, with escapes like \\xff in place of those that are not UTF-8; None stays None."""
    (content,) = text
    return None if content is None else str(content, errors="backslashreplace")


def as_text(text: str | bytes | None) -> str | None:
    """The same of a value that may be text all the same."""
    return readable(text) if isinstance(text, bytes) else text


def is_utf8(*texts: Any) -> bool:
    """Whether all these texts are UTF-8."""
    try:
        return all(text is None or text.decode() is not None for text in texts)
    except UnicodeDecodeError:
        return False


def rows_of(connection: apsw.Connection, statement: str, values: Row = ()) -> list[Any]:
    """All rows of a statement, leniently if need be."""
    try:
        return connection.execute(statement, values).fetchall()
    except UnicodeDecodeError:
        return connection.execute(leniently(statement), values).fetchall()


def resumed(connection: apsw.Connection, statement: str, place: int) -> Iterator[Row]:
    """The rows of a statement with one parameter, a sequence behind which they begin, in the order of their sequences,
    one by one; leniently from the first row on that needs it. place: of the sequence in a row."""
    last, again = 0, statement
    while True:
        rows: Iterator[Row] = connection.cursor().execute(again, (last,))
        try:
            for row in rows:
                last = row[place]
                yield row
            return
        except UnicodeDecodeError:
            if again != statement:
                raise
            again = leniently(statement)


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
_TEXTS_OF: Final[tuple[type, ...]] = (str, type(None))
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


def pack_failure(error_type: str, error: str) -> bytes:
    """Encode the column `lease.failure`."""
    return _encode((error_type, error))


def intact(message: MessageRow, failure: bytes | None = None) -> Extras | None:
    """The extras of an undamaged message, with the error from its column `lease.failure`; None if its body does not
    match its MD5, or anything that goes with it cannot be read."""
    body = message.body
    if type(body) is not bytes or md5_of(body, usedforsecurity=False).digest() != message.md5:
        return None
    if type(message.sender) is not str or not (type(message.group) in _TEXTS_OF and type(message.type) in _TEXTS_OF):
        return None  # the type of a value is stored, and may be damaged, too
    extras = read_extras(message.packed)
    if extras is None or failure is None:
        return extras
    try:
        error_type, error = _FAILURE(failure)
    except ValueError:
        return None
    return msgspec.structs.replace(extras, error_type=error_type, error=error)


class OriginNumbers(dict[Origin, int]):
    """The number of each origin."""

    def __init__(self, connection: apsw.Connection) -> None:
        super().__init__(
            (Origin(protocol, principal, client), row)
            for row, protocol, principal, client in rows_of(connection, ORIGINS)
        )
        self.greatest = max(self.values(), default=0)
        """The last number assigned. Its row is never dropped, so none is assigned twice."""

    def as_recorded(self, origin: Origin) -> Origin:
        """A new origin, less specific where there are many already."""
        if len(self) < PROCESSES_MAX:
            return origin
        client = "" if len(self) >= ORIGINS_MAX else _PROCESS.sub("", origin.client)
        return Origin(origin.protocol, origin.principal, client)

    def forget_last(self, origin: Origin) -> None:
        """The batch that assigned a number is rolled back."""
        self.greatest = self.pop(origin) - 1


def readable_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row with `\ufffd` for what is no UTF-8."""
    return tuple(_text(each) if isinstance(each, str) else each for each in row)


def _text(value: str) -> str:
    return value.encode(errors="surrogateescape").decode(errors="replace")
