"""The open batch: the only connection that writes, and all state that rolls back with the batch.

Strategy: the rooms with commands (sends, claims, leases, queue_commands, sweeps) are functions of a `Writer` and a
command. The writer assigns sequences, collects events, registers undo steps, and ends the batch with one row of history
and the mark. It never commits by itself: the store does, in whatever thread the shell chose. A batch becomes a
transaction at its first statement. A batch that changed no table goes into the redo log instead (disk/redo), or where
the store has a log, into that alone; the next transaction first copies it into the database.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar

import apsw
import msgspec

from veilmq.model.commands import Origin
from veilmq.model.errors import DiskLow, StoreFailed, StoreUnknown
from veilmq.model.events import SCHEMA_VERSION, Event
from veilmq.model.instant import Instant
from veilmq.model.message_type import MessageTypes
from veilmq.model.messages import ReceiptKey, fresh_ids
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import Topics
from veilmq.store import Options
from veilmq.store.log import Plain
from veilmq.store.sqlite.batch.history_index import HistoryIndex, history_end
from veilmq.store.sqlite.batch.memtable import Memtable
from veilmq.store.sqlite.batch.quarantine import QuarantineLog
from veilmq.store.sqlite.batch.queues import LiveQueue, Queues
from veilmq.store.sqlite.batch.rollups import EVENTS_MAX, Rollups
from veilmq.store.sqlite.disk import may_pass, trust_pages, verdict
from veilmq.store.sqlite.disk.redo import INSERT_HISTORY, INSERT_MEMTABLE, UPDATE_MARK, Entry, Redo, apply_log, entry_of
from veilmq.store.sqlite.disk.redo.file import note_size
from veilmq.store.sqlite.disk.redo.last_commit import LastCommit
from veilmq.store.sqlite.disk.rows import MessageRow, OriginNumbers, Row, insert_rows, leniently
from veilmq.store.sqlite.effects import Shipping

DELIVERED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bodies and attributes that one batch delivers. More than ten messages of 1 MiB, so no client gets less for it."""
_NEXT_NUMBER: Final = "INSERT INTO last_number VALUES (?, 1) ON CONFLICT DO UPDATE SET last = last + 1 RETURNING last"
_UNSYNCED: Final = "PRAGMA synchronous = 1"
"""NORMAL: commits to the WAL are not synced, checkpoints are."""
logger = logging.getLogger("veilmq.store")
T = TypeVar("T")


class Mark(msgspec.Struct):
    """The numbers that only grow, as they will be after the open batch."""

    clock: int
    sequence: int
    generation: int
    offset: int


