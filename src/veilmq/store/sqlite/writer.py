"""The open batch: the one connection that writes, and everything that rolls back with it.

Strategy: command rooms (sends, claims, leases, queue_commands, sweeps) are functions of a `Writer` and a command. The
writer gives out sequences, collects events, remembers what to undo, and ends the batch with one row of history and the
mark. It never commits by itself: the store does, in whatever thread the shell chose.
"""

import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final, TypeVar

import apsw
import msgspec

from veilmq.model.commands import Origin
from veilmq.model.events import SCHEMA_VERSION, Event
from veilmq.model.instant import Instant
from veilmq.model.queue import QueueKey
from veilmq.model.receipt import ReceiptKey
from veilmq.store.sqlite.nursery import Nursery
from veilmq.store.sqlite.queues import LiveQueue, Queues
from veilmq.store.sqlite.topics import Topics

ORIGINS_MAX: Final = 100_000
"""Beyond this many distinct clients, new ones are recorded without their user agent."""
_IDS: Final = struct.Struct("16s" * 256)
_VERSION_4: Final = bytes(byte & 0x0F | 0x40 for byte in range(256))
_VARIANT: Final = bytes(byte & 0x3F | 0x80 for byte in range(256))
"""What a random byte 6 and 8 becomes in a UUID of version 4 (RFC 9562, 5.4)."""

_ROWS_MAX: Final = 256
"""Of one insert: more at once are no faster, and apsw keeps no text of more than 16 KiB compiled."""

INSERT_MESSAGE: Final = "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_LEASE: Final = "INSERT INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

Row = tuple[Any, ...]
T = TypeVar("T")


class Mark(msgspec.Struct):
    """What grows for ever, as it will be after the open batch."""

    clock: int
    sequence: int
    generation: int
    offset: int

    def copy(self) -> "Mark":
        """A value to go back to."""
        return Mark(self.clock, self.sequence, self.generation, self.offset)


