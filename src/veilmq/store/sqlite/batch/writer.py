"""The open batch: the one connection that writes, and everything that rolls back with it.

Strategy: command rooms (sends, claims, leases, queue_commands, sweeps) are functions of a `Writer` and a command. The
writer gives out sequences, collects events, remembers what to undo, and ends the batch with one row of history and the
mark. It never commits by itself: the store does, in whatever thread the shell chose. A batch becomes a transaction with
its first statement; one that changed no table goes into the redo log instead (redo.py), and the next transaction begins
when the database has that too.
"""

import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

import apsw
import msgspec

from veilmq.model.commands import Origin
from veilmq.model.errors import StoreUnknown
from veilmq.model.events import SCHEMA_VERSION, Event
from veilmq.model.instant import Instant
from veilmq.model.message_type import MessageTypes
from veilmq.model.queue import QueueKey
from veilmq.model.receipt import ReceiptKey
from veilmq.store.sqlite.batch.memtable import Memtable
from veilmq.store.sqlite.batch.queues import LiveQueue, Queues
from veilmq.store.sqlite.disk.connections import verdict
from veilmq.store.sqlite.disk.inserts import Row, insert_rows
from veilmq.store.sqlite.disk.redo import INSERT_HISTORY, INSERT_MEMTABLE, UPDATE_MARK, Contents, Entry, Redo, apply_log
from veilmq.store.sqlite.disk.redo_presence import note_size
from veilmq.store.topics import Topics

ORIGINS_MAX: Final = 100_000
"""Beyond this many distinct clients, new ones are recorded without their user agent."""
PROCESSES_MAX: Final = 50_000
"""Beyond this many, new ones are recorded without their process: each restart of a worker makes one."""
_PROCESS: Final = re.compile(r"; pid \d+")
"""Of a client name (veilmq.client.client_name)."""
_IDS: Final = struct.Struct("16s" * 256)
_VERSION_4: Final = bytes(byte & 0x0F | 0x40 for byte in range(256))
_VARIANT: Final = bytes(byte & 0x3F | 0x80 for byte in range(256))
"""What a random byte 6 and 8 becomes in a UUID of version 4 (RFC 9562, 5.4)."""

INSERT_MESSAGE: Final = "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
LEASE_COLUMNS: Final = (
    "sequence, generation, priority, line, hidden, due, attempt, rotation, granted, first, origin, turn"
)
"""Of a row of `lease` as it begins; the rest have their defaults."""
INSERT_LEASE: Final = f"INSERT INTO lease ({LEASE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_NEXT_NUMBER: Final = (
    "INSERT INTO last_number VALUES (?, 1) ON CONFLICT (kind) DO UPDATE SET last = last + 1 RETURNING last"
)
_SYNCHRONOUS_NORMAL: Final = 1
"""Commits to a WAL are not synced, checkpoints are."""

