"""The redo log: committed batches that the database does not have yet.

Strategy: a batch that changed no table, because all its messages are unflushed, is one record of this file: its events,
the messages that it sent, and the mark. One synced write makes it durable, at half the cost of a transaction. The
records are copied into the database soon, in a transaction of their own: ahead of a batch that will flush the memtable,
before any other batch that needs a table, before any read, at each sweep, at close, and after a kill at the next start
(`apply_log`, `Writer.apply_log`). Until then records are appended. Once a synced transaction has them all, writing
starts again at the beginning of the file. The file (file.py) never grows: a batch that does not fit is a transaction.
See docs/decisions/0014-redo-log.md.

    record   length of the rest (4 bytes), its CRC-32 seeded with that of the receipt key (4), Entry in MessagePack

A record counts if it is complete and continues the record before it: same random run number, next offset. Eight zeros
are written behind the last record. So a torn record, a record of an earlier run or of another database, or bytes that a
client put into a message are never taken for a record.
"""

import logging
import os
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import apsw
import msgspec

from veilmq.model.events import Event
from veilmq.model.instant import Instant
from veilmq.store import Options
from veilmq.store.directory import NotOurs
from veilmq.store.files import Disk
from veilmq.store.sqlite.disk.redo.file import RedoFile, ahead, is_given_up, is_same_file, keyless, note_size, open_file
from veilmq.store.sqlite.disk.rows import Execute, MessageRow, Row, insert_rows

INSERT_HISTORY: Final = "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)"
INSERT_MEMTABLE: Final = "INSERT INTO memtable VALUES (?, ?)"
UPDATE_MARK: Final = "UPDATE mark SET clock = ?, sequence = ?, generation = ?, offset = ?"
HEAD: Final = struct.Struct("<II")
_END: Final = bytes(HEAD.size)
DAMAGED: Final = "a batch is damaged or missing, and what came after it is lost"
_SKIPPED_MAX: Final = 64
"""Incomplete records to skip before the search for complete ones ends."""

