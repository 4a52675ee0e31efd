"""Knows what was committed last, outside the WAL and the redo log.

Strategy: SQLite drops every frame of a WAL behind the first bad one, without a word, and a redo log of zeros looks
unused. So each commit also writes the offset of the next event and its time into the file `committed`, after its own
sync and before it is answered. The write survives a kill, and `sync` makes it survive a power cut, once a second and
beside the batches. A start, `check` and `backup` compare what they find with this file (`losses`).

    slot     epoch of the database (16 bytes), number of the write (8), offset (8), clock (8), CRC-32 of these (4)

Two slots, in different sectors, are written alternately: a torn write leaves the other one. Between two with
consecutive numbers lies one commit, and a start looks for its batch in the history. Two more slots say up to which
commit the database's own file goes, once a checkpoint has copied the whole WAL and has synced the file: under a newer
WAL an older copy of the file is noticed by that.

Before changing it: the file may lag behind the database, never be ahead of it. So it is only kept where every commit is
synced, and what the database lacks after an operator gave it up goes from the file too. A copy of the database has an
epoch of its own, and is refused beside the file of another one. On ext4 the file is mapped into memory, because a
system call for each commit costs 25 us; elsewhere it is not, because on a full copy-on-write file system a write to a
mapped page ends the process (SIGBUS). See docs/decisions/0017-last-commit.md.
"""

import logging
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import apsw

from veilmq.store import Options
from veilmq.store.directory import COMMITTED, REDO
from veilmq.store.files import Job, RawFile, write_whole
from veilmq.store.sqlite.disk import own_file, redo
from veilmq.store.sqlite.disk.redo import Entry
from veilmq.store.sqlite.disk.redo import file as redo_file

_SLOT: Final = struct.Struct("<16sQQQ")
_CHECKSUM: Final = struct.Struct("<I")
_SLOT_BYTES: Final = _SLOT.size + _CHECKSUM.size
_PLACES: Final = (0, 512)
_FOLDED_PLACES: Final = (256, 768)
_FILE_BYTES: Final = 1024
_MAPPED: Final = frozenset({"ext4"})
"""File systems on which a write to a page of the file needs no space."""
_NO_EVENT: Final = "what was committed last is missing, though no event of the history"

_BATCH: Final = "SELECT offset, count, at FROM history WHERE offset <= ? ORDER BY offset DESC LIMIT 1"

logger = logging.getLogger("veilmq.store")


class Noted(NamedTuple):
    """What the file says."""

    epoch: bytes
    number: int
    offset: int
    """Offset of the next event, after the last commit that is known."""
    clock: int
    """The lease clock at that commit. It distinguishes commits without events."""


class LastCommit:
    """The file of an open store."""

    def __init__(self, path: Path, options: Options, epoch: bytes, offset: int, clock: int) -> None:
        """Replaces the file, durably. If that fails, an old one stays, unless it is ahead of the database.

        Raises OSError if it can neither be replaced nor removed.
        """
        self._last = Noted(epoch, 0, offset, clock)
        self._synced = self._last
        self._folded = Noted(epoch, 0, 0, 0)
        self._disk = disk = options.disk
        self._file: RawFile | None = None
        self._syncing: Job | None = None
        if options.synchronous != "FULL":
            with suppress(FileNotFoundError):
                disk.remove(path)
            return
        try:
            write_whole(disk, path, path.with_name(f".{path.name}.part"), [_slot(self._last).ljust(_FILE_BYTES, b"\0")])
            self._file = disk.map(path, _FILE_BYTES) if disk.file_system(path) in _MAPPED else disk.open(path)
        except OSError as error:
            logger.warning("a damaged WAL or redo log would not be noticed after a kill: %s: %s", path, error)
            noted = read(path)
            if noted is not None and noted.epoch == epoch and noted[2:] > (offset, clock):
                disk.remove(path)

    def note(self, offset: int, clock: int) -> None:
        """Write what was committed, after the commit was synced: the offset of the next event, and the lease clock."""
        last = self._last
        if self._file is None or (offset == last.offset and clock == last.clock):
            return
        self._last = last = Noted(last.epoch, last.number + 1, offset, clock)
        try:
            self._file.write(_slot(last), _PLACES[last.number & 1])
        except OSError:  # then the file lags behind until the next commit
            return

    def note_folded(self, offset: int, clock: int) -> None:
        """Write what the database's own file has, after that was synced. Any thread, one call at a time."""
        last = self._folded
        if self._file is not None and last[2:] != (offset, clock):
            self._folded = noted = Noted(last.epoch, last.number + 1, offset, clock)
            with suppress(OSError):  # then it lags behind until the next checkpoint
                self._file.write(_slot(noted), _FOLDED_PLACES[noted.number & 1])

    def sync(self) -> None:
        """Begin to sync the file, in a thread, unless it is synced. Call about once a second."""
        if self._file is None or self._last is self._synced or (self._syncing and self._syncing.is_alive()):
            return
        with suppress(RuntimeError):  # "can't start new thread": the next second
            self._syncing = self._disk.beside(self._sync, "veilmq-last-commit")

    def _sync(self) -> None:
        last, file = self._last, self._file
        assert file is not None
        with suppress(OSError):
            file.sync()
            self._synced = last

    def close(self) -> None:
        """Close the file."""
        if self._syncing is not None and self._syncing.is_alive():
            self._syncing.join()
        if self._file is not None:
            self._file.close()
            self._file = None


