"""Snapshots of a shard's state in the cluster's PostgreSQL: whole copies of the file, so that the log need not be kept.

Strategy: a follower copies its file, checks the copy, and uploads it in parts; the row that says what the parts are
comes last, so that half a snapshot is none. It names the record of the log that the copy ends with, and a reader goes
on from there. Two snapshots are kept, and the log from the older one on: if the newer one turns out to be bad, the
older one and the log still give everything.
"""

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import Any, Final, NamedTuple
from uuid import UUID

import psycopg

from veilmq.cluster.postgres import Postgres, Session, Unreachable
from veilmq.cluster.postgres.schema import log_bytes, look
from veilmq.model.instant import Instant
from veilmq.store.log import Position
from veilmq.store.log.restoring import SnapshotBad

PART_BYTES: Final = 4 * 1024 * 1024
"""Of the file, before compression."""
BYTES_PER_SECOND: Final = 32 * 1024 * 1024
"""An upload shares PostgreSQL's log with the appends: it takes at most so much of the file a second."""
KEPT: Final = 2

_NEWEST: Final = "select lsn, epoch, checksum, size, parts, clock from veilmq.snapshot order by lsn desc"
_PART: Final = "select content from veilmq.snapshot_part where lsn = %s and number = %s"

log = logging.getLogger("veilmq.cluster")


class Snapshot(NamedTuple):
    """What a row says."""

    position: Position
    size: int
    """Bytes of the file."""
    parts: list[bytes]
    """SHA-256 of each part of the file."""
    clock: Instant
    """The lease clock at its last record."""


class Snapshots:
    """Writes and reads them. Any thread."""

    def __init__(self, postgres: Postgres, incarnation: UUID) -> None:
        self._postgres = postgres
        self._incarnation = incarnation

    def list(self) -> list[Snapshot]:
        """All that are complete, the newest first. Raises Unreachable, Unfit."""
        try:
            with self._postgres.connect() as session:
                look(session, incarnation=self._incarnation)
                rows: list[tuple[Any, ...]] = session.execute(_NEWEST).fetchall()
        except psycopg.Error as error:
            raise Unreachable(f"PostgreSQL does not answer: {error}") from error
        return [Snapshot(Position(*row[:3]), *row[3:]) for row in rows]

    def log_bytes(self) -> int:
        """Bytes of the log's segments from the newest snapshot on. Raises Unreachable, Unfit."""
        try:
            with self._postgres.connect() as session:
                shard = look(session, incarnation=self._incarnation)
                ((lsn,),) = session.execute("select coalesce(max(lsn), 0) from veilmq.snapshot")
                return log_bytes(session, lsn // shard.segment)
        except psycopg.Error as error:
            raise Unreachable(f"PostgreSQL does not answer: {error}") from error

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """While the block runs no other server writes a snapshot; False: one does. Raises Unreachable, Unfit."""
        with self._postgres.connect() as session:
            ((mine,),) = session.execute("select pg_try_advisory_lock(hashtext('veilmq snapshot'))")
            yield mine

    def write(self, file: Path, position: Position, clock: Instant) -> None:
        """Upload a copy that has every record up to the position, and commit it.

        clock: the lease clock at that record. Raises Unreachable, Unfit, OSError.
        """
        snapshot = self.upload(file, position, clock)
        try:
            with self._postgres.connect() as session:
                look(session, incarnation=self._incarnation)
                with session.certain():
                    insert(session, snapshot)
                old = "select lsn from veilmq.snapshot order by lsn desc offset %s"
                with session.transaction():
                    session.execute(f"delete from veilmq.snapshot where lsn in ({old})", (KEPT,))
                    session.execute(
                        "delete from veilmq.snapshot_part where lsn < %s"
                        " and lsn not in (select lsn from veilmq.snapshot)",
                        (position.lsn,),
                    )
        except psycopg.Error as error:
            raise Unreachable(f"PostgreSQL did not take a snapshot: {error}") from error

    def upload(self, file: Path, position: Position, clock: Instant) -> Snapshot:
        """Upload the parts alone: that is no snapshot before its row is there. Raises as `write`."""
        hashes: list[bytes] = []
        try:
            with self._postgres.connect() as session:
                look(session, incarnation=self._incarnation)
                session.execute("delete from veilmq.snapshot_part where lsn = %s", (position.lsn,))
                for number, part in enumerate(_parts(file)):
                    hashes.append(sha256(part).digest())
                    session.execute(
                        "insert into veilmq.snapshot_part values (%s, %s, %b)",
                        (position.lsn, number, zlib.compress(part, 1)),
                    )
                    sleep(len(part) / BYTES_PER_SECOND)
        except psycopg.Error as error:
            raise Unreachable(f"PostgreSQL did not take a snapshot: {error}") from error
        return Snapshot(position, file.stat().st_size, hashes, clock)

    def read(self, snapshot: Snapshot, file: Path) -> None:
        """Write the file as it was. Raises SnapshotBad, Unreachable, Unfit, OSError; the file is then to be removed."""
        try:
            with self._postgres.connect() as session, file.open("wb") as written:
                for number, expected in enumerate(snapshot.parts):
                    row = session.execute(_PART, (snapshot.position.lsn, number)).fetchone()
                    if row is None:
                        raise SnapshotBad(f"snapshot {snapshot.position.lsn} lacks part {number}")
                    part = zlib.decompress(row[0])
                    if sha256(part).digest() != expected:
                        raise SnapshotBad(f"part {number} of snapshot {snapshot.position.lsn} is damaged")
                    written.write(part)
        except zlib.error as error:
            raise SnapshotBad(f"snapshot {snapshot.position.lsn} is damaged: {error}") from error
        except psycopg.Error as error:
            raise Unreachable(f"PostgreSQL does not answer: {error}") from error
        if file.stat().st_size != snapshot.size:
            raise SnapshotBad(f"snapshot {snapshot.position.lsn} is not complete")


def insert(session: Session, snapshot: Snapshot) -> None:
    """Commit a snapshot whose parts are there. Raises psycopg's errors."""
    session.execute(
        "insert into veilmq.snapshot (lsn, epoch, checksum, size, parts, clock) values (%s, %s, %s, %s, %s, %s)",
        (*snapshot.position, *snapshot[1:]),
    )


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while part := opened.read(PART_BYTES):
            yield part