class Writer:
    """State of the open batch, and the statements that all command rooms share."""

    def __init__(
        self, connection: apsw.Connection, queues: Queues, topics: Topics, mark: Mark, receipts: ReceiptKey
    ) -> None:
        self.connection = connection
        self.queues = queues
        self.topics = topics
        self.mark = mark
        self.receipts = receipts
        self.nursery = Nursery()
        self.nursery.restore(connection, queues)
        self.now = Instant(mark.clock)
        self.disorder = 0
        """How many places a message may be out of its order, on purpose."""
        self.disk_low: int | None = None
        """Free bytes when they are below the floor."""
        self.events: list[Event] = []
        self.wrote = False
        self.returned = 0
        """Messages whose lease or delay ended because a command of the open batch looked."""
        self.detours = 0
        """Candidates that receives of the open batch met and did not give out."""
        self.open = False
        self.history_bytes = history_end(connection)
        self._execute = connection.cursor().execute
        self._executemany = connection.cursor().executemany
        self._encoder = msgspec.msgpack.Encoder()
        self._touched: dict[int, tuple[LiveQueue, tuple[object, ...]]] = {}
        self._undo: list[Callable[[], None]] = []
        self._saved = (mark.copy(), self.history_bytes)
        self._origins: dict[Origin, int] = {
            Origin(protocol, principal, client): row
            for row, protocol, principal, client in connection.execute(
                "SELECT id, protocol, principal, client FROM origin"
            )
        }
        self._ids: list[bytes] = []
        self._last_key: QueueKey | None = None
        self._last_queue: LiveQueue | None = None
        self._last_origin: Origin | None = None
        self._last_origin_row = 0

    def begin(self, now: Instant) -> None:
        """Open a batch that is judged by `now`, or by the mark if that is later."""
        self.now = Instant(max(now, self.mark.clock))
        self.wrote = False
        self.returned = self.detours = 0
        self.events = []
        self.nursery.changed = False
        self._touched = {}
        self._undo = []
        self._last_key = self._last_origin = None
        self._saved = (self.mark.copy(), self.history_bytes)
        self._execute("BEGIN IMMEDIATE")
        self.open = True

    def finish(self) -> None:
        """Write the history row and the mark; a batch that wrote nothing is closed here."""
        if self.events:
            packed = self._encoder.encode(self.events)
            self._execute(
                "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)",
                (self.mark.offset, len(self.events), self.now, self.history_bytes, SCHEMA_VERSION, packed),
            )
            born = self.nursery.end_batch(len(self.events))
            if born:
                self._execute("INSERT INTO nursery VALUES (?, ?)", (self.mark.offset, self._encoder.encode(born)))
            self.mark.offset += len(self.events)
            self.history_bytes += len(packed)
            self.wrote = True
        if not self.wrote:
            self._execute("ROLLBACK")
            self.open = False
            return
        self.mark.clock = self.now
        self._execute(
            "UPDATE mark SET clock = ?, sequence = ?, generation = ?, offset = ?",
            (self.mark.clock, self.mark.sequence, self.mark.generation, self.mark.offset),
        )

    def commit(self) -> None:
        """Commit the open batch and make it durable."""
        self._execute("COMMIT")
        self.open = False

    def rollback(self) -> None:
        """Forget the open batch, on disk and in memory."""
        self.open = False
        if self.connection.in_transaction:
            self._execute("ROLLBACK")
        for undo in reversed(self._undo):
            undo()
        for queue, saved in self._touched.values():
            queue.restore(saved)
            self.queues.rebound(queue)
        self._undo = []
        self._touched = {}
        self.mark, self.history_bytes = self._saved
        self.events = []
        if self.nursery.changed:
            self.nursery.restore(self.connection, self.queues)

    def touch(self, queue: LiveQueue) -> None:
        """Call before changing anything of the queue in memory."""
        if queue.incarnation not in self._touched:
            queue.woken = 0
            self._touched[queue.incarnation] = (queue, queue.save())

    def undo(self, action: Callable[[], None]) -> None:
        """Do this too when the batch is rolled back."""
        self._undo.append(action)

    def write(self, statement: str, values: tuple[Any, ...]) -> None:
        """Run a statement that changes something."""
        self.wrote = True
        self._execute(statement, values)

    def write_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Run a statement that changes something, once a row."""
        self.wrote = True
        self._executemany(statement, rows)

    def insert_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Run an insert of one row for all of these: 256 a statement, and powers of two for the rest.

        apsw lets the interpreter go at every statement, and gets it back from a thread that burns the CPU only when
        that one's turn is over (`sys.setswitchinterval`).
        """
        self.wrote = True
        start = 0
        while start < len(rows):
            count = min(1 << (len(rows) - start).bit_length() - 1, _ROWS_MAX)
            values = tuple(chain.from_iterable(rows[start : start + count]))
            self._execute(_of_rows(statement, count), values)
            start += count

    def read(self, statement: str, values: tuple[Any, ...]) -> list[Row]:
        """All rows that a query gives, as the open batch sees them."""
        return self._execute(statement, values).fetchall()

    def read_packed(self, statement: str, values: tuple[Any, ...], decoder: "msgspec.json.Decoder[T]") -> T:
        """What a statement gives that packs its rows into one array of JSON: many rows at the price of one, when each
        has to wait for the interpreter as in `insert_many`."""
        packed: Any = self._execute(statement, values).get
        return decoder.decode(packed)

    def read_one(self, statement: str, values: tuple[Any, ...]) -> Row | None:
        """The first row that a query gives."""
        return self._execute(statement, values).fetchone()

    def next_sequence(self) -> int:
        """A sequence greater than any before."""
        self.mark.sequence += 1
        return self.mark.sequence

    def next_generation(self) -> int:
        """A generation that no row has."""
        self.mark.generation += 1
        return self.mark.generation

    def next_id(self) -> bytes:
        """A UUID of version 4, taken from a pool."""
        if not self._ids:
            pool = bytearray(os.urandom(_IDS.size))
            pool[6::16] = pool[6::16].translate(_VERSION_4)
            pool[8::16] = pool[8::16].translate(_VARIANT)
            self._ids = list(_IDS.unpack(pool))
        return self._ids.pop()

    def queue(self, key: QueueKey) -> LiveQueue | None:
        """The queue of that name. A wire batch names one queue many times: the last one found is at hand."""
        if key is self._last_key:
            return self._last_queue
        queue = self.queues.by_key.get(key)
        self._last_key, self._last_queue = key, queue
        return queue

    def forget_queue(self) -> None:
        """A queue was created or deleted: look names up again."""
        self._last_key = None

    def origin(self, origin: Origin) -> int:
        """The number of an origin, given at its first use."""
        if origin is self._last_origin:
            return self._last_origin_row
        row = self._origins.get(origin)
        if row is None:
            if len(self._origins) >= ORIGINS_MAX and origin.client:
                return self.origin(Origin(origin.protocol, origin.principal))
            row = len(self._origins) + 1
            values = (row, origin.protocol, origin.principal, origin.client)
            self.write("INSERT INTO origin VALUES (?, ?, ?, ?)", values)
            self._origins[origin] = row
            self.undo(lambda: self._forget_origin(origin))
        self._last_origin, self._last_origin_row = origin, row
        return row

    def _forget_origin(self, origin: Origin) -> None:
        del self._origins[origin]

    def take_visible(self) -> dict[QueueKey, int]:
        """How many messages became visible in the batch, by queue. Every queue that has some was touched."""
        return {queue.key: queue.woken for queue, _ in self._touched.values() if queue.woken}


@cache
def _of_rows(statement: str, count: int) -> str:
    """An insert of one row as one of so many."""
    head, row = statement.split(" VALUES ")
    return f"{head} VALUES {','.join([row.replace(' ', '')] * count)}"


def history_end(connection: apsw.Connection) -> int:
    """Bytes of all events ever appended."""
    row = connection.execute("SELECT bytes_before, length(events) FROM history ORDER BY offset DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0]) + int(row[1])
