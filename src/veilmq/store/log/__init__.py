"""The log that makes a batch durable before anybody is answered, where that is not this directory's own files.

Strategy: a record is what one transaction of the store changed. Records of a shard are numbered without a gap, and each
names the checksum of the one before, so a reader notices what is missing or of another history. A log takes one record
at a time, and only from the server that owns the shard; how it knows the owner is its own affair. The store calls
`append` between its statements and its COMMIT. It ends in one of three ways: done, NotAppended, or AppendUnknown.

The state of an instant is restored from snapshots and the records that came after them, wherever these are kept
(`restore`): the newest snapshot from before the instant is the beginning; a damaged one is passed over for an older
one. Then come the records, until one is of a later instant by its own lease clock. A record names the checksum of the
one before: so a record is applied once the next one has confirmed it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueInfo
from veilmq.store.directory import DATABASE, DataDirectory, SchemaRefused
from veilmq.store.reader import View

TOGETHER: Final = 64
"""At most this many records are applied in one transaction of a follower."""
TOGETHER_BYTES: Final = 16 * 1024 * 1024
"""A transaction ends with the record by which it exceeds this size."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What one transaction changed, as it is kept in the log."""

    schema: int
    """Version of the tables that it was made with; a follower migrates older tables before it applies the record."""
    clock: int
    """The lease clock after it, in microseconds."""
    before: int
    """Checksum of the packed record before it; 0 before the first."""
    patch: bytes
    """Patchset of the tables with bodies and events."""
    change: bytes
    """Changeset of all other tables."""
    plain: "Plain | None" = None
    """Replaces both if the transaction changed only what `Plain` holds."""


class Plain(msgspec.Struct, frozen=True, array_like=True):
    """What most transactions change, as the values that they write."""

    history: tuple[int, int, int, int, int, bytes]
    """The new row of the table."""
    journal: bytes | None
    """What the memtable's new row holds, under the same key; None: it has none."""
    mark: tuple[int, int, int, int]
    """The row of the table: clock, sequence, generation, offset."""


class Position(NamedTuple):
    """How far a file has come in the log."""

    lsn: int
    """Number of the last record that it has; 0: none."""
    epoch: int
    """The epoch under which that was appended."""
    checksum: int
    """Checksum of that record, packed."""


class Entry(NamedTuple):
    """One record of a log."""

    lsn: int
    epoch: int
    record: bytes


class Point(NamedTuple):
    """What a copy of the state holds."""

    position: Position
    """The last record that it has."""
    clock: Instant
    """The lease clock then."""


class NotAppended(Exception):
    """The record is not in the log and never will be. The owner may go on after a rollback."""


class NotOwner(NotAppended):
    """The same, because another server owns the shard now. Nothing more may be appended."""


class AppendUnknown(Exception):
    """It cannot be known whether the record is in the log. Nobody may be answered, and nothing more may be appended."""


class Log(Protocol):
    """Where the owner of a shard puts its records. One call at a time, in any thread."""

    @property
    def epoch(self) -> int:
        """The epoch under which the next record is appended. It may grow by a call that found out what became of a
        record."""

    def append(self, lsn: int, record: bytes) -> None:
        """Make a packed `Record` durable, or finish what `send` began. Blocks, unless `confirmed` was True. Raises
        NotAppended, NotOwner, AppendUnknown.

        lsn: the number of the last record, plus one.
        """

    def send(self, lsn: int, record: bytes) -> int | None:
        """Begin an append without waiting. Returns the descriptor that is readable when an answer arrives: then ask
        `confirmed`. None: `append` has to wait. Raises NotAppended, NotOwner, AppendUnknown."""

    def confirmed(self) -> bool | None:
        """Whether what was sent is in the log; False: `append` has to find out; None: there was no answer yet."""


class Changed(NamedTuple):
    """What applied records changed that the server must hear of."""

    queues: set[int]
    """Incarnations of queues whose rows it changed."""
    shared: bool
    """Whether it changed a value that all servers of a cluster have."""


class Diverged(Exception):
    """A follower does not hold what the owner held: its directory must be filled anew."""


class FormatUnknown(SchemaRefused):
    """A record is of tables that this release does not know: a later release must go on."""

    def __init__(self, lsn: int, found: int, known: int) -> None:
        super().__init__(f"record {lsn} is of state format {found}, and this release knows {known}: upgrade")


