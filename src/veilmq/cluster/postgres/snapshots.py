"""Snapshots of a shard's state: whole copies of the file, so that the log need not be kept.

Strategy: a copy that was checked and proven (`Proofs`) is uploaded in parts, into a table or to the URL that the
shard's row names. The row that says what the parts are comes last, so that half a snapshot is none. It names the record
of the log that the copy ends with, and a reader goes on from there. Two verified snapshots are kept, and as many as a
restore to an instant needs, and the log from the oldest of them on: if the newest turns out to be bad, the one before
and the log still give everything.

A copy is proven if another server's tables are the same. A server that wants to publish asks, and names the record that
its copy has reached. One other server answers: it reads its own tables as they are at that record or a later one, and
writes their digest and the record's number. The asker then brings its copy to that very record and compares. So nobody
has to stop at a record. A follower answers at once; the owner leaves that to the followers for some seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple
from uuid import UUID

from veilmq.cluster.postgres import Connected, Postgres, Session, Unfit, Unreachable
from veilmq.cluster.postgres.schema import SHARD, Shard, log_bytes, look
from veilmq.model.instant import Instant
from veilmq.store.archive import (
    Place,
    PlaceFailed,
    PlaceUnusable,
    compressed,
    parts_of,
    place_at,
    remove_others,
    upload,
    write_file,
)
from veilmq.store.log import Point, Position

BYTES_PER_SECOND: Final = 32 * 1024 * 1024
"""An upload shares PostgreSQL's log, or the network, with the appends: it takes at most so much of the file a
second."""
KEPT: Final = 2

_COLUMNS: Final = "lsn, epoch, checksum, clock, size, parts, verified_by, url, folder"
_PART: Final = "select content from veilmq.snapshot_part where lsn = %s and number = %s"

OWNER_WAITS_SECONDS: Final = 5.0
_OLD_SECONDS: Final = 900.0
"""After that nobody waits for an answer any more."""

_ASK: Final[LiteralString] = """
    insert into veilmq.proof values (%s, %s, %s, clock_timestamp(), null, null, null)
    on conflict (id) do update set wanted = excluded.wanted, asker = excluded.asker, asked = excluded.asked,
        claimed = null, lsn = null, digest = null
"""
_CLAIM: Final[LiteralString] = """
    update veilmq.proof set claimed = %s
    where id = %s and claimed is null and asker <> %s and wanted <= %s
        and extract(epoch from clock_timestamp() - asked) between %s and %s
    returning wanted
"""
_ANSWER: Final[LiteralString] = (
    "update veilmq.proof set lsn = %s, digest = %b where id = %s and claimed = %s and wanted = %s"
)
_RELEASE: Final[LiteralString] = "update veilmq.proof set claimed = null where id = %s and claimed = %s and lsn is null"
_LOOK: Final[LiteralString] = "select claimed, lsn, digest from veilmq.proof where id = %s and asker = %s"


class Snapshot(NamedTuple):
    """What a row says."""

    point: Point
    """What the copy holds."""
    size: int
    """Bytes of the file."""
    parts: list[str]
    """SHA-256 of each part of the file."""
    verified_by: str
    """The server that had the same tables; empty: there was no other."""
    url: str
    """Where the parts are; empty: in the database."""
    folder: str
    """In what folder there."""

    @property
    def lsn(self) -> int:
        """The last record that it has."""
        return self.point.position.lsn


class Snapshots:
    """Writes and reads them. Any thread."""

    def __init__(self, postgres: Postgres, incarnation: UUID) -> None:
        self._postgres = postgres
        self._incarnation = incarnation

    @contextmanager
    def _asked(self) -> Iterator[tuple[Session, Shard]]:
        """A session, and the shard's row. Raises Unreachable, Unfit."""
        try:
            with self._postgres.session() as session:
                yield session, look(session, incarnation=self._incarnation)
        except PlaceFailed as error:
            raise Unreachable(f"the snapshots' place does not answer: {error}") from error

    def list(self) -> list[Snapshot]:
        """All that are complete, the newest first. Raises Unreachable, Unfit."""
        with self._asked() as (session, _):
            return _rows(session)

    def log_bytes(self) -> int:
        """Bytes of the log since the newest snapshot. Raises Unreachable, Unfit."""
        with self._asked() as (session, shard):
            ((lsn,),) = session.execute("select coalesce(max(lsn), 0) from veilmq.snapshot")
            return log_bytes(session, lsn, shard.segment)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """While the block runs no other server writes a snapshot; False: one does. Raises Unreachable, Unfit."""
        with self._postgres.session() as session:
            ((mine,),) = session.execute("select pg_try_advisory_lock(hashtext('veilmq snapshot'))")
            yield mine

    def write(self, file: Path, point: Point, verified_by: str, pace: Callable[[int], object]) -> int:
        """Upload a copy and commit it, and remove the snapshots that are not needed any more. Returns the number of the
        record below which the log is not needed.

        pace: called with the size of each part of the upload. Raises Unreachable, Unfit, OSError.
        """
        snapshot = self.upload(file, point, verified_by, pace)
        with self._asked() as (session, shard):
            with session.certain():
                insert(session, snapshot)
            every = _rows(session)
            kept = needed(every, shard.keep_us)
            lsns = [each.lsn for each in kept]
            with session.transaction():
                session.execute("delete from veilmq.snapshot where not lsn = any(%s)", (lsns,))
                session.execute(
                    "delete from veilmq.snapshot_part where lsn < %s and not lsn = any(%s)", (snapshot.lsn, lsns)
                )
            for url in {each.url for each in every} - {""}:
                folders = {each.folder for each in kept}
                remove_others(_place(url), str(self._incarnation), folders, snapshot.lsn)
        return lsns[-1] if len(kept) >= KEPT else 0

    def upload(self, file: Path, point: Point, verified_by: str, pace: Callable[[int], object]) -> Snapshot:
        """Upload the parts alone: that is no snapshot before its row is there. Raises as `write`."""
        lsn, size = point.position.lsn, file.stat().st_size
        with self._asked() as (session, shard):
            if shard.snapshots:
                folder, manifest = upload(
                    _place(shard.snapshots), str(self._incarnation), file, point,
                    state_format=shard.format, pace=pace, verified_by=verified_by,
                )  # fmt: skip
                return Snapshot(point, size, manifest.parts, verified_by, shard.snapshots, folder)
            hashes = []
            session.execute("delete from veilmq.snapshot_part where lsn = %s", (lsn,))
            for number, part in enumerate(parts_of(file)):
                found, kept = compressed(part)
                hashes.append(found)
                session.execute("insert into veilmq.snapshot_part values (%s, %s, %b)", (lsn, number, kept))
                pace(len(part))
        return Snapshot(point, size, hashes, verified_by, "", "")

    def read(self, snapshot: Snapshot, file: Path, between: Callable[[], None] = lambda: None) -> None:
        """Write the file as it was; `between` is called before each part. Raises what it raises, SnapshotBad,
        Unreachable, Unfit, OSError; the file is then to be removed."""
        name = f"the snapshot of record {snapshot.lsn}"
        place = _place(snapshot.url) if snapshot.url else None
        with self._asked() as (session, _):

            def fetch(number: int) -> bytes | None:
                between()
                if place is not None:
                    return place.read(f"{snapshot.folder}/{number:05}")
                row = session.execute(_PART, (snapshot.lsn, number)).fetchone()
                return None if row is None else bytes(row[0])

            write_file(file, snapshot.size, snapshot.parts, fetch, name)


