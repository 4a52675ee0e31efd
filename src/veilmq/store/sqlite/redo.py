"""The redo log: committed batches that the database does not have yet.

Strategy: a batch that changed no table, because all its messages are young, is one record of this file: its events, the
messages that it sent, and the mark. One write and one sync make it durable, at half the price of a transaction. The
database gets it soon, in a transaction of its own: before the next batch that needs a table, before anybody reads, at
each sweep, at the end, and after a kill at the next start (`settle`, `Writer.settle`). Until then records follow one
another; once a synced transaction has them all they begin anew at the start of the file, which never grows: a batch
that has no room there is a transaction. See docs/decisions/0014-redo-log.md.

    record   length of the rest (4 bytes), its CRC-32 begun with that of the database's epoch (4), Entry in MessagePack

A record counts if it is whole and follows the one before it: it bears the offset of its run's first one, and its own
is the next. So neither a torn record, nor one of an earlier run or of another database, is ever taken for one.
"""

import errno
import logging
import os
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

import apsw
import msgspec

from veilmq.model.events import Event
from veilmq.model.instant import Instant
from veilmq.store.sqlite.inserts import Execute, insert_rows
from veilmq.store.sqlite.options import Options
from veilmq.store.sqlite.young import Contents

INSERT_HISTORY: Final = "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)"
INSERT_NURSERY: Final = "INSERT INTO nursery VALUES (?, ?)"
UPDATE_MARK: Final = "UPDATE mark SET clock = ?, sequence = ?, generation = ?, offset = ?"
_HEAD: Final = struct.Struct("<II")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_NOW: Final = _FULL | {errno.EMFILE, errno.ENFILE}
_ZEROS: Final = bytes(1 << 20)

logger = logging.getLogger("veilmq.store")


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a committed batch leaves to be written into tables."""

    run: int
    """Offset of the first entry since the log began anew."""
    offset: int
    """Of the first event."""
    count: int
    at: Instant
    bytes_before: int
    version: int
    sequence: int
    generation: int
    events: bytes
    """As the history has them."""
    born: list[Contents]
    """The young messages that the batch sent."""

    @property
    def following(self) -> int:
        """The offset of the next event."""
        return self.offset + self.count


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
_ENTRY: Final = msgspec.msgpack.Decoder(Entry)


class _File(Protocol):
    """What the log is written to. Raises apsw.FullError for want of space, apsw.IOError for the rest."""

    def write(self, data: bytes, offset: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class _OnDisk:
    """The file itself."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, data: bytes, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise (apsw.FullError if error.errno in _FULL else apsw.IOError)(f"redo log: {error}") from error

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise apsw.IOError(f"redo log: {error}") from error

    def close(self) -> None:
        os.close(self._descriptor)


class _InVfs:
    """The file through the VFS of a test, which can make it fail."""

    _SYNC: Final = apsw.SQLITE_SYNC_NORMAL | apsw.SQLITE_SYNC_DATAONLY

    def __init__(self, path: Path, vfs: str) -> None:
        self._file = apsw.VFSFile(vfs, str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])

    def write(self, data: bytes, offset: int) -> None:
        self._file.xWrite(data, offset)

    def sync(self) -> None:
        self._file.xSync(self._SYNC)

    def close(self) -> None:
        self._file.xClose()


class Run(NamedTuple):
    """What a file holds: the records that follow one another from its start."""

    entries: list[Entry]
    end: int
    """Where the next record would begin."""

    @property
    def following(self) -> int | None:
        """The next offset after them."""
        return self.entries[-1].following if self.entries else None

    def beyond(self, following: int) -> list[Entry]:
        """Those that a database lacks whose next offset is `following`."""
        missing = [entry for entry in self.entries if entry.offset >= following]
        return missing if missing and missing[0].offset == following else []


NO_RUN: Final = Run([], 0)


