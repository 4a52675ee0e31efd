"""The log of a shard in PostgreSQL: the owner appends, everybody reads.

Strategy: an append is one statement. It inserts only while the shard's epoch is the owner's (the row is locked, so that
a take-over waits), and only behind the record before, of the epoch that the owner knows. So there is no gap and no
branch, even on a promoted standby that lacks records. One append is under way at a time. If its outcome is unknown, the
owner takes over from itself, and only then looks for the record: a later append finds another epoch, and what is there
was written before the take-over, which is replicated.

As long as all is well, no thread waits for an append: `send` and `confirmed` are called on the owner's loop. `append`
handles everything else, in a thread.

Before changing it: nobody cancels an append. One whose wait for the standby is cancelled is visible here and absent
after a failover.
"""

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import count
from struct import Struct
from time import perf_counter
from typing import Any, Final

import psycopg
from psycopg import pq, sql
from psycopg.abc import PQGen
from psycopg.types.numeric import Int8
from psycopg.waiting import Ready, Wait

from veilmq.cluster.postgres import ClusterError, Connected, Session, Uncertain, Unfit, Unreachable, text_of
from veilmq.cluster.postgres.log.reading import end_of_log, epoch_of
from veilmq.cluster.postgres.ownership import Ownership, owned_by
from veilmq.cluster.postgres.schema import SHARD, add_segment, look, segment_table
from veilmq.store.log import AppendUnknown, NotAppended, NotOwner, Position

log = logging.getLogger("veilmq.cluster")

RESOLVE_SECONDS: Final = 30.0
"""For how long an owner tries to find out what became of an append: as long as a failover of PostgreSQL takes."""
PAUSE_SECONDS: Final = 0.2
RECONNECT_SECONDS: Final = 1.0
"""For how long no new connection is tried after one failed: a store tries the commands of a failed batch singly."""

_INSERT: Final = """
    insert into {table} (lsn, epoch, record)
    select %s, %s, %b from (select from veilmq.shard where id = {shard} and epoch = %s for key share) as mine
"""
_DENSE: Final = " where exists (select from {before} where lsn = %s and epoch = %s)"
_PREPARE: Final = "prepare {} (bigint, bigint, bytea, bigint, bigint, bigint) as {}"
_NAMES: Final = count(1)
_BINARY: Final = [pq.Format.BINARY] * 6
_pack: Final = Struct("!q").pack


class LogLost(NotOwner):
    """PostgreSQL lacks records that it had confirmed: a standby without them was promoted. Nothing may be appended."""


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
        self._sending: _Sending | None = None
        self._created = 0
        """The last segment that `prepare` has created."""
        self._prepared: tuple[Session, int, str] | None = None
        """On which session `send` may append, to which segment, and by which statement."""
        self._failed: ClusterError | None = None
        self._failed_until = 0.0
        session = self._postgres.connect()
        try:
            shard = look(session, incarnation=ownership.shard.incarnation)
            if shard.epoch != ownership.epoch:
                ownership.lose(owned_by(shard))
                raise owned_by(shard)
            self.end = end_of_log(session)
            self.format = shard.format
        except BaseException as error:
            session.close()
            if isinstance(error, psycopg.Error):
                raise Unreachable(f"PostgreSQL does not answer: {text_of(error)}") from error
            raise
        self._session = session
        self._last = self.end

    end: Position
    """Where the log ended when this owner began."""
    format: int
    """The state format that the cluster has."""

    @property
    def last(self) -> int:
        """Number of the last record."""
        return self._last.lsn

    @property
    def epoch(self) -> int:
        """As in `Log`."""
        return self._ownership.epoch

    def append(self, lsn: int, record: bytes) -> None:
        """As in `Log`."""
        if not self._busy.acquire(blocking=False):
            raise AssertionError("an append is under way")
        try:
            sending, self._sending = self._sending, None
            if sending is None:
                self._may_append(lsn)
            epoch, began_s = (self.epoch, perf_counter()) if sending is None else (sending.epoch, sending.began_s)
            try:
                confirmed = sending is not None and sending.confirmed
                if sending is not None and not confirmed:
                    self._prepared = None  # perhaps that statement is gone
                inserted = confirmed or self._insert(lsn, epoch, record, sending)
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

    def send(self, lsn: int, record: bytes) -> int | None:
        """As in `Log`. Begins nothing where more than one statement is needed."""
        assert not self._busy.locked(), "an append is under way"
        self._may_append(lsn)
        session, last, segment, prepared = self._session, self._last, lsn // self._segment, self._prepared
        if (
            session is None
            or prepared is None
            or prepared[:2] != (session, segment)
            or last.lsn // self._segment != segment
            or self._ownership.unfit is not None
            or not self._postgres.is_usable(session)
        ):
            return None
        sending = self._sending = _Sending(session, self.epoch)
        sending.send(prepared[2], [_pack(lsn), _pack(self.epoch), record, _pack(self.epoch), *map(_pack, last[:2])])
        return sending.descriptor

    def confirmed(self) -> bool | None:
        """As in `Log`."""
        return False if self._sending is None else self._sending.read()

    def prepare(self) -> None:
        """Create the next segment when half of the current one is used. Call now and then, in any thread.

        Raises Unreachable, Unfit; an append would do it, too.
        """
        number, used = divmod(self._last.lsn, self._segment)
        if used < self._segment // 2 or self._created > number:
            return
        with self._postgres.session("PostgreSQL did not create the next segment") as session:
            add_segment(session, number + 1, self._segment)
        self._created = number + 1

    def close(self) -> None:
        """Let the connection go. An append that is being found out ends as unknown."""
        self._closing.set()
        with self._busy:
            super().close()

    def _may_append(self, lsn: int) -> None:
        assert self._sending is None, "an append is under way"
        assert lsn == self._last.lsn + 1, f"record {lsn} after {self._last.lsn}"
        if self._ended is not None:
            raise self._ended
        if self._ownership.lost is not None:
            raise self._ownership.lost
        if self._ownership.unfit is not None:
            raise NotAppended(str(self._ownership.unfit))

    def _insert(self, lsn: int, epoch: int, record: bytes, sending: "_Sending | None") -> bool:
        """Whether it was inserted. Raises NotAppended, Uncertain."""
        if sending is not None:
            return self._inserted(lsn, sending.finish)
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

        def insert_into() -> bool:
            try:
                inserted = insert()
            except psycopg.errors.UndefinedTable:  # nobody called `prepare`
                add_segment(session, number, self._segment)
                inserted = insert()
            self._prepare(session, number)
            return inserted

        return self._inserted(lsn, insert_into)

    def _prepare(self, session: Session, number: int) -> None:
        """Prepare what `send` executes, unless that is done. What was prepared for the segment before is given back:
        a connection lives for months."""
        before, name = self._prepared, f"veilmq_append_{next(_NAMES)}"
        if before is not None and before[:2] == (session, number):
            return
        self._prepared = None
        with suppress(psycopg.Error):
            session.execute(preparation(name, number))
            self._prepared = (session, number, name)
            if before is not None and before[0] is session:
                session.execute(f"deallocate {before[2]}")

    def _inserted(self, lsn: int, insert: Callable[[], bool]) -> bool:
        """What an insertion says. Raises NotAppended, Uncertain."""
        try:
            return insert()
        except psycopg.errors.UniqueViolation:
            return False
        except psycopg.Error as error:
            raise NotAppended(f"PostgreSQL did not take record {lsn}: {text_of(error)}") from error

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
            raise NotAppended(f"PostgreSQL refused record {lsn}, and does not say why: {text_of(error)}") from error
        raise NotAppended(f"PostgreSQL refused record {lsn}")

    def _check_tail(self, session: Session, lsn: int) -> None:
        """That the log ends with the last record that I know. Raises LogLost."""
        here, before = (epoch_of(session, self._segment, number) for number in (lsn, self._last.lsn))
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
        logged = ""
        while True:
            try:
                self._find(lsn, epoch)
                return
            except (Unreachable, Unfit, psycopg.Error) as error:
                if (text := text_of(error)) != logged:
                    logged = text
                    log.warning("record %d: still unknown: %s", lsn, logged)
                if perf_counter() >= end or self._closing.wait(PAUSE_SECONDS):
                    self._ended = AppendUnknown(f"it cannot be known whether record {lsn} is in the log: {logged}")
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
            if epoch_of(session, self._segment, lsn) != epoch:
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


