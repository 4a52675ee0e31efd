"""Takes the data of a server alone into an empty cluster, and a cluster's data elsewhere.

Strategy: the data moves, so receipt handles stay good; and so nobody may serve it at the old place any more. An import
copies the database, uploads the copy as the cluster's first snapshot, and commits that in one transaction with a first
record of the log that changes nothing. The log begins with its second segment, so that no copy is ever filled from the
log alone. An export takes the shard over for good, brings a new directory to the end of the log, and takes it out of
the cluster.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from time import sleep
from typing import Final, NamedTuple
from uuid import uuid4

import msgspec
import psycopg
from psycopg.types.numeric import Int8

from veilmq.cluster.member.copy import Copy
from veilmq.cluster.postgres import ClusterError, Postgres, Session, Uncertain, Unfit, text_of
from veilmq.cluster.postgres.log import insertion
from veilmq.cluster.postgres.log.reading import LogDiverged, LogReader, LogTrimmed, end_of_log
from veilmq.cluster.postgres.ownership import Candidate, Ownership, Server, StillOwned, raise_epoch
from veilmq.cluster.postgres.schema import SHARD, Formats, Shard, add_segment, drop_segments, look
from veilmq.cluster.postgres.snapshots import Snapshot, Snapshots, insert
from veilmq.engine.directory import (
    STATE_FORMAT,
    STATE_FORMAT_OLDEST,
    check_vacant,
    copy_checked,
    made_beside,
    open_follower,
    set_position,
)
from veilmq.model.instant import Instant
from veilmq.store import Options
from veilmq.store.archive import EPOCH_MIN
from veilmq.store.directory import DATABASE, DataDirectory, NotOurs
from veilmq.store.log import Entry, Held, NotOwner, Point, Position, Record, RecordsEnd, SourceUnusable, checksum

_LOOK_SECONDS: Final = 0.1
_PLACE: Final = "import-"
_NAME: Final = "veilmq cluster export"
_OPTIONS: Final = Options(reserve_bytes=0)
_FAILED: Final = "PostgreSQL did not carry it out"
_FORMATS: Final = Formats(STATE_FORMAT_OLDEST, STATE_FORMAT)


class Moved(NamedTuple):
    """What was moved."""

    position: Position
    """Where the cluster's log was then, or begins."""
    size_bytes: int
    earlier: str = ""
    """Of an export: the other directory to which one was begun before."""


def import_directory(postgres: Postgres, directory: Path, wall: Instant) -> Moved:
    """Bring a data directory into an empty cluster. The directory stays, and no server starts on it any more.

    Raises DirectoryHeld, DirectoryUnsafe, SchemaRefused, NotOurs, DatabaseFailed, Diverged (it is damaged), Unfit,
    Unreachable, OSError; then the cluster is as it was.
    """
    with postgres.session(_FAILED) as session:
        shard = _empty(session)
    if not (directory / DATABASE).is_file():
        raise NotOurs(f"{directory} has no {DATABASE}")
    with closing(DataDirectory(directory, 0, 0)) as source, _place(directory) as place:
        copy = Path(place, DATABASE)
        found = copy_checked(source.database, copy)
        if 0 < found.position.epoch < EPOCH_MIN:
            raise NotOurs(f"{directory} is a copy that a server of a cluster keeps: export that cluster instead")
        record = msgspec.msgpack.encode(Record(STATE_FORMAT, found.clock, 0, b"", b""))
        position = Position(shard.segment, shard.epoch + 1, checksum(record))
        set_position(copy, position)
        snapshots = Snapshots(postgres, shard.incarnation)
        snapshot = snapshots.upload(copy, Point(position, found.clock), "", lambda size: None)
        size = copy.stat().st_size
        with _committing(), postgres.session(_FAILED) as session, session.certain(), session.transaction():
            now = _empty(session, lock=True)
            if now.epoch != shard.epoch:
                raise Unfit("a server of the cluster has started meanwhile: stop it, and import again")
            raise_epoch(session, now, None)
            add_segment(session, 1, shard.segment)
            drop_segments(session, position.lsn, shard.segment)
            values = [Int8(position.lsn), Int8(position.epoch), record, Int8(position.epoch)]
            session.execute(insertion(1, 1, False), values)
            insert(session, snapshot)
            clock = max(found.clock, wall)
            session.execute(
                "update veilmq.lease set clock = %s, renewed = clock_timestamp() where id = %s", (clock, SHARD)
            )
        set_position(source.database, position)  # so that no server starts on it
    return Moved(position, size)


@contextmanager
def _place(directory: Path) -> Iterator[str]:
    """A folder for the copy. The directory is held, so that of an import that was killed is nobody's: it is removed."""
    for left in directory.glob(f"{_PLACE}*"):
        rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=directory, prefix=_PLACE) as place:
        yield place