class Follower(Protocol):
    """Keeps a data directory as the owner's is. One thread."""

    @property
    def position(self) -> Position:
        """The last record that it has."""

    @property
    def clock(self) -> Instant:
        """The lease clock at that record; 0: it has none. Raises Diverged, StoreUnknown."""

    @property
    def format(self) -> int:
        """The state format that the tables have."""

    @property
    def directory(self) -> DataDirectory:
        """Where the data is."""

    def apply(self, entries: Sequence[Entry], *, forced: int = 0, alone: Collection[int] = ()) -> Changed:
        """Apply the next records in one transaction: that costs less than one at a time, and `TOGETHER` of them are
        checked less strictly.

        forced: number of a record that is applied even if it does not fit the rows here, because the owner's are wrong.
        alone: numbers of records that are checked in full.
        Raises Diverged, FormatUnknown: the records before the one that does not fit stay applied, and that one changes
        nothing. StoreUnknown: close it, and open it again.
        """

    def look_again(self) -> None:
        """Begin to fold in what its WAL gathered behind a long read, if that has ended. Call about once a second."""

    def queues(self, incarnations: Iterable[int] | None = None) -> dict[int, QueueInfo | None]:
        """These queues, or all, without counts; None for one that is not there. By incarnation. Raises Diverged,
        StoreUnknown."""

    def shared(self) -> dict[str, bytes]:
        """Values that all servers of the cluster have, secrets among them, by name. Raises Diverged, StoreUnknown."""

    def look(self) -> AbstractContextManager[View]:
        """A view for the calling thread, beside `apply`; waits while too many are open. Raises StoreFailed once the
        follower is closed."""

    def copy(self, file: Path) -> Point:
        """Write a copy of the state, which a follower can open, and check it.

        Any thread, beside `apply`. Raises Diverged if the check found anything; DestinationTaken, DatabaseFailed,
        OSError.
        """

    def close(self) -> None:
        """Release the directory."""


def checksum(record: bytes) -> int:
    """What the next record calls `before`."""
    return crc32(record)