class _Sending:
    """An append that is under way."""

    def __init__(self, session: Session, epoch: int) -> None:
        self.epoch = epoch
        self.began_s = perf_counter()
        self._session = session
        self._results: list[pq.abc.PGresult] = []
        self._is_whole = False
        """Whether all results are there. PostgreSQL says what it inserted before it commits, so an error may follow."""
        self._coming = self._answer()
        self.descriptor: int | None = None
        """Where the answer comes in; None: not all has left yet."""
        self.confirmed = False
        """Whether the record is certainly in the log."""

    def send(self, statement: str, parameters: list[bytes]) -> None:
        """Send it. If that fails, `read` and `finish` find the connection lost."""
        self._session.remarks.clear()
        with suppress(psycopg.Error):
            self._session.pgconn.send_query_prepared(statement.encode(), parameters, _BINARY)
            if next(self._coming) == Wait.R:
                self.descriptor = self._session.fileno()

    def read(self) -> bool | None:
        """Read what has arrived of the answer. Returns as `Log.confirmed`."""
        try:
            self._coming.send(Ready.R)
        except StopIteration:
            results = self._results
            self.confirmed = len(results) == 1 and results[0].command_tuples == 1 and not self._session.remarks
            return self.confirmed
        except psycopg.Error:
            return False
        return None

    def finish(self) -> bool:
        """Wait for the answer: whether it was inserted. Raises psycopg.Error, Uncertain."""
        with self._session.certain(goes_on=True):
            self._session.wait(self._coming)
            for result in self._results:
                if result.status != pq.ExecStatus.COMMAND_OK:
                    raise psycopg.errors.error_from_result(result)
            if not self._is_whole or not self._results:
                self._session.close()
                raise psycopg.OperationalError("no answer")
            return self._results[0].command_tuples == 1

    def _answer(self) -> PQGen[None]:
        connection = self._session.pgconn
        while connection.flush():
            yield Wait.RW
            connection.consume_input()
        while True:
            while not connection.is_busy():
                result = connection.get_result()
                if result is None:
                    self._is_whole = True
                    return
                self._results.append(result)
            yield Wait.R
            connection.consume_input()


def preparation(name: str, segment: int) -> str:
    """The statement that prepares one that appends to a segment that has the record before, too."""
    counting = count(1)
    numbered = re.sub("%[sb]", lambda _: f"${next(counting)}", insertion(segment, segment, True).decode())
    return _PREPARE.format(name, numbered)


@lru_cache(maxsize=4)
def insertion(number: int, before: int, dense: bool) -> bytes:
    """The statement that appends to a segment, with the record before in its own or the one before."""
    statement = sql.SQL(_INSERT + (_DENSE if dense else "")).format(
        table=segment_table(number), shard=SHARD, before=segment_table(before)
    )
    return statement.as_bytes(None)