class Redo:
    """The log of an open store."""

    def __init__(self, path: Path, options: Options, epoch: bytes, run: Run = NO_RUN) -> None:
        """run: what the file holds that the database has as its last, and perhaps not synced: it goes on.

        Raises OSError if the file cannot be made for another reason than want of space or of files.
        """
        self.unsettled: list[Entry] = []
        """Those that the database does not have, oldest first."""
        self.dead: set[int] = set()
        """Sequences of young messages whose deletion is in an entry or before."""
        self._seed = crc32(epoch)
        self._size = path.stat().st_size if run.entries else options.redo_bytes
        self._synced = options.synchronous == "FULL"
        self._at = run.end
        self._run = run.entries[0].run if run.entries else 0
        self._file: _File | None = None
        if self._size and _make(path, self._size):
            self._file = _InVfs(path, options.vfs) if options.vfs else _OnDisk(path)

    def entry(self, row: tuple[Any, ...], sequence: int, generation: int, born: list[Contents]) -> "Entry | None":
        """The batch that has this row of history, ready to be appended; None: there is no log."""
        if self._file is None:
            return None
        offset, count, at, bytes_before, version, events = row
        run = self._run if self._at else offset
        return Entry(run, offset, count, at, bytes_before, version, sequence, generation, events, born)

    def record(self, entry: Entry) -> bytes | None:
        """As it stands in the file; None: there is no room."""
        packed = _ENCODE(entry)
        if self._at + _HEAD.size + len(packed) > self._size:
            return None
        return _HEAD.pack(len(packed), crc32(packed, self._seed)) + packed

    def append(self, entry: Entry, record: bytes) -> None:
        """Make it durable. Raises apsw.Error; after one of `sync` nobody knows whether it is."""
        assert self._file is not None
        self._file.write(record, self._at)
        if self._synced:
            self._file.sync()
        self._run = entry.run
        self._at += len(record)

    def restart(self) -> None:
        """A synced transaction was committed since the last entry: the database has them all for good."""
        self._at = 0

    def close(self) -> None:
        """Let the file go, as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None


def settle(execute: Execute, entries: Sequence[Entry], dead: Container[int] = ()) -> None:
    """Write entries into the tables, in the open transaction; messages that are dead by now are left out."""
    insert_rows(execute, INSERT_HISTORY, [(*msgspec.structs.astuple(each)[1:6], each.events) for each in entries])
    for each in entries:
        alive = [contents for contents in each.born if contents.sequence not in dead]
        if alive:
            execute(INSERT_NURSERY, (each.offset, _ENCODE(alive)))
    last = entries[-1]
    execute(UPDATE_MARK, (last.at, last.sequence, last.generation, last.following))


def events(entries: Iterable[Entry]) -> Iterator[tuple[int, Event]]:
    """Their events with their offsets."""
    for entry in entries:
        yield from enumerate(_EVENTS.decode(entry.events), entry.offset)


def lacking(path: Path, connection: apsw.Connection) -> list[Entry]:
    """The entries of the file that the database lacks. Begins a transaction that they go with, if none is open.

    The file is read first: a server that settles its entries meanwhile leaves a database that has them. Raises
    apsw.CantOpenError if it may not be read.
    """
    epoch: Any = connection.execute("SELECT epoch FROM secret").get
    run = read(path, epoch)
    if not connection.in_transaction:
        connection.execute("BEGIN")
    following: Any = connection.execute("SELECT offset FROM mark").get
    return run.beyond(following)


def read(path: Path, epoch: bytes) -> Run:
    """What the file of a database of that epoch holds. Raises apsw.CantOpenError if it may not be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return NO_RUN
    except OSError as error:
        raise apsw.CantOpenError(f"redo log: {error}") from error
    seed = crc32(epoch)
    found: list[Entry] = []
    at = 0
    while at + _HEAD.size <= len(content):
        length, checksum = _HEAD.unpack_from(content, at)
        packed = content[at + _HEAD.size : at + _HEAD.size + length]
        if not length or len(packed) < length or crc32(packed, seed) != checksum:
            break
        entry = _ENTRY.decode(packed)
        before = found[-1] if found else None
        if entry.run != (before.run if before else entry.offset) or (before and entry.offset != before.following):
            break
        found.append(entry)
        at += _HEAD.size + length
    return Run(found, at)


def _make(path: Path, size: int) -> bool:
    """Make the file of that size, all of it written, so that later writes change nothing but bytes of it."""
    if path.exists() and path.stat().st_size == size:
        return True
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for at in range(0, size, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: size - at], at)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        if error.errno not in _NOT_NOW:
            raise
        path.unlink(missing_ok=True)
        logger.warning("no redo log, so every batch is a transaction: %s", error)
        return False
    return True