def needed(snapshots: Sequence[Snapshot], keep_us: int) -> list[Snapshot]:
    """Of all, the newest first, those to keep: two, and as many as reach back for `keep_us` from the newest on. Others
    than verified ones count until the verified ones are enough by themselves, and where the newest was not verified,
    because there is no other server."""
    begins = snapshots[0].point.clock - keep_us
    verified = [each for each in snapshots if each.verified_by]
    enough = len(verified) >= KEPT and (not keep_us or verified[-1].point.clock <= begins)
    trusted = verified if enough and snapshots[0].verified_by else snapshots
    reached = sum(each.point.clock > begins for each in trusted) + 1 if keep_us else 0
    return list(trusted[: max(KEPT, reached)])


def insert(session: Session, snapshot: Snapshot) -> None:
    """Commit a snapshot whose parts are there. Raises psycopg's errors."""
    (lsn, epoch, checksum), clock = snapshot.point
    session.execute(
        f"insert into veilmq.snapshot ({_COLUMNS}) values (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (lsn, epoch, checksum, clock, *snapshot[1:]),
    )


def _rows(session: Session) -> list[Snapshot]:
    rows: list[tuple[Any, ...]] = session.execute(
        f"select {_COLUMNS} from veilmq.snapshot order by lsn desc"
    ).fetchall()
    return [Snapshot(Point(Position(*row[:3]), Instant(row[3])), *row[4:]) for row in rows]


def _place(url: str) -> Place:
    try:
        return place_at(url)
    except PlaceUnusable as error:
        raise Unfit(f"snapshots: {error}") from error


class Proof(NamedTuple):
    """What another server has said."""

    by: str
    """Its name, once it is about to answer; empty: nobody is."""
    lsn: int
    """0: it has not answered yet."""
    digest: bytes


class Proofs(Connected):
    """Asks and answers, as one server. One thread."""

    def __init__(self, postgres: Postgres, incarnation: UUID, name: str) -> None:
        self._postgres = postgres
        self._incarnation = incarnation
        self._name = name

    def ask(self, lsn: int) -> None:
        """Ask for the digest at that record or a later one. Raises Unreachable, Unfit."""
        self._execute(_ASK, (SHARD, lsn, self._name))

    def look(self) -> Proof:
        """What was answered until now. Raises Unreachable, Unfit."""
        row = self._execute(_LOOK, (SHARD, self._name))
        by, lsn, digest = row or (None, None, None)
        return Proof(by or "", lsn or 0, bytes(digest or b""))

    def claim(self, lsn: int, *, owns: bool) -> int | None:
        """Claim the answer, if this server, which has that record, is to give it: returns what to hand to `answer`;
        None: it is not. Raises Unreachable, Unfit."""
        waits_s = OWNER_WAITS_SECONDS if owns else 0.0
        row = self._execute(_CLAIM, (self._name, SHARD, self._name, lsn, waits_s, _OLD_SECONDS))
        return None if row is None else int(row[0])

    def release(self) -> None:
        """Leave an answer that this server has claimed to others. Raises Unreachable, Unfit."""
        self._execute(_RELEASE, (SHARD, self._name))

    def answer(self, claimed: int, lsn: int, digest: bytes) -> None:
        """Say what this server's tables hold at that record. Raises Unreachable, Unfit."""
        self._execute(_ANSWER, (lsn, digest, SHARD, self._name, claimed))

    def _execute(self, statement: LiteralString, parameters: tuple[Any, ...]) -> tuple[Any, ...] | None:
        with self._asking():
            cursor = self._connected().execute(statement, parameters)
            return cursor.fetchone() if cursor.description else None

    def _connected(self) -> Session:
        if self._session is None or not self._postgres.is_usable(self._session):
            self.close()
            self._session = self._postgres.connect()
            look(self._session, incarnation=self._incarnation)
        return self._session