class Writer:
    """The state of the open batch, and the statements that all command rooms share."""

    held_us = 0
    """How far the expiry clock is behind the lease clock: steps of the clock that nobody has accepted yet."""
    expiry_now = Instant(0)
    """The expiry clock, in a batch: retention, time to live and the history's age are judged by it."""
    step_us_max: int | None = None
    """Until the first batch: the longest step from the mark that needs nobody's acceptance."""

    def __init__(
        self,
        connection: apsw.Connection,
        queues: Queues,
        topics: Topics,
        mark: Mark,
        receipts: ReceiptKey,
        redo: Redo,
        last_commit: LastCommit,
        shipping: Shipping | None,
        options: Options,
    ) -> None:
        self.connection = connection
        self.options = options
        self.redo = redo
        self.last_commit = last_commit
        self.shipping = shipping
        self._log = shipping if shipping is not None and shipping.makes_durable else None
        self.queues = queues
        self.topics = topics
        self.mark = mark
        self.receipts = receipts
        self.memtable = Memtable()
        self.memtable.restore(connection, queues)
        self.now = Instant(mark.clock)
        self.types = MessageTypes(options.type_attribute, options.type_pointer)
        self.refusal: DiskLow | StoreFailed | None = None
        """Why sends and creates are refused (space.py): answer with copies. None: they are not."""
        self.events: list[Event] = []
        self.quarantined = QuarantineLog()
        self.wrote = False
        self.returned = 0
        """Messages whose ended lease or delay a command of the open batch noticed."""
        self.detours = 0
        """Candidates that receives of the open batch examined but did not deliver."""
        self.bytes_left = DELIVERED_BYTES_MAX
        """Bytes of messages that receives of the batch may still deliver; the last message may go beyond."""
        self.open = self._transacting = False
        self._entry: tuple[Entry, bytes] | None = None
        """The open batch's entry, if it goes into a log alone, and its record in the redo log."""
        self._gate = threading.Lock()
        """Hold it to begin a transaction. Nobody waits for it while a transaction is open."""
        self.wal_pages, self._grew = 0, False
        """Whether the latest commit wrote to the WAL."""
        connection.set_wal_hook(self._wal_grew)
        self._commits_unsynced = False  # or perhaps, because applying the log was interrupted
        self._failed: apsw.Error | None = None
        """The error after which it is unknown whether the log was applied."""
        self._closed = False
        self._synced = f"PRAGMA synchronous = {connection.pragma('synchronous')}"
        self.history_bytes = history_end(connection)
        self.index = HistoryIndex(connection, mark.offset)
        self.rollups = Rollups(connection, queues, mark.offset)
        self._execute = connection.cursor().execute
        self._executemany = connection.cursor().executemany
        self._encoder = msgspec.msgpack.Encoder()
        self._touched: dict[int, tuple[LiveQueue, tuple[object, ...]]] = {}
        self._undo: list[Callable[[], None]] = []
        self._saved = (msgspec.structs.replace(mark), self.history_bytes)
        self.origins = OriginNumbers(connection)
        self._ids: list[bytes] = []
        self._last_key: QueueKey | None = None
        self._last_queue: LiveQueue | None = None
        self._last_origin: Origin | None = None
        self._last_origin_row = 0

    def begin(self, now: Instant) -> None:
        """Open a batch. It is judged by `now`, or by the mark if that is later."""
        self.now = Instant(max(now, self.mark.clock))
        self.wrote, self.events = False, []
        self.returned = self.detours = 0
        self.quarantined.pending.clear()
        self.memtable.begin_batch()
        self._touched, self._undo = {}, []
        self._last_key = self._last_origin = None
        self._saved = (msgspec.structs.replace(self.mark), self.history_bytes)
        self._entry = None
        self.open = True
        if self.step_us_max is not None:
            self._judge_step(self.step_us_max)
        self.expiry_now = Instant(self.now - self.held_us)
        if self.now >= self.rollups.ends or self.rollups.pending >= EVENTS_MAX:
            self.rollups.turn(self.now)

    def _judge_step(self, step_us_max: int) -> None:
        """In the first batch: hold the expiry clock back if the lease clock is far ahead of the mark. No crash
        separates this from the new mark."""
        step_us = self.now - self.mark.clock
        self.undo(partial(setattr, self, "step_us_max", step_us_max))
        self.step_us_max = None
        if self.mark.clock and step_us > step_us_max:  # a new file has no mark yet
            self.hold(self.held_us + step_us)

    def hold(self, held_us: int) -> None:
        """Set how far the expiry clock is behind the lease clock."""
        self.undo(partial(setattr, self, "held_us", self.held_us))
        self.held_us = held_us
        self.expiry_now = Instant(self.now - held_us)
        self.write("UPDATE expiry_hold SET held_us = ?", (held_us,))

    def finish(self) -> None:
        """End the batch's statements with the history row and the mark. A batch that wrote nothing is closed here."""
        if self.events:
            packed = self._encoder.encode(self.events)
            count = len(self.events)
            row = (self.mark.offset, count, self.now, self.history_bytes, SCHEMA_VERSION, packed)
            messages = self.memtable.end_batch(count)
            self.index.note(self.events)
            self.mark.offset += count
            self.history_bytes += len(packed)
            if not self.wrote and self._goes_into_log(row, messages):
                return
            journal = self._encoder.encode(messages) if messages else None
            self.write(INSERT_HISTORY, row)
            if journal is not None:
                self.write(INSERT_MEMTABLE, (row[0], journal))
        if not self.wrote:
            self._end_transaction("ROLLBACK")
            self.open = False
            return
        if self.index.is_full(self.mark.offset):
            self.index.write_block(self.mark.offset, self.undo)
        self.mark.clock = self.now
        self._execute(UPDATE_MARK, (self.mark.clock, self.mark.sequence, self.mark.generation, self.mark.offset))

    def _goes_into_log(self, row: Row, messages: list[MessageRow]) -> bool:
        """Whether the open batch needs no transaction of its own."""
        if self.refusal is not None:
            return False  # if the database may have no room for it, refuse it at once
        mark, log = self.mark, self._log
        if log is None:
            self._entry = self.redo.prepare(row, mark.sequence, mark.generation, messages)
        elif not self.index.is_full(mark.offset):  # the memtable is flushed before the database lacks many
            self._entry = entry_of(0, row, mark.sequence, mark.generation, messages), b""
        if self._entry is None:
            return False
        self._end_transaction("ROLLBACK")  # it only read
        mark.clock, self.wrote = self.now, True
        if log is not None:
            journal = self._encoder.encode(messages) if messages else None
            log.keep(Plain(row, journal, msgspec.structs.astuple(mark)))
        return True

    def commit(self) -> None:
        """Make the open batch durable. Raises apsw.Error, and as `Log.append`."""
        if self._entry is None:
            self._grew = False
            if self.shipping is not None:
                self.shipping.append(self.mark.clock)
            self._end_transaction("COMMIT")
            if self._grew:  # a transaction that changed nothing syncs nothing
                self.redo.restart()
        else:
            self._commit_entry(*self._entry)
        self.last_commit.note(self.mark.offset, self.mark.clock)
        self.rollups.note(self.events)
        self.open = False
        if self.quarantined.pending:
            self.quarantined.report(self.now)

    def _commit_entry(self, entry: Entry, record: bytes) -> None:
        if self._log is not None:
            self._log.append(self.mark.clock)
            with self._gate:
                self.redo.unapplied.append(entry)
                self._log.end("COMMIT")
        else:
            self.redo.append(entry, record)
            with self._gate:
                self.redo.unapplied.append(entry)
                self.redo.deleted.update(self.memtable.deleted)

    def transact(self) -> None:
        """Call before each statement of the open batch: the first one begins the transaction."""
        if not self._transacting:
            with self._gate:
                if self._failed is not None:
                    raise self._failed
                self._apply_log()
                self._execute("BEGIN IMMEDIATE")
                self._transacting = True
                if self.shipping is not None:
                    self.shipping.begin()

    def _end_transaction(self, how: str) -> None:
        if self._transacting:
            self._execute(how)
            self._transacting = False
            if self.shipping is not None:
                self.shipping.end(how)

    def trust_pages(self) -> None:
        """Read pages from now on whatever their checksums say."""
        with self._gate:
            trust_pages(self.connection)

    def apply_log(self) -> None:
        """Copy committed batches that only a log has into the database, for readers of the database. Any thread."""
        if self.redo.unapplied:
            with self._gate:
                if not self._transacting and not self._closed:
                    self._apply_log()

    def _apply_log(self) -> None:
        """The same. Call with the gate held and no transaction open.

        Not synced: the redo log keeps the entries until a later transaction was synced. The calling thread may be
        interrupted anywhere, so the database may already have entries that are still listed here.
        """
        redo = self.redo
        if self._commits_unsynced:
            self._sync_commits()
        if not redo.unapplied:
            return
        self._commits_unsynced = True
        try:
            self._execute(_UNSYNCED)
            self._execute("BEGIN IMMEDIATE")
            following: Any = self._execute("SELECT offset FROM mark").get
            missing = [entry for entry in redo.unapplied if entry.offset >= following]
            with nullcontext() if self.shipping is None else self.shipping.later(self.mark.clock):
                if missing:
                    apply_log(self._execute, missing, redo.deleted)
            self._execute("COMMIT")
            if self.shipping is not None:
                self.shipping.applied()
        except BaseException as error:
            if isinstance(error, apsw.Error) and isinstance(verdict(error), StoreUnknown):
                self._failed = error
            elif self._log is not None and isinstance(error, apsw.Error) and not may_pass(error):
                raise StoreUnknown(reason=f"the log has batches that the database lacks: {error}") from error
            raise
        finally:
            self._sync_commits()
        redo.unapplied, redo.deleted = [], set()

    def _sync_commits(self) -> None:
        """After applying the log, or failing to: make sure that no transaction is open and that commits are synced."""
        if self.connection.in_transaction:
            self._execute("ROLLBACK")
        self._execute(self._synced)
        self._commits_unsynced = False

    def release_redo(self) -> None:
        """If the database has everything, record that the log is not needed; synced. Raises apsw.Error."""
        with self._gate:
            if not self.redo.unapplied:
                with suppress(apsw.FullError, apsw.BusyError):
                    note_size(self.connection, 0)

    def renew_redo(self, room_bytes: int) -> None:
        """Replace a log file that somebody deleted or replaced, once the database has everything, synced. Call when no
        batch is open. Does nothing on a full disk, or while another program writes. Raises apsw.Error."""
        try:
            self.apply_log()
            note_size(self.connection, 0)  # writes a page, and so syncs what was applied
        except (apsw.FullError, apsw.BusyError):
            return
        self.redo.close()
        self.redo.restart()
        self.redo.open(room_bytes, self.connection)
        logger.warning(
            "the redo log was deleted or replaced while the server ran: nothing is lost, because the database"
            " has every batch"
        )

    def close(self, how: Callable[[apsw.Connection], None], *, waits: bool) -> None:
        """Close the connection and the log. A reader that still waits then finds nothing to apply. waits: for a thread
        that is applying the log; a forked process would wait for ever."""
        with self._gate if waits else nullcontext():
            self._closed = True
            self.redo.close()
            self.last_commit.close()
            if self.shipping is not None:
                self.shipping.close()
            how(self.connection)

    def _wal_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self.wal_pages, self._grew = pages, True
        return apsw.SQLITE_OK

    def rollback(self) -> None:
        """Undo the open batch, on disk and in memory."""
        self.open = False
        if self._entry is not None and self._log is not None:
            self._log.end("ROLLBACK")
        self._entry = None
        if self._transacting and not self.connection.in_transaction:
            self._transacting = False  # SQLite has rolled it back
        self._end_transaction("ROLLBACK")
        for undo in reversed(self._undo):
            undo()
        for queue, saved in self._touched.values():
            queue.restore(saved)
            self.queues.rebound(queue)
        self._touched, self._undo = {}, []
        (self.mark, self.history_bytes), self.events = self._saved, []
        if self.memtable.changed:
            with self._gate:
                self.memtable.restore(self.connection, self.queues, self.redo.unapplied)

    def touch(self, queue: LiveQueue) -> None:
        """Call before changing the queue in memory."""
        if queue.incarnation not in self._touched:
            queue.woken = 0
            self._touched[queue.incarnation] = (queue, queue.save())

    def undo(self, action: Callable[[], None]) -> None:
        """Register a step to run if the batch is rolled back."""
        self._undo.append(action)

    def write(self, statement: str, values: Row) -> None:
        """Run a statement that changes something."""
        self.transact()
        self.wrote = True
        self._execute(statement, values)

    def write_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Run a statement that changes something, once for each row."""
        self.transact()
        self.wrote = True
        self._executemany(statement, rows)

    def insert_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Run a one-row insert for all rows, in few statements (disk/rows.py)."""
        self.transact()
        self.wrote = True
        insert_rows(self._execute, statement, rows)

    def read(self, statement: str, values: Row) -> list[Row]:
        """All rows of a query, as the open batch sees them."""
        self.transact()
        try:
            return self._execute(statement, values).fetchall()
        except UnicodeDecodeError:
            return self._execute(leniently(statement), values).fetchall()

    def read_packed(self, statement: str, values: Row, decoder: "msgspec.json.Decoder[T]") -> T:
        """The result of a statement that packs its rows into one JSON array. Many rows then cost one wait for the
        interpreter, as in disk/rows.py."""
        self.transact()
        try:
            packed: Any = self._execute(statement, values).get
        except (UnicodeDecodeError, apsw.SQLError):  # the latter if a text became a blob
            packed = self._execute(leniently(statement), values).get
        return decoder.decode(packed)

    def read_one(self, statement: str, values: Row) -> Row | None:
        """The first row of a query, if any."""
        self.transact()
        try:
            return self._execute(statement, values).fetchone()
        except UnicodeDecodeError:
            return self._execute(leniently(statement), values).fetchone()

    def next_sequence(self) -> int:
        """Assign a sequence greater than all before."""
        self.mark.sequence += 1
        return self.mark.sequence

    @property
    def next_offset(self) -> int:
        """Offset of the open batch's next event. It grows, so it orders messages by when they were given back."""
        return self.mark.offset + len(self.events)

    def next_number(self, kind: str) -> int:
        """A number that this `kind` (queue, topic, subscription, move_task, operator_command, job) never had before."""
        self.wrote = True
        ((number,),) = self.read(_NEXT_NUMBER, (kind,))
        return int(number)

    def next_generation(self) -> int:
        """A generation that no row uses."""
        self.mark.generation += 1
        return self.mark.generation

    def next_id(self) -> bytes:
        """A UUID of version 4, from a pool."""
        if not self._ids:
            self._ids = fresh_ids()
        return self._ids.pop()

    def ids(self, count: int) -> list[bytes]:
        """The pool, with at least so many; they are taken from its end."""
        while len(self._ids) < count:
            self._ids[:0] = fresh_ids()
        return self._ids

    def queue(self, key: QueueKey) -> LiveQueue | None:
        """The queue of that name. The last one is cached, because a wire batch names one queue many times."""
        if key is self._last_key:
            return self._last_queue
        queue = self.queues.by_key.get(key)
        self._last_key, self._last_queue = key, queue
        return queue

    def forget_queue(self) -> None:
        """Drop the cached queue: a queue was created or deleted."""
        self._last_key = None

    def origin(self, origin: Origin) -> int:
        """The number of an origin, assigned at its first use."""
        if origin is self._last_origin:
            return self._last_origin_row
        row = self.origins.get(origin)
        if row is None:
            if (recorded := self.origins.as_recorded(origin)) != origin:
                return self.origin(recorded)
            row = self.origins.greatest + 1
            values = (row, origin.protocol, origin.principal, origin.client)
            self.write("INSERT INTO origin VALUES (?, ?, ?, ?)", values)
            self.origins[origin] = self.origins.greatest = row
            self.undo(lambda: self.origins.forget_last(origin))
        self._last_origin, self._last_origin_row = origin, row
        return row

    def forget_origins(self, gone: set[int]) -> None:
        """Take these numbers out of the map. A client that comes back gets a new one."""
        dropped = {origin: row for origin, row in self.origins.items() if row in gone}
        for origin in dropped:
            del self.origins[origin]
        self._last_origin = None
        self.undo(lambda: self.origins.update(dropped))

    def take_visible(self) -> dict[QueueKey, int]:
        """How many messages became visible in the batch, by queue. Every such queue was touched."""
        return {queue.key: queue.woken for queue, _ in self._touched.values() if queue.woken}
