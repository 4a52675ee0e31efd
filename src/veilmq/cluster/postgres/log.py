"""The log of a shard in PostgreSQL: the owner appends, everybody reads.

Strategy: an append is one statement, which inserts only while the shard's epoch is mine (its row locked, so that a
take-over waits) and where the record before is there, of the epoch that I know. So there is no gap and no branch, also
on a promoted standby that lacks records. One append is under way at a time. If it is unknown what became of it, I take
over from myself, and look for the record only then: an append that comes later finds another epoch, and what is there
was written before the take-over, which is replicated.

Before changing it: nobody cancels an append. One whose wait for the standby is cancelled is visible here and absent
after a failover.
"""

import logging
import threading
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any, Final, NamedTuple
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.types.numeric import Int8

from veilmq.cluster.postgres import ClusterError, Connected, Postgres, Session, Uncertain, Unfit, Unreachable
from veilmq.cluster.postgres.ownership import Ownership, owned_by
from veilmq.cluster.postgres.schema import SHARD, Shard, add_segment, drop_segments, look, segment_table, segments
from veilmq.store.log import AppendUnknown, NotAppended, NotOwner, Position, checksum

log = logging.getLogger("veilmq.cluster")

RESOLVE_SECONDS: Final = 30.0
"""For how long an owner tries to find out what became of an append: as long as a failover of PostgreSQL takes."""
PAUSE_SECONDS: Final = 0.2
RECONNECT_SECONDS: Final = 1.0
"""For how long no new connection is tried after one failed: a store tries the commands of a failed batch singly."""
PAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit of one answer to a reader, but for a single record that is larger."""

_INSERT: Final = """
    insert into {table} (lsn, epoch, record)
    select %s, %s, %b from (select from veilmq.shard where id = {shard} and epoch = %s for key share) as mine
"""
_DENSE: Final = " where exists (select from {before} where lsn = %s and epoch = %s)"
_READ: Final = """
    select lsn, epoch, record from (
        select *, sum(octet_length(record)) over (order by lsn) as total from {table} where lsn >= %s and lsn < %s
    ) as page where total <= %s or lsn <= %s order by lsn
"""


class LogLost(NotOwner):
    """PostgreSQL lacks records that it had confirmed: a standby without them was promoted. Nothing may be appended."""


class LogDiverged(Exception):
    """The log has another record where the reader's last one was, or none: the reader needs a snapshot."""


class LogTrimmed(Exception):
    """The log begins after what the reader wants next: the reader needs a snapshot."""


class Entry(NamedTuple):
    """One record of the log."""

    lsn: int
    epoch: int
    record: bytes