def together(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """The entries in parts, each for one transaction of a follower."""
    return (entries[place : place + TOGETHER] for place in range(0, len(entries), TOGETHER))


_RECORD: Final = msgspec.msgpack.Decoder(Record)


class SourceUnusable(Exception):
    """Nothing can be restored from it. The text says why."""

    def __init__(self, why: str, since: Instant | None = None) -> None:
        """since: the first instant that can be restored, if an earlier one was asked for."""
        super().__init__(why)
        self.since = since


class SnapshotBad(Exception):
    """A snapshot is not what was written."""


class RecordsEnd(Exception):
    """The records go no further, though there should be more. The text says why."""


class Held(NamedTuple):
    """A snapshot that a source has."""

    point: Point
    """Its clock is 0 if it is not known, because of damage."""
    fetch: Callable[[Path], Point]
    """Writes its file, and returns what the file holds. Raises SnapshotBad, SourceUnusable, OSError: then remove the
    file."""
    born: Instant = Instant(0)
    """When its epoch began, where that is known: its first snapshot may be of an earlier instant, after a restore."""


class Source(Protocol):
    """Where snapshots and records are kept."""

    def snapshots(self) -> Sequence[Held]:
        """All, the newest first. Raises SourceUnusable, OSError."""

    def records(self, after: Position) -> Iterable[Entry]:
        """Those after a record, 0 for the first, in their order. Raises RecordsEnd, SourceUnusable, OSError."""


class Restored(msgspec.Struct, kw_only=True):
    """What was restored."""

    lsn: int
    """Number of the last record that is in it."""
    clock: Instant
    """The lease clock at that record."""
    snapshot: int
    """Number of the last record of the snapshot it began with; 0: it began with nothing."""
    records: int
    """Records that were applied."""
    goes_on: Instant | None = None
    """The clock of the record that comes next in the source, or else of its next snapshot; None: there is none."""
    damaged: list[str] = []
    """Snapshots that were passed over, and why the records ended early, if they did."""


def restore(source: Source, to: Instant | None, directory: Path, open_follower: Callable[[Path], Follower]) -> Restored:
    """Fill an empty directory with the state at an instant; None: the newest.

    Raises SourceUnusable, also if it has nothing from before that instant; OSError, and as the opening of a follower.
    """
    damaged: list[str] = []
    begun = _begin(source, to, directory, damaged)
    with closing(open_follower(directory)) as follower:
        has = follower.position  # a snapshot of a cluster of 0.1.0 may name a later record, and its instant
        restored = Restored(lsn=has.lsn, clock=follower.clock, snapshot=has.lsn, records=0, damaged=damaged)
        try:
            rest = _until(to, _decoded(source.records(has)), restored)
            for part in _parts(rest):
                _apply(follower, part, restored)
        except (RecordsEnd, Diverged) as error:
            if not restored.lsn:
                raise SourceUnusable(f"{error}, and no snapshot from before can be read") from error
            damaged.append(f"the records end after {restored.lsn}: {error}")
        except SourceUnusable as error:
            if not damaged:
                raise
            raise SourceUnusable(f"no snapshot from then is whole: {'; '.join(damaged)}") from error
        else:
            if restored.lsn < begun.position.lsn:
                damaged.append(f"the snapshot of record {begun.position.lsn} has no record after {restored.lsn}")
    if not restored.clock:
        why = "there is nothing from before that instant" if restored.goes_on else "it is empty"
        raise SourceUnusable(why, restored.goes_on)
    if to is not None and restored.goes_on is None and not damaged:  # another epoch may follow
        clocks = (max(held.point.clock, held.born) for held in source.snapshots())
        restored.goes_on = min((clock for clock in clocks if clock > to), default=None)
    return restored


def _parts(entries: Iterator[tuple[Entry, Instant]]) -> Iterator[list[tuple[Entry, Instant]]]:
    """The entries in parts, each to be applied together. Before RecordsEnd is raised, the last part is yielded."""
    part: list[tuple[Entry, Instant]] = []
    size = 0
    try:
        for each in entries:
            part.append(each)
            size += len(each[0].record)
            if len(part) == TOGETHER or size > TOGETHER_BYTES:
                yield part
                part, size = [], 0
    except RecordsEnd:
        if part:
            yield part
        raise
    if part:
        yield part


def _apply(follower: Follower, part: list[tuple[Entry, Instant]], restored: Restored) -> None:
    """Apply these records; `restored` says how far that came. Raises Diverged if one does not continue another."""

    def came(to: int) -> None:
        for entry, clock in part[:to]:
            restored.lsn, restored.clock = entry.lsn, max(restored.clock, clock)
            restored.records += 1
        del part[:to]

    while part:
        try:
            follower.apply([entry for entry, _ in part])
            came(len(part))
        except Diverged:
            came(sum(entry.lsn <= follower.position.lsn for entry, _ in part))
            if not part:
                raise
            bad = part[0][0]
            try:
                follower.apply([bad])  # it may have been another one
            except Diverged as error:  # this state is of the log alone: the owner's was damaged
                follower.apply([bad], forced=bad.lsn)
                restored.damaged.append(f"record {bad.lsn} was applied, though its owner had other rows: {error}")
            came(1)


def _begin(source: Source, to: Instant | None, directory: Path, damaged: list[str]) -> Point:
    """Put the newest good snapshot from before the instant into the directory."""
    file = directory / DATABASE
    found = source.snapshots()
    if to is not None:
        found = [held for held in found if held.point.clock <= to]
        found.sort(key=lambda held: (not held.point.clock, held.born <= to, held.point.clock), reverse=True)
    for held in found:
        try:
            point = held.fetch(file)
        except SnapshotBad as error:
            damaged.append(str(error))
            file.unlink(missing_ok=True)
            continue
        if to is not None and point.clock > to:
            raise SourceUnusable("it is of a later instant", point.clock)
        file.chmod(0o600)
        return point
    return Point(Position(0, 0, 0), Instant(0))


def _decoded(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Instant]]:
    """Each record once the one after it has confirmed it. Raises RecordsEnd if that does not."""
    held: tuple[Entry, Instant] | None = None
    try:
        for entry in entries:
            try:
                record = _RECORD.decode(entry.record)
            except msgspec.MsgspecError as error:
                raise RecordsEnd(f"record {entry.lsn} is damaged ({error})") from error
            if held is not None and record.before != checksum(held[0].record):
                held = None
                raise RecordsEnd(f"record {entry.lsn - 1} is damaged, or the one after it")
            if held is not None:
                yield held
            held = entry, Instant(record.clock)
    except RecordsEnd:
        if held is not None:
            yield held
        raise
    if held is not None:
        yield held


def _until(
    to: Instant | None, entries: Iterator[tuple[Entry, Instant]], restored: Restored
) -> Iterator[tuple[Entry, Instant]]:
    for entry, clock in entries:
        if to is not None and clock > to:
            restored.goes_on = clock
            return
        yield entry, clock