def _slot(noted: Noted) -> bytes:
    slot = _SLOT.pack(*noted)
    return slot + _CHECKSUM.pack(crc32(slot))


def read(path: Path, places: tuple[int, int] = _PLACES) -> Noted | None:
    """The newer whole slot; None: there is no such file, or the operator gave up what it knows. Raises OSError."""
    return next(iter(newest_first(path, places)), None)


def newest_first(path: Path, places: tuple[int, int] = _PLACES) -> list[Noted]:
    """The whole slots. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for place in places:
        slot = content[place : place + _SLOT_BYTES]
        if len(slot) == _SLOT_BYTES and _CHECKSUM.unpack(slot[_SLOT.size :])[0] == crc32(slot[: _SLOT.size]):
            found.append(Noted(*_SLOT.unpack(slot[: _SLOT.size])))
    return sorted(found, key=lambda noted: noted.number, reverse=True)


class Found(NamedTuple):
    """What lies beside a database, as of one state of it."""

    noted: list[Noted]
    """The last commits that were noted before that state, the newest first: at most two."""
    folded: Noted | None
    """The last commit that the database's own file had, as was noted before."""
    missing: list[Entry]
    """The entries of the redo log that the database lacks."""
    is_damaged: bool
    """Whether the log is damaged there."""
    is_ahead: bool
    """Whether the database is older than the log."""


def find(database: Path, connection: apsw.Connection) -> Found:
    """Read the file and the redo log of a database. Begins a transaction if none is open; the entries match its state.

    The file is read before: a running server commits on. Raises apsw.Error, msgspec.MsgspecError, OSError.
    """
    committed = database.with_name(COMMITTED)
    noted, folded = newest_first(committed), read(committed, _FOLDED_PLACES)
    return Found(noted, folded, *redo.lacking(database.with_name(REDO), connection))


def losses(database: Path, connection: apsw.Connection, found: Found) -> list[str]:
    """What was committed and is neither in the database nor in its redo log, and what to do; empty if all is there, or
    if nothing is known. Pages that are missing: `own_file.lacks`. connection: in the transaction of `find`. Raises
    apsw.Error, OSError."""
    log, committed = database.with_name(REDO), database.with_name(COMMITTED)
    loss = None
    if found.noted and not redo_file.is_given_up(log):
        loss = _loss(committed, found.noted[0], connection, found.missing) or _strange(found.noted, connection)
    useless, mixed = _mixed(database, connection, found)
    return [reason for reason in (redo_file.loss(log, connection), useless, loss, mixed) if reason is not None]