def _empty(session: Session, *, lock: bool = False) -> Shard:
    """The shard's row. Raises Unfit if it has data, or an owner, or another state format."""
    shard = look(session, lock="for update" if lock else "")
    _FORMATS.admit(shard)
    if shard.holder is not None:
        raise Unfit(f"{shard.owner} has served this cluster: import into one that no server has served yet")
    [(snapshots,)] = session.execute("select count(*) from veilmq.snapshot")
    if end_of_log(session).lsn or snapshots:
        raise Unfit("the cluster is not empty: make another, in a database of its own")
    return shard


def export_directory(postgres: Postgres, destination: Path, read_boot_ns: Callable[[], int]) -> Moved:
    """Take a cluster's data into a new directory. No server of the cluster starts any more.

    Raises DestinationTaken; Unfit, also if a server owns the cluster; Unreachable, DatabaseFailed, OSError. A second
    call after one that failed goes on.
    """
    check_vacant(destination)
    with postgres.session(_FAILED) as session:
        shard = look(session)
        _FORMATS.admit(shard)
        if not end_of_log(session).lsn:
            raise Unfit("the cluster is empty: there is nothing to export")
    server = Server(_NAME, "", uuid4(), _FORMATS)
    with (
        closing(Candidate(postgres, server, shard.incarnation, read_boot_ns)) as candidate,
        made_beside(destination) as place,
        closing(_take_over(candidate, str(destination.absolute()))) as ownership,
        closing(LogReader(postgres, shard.incarnation)) as reader,
    ):
        with closing(
            Copy(place, partial(open_follower, options=_OPTIONS), Snapshots(postgres, shard.incarnation))
        ) as copy:
            copy.catch_up(reader)
            position = copy.follower.position
        with _alone():
            ownership.hand_over("", ownership.before.clock)
        set_position(place / DATABASE, None)
        size = (place / DATABASE).stat().st_size
    return Moved(position, size, shard.moved if shard.moved != str(destination.absolute()) else "")


def _take_over(candidate: Candidate, moves_to: str) -> Ownership:
    """Own the shard once nobody does. Raises Unfit if somebody does."""
    first = candidate.look()
    while not candidate.is_due():
        sleep(_LOOK_SECONDS)
        sight = candidate.look()
        if (sight.epoch, sight.beat) != (first.epoch, first.beat):
            raise Unfit(f"{sight.owner} serves this cluster: stop all of its servers first")
    with _alone():
        return candidate.take_over(moves_to=moves_to)


@contextmanager
def _alone() -> Iterator[None]:
    """Raises Unfit if a server or another export comes in between."""
    try:
        yield
    except (StillOwned, NotOwner) as error:
        raise Unfit(f"{error}: stop all servers and other exports of this cluster, and export again") from error


@contextmanager
def _committing() -> Iterator[None]:
    """Raises Uncertain with what to look for."""
    try:
        yield
    except Uncertain as error:
        raise Uncertain(
            f"the directory may have been imported: check with `veilmq cluster status` before you start a server on "
            f"it or on the cluster: {error}"
        ) from error


class PostgresSource:
    """What a cluster's PostgreSQL has to restore from. See `Source`."""

    def __init__(self, dsn: str) -> None:
        """Raises SourceUnusable."""
        with _reading():
            self._postgres = Postgres(dsn, single_copy=True)
            with self._postgres.connect() as session:
                shard = look(session)
            _FORMATS.admit(shard)
            self._incarnation = shard.incarnation
            self._snapshots = Snapshots(self._postgres, shard.incarnation)

    def snapshots(self) -> Sequence[Held]:
        with _reading():
            return [Held(each.point, partial(self._fetch, each)) for each in self._snapshots.list()]

    def _fetch(self, snapshot: Snapshot, file: Path) -> Point:
        with _reading():
            self._snapshots.read(snapshot, file)
        return snapshot.point

    def records(self, after: Position) -> Iterator[Entry]:
        """See `Source.records`. Those that come after the call are not among them."""
        with _reading(), closing(LogReader(self._postgres, self._incarnation)) as reader:
            end = reader.end().lsn
            while after.lsn < end:
                for entry in reader.read(after):
                    after = Position(entry.lsn, entry.epoch, checksum(entry.record))
                    yield entry


@contextmanager
def _reading() -> Iterator[None]:
    """Raises what a source does."""
    try:
        yield
    except (LogTrimmed, LogDiverged) as error:
        raise RecordsEnd(str(error)) from error
    except (ClusterError, psycopg.Error) as error:
        raise SourceUnusable(text_of(error)) from error
