"""Reading a shard's log in PostgreSQL: followers do, and whoever becomes the owner.

Strategy: a reader names the record that it has, and gets what follows only if the log has the very same one there. So
it notices another history, and a log that was trimmed.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.types.numeric import Int8

from veilmq.cluster.postgres import Connected, Postgres, Session
from veilmq.cluster.postgres.schema import Shard, drop_segments, look, segment_table, segments
from veilmq.store.log import TOGETHER, Entry, Position, checksum

PAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit of one answer to a reader, but for a single record that is larger."""

_READ: Final = """
    select lsn, epoch, record, last from (
        select *, sum(octet_length(record)) over (order by lsn) as total, max(lsn) over () as last
        from {table} where lsn >= %s and lsn < %s
    ) as page where total <= %s or lsn <= %s order by lsn
"""


class LogDiverged(Exception):
    """The log has another record where the reader's last one was, or none: the reader needs a snapshot."""


class LogTrimmed(Exception):
    """The log begins after what the reader wants next: the reader needs a snapshot."""


class LogReader(Connected):
    """Reads the log, from the primary alone: a standby shows records before they are acknowledged.

    Belongs to one thread.
    """

    def __init__(self, postgres: Postgres, incarnation: UUID) -> None:
        self._postgres = postgres
        self._incarnation = incarnation
        self._shard: Shard | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._coming: tuple[Position, Future[tuple[list[Entry], bool]]] | None = None
        """What is read ahead, and after which record."""
        self.is_level = False
        """Whether the last page that `read_on` returned had all that there was, and was short: while it is applied few
        can come."""

    def read(self, after: Position, limit: int = 1_000) -> list[Entry]:
        """The next records, at most `limit` of them and some 16 MiB; none: there are none yet.

        Raises LogDiverged, LogTrimmed; Unreachable, Unfit.
        """
        return self._read(after, limit)[0]

    def _read(self, after: Position, limit: int = 1_000) -> tuple[list[Entry], bool]:
        """As `read`; and see `is_level`."""
        with self._asking():
            session, shard = self._connected()
            entries, is_all = _page(session, shard.segment, after, limit)
        ends_segment = bool(entries) and (entries[-1].lsn + 1) % shard.segment == 0
        return entries, is_all and len(entries) < TOGETHER and not ends_segment

    def read_on(self, after: Position) -> list[Entry]:
        """As `read`. Behind a page that is at least half full the next one is read in a thread, while this one is
        applied. Behind an empty page nothing is read ahead: a candidate that has read everything and then takes over
        gets what is there after that."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] != after:  # the copy begins anew
            wait([coming[1]])
            coming = None
        entries, self.is_level = self._read(after) if coming is None else coming[1].result()
        if sum(len(each.record) for each in entries) >= PAGE_BYTES_MAX // 2:
            following = Position(entries[-1].lsn, entries[-1].epoch, checksum(entries[-1].record))
            self._pool = self._pool or ThreadPoolExecutor(1, "veilmq-reading")
            self._coming = following, self._pool.submit(self._read, following)
        return entries

    def close(self) -> None:
        """Let the connection go, once what is read ahead has come."""
        if self._pool is not None:
            self._pool.shutdown()
        self._coming = self._pool = None
        super().close()

    def end(self) -> Position:
        """Where the log ends. Raises Unreachable, Unfit."""
        with self._asking():
            session, _ = self._connected()
            return end_of_log(session)

    def drop_below(self, lsn: int) -> list[int]:
        """Drop each segment whose records are all below lsn, but never the last record. Returns their numbers.

        Raises Unreachable (try again: a reader was in the way), Unfit.
        """
        with self._asking("PostgreSQL did not drop old segments"):
            session, shard = self._connected()
            return drop_segments(session, min(lsn, end_of_log(session).lsn), shard.segment)

    def _connected(self) -> tuple[Session, Shard]:
        if self._session is None or self._shard is None or not self._postgres.is_usable(self._session):
            super().close()
            self._session = self._postgres.connect()
            self._shard = look(self._session, incarnation=self._incarnation)
        return self._session, self._shard


def _page(session: Session, segment: int, after: Position, limit: int) -> tuple[list[Entry], bool]:
    """The entries, and whether there are no more that the limits leave out."""
    first = max(after.lsn, 1)  # the reader's last record, or the first of all
    number = first // segment
    entries, is_all = _entries(session, number, first, limit + 1)
    if after.lsn and (not entries or entries[0].lsn != first):
        there = segments(session)
        if there and number < there[0]:
            raise LogTrimmed(f"the log begins at segment {there[0]}, and record {first} was in segment {number}")
        raise LogDiverged(f"record {first} of epoch {after.epoch} is not in the log")
    if after.lsn:
        own = entries.pop(0)
        if own.epoch != after.epoch or checksum(own.record) != after.checksum:
            raise LogDiverged(f"record {first} is of epoch {own.epoch} in the log, and of {after.epoch} here")
    elif not entries:
        there = segments(session)
        if there and there[0] > 0:
            raise LogTrimmed(f"the log begins at segment {there[0]}")
    if not entries and (after.lsn + 1) // segment != number:
        entries, is_all = _entries(session, number + 1, after.lsn + 1, limit)
    for lsn, entry in enumerate(entries, after.lsn + 1):
        if entry.lsn != lsn:
            raise LogDiverged(f"the log has record {entry.lsn} where {lsn} should be")
    return entries, is_all


def _entries(session: Session, number: int, first: int, limit: int) -> tuple[list[Entry], bool]:
    query = sql.SQL(_READ).format(table=segment_table(number))
    parameters = (Int8(first), Int8(first + limit), PAGE_BYTES_MAX, Int8(first + 1))
    try:
        rows = session.execute(query, parameters, binary=True).fetchall()
    except psycopg.errors.UndefinedTable:
        return [], True
    return [Entry(*row[:3]) for row in rows], not rows or rows[-1][3] == rows[-1][0]


def end_of_log(session: Session) -> Position:
    """Where the log ends."""
    for number in reversed(segments(session)):
        query = sql.SQL("select lsn, epoch, record from {} order by lsn desc limit 1").format(segment_table(number))
        row = session.execute(query, binary=True).fetchone()
        if row is not None:
            return Position(row[0], row[1], checksum(row[2]))
    return Position(0, 0, 0)


def epoch_of(session: Session, segment: int, lsn: int) -> int | None:
    """The epoch of a record; None: it is not there."""
    query = sql.SQL("select epoch from {} where lsn = %s").format(segment_table(lsn // segment))
    try:
        row = session.execute(query, (lsn,)).fetchone()
    except psycopg.errors.UndefinedTable:
        return None
    return None if row is None else int(row[0])
