"""An idempotency guard in a table, over any DB-API driver (PEP 249).

Strategy: one row a key; every change is a single statement that names the fence it expects, so that it is right at any
isolation level, and is tried again after it met another's. Claims end by the database's clock: machines whose own
differ agree. Put the table into the database that the handler itself writes, and both survive the same crashes. Each
thread has a connection of its own, which ends with the thread or with the guard; a forked child neither uses nor closes
those of its parent.
"""

import hashlib
import threading
import weakref
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from veilmq.client.closing import Closing
from veilmq.client.dbapi import (
    EXACT,
    TEXT,
    Connect,
    clock_of,
    driver_error,
    end,
    lost,
    paramstyle_of,
    run,
    table_name,
)
from veilmq.client.forked import KEPT, Anew, OfProcess
from veilmq.client.worker.guard import (
    Answer,
    Begun,
    Busy,
    Claim,
    Record,
    Superseded,
    abandoned,
    finished,
    judge,
    prolonged,
)
from veilmq.model.errors import Overloaded, ParameterInvalid

_TRIES: Final = 20
_NAME_CHARACTERS_MAX: Final = 255


class _Held(OfProcess):
    """A connection, as long as its thread or its guard lives."""

    def __init__(self, connection: Any) -> None:
        self._pid = self._this()
        self.connection = connection
        driver_error(connection, "Error")  # what is no connection at all is refused before it is asked the time
        self.clock = clock_of(connection)

    def close(self) -> None:
        """A driver may bind a connection to its thread, and refuse."""
        end(self.connection)

    def __del__(self) -> None:
        if self.inherited:
            KEPT.append(self.connection)
        else:
            self.close()


class TableGuard(Closing, Anew):
    """See `Guard`. All calls raise the driver's errors, and Overloaded when too many want one key at the same time.

    connect: makes a new connection; one a thread is kept, and made again when it was lost. table: is created if it is
    missing. paramstyle: the driver's, if it does not tell. Raises ParameterInvalid, the driver's errors. Close
    it after its workers: from then on all calls raise ParameterInvalid.
    """

    def __init__(self, connect: Connect, table: str = "veilmq_guard", paramstyle: str | None = None) -> None:
        self._table = table_name(table)
        self._connect = connect
        self._closed = False
        self._here()
        connection = self._held().connection
        self._paramstyle = paramstyle_of(paramstyle, connection)
        self._error = driver_error(connection, "Error")
        try:
            self._run(
                f"CREATE TABLE IF NOT EXISTS {table} (name VARCHAR({_NAME_CHARACTERS_MAX}) PRIMARY KEY,"
                f" fence BIGINT NOT NULL, record {TEXT} NOT NULL) {EXACT}"
            )
        except self._error:
            # Without the right to create, or together with another (PostgreSQL): what counts is that it is there.
            self._read("")

    def begin(self, key: str, claim: Claim) -> Answer:
        """See `Guard.begin`."""
        for _ in range(_TRIES):
            record, ahead = self._look(key, claim.now)
            answer = judge(record, replace(claim, now=claim.now + ahead, until=claim.until + ahead))
            if isinstance(answer, Busy):
                return Busy(answer.until - ahead)
            if not isinstance(answer, Record):
                return answer
            if self._write(key, record, answer):
                return Begun(answer.fence)
        raise Overloaded(limit=_TRIES)

    def finish(self, key: str, fence: int, result: Any) -> None:
        """See `Guard.finish`."""
        record = self._read(key)
        if not self._write(key, record, finished(record, key, fence, result)):
            raise Superseded(key)

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """See `Prolonging.prolong`."""
        record, ahead = self._look(key, now)
        after = prolonged(record, key, fence, until + ahead)
        if after is not None and not self._write(key, record, after):
            raise Superseded(key)

    def abandon(self, key: str, fence: int) -> None:
        """See `Guard.abandon`."""
        record = self._read(key)
        after = abandoned(record, fence)
        if after is not None:
            self._write(key, record, after)

    def close(self) -> None:
        """Close the connections of all threads. Where the driver binds one to its thread (sqlite3, unless
        check_same_thread=False), that one ends with the thread. Twice is once."""
        self._here()
        with self._lock:
            self._closed = True
            every = list(self._all)
        for held in every:
            held.close()

    def _read(self, key: str) -> Record | None:
        rows = self._run(f"SELECT record FROM {self._table} WHERE name = ?", _name(key))
        return _record(rows[0][0]) if rows else None

    def _look(self, key: str, now: float) -> tuple[Record | None, float]:
        """What is there, and how many seconds the database's clock is ahead of `now`."""
        clock = self._held().clock
        if clock is None:
            return self._read(key), 0.0
        ((text, there),) = self._run(f"SELECT (SELECT record FROM {self._table} WHERE name = ?), {clock}", _name(key))
        # No database's clock is finer than it need be here: a millisecond.
        return None if text is None else _record(text), round(float(there) - now, 3)

    def _write(self, key: str, before: Record | None, after: Record) -> bool:
        """False if the row is no longer `before`."""
        text = msgspec.json.encode(after).decode()
        try:
            if before is None:
                statement = f"INSERT INTO {self._table} (name, fence, record) VALUES (?, ?, ?)"
                self._run(statement, _name(key), after.fence, text)
                return True
            old = msgspec.json.encode(before).decode()
            statement = f"UPDATE {self._table} SET fence = ?, record = ? WHERE name = ? AND fence = ? AND record = ?"
            changed: int = self._run(statement, after.fence, text, _name(key), before.fence, old)
            return changed == 1
        except self._error:
            # An IntegrityError (where the driver keeps to PEP 249), a deadlock, or what a strict isolation level
            # forbids: what counts is whether somebody else was there.
            if self._read(key) == before:
                raise
            return False

    def _run(self, statement: str, *values: Any) -> Any:
        """Rows of a SELECT; the number of changed rows of anything else, committed. Once more if the connection was
        lost: a change names what was there before it, and is not made twice."""
        for again in (True, False):
            connection = self._held().connection
            try:
                cursor = run(connection.cursor(), self._paramstyle, statement, values)
                found: Any = cursor.fetchall() if statement.startswith("SELECT") else cursor.rowcount
                connection.commit()
                cursor.close()
                return found
            except BaseException as error:
                # A connection that failed may be broken: the next call opens another.
                again = again and isinstance(error, Exception) and lost(connection)
                self._local.held.close()
                self._local.held = None
                if not again:
                    raise
        raise AssertionError("the last try returns or raises")

    def _held(self) -> _Held:
        self._here()
        held: _Held | None = getattr(self._local, "held", None)
        if held is None:
            connection = self._connect()
            held = _Held(connection)
            with self._lock:
                self._all.add(held)
            self._local.held = held
        if self._closed:
            held.close()
            raise ParameterInvalid(parameter="guard", reason="it is closed")
        return held

    def _begin(self) -> None:
        self._local = threading.local()
        self._all: weakref.WeakSet[_Held] = weakref.WeakSet()
        self._lock = threading.Lock()


def _name(key: str) -> str:
    """A key as every database takes it, whole and apart from all others: MySQL compares names without the spaces at
    their end, PostgreSQL takes no NUL, and the column has a width."""
    if len(key) <= _NAME_CHARACTERS_MAX and not key.endswith(" ") and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _record(text: str) -> Record:
    return msgspec.json.decode(text, type=Record)
