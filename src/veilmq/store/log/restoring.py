"""Restores the state to an instant from snapshots and the records that came after them, wherever these are kept.

Strategy: the newest snapshot from before the instant is the beginning; a damaged one is passed over for an older one.
Then come the records, until one is of a later instant by its own lease clock. A record names the checksum of the one
before: so a record is applied once the next one has confirmed it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from veilmq.model.instant import Instant
from veilmq.store.directory import DATABASE
from veilmq.store.log import Diverged, Entry, Follower, Point, Position, Record, checksum

_RECORD: Final = msgspec.msgpack.Decoder(Record)


class SourceUnusable(Exception):
    """Nothing can be restored from it. The text says why."""


class SnapshotBad(Exception):
    """A snapshot is not what was written."""


class RecordsEnd(Exception):
    """The records go no further, though there should be more. The text says why."""


class Held(NamedTuple):
    """A snapshot that a source has."""

    point: Point
    fetch: Callable[[Path], Point]
    """Writes its file, and says what that has. Raises SnapshotBad, SourceUnusable, OSError; the file is then to be
    removed."""


class Source(Protocol):
    """Where snapshots and records are kept."""

    def snapshots(self) -> Sequence[Held]:
        """All, the newest first. Raises SourceUnusable, OSError."""
        ...

    def records(self, after: Position) -> Iterable[Entry]:
        """Those after a record, 0 for the first, in their order. Raises RecordsEnd, SourceUnusable, OSError."""
        ...


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
    """The clock of the record that comes next in the source; None: there is none."""
    damaged: list[str] = []
    """Snapshots that were passed over, and why the records ended early, if they did."""


def restore(source: Source, to: Instant | None, directory: Path, open_follower: Callable[[Path], Follower]) -> Restored:
    """Fill an empty directory with the state at an instant; None: the newest.

    Raises SourceUnusable, also if it has nothing from before that instant; OSError, and as the opening of a follower.
    """
    damaged: list[str] = []
    begun = _begin(source, to, directory, damaged)
    with closing(open_follower(directory)) as follower:
        restored = Restored(
            lsn=begun.position.lsn, clock=begun.clock, snapshot=begun.position.lsn, records=0, damaged=damaged
        )
        try:
            for entry, clock in _until(to, _decoded(source.records(begun.position)), restored):
                follower.apply(*entry)
                restored.lsn, restored.clock = entry.lsn, max(restored.clock, clock)
                restored.records += 1
        except (RecordsEnd, Diverged) as error:
            if not restored.lsn:
                raise SourceUnusable(f"{error}, and no snapshot from before can be read") from error
            damaged.append(f"the records end after {restored.lsn}: {error}")
    if not restored.clock:
        raise SourceUnusable("there is nothing from before that instant" if restored.goes_on else "it is empty")
    return restored


def _begin(source: Source, to: Instant | None, directory: Path, damaged: list[str]) -> Point:
    """Put the newest good snapshot from before the instant into the directory."""
    file = directory / DATABASE
    for held in source.snapshots():
        if to is not None and held.point.clock > to:
            continue
        try:
            point = held.fetch(file)
        except SnapshotBad as error:
            damaged.append(str(error))
            file.unlink(missing_ok=True)
            continue
        if to is not None and point.clock > to:
            raise SourceUnusable("it is of a later instant")
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