logger = logging.getLogger("veilmq.store")

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
        self,
        connection: apsw.Connection,
        queues: Queues,
        topics: Topics,
        mark: Mark,
        receipts: ReceiptKey,
        redo: Redo,
    ) -> None:
        self.connection = connection
        self.redo = redo
        self.queues = queues
        self.topics = topics
        self.mark = mark
        self.receipts = receipts
        self.memtable = Memtable()
        self.memtable.restore(connection, queues)
        self.now = Instant(mark.clock)
        self.disorder = 0
        """How many places a message may be out of its order, on purpose."""
        self.types = MessageTypes()
        self.error_lines = True
        """Whether the first line of a worker's error is kept."""
        self.disk_low: int | None = None
        """Free bytes when they are below the floor."""
        self.events: list[Event] = []
        self.wrote = False
        self.returned = 0
        """Messages whose lease or delay ended because a command of the open batch looked."""
        self.detours = 0
        """Candidates that receives of the open batch met and did not give out."""
        self.open = False
        self._transacting = False
        self._entry: tuple[Entry, bytes] | None = None
        """The open batch, if it goes into the redo log."""
        self._gate = threading.Lock()
        """Who holds it may begin a transaction; nobody waits for it while one is open."""
        self.wal_pages = 0
        self._grew = False
        """Whether the WAL got anything from the latest commit."""
        connection.set_wal_hook(self._wal_grew)
        self._relaxed = False
        """Whether commits may not be synced, because applying the log was interrupted."""
        self._failed: apsw.Error | None = None
        """Why it is unknown whether the log was applied."""
        self._closed = False
        synchronous = connection.pragma("synchronous")
        self._synced = f"PRAGMA synchronous = {synchronous}"
        self._unsynced = f"PRAGMA synchronous = {min(synchronous, _SYNCHRONOUS_NORMAL)}"
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
        self.memtable.begin_batch()
        self._touched = {}
        self._undo = []
        self._last_key = self._last_origin = None
        self._saved = (self.mark.copy(), self.history_bytes)
        self._entry = None
        self.open = True

    def finish(self) -> None:
        """End the batch's statements with the history row and the mark; a batch that wrote nothing is closed here."""
        if self.events:
            packed = self._encoder.encode(self.events)
            count = len(self.events)
            row = (self.mark.offset, count, self.now, self.history_bytes, SCHEMA_VERSION, packed)
            born = self.memtable.end_batch(count)
            self.mark.offset += count
            self.history_bytes += len(packed)
            if not self.wrote and self._goes_into_redo(row, born):
                return
            self.write(INSERT_HISTORY, row)
            if born:
                self.write(INSERT_MEMTABLE, (row[0], self._encoder.encode(born)))
        if not self.wrote:
            self._end_transaction("ROLLBACK")
            self.open = False
            return
        self.mark.clock = self.now
        self._execute(UPDATE_MARK, (self.mark.clock, self.mark.sequence, self.mark.generation, self.mark.offset))

    def _goes_into_redo(self, row: Row, born: list[Contents]) -> bool:
        if self.disk_low is not None:
            return False  # what may have no room in the database is refused at once
        self._entry = self.redo.prepare(row, self.mark.sequence, self.mark.generation, born)
        if self._entry is None:
            return False
        self._end_transaction("ROLLBACK")  # it only read
        self.mark.clock = self.now
        self.wrote = True
        return True

    def commit(self) -> None:
        """Make the open batch durable."""
        if self._entry is None:
            self._grew = False
            self._end_transaction("COMMIT")
            if self._grew:  # a transaction that changed nothing syncs nothing
                self.redo.restart()
        else:
            entry, record = self._entry
            self.redo.append(entry, record)
            with self._gate:
                self.redo.unapplied.append(entry)
                self.redo.dead.update(self.memtable.died)
        self.open = False

    def _transact(self) -> None:
        """Call before a statement of the open batch: the first one begins its transaction."""
        if not self._transacting:
            with self._gate:
                if self._failed is not None:
                    raise self._failed
                self._apply_log()
                self._execute("BEGIN IMMEDIATE")
                self._transacting = True

    def _end_transaction(self, how: str) -> None:
        if self._transacting:
            self._execute(how)
            self._transacting = False

    def apply_log(self) -> None:
        """Bring into the database what only the redo log has of committed batches: for who reads there. Any thread."""
        if self.redo.unapplied:
            with self._gate:
                if not self._transacting and not self._closed:
                    self._apply_log()

    def _apply_log(self) -> None:
        """The same, with the gate in hand and no transaction open.

        Not synced: the redo log keeps the entries until a synced transaction has followed. A caller's thread may be
        interrupted anywhere in it, so that the database may have them though they stand here.
        """
        redo = self.redo
        if self._relaxed:
            self._tighten()
        if not redo.unapplied:
            return
        self._relaxed = True
        try:
            self._execute(self._unsynced)
            self._execute("BEGIN IMMEDIATE")
            following: Any = self._execute("SELECT offset FROM mark").get
            missing = [entry for entry in redo.unapplied if entry.offset >= following]
            if missing:
                apply_log(self._execute, missing, redo.dead)
            self._execute("COMMIT")
        except BaseException as error:
            if isinstance(error, apsw.Error) and isinstance(verdict(error), StoreUnknown):
                self._failed = error
            raise
        finally:
            self._tighten()
        redo.unapplied = []
        redo.dead = set()

    def _tighten(self) -> None:
        """After the log was applied, or failed to be: no transaction is open, and commits are synced."""
        if self.connection.in_transaction:
            self._execute("ROLLBACK")
        self._execute(self._synced)
        self._relaxed = False

    def release_redo(self) -> None:
        """If the database has all, let it be known that the log is not needed; synced. Raises apsw.Error."""
        with self._gate:
            if not self.redo.unapplied:
                with suppress(apsw.FullError, apsw.BusyError):
                    note_size(self.connection, 0)

    def renew_redo(self, room_bytes: int) -> None:
        """Somebody deleted or replaced the log's file: the database gets all for good, then there is another file.

        Call when no batch is open. On a full disk, or while another program writes, it stays as it is for now. Raises
        apsw.Error.
        """
        try:
            self.apply_log()
            note_size(self.connection, 0)  # a page is written, and synced with what was applied
        except (apsw.FullError, apsw.BusyError):
            return
        self.redo.close()
        self.redo.restart()
        self.redo.open(room_bytes, self.connection)
        logger.warning(
            "the redo log was deleted or replaced under the server: nothing is lost, for the database has all"
        )

    def close(self, how: Callable[[apsw.Connection], None], *, waits: bool) -> None:
        """Close the connection and the log; who still waits to read finds nothing to apply.

        waits: for the thread that applies the log just now. In a forked process that would never end.
        """
        with self._gate if waits else nullcontext():
            self._closed = True
            self.redo.close()
            how(self.connection)

    def _wal_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self.wal_pages, self._grew = pages, True
        return apsw.SQLITE_OK

    def rollback(self) -> None:
        """Forget the open batch, on disk and in memory."""
        self.open = False
        self._entry = None
        if self._transacting and not self.connection.in_transaction:
            self._transacting = False  # SQLite has rolled it back
        self._end_transaction("ROLLBACK")
        for undo in reversed(self._undo):
            undo()
        for queue, saved in self._touched.values():
            queue.restore(saved)
            self.queues.rebound(queue)
        self._undo = []
        self._touched = {}
        self.mark, self.history_bytes = self._saved
        self.events = []
        if self.memtable.changed:
            with self._gate:
                self.memtable.restore(self.connection, self.queues, self.redo.unapplied)

    def touch(self, queue: LiveQueue) -> None:
        """Call before changing anything of the queue in memory."""
        if queue.incarnation not in self._touched:
            queue.woken = 0
            self._touched[queue.incarnation] = (queue, queue.save())

    def undo(self, action: Callable[[], None]) -> None:
        """Do this too when the batch is rolled back."""
        self._undo.append(action)

    def write(self, statement: str, values: Row) -> None:
        """Run a statement that changes something."""
        self._transact()
        self.wrote = True
        self._execute(statement, values)

    def write_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Run a statement that changes something, once a row."""
        self._transact()
        self.wrote = True
        self._executemany(statement, rows)

    def insert_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Run an insert of one row for all of these, in few statements (inserts.py)."""
        self._transact()
        self.wrote = True
        insert_rows(self._execute, statement, rows)

    def read(self, statement: str, values: Row) -> list[Row]:
        """All rows that a query gives, as the open batch sees them."""
        self._transact()
        return self._execute(statement, values).fetchall()

    def read_packed(self, statement: str, values: Row, decoder: "msgspec.json.Decoder[T]") -> T:
        """What a statement gives that packs its rows into one array of JSON: many rows at the price of one, when each
        has to wait for the interpreter as in inserts.py."""
        self._transact()
        packed: Any = self._execute(statement, values).get
        return decoder.decode(packed)

    def read_one(self, statement: str, values: Row) -> Row | None:
        """The first row that a query gives."""
        self._transact()
        return self._execute(statement, values).fetchone()

    def next_sequence(self) -> int:
        """A sequence greater than any before."""
        self.mark.sequence += 1
        return self.mark.sequence

    @property
    def next_offset(self) -> int:
        """The offset that the next event of the open batch gets: what is given back later has a greater one."""
        return self.mark.offset + len(self.events)

    def next_number(self, kind: str) -> int:
        """A number that no `kind` (queue, topic, subscription, move_task) had before."""
        self.wrote = True
        ((number,),) = self.read(_NEXT_NUMBER, (kind,))
        return int(number)

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
            if len(self._origins) >= PROCESSES_MAX and (plainer := self._plainer(origin)) != origin:
                return self.origin(plainer)
            row = len(self._origins) + 1
            values = (row, origin.protocol, origin.principal, origin.client)
            self.write("INSERT INTO origin VALUES (?, ?, ?, ?)", values)
            self._origins[origin] = row
            self.undo(lambda: self._forget_origin(origin))
        self._last_origin, self._last_origin_row = origin, row
        return row

    def _plainer(self, origin: Origin) -> Origin:
        """What is recorded of a new client when there are many already."""
        client = "" if len(self._origins) >= ORIGINS_MAX else _PROCESS.sub("", origin.client)
        return Origin(origin.protocol, origin.principal, client)

    def _forget_origin(self, origin: Origin) -> None:
        del self._origins[origin]

    def take_visible(self) -> dict[QueueKey, int]:
        """How many messages became visible in the batch, by queue. Every queue that has some was touched."""
        return {queue.key: queue.woken for queue, _ in self._touched.values() if queue.woken}


def history_end(connection: apsw.Connection) -> int:
    """Bytes of all events ever appended."""
    row = connection.execute("SELECT bytes_before, length(events) FROM history ORDER BY offset DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0]) + int(row[1])