def ahead_us(connection: apsw.Connection, found: Found) -> int:
    """How far the mark of the lease clock is ahead of the last commit, if that is the same one; else 0."""
    rows: Any = connection.execute("SELECT clock, offset, epoch FROM mark, secret").fetchall()
    ((clock, offset, epoch),) = rows
    if not found.noted or found.missing or (found.noted[0].epoch, found.noted[0].offset) != (epoch, offset):
        return 0
    return int(clock) - found.noted[0].clock


def _loss(path: Path, noted: Noted, connection: apsw.Connection, missing: Sequence[Entry]) -> str | None:
    """What was committed and is neither in the database nor among the log's entries."""
    epoch: Any = connection.execute("SELECT epoch FROM secret").get
    if epoch != noted.epoch:
        return (
            f"{path} is another database's, whose last acknowledged messages may be in {REDO}: restore into a new"
            f" directory, or move {REDO}, {COMMITTED}, veilmq.db-wal and veilmq.db-shm away, which are not this one's"
        )
    following: Any
    clock: Any
    ((following, clock),) = connection.execute("SELECT offset, clock FROM mark").fetchall()
    if missing:
        following, clock = missing[-1].following, missing[-1].at
    if following >= noted.offset and clock >= noted.clock:
        return None
    lost = noted.offset - following
    what = f"{lost} events that were committed last are missing, from offset {following} on" if lost > 0 else _NO_EVENT
    return f"{what}: veilmq.db-wal or {REDO} is damaged, cut, or not of the same moment; {redo_file.advice(path)}"


def other_batch(notes: Sequence[Noted], connection: apsw.Connection) -> int | None:
    """Where the history has another batch than the one that was noted last, if that had events. notes: the newest
    first, of this database's epoch."""
    noted, *before = notes
    if not before or noted.number != before[0].number + 1 or noted.offset == before[0].offset:
        return None
    began = before[0].offset
    row: Any = connection.execute(_BATCH, (began,)).fetchone()
    # It may be trimmed, or in the redo log alone.
    if row is None or row[0] + row[1] <= began or row == (began, noted.offset - began, noted.clock):
        return None
    return began


def _strange(notes: Sequence[Noted], connection: apsw.Connection) -> str | None:
    """Says that the WAL is not this database's, and what to do. With it `lost` would lose this database's messages.
    Without a WAL the batch is this database's, and damaged."""
    began, wal = other_batch(notes, connection), Path(connection.filename_wal)
    if began is None or not wal.exists() or not wal.stat().st_size:
        return None
    return (
        f"the batch from offset {began} on is another one: veilmq.db-wal is of another database or copy; move"
        f" veilmq.db-wal and veilmq.db-shm away (keep them), then {redo_file.RESTORE}"
    )


def _mixed(database: Path, connection: apsw.Connection, found: Found) -> tuple[str | None, str | None]:
    """Whether the WAL has less than the database's own file, which does without it; and whether that file is otherwise
    newer than its WAL, or older than what lies beside it. With what to do."""
    committed = database.with_name(COMMITTED)
    in_file, folded = own_file.mark_of(connection), found.folded
    rows: Any = connection.execute("SELECT offset, clock, epoch FROM mark, secret").fetchall()
    ((*with_wal, epoch),) = rows
    if in_file is None:
        return None, None
    if folded is not None and folded.epoch != epoch:
        folded = None
    if in_file > tuple(with_wal):
        what = f"{connection.filename_wal} is damaged or older than {database}"
        if folded is not None and in_file == folded[2:]:
            return (
                f"{what}, which has all before offset {in_file[0]} without it: restore all files of one moment, or move"
                " the WAL and veilmq.db-shm away, and run `veilmq check`"
            ), None
        # A checkpoint may have been amid its work: then pages that the file still lacks are in the WAL alone.
        is_given_up = redo_file.is_given_up(committed)
        return None, None if is_given_up else f"{what}, which may need pages from it; {redo_file.advice(committed)}"
    if folded is None or in_file >= folded[2:]:
        return None, None
    return None, (
        f"{database} is an earlier copy, with all before offset {in_file[0]}: it had all before {folded.offset}, and"
        f" changes between the two may be missing; {redo_file.advice(committed)}"
    )