logger = logging.getLogger("veilmq.store")


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A committed batch, as it is to be written into the tables."""

    run: int
    """A random number, the same for all entries since the log restarted."""
    offset: int
    """Offset of the first event."""
    count: int
    at: Instant
    bytes_before: int
    version: int
    sequence: int
    generation: int
    events: bytes
    """Encoded as in the history."""
    messages: list[MessageRow]
    """The unflushed messages that the batch sent."""

    @property
    def following(self) -> int:
        """The offset of the next event."""
        return self.offset + self.count


def entry_of(run: int, row: Row, sequence: int, generation: int, messages: list[MessageRow]) -> Entry:
    """The entry of the batch with this history row."""
    offset, count, at, bytes_before, version, events = row
    return Entry(run, offset, count, at, bytes_before, version, sequence, generation, events, messages)


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
ENTRY: Final = msgspec.msgpack.Decoder(Entry)


class KeyMissing(apsw.CorruptError):
    """The database has no receipt key any more, so nobody can know what the log holds."""


class Run(NamedTuple):
    """The content of a file: the consecutive records from its start."""

    entries: list[Entry]
    later: Entry | None = None
    """The next complete record after an incomplete one, if any."""

    def beyond(self, following: int) -> list[Entry]:
        """The entries that a database with next offset `following` lacks."""
        missing = [entry for entry in self.entries if entry.offset >= following]
        return missing if missing and missing[0].offset == following else []

    def is_damaged(self, following: int) -> bool:
        """Whether a record is missing among those that the database lacks, or before them.

        Each record was synced before the next one was begun, and the first was written when the database had all before
        it.
        """
        return self.is_ahead(following) or (self.later is not None and self.later.offset >= following)

    def is_ahead(self, following: int) -> bool:
        """Whether what is missing comes before all entries: the database is older than the file."""
        return bool(self.entries) and self.entries[0].offset > following


_NO_RUN: Final = Run([])


class Redo:
    """The redo log of an open store."""

    def __init__(self, path: Path, options: Options, key: bytes) -> None:
        """key: the receipt key, which is secret."""
        self.unapplied: list[Entry] = []
        """Entries that the database does not have, oldest first."""
        self.deleted: set[int] = set()
        """Sequences of unflushed messages that were deleted in one of the entries or before."""
        self._seed = crc32(key)
        self._path, self._options = path, options
        self._size = options.redo_bytes
        self._at = self._run = 0
        self._file: RedoFile | None = None
        self._inode: int | None = None

    def open(self, room_bytes: int, connection: apsw.Connection) -> None:
        """Open the file if it is not open, creating it if `room_bytes` allows. On failure go on without a log.

        The file's size is recorded in the database before the first record is written. Call when no transaction is
        open; raises apsw.Error.
        """
        if self._file is not None:
            return
        if self._size:
            try:
                self._file = open_file(self._path, self._options, room_bytes)
            except (OSError, apsw.Error) as error:
                _without(error)
        try:
            self._inode = None if self._file is None else self._path.stat().st_ino
            note_size(connection, 0 if self._file is None else self._size)
        except (apsw.FullError, apsw.BusyError, OSError) as error:
            self.close()
            _without(error)

    def is_gone(self) -> bool:
        """Whether the file being written was deleted or replaced. Raises OSError."""
        return self._file is not None and not is_same_file(self._path, self._inode)

    def prepare(
        self, row: Row, sequence: int, generation: int, messages: list[MessageRow]
    ) -> tuple[Entry, bytes] | None:
        """The entry and record of the batch with this history row; None: there is no log, or no room in it."""
        if self._file is None:
            return None
        run = self._run if self._at else int.from_bytes(os.urandom(8), "big")
        entry = entry_of(run, row, sequence, generation, messages)
        record = self.record(entry)
        return None if record is None else (entry, record)

    def record(self, entry: Entry) -> bytes | None:
        """The entry as a record of the file; None: there is no room."""
        packed = _ENCODE(entry)
        if self._at + HEAD.size + len(packed) + len(_END) > self._size:
            return None
        return HEAD.pack(len(packed), crc32(packed, self._seed)) + packed

    def append(self, entry: Entry, record: bytes) -> None:
        """Write a record durably. Raises apsw.FullError if it was not written, apsw.IOError if that is unknown."""
        assert self._file is not None
        self._file.write(record + _END, self._at)
        self._run = entry.run
        self._at += len(record)

    def restart(self) -> None:
        """Start again at the beginning: a synced transaction has followed the last entry, so the database has them all
        durably."""
        self._at = 0

    def close(self) -> None:
        """Close the file and leave it as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _without(error: Exception) -> None:
    logger.warning("no redo log, so every batch is a transaction: %s", error)


def apply_log(execute: Execute, entries: Sequence[Entry], deleted: Container[int] = ()) -> None:
    """Write entries into the tables, in the open transaction, without the messages in `deleted`."""
    insert_rows(execute, INSERT_HISTORY, [(*msgspec.structs.astuple(each)[1:6], each.events) for each in entries])
    for each in entries:
        left = [row for row in each.messages if row.sequence not in deleted]
        if left:
            execute(INSERT_MEMTABLE, (each.offset, _ENCODE(left)))
    last = entries[-1]
    execute(UPDATE_MARK, (last.at, last.sequence, last.generation, last.following))


def events(entries: Iterable[Entry]) -> Iterator[tuple[int, Event]]:
    """The events of the entries, with their offsets."""
    for entry in entries:
        yield from enumerate(_EVENTS.decode(entry.events), entry.offset)