class PostgresLog(Connected):
    """Where the owner of the shard appends (`veilmq.store.log.Log`). One call at a time, in any thread."""

    def __init__(
        self,
        ownership: Ownership,
        *,
        resolve_seconds: float = RESOLVE_SECONDS,
        took: Callable[[int], None] = lambda elapsed_us: None,
    ) -> None:
        """Reads where the log ends, which is where the store must be before the first append.

        took: called after each append that succeeded, with how long it took.

        Raises Unreachable, Unfit; NotOwner if the shard was lost meanwhile.
        """
        self._ownership = ownership
        self._postgres = ownership.postgres
        self._segment = ownership.shard.segment
        self._resolve_seconds = resolve_seconds
        self._took = took
        self._busy = threading.Lock()
        self._closing = threading.Event()
        self._ended: AppendUnknown | None = None
        self._failed: ClusterError | None = None
        self._failed_until = 0.0
        session = self._postgres.connect()
        try:
            shard = look(session, incarnation=ownership.shard.incarnation)
            if shard.epoch != ownership.epoch:
                ownership.lose(owned_by(shard))
                raise owned_by(shard)
            self.end = end_of_log(session, self._segment)
        except BaseException as error:
            session.close()
            if isinstance(error, psycopg.Error):
                raise Unreachable(f"PostgreSQL does not answer: {error}") from error
            raise
        self._session = session
        self._last = self.end

    end: Position
    """Where the log ended when this owner began."""

    @property
    def epoch(self) -> int:
        """As in `Log`."""
        return self._ownership.epoch

    def append(self, lsn: int, record: bytes) -> None:
        """As in `Log`."""
        if not self._busy.acquire(blocking=False):
            raise AssertionError("an append is under way")
        try:
            self._may_append()
            assert lsn == self._last.lsn + 1, f"record {lsn} after {self._last.lsn}"
            epoch, began_s = self.epoch, perf_counter()
            try:
                inserted = self._insert(lsn, epoch, record)
            except Uncertain as error:
                log.warning("record %d: %s; finding out whether it is in the log", lsn, error)
                self._resolve(lsn, epoch)
            else:
                if not inserted:
                    self._explain(lsn)
            self._last = Position(lsn, epoch, 0)
            self._took(int((perf_counter() - began_s) * 1e6))
        finally:
            self._busy.release()

    def prepare(self) -> None:
        """Create the next segment when half of the current one is used. Call now and then, in any thread.

        Raises Unreachable, Unfit; an append would do it, too.
        """
        number, used = divmod(self._last.lsn, self._segment)
        if used < self._segment // 2:
            return
        try:
            with self._postgres.connect() as session:
                add_segment(session, number + 1, self._segment)
        except psycopg.Error as error:
            raise Unreachable(f"PostgreSQL did not create the next segment: {error}") from error

    def close(self) -> None:
        """Let the connection go. An append that is being found out ends as unknown."""
        self._closing.set()
        with self._busy:
            super().close()

    def _may_append(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._ownership.lost is not None:
            raise self._ownership.lost
        if self._ownership.unfit is not None:
            raise NotAppended(str(self._ownership.unfit))

    def _insert(self, lsn: int, epoch: int, record: bytes) -> bool:
        """Whether it was inserted. Raises NotAppended, Uncertain."""
        if self._failed is not None and perf_counter() < self._failed_until:
            raise NotAppended(str(self._failed))
        try:
            session = self._connected()
        except (Unreachable, Unfit) as error:
            self._failed, self._failed_until = error, perf_counter() + RECONNECT_SECONDS
            raise NotAppended(str(error)) from error
        number, before = lsn // self._segment, self._last.lsn // self._segment
        parameters: list[Any] = [Int8(lsn), Int8(epoch), record, Int8(epoch)]
        if self._last.lsn:
            parameters += [Int8(self._last.lsn), Int8(self._last.epoch)]
        query = insertion(number, before, self._last.lsn > 0)

        def insert() -> bool:
            with session.certain():
                return session.execute(query, parameters, prepare=True).rowcount == 1

        try:
            try:
                return insert()
            except psycopg.errors.UndefinedTable:  # nobody called `prepare`
                add_segment(session, number, self._segment)
                return insert()
        except psycopg.errors.UniqueViolation:
            return False
        except psycopg.Error as error:
            raise NotAppended(f"PostgreSQL did not take record {lsn}: {error}") from error

    def _explain(self, lsn: int) -> None:
        """Raise why PostgreSQL refused a record."""
        session = self._session
        assert session is not None
        try:
            shard = look(session, incarnation=self._ownership.shard.incarnation)
            if shard.epoch != self.epoch:
                self._ownership.lose(owned_by(shard))
                raise owned_by(shard)
            self._check_tail(session, lsn)
        except (psycopg.Error, Unfit) as error:
            super().close()
            raise NotAppended(f"PostgreSQL refused record {lsn}, and does not say why: {error}") from error
        raise NotAppended(f"PostgreSQL refused record {lsn}")

    def _check_tail(self, session: Session, lsn: int) -> None:
        """That the log ends with the last record that I know. Raises LogLost."""
        here, before = (_epoch_of(session, self._segment, number) for number in (lsn, self._last.lsn))
        if here is not None or (self._last.lsn and before != self._last.epoch):
            lost = LogLost(
                f"the log does not end with record {self._last.lsn} of epoch {self._last.epoch}: PostgreSQL's standby "
                "was promoted without it, or somebody else writes here"
            )
            self._ownership.lose(lost)
            raise lost

    def _resolve(self, lsn: int, epoch: int) -> None:
        """Find out whether a record is in the log. Returns if it is. Raises as `append`."""
        super().close()
        end = perf_counter() + self._resolve_seconds
        said = ""
        while True:
            try:
                self._find(lsn, epoch)
                return
            except (Unreachable, Unfit, psycopg.Error) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("record %d: still unknown: %s", lsn, said)
                if perf_counter() >= end or self._closing.wait(PAUSE_SECONDS):
                    self._ended = AppendUnknown(f"it cannot be known whether record {lsn} is in the log: {error}")
                    self._ownership.lose(NotOwner(str(self._ended)))
                    raise self._ended from error

    def _find(self, lsn: int, epoch: int) -> None:
        session = self._postgres.connect(widely=True)
        try:
            lost: NotOwner | None = None
            try:
                self._ownership.fence(session)
            except NotOwner as error:
                lost = error
            # A later statement than the fence: an append that the fence waited for is seen.
            if _epoch_of(session, self._segment, lsn) != epoch:
                if lost is not None:
                    raise lost
                self._check_tail(session, lsn)
                raise NotAppended(f"record {lsn} is not in the log, and never will be")
        except NotAppended:
            self._session = session
            raise
        except BaseException:
            session.close()
            raise
        log.info("record %d is in the log", lsn)
        self._session = session

    def _connected(self) -> Session:
        if self._session is None or not self._postgres.is_usable(self._session):
            super().close()
            self._session = self._postgres.connect()
        return self._session


@lru_cache(maxsize=4)
def insertion(number: int, before: int, dense: bool) -> bytes:
    """The statement that appends to a segment, with the record before in its own or the one before."""
    statement = sql.SQL(_INSERT + (_DENSE if dense else "")).format(
        table=segment_table(number), shard=SHARD, before=segment_table(before)
    )
    return statement.as_bytes(None)


class LogReader(Connected):
    """Reads the log, from the primary alone: a standby shows records before they are acknowledged.

    Belongs to one thread.
    """

    def __init__(self, postgres: Postgres, incarnation: UUID) -> None:
        self._postgres = postgres
        self._incarnation = incarnation
        self._shard: Shard | None = None

    def read(self, after: Position, limit: int = 1_000) -> list[Entry]:
        """The next records, at most `limit` of them and some 16 MiB; none: there are none yet.

        Raises LogDiverged, LogTrimmed; Unreachable, Unfit.
        """
        try:
            session, shard = self._connected()
            return _page(session, shard.segment, after, limit)
        except psycopg.Error as error:
            self.close()
            raise Unreachable(f"PostgreSQL does not answer: {error}") from error

    def end(self) -> Position:
        """Where the log ends. Raises Unreachable, Unfit."""
        try:
            session, shard = self._connected()
            return end_of_log(session, shard.segment)
        except psycopg.Error as error:
            self.close()
            raise Unreachable(f"PostgreSQL does not answer: {error}") from error

    def drop_below(self, lsn: int) -> list[int]:
        """Drop each segment whose records are all below lsn, but never the last record. Returns their numbers.

        Raises Unreachable (try again: a reader was in the way), Unfit.
        """
        try:
            session, shard = self._connected()
            return drop_segments(session, min(lsn, end_of_log(session, shard.segment).lsn), shard.segment)
        except psycopg.Error as error:
            self.close()
            raise Unreachable(f"PostgreSQL did not drop old segments: {error}") from error

    def _connected(self) -> tuple[Session, Shard]:
        if self._session is None or self._shard is None or not self._postgres.is_usable(self._session):
            self.close()
            self._session = self._postgres.connect()
            self._shard = look(self._session, incarnation=self._incarnation)
        return self._session, self._shard


def _page(session: Session, segment: int, after: Position, limit: int) -> list[Entry]:
    first = max(after.lsn, 1)  # the reader's last record, or the first of all
    number = first // segment
    entries = _entries(session, number, first, limit + 1)
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
        entries = _entries(session, number + 1, after.lsn + 1, limit)
    for lsn, entry in enumerate(entries, after.lsn + 1):
        if entry.lsn != lsn:
            raise LogDiverged(f"the log has record {entry.lsn} where {lsn} should be")
    return entries


def _entries(session: Session, number: int, first: int, limit: int) -> list[Entry]:
    query = sql.SQL(_READ).format(table=segment_table(number))
    parameters = (Int8(first), Int8(first + limit), PAGE_BYTES_MAX, Int8(first + 1))
    try:
        rows = session.execute(query, parameters, binary=True).fetchall()
    except psycopg.errors.UndefinedTable:
        return []
    return [Entry(*row) for row in rows]


def end_of_log(session: Session, segment: int) -> Position:
    """Where the log ends."""
    for number in reversed(segments(session)):
        query = sql.SQL("select lsn, epoch, record from {} order by lsn desc limit 1").format(segment_table(number))
        row = session.execute(query, binary=True).fetchone()
        if row is not None:
            return Position(row[0], row[1], checksum(row[2]))
    return Position(0, 0, 0)


def _epoch_of(session: Session, segment: int, lsn: int) -> int | None:
    """The epoch of a record; None: it is not there."""
    query = sql.SQL("select epoch from {} where lsn = %s").format(segment_table(lsn // segment))
    try:
        row = session.execute(query, (lsn,)).fetchone()
    except psycopg.errors.UndefinedTable:
        return None
    return None if row is None else int(row[0])