def lacking(path: Path, connection: apsw.Connection) -> tuple[list[Entry], bool, bool]:
    """The entries that the database lacks, whether the log is damaged there, and whether the database is older than it.

    Begins a transaction if none is open; the entries match its state. The file is read first: if a server applies
    entries in between, the database has them. Raises OSError if the file may not be read; KeyMissing, apsw.Error.
    """
    key: Any = connection.execute("SELECT receipts FROM secret").get
    if key is None:
        raise KeyMissing(keyless(path))
    run = read(path, key)
    if not connection.in_transaction:
        connection.execute("BEGIN")
    following: Any = connection.execute("SELECT offset FROM mark").get
    if following is None:
        raise apsw.CorruptError("the table `mark` is empty")
    return run.beyond(following), run.is_damaged(following), run.is_ahead(following)


def recover(
    disk: Disk,
    path: Path,
    connection: apsw.Connection,
    key: bytes,
    transaction: Callable[[int], AbstractContextManager[object]],
) -> None:
    """At start: copy what only the log has into the database, and make sure that the database has everything durably.
    transaction: begins one on the connection, for batches up to a lease clock.

    A damaged file is moved away. Raises NotOurs if the database is older than the log; OSError.
    """
    if is_given_up(path):
        logger.warning("%s was given up: the last acknowledged batches before the crash may be missing", path)
    run = read(path, key)
    following: Any = connection.execute("SELECT offset FROM mark").get
    if run.is_ahead(following):
        raise NotOurs(ahead(path))
    missing = run.beyond(following)
    if missing:
        with transaction(missing[-1].at):
            apply_log(connection.execute, missing)
        logger.info("%d batches were recovered from the redo log", len(missing))
    else:
        # After a kill, the latest transactions may be in the WAL unsynced. This writes a page, even if unchanged, and
        # so syncs them, before anything says that they are there.
        connection.pragma("user_version", connection.pragma("user_version"))
    if run.is_damaged(following):
        note_size(connection, 0)  # until there is a new file
        kept = path.with_suffix(".damaged")
        disk.rename(path, kept)
        logger.error("%s: %s; see %s", path, DAMAGED, kept)


def forget_given_up(disk: Disk, path: Path, connection: apsw.Connection) -> None:
    """Once the start goes on without the log's content, remove the operator's word in the file that allowed this: it
    must not excuse a later loss. Raises apsw.Error, OSError."""
    if is_given_up(path):
        note_size(connection, 0)
        disk.remove(path)


def read(path: Path, key: bytes) -> Run:
    """Read the records of the database with that receipt key. Raises OSError if the file may not be read."""
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the file is written past the page cache
            content = file.read()
    except FileNotFoundError:
        return _NO_RUN
    seed = crc32(key)
    found: list[Entry] = []
    at = 0
    while (record := record_at(content, at, seed)) is not None:
        entry, end = record
        if found and (entry.run, entry.offset) != (found[-1].run, found[-1].following):
            break
        found.append(entry)
        at = end
    return Run(found, _behind(content, at, seed, found))


def is_blank(path: Path) -> bool:
    """Whether the file is missing, or no record was ever written to it."""
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return not any(file.read(HEAD.size))
    except FileNotFoundError:
        return True


def record_at(content: bytes, at: int, seed: int) -> tuple[Entry, int] | None:
    """The entry at byte `at`, if it is complete, and the byte where it ends."""
    if at + HEAD.size > len(content):
        return None
    length, checksum = HEAD.unpack_from(content, at)
    begin = at + HEAD.size
    packed = content[begin : begin + length]
    if not length or len(packed) < length or crc32(packed, seed) != checksum:
        return None
    return ENTRY.decode(packed), begin + length


def _behind(content: bytes, at: int, seed: int, found: Sequence[Entry]) -> Entry | None:
    """The next complete record of the run after byte `at`, as far as it can be found by the lengths of records."""
    for _ in range(_SKIPPED_MAX):
        if at + HEAD.size > len(content):
            break
        (length, _) = HEAD.unpack_from(content, at)
        if not length:
            break
        at += HEAD.size + length
        record = record_at(content, at, seed)
        if record is not None and (not found or record[0].run == found[0].run):
            return record[0]
    return None
