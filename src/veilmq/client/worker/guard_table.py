"""An idempotency guard in a table, over any DB-API driver (PEP 249).

Strategy: one row a key; every change is a single statement that names the fence it expects, so that it is right at any
isolation level, and is tried again after it met another's. Claims end by the database's clock: machines whose own
differ agree. Put the table into the database that the handler itself writes, and both survive the same crashes. Each
thread has a connection of its own, which ends with the thread or with the guard; a forked child neither uses nor closes
those of its parent.
"""

import threading
import weakref
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from veilmq.client.closing import Closing
from veilmq.client.dbapi import Connect, clock_of, driver_error, paramstyle_of, run, table_name
from veilmq.client.forked import KEPT, Anew, OfProcess
from veilmq.client.worker.guard import Answer, Begun, Busy, Claim, Record, Superseded, abandoned, finished, judge
from veilmq.model.errors import Overloaded, ParameterInvalid

_TRIES: Final = 20


class _Held(OfProcess):
    """A connection, as long as its thread or its guard lives."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._error = driver_error(connection, "Error")
        self._pid = self._this()
        self.clock = clock_of(connection)

    def close(self) -> None:
        """A driver may bind a connection to its thread, and refuse."""
        with suppress(self._error):
            self.connection.close()

    def __del__(self) -> None:
        if self.inherited:
            KEPT.append(self.connection)
        else:
            self.close()


class TableGuard(Closing, Anew):
    """See `Guard`. All calls raise the driver's errors, and Overloaded when too many want one key at the same time.

    connect: makes a new connection; one a thread is kept. table: is created if it is missing, with columns that every
    database knows. paramstyle: the driver's, if it does not tell. Raises ParameterInvalid, the driver's errors. Close
    it after its workers: from then on all calls raise ParameterInvalid.
    """

    def __init__(self, connect: Connect, table: str = "veilmq_guard", paramstyle: str | None = None) -> None:
        self._table = table_name(table)
        self._connect = connect
        self._closed = False
        self._here()
        connection = self._held().connection
        self._paramstyle = paramstyle_of(paramstyle, connection)
        self._taken = driver_error(connection, "IntegrityError")
        self._run(
            f"CREATE TABLE IF NOT EXISTS {table} (name VARCHAR(255) PRIMARY KEY, fence BIGINT NOT NULL, "
            "record TEXT NOT NULL)"
        )

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
        rows = self._run(f"SELECT record FROM {self._table} WHERE name = ?", key)
        return _record(rows[0][0]) if rows else None

    def _look(self, key: str, now: float) -> tuple[Record | None, float]:
        """What is there, and how many seconds the database's clock is ahead of `now`."""
        clock = self._held().clock
        if clock is None:
            return self._read(key), 0.0
        ((text, there),) = self._run(f"SELECT (SELECT record FROM {self._table} WHERE name = ?), {clock}", key)
        # No database's clock is finer than it need be here: a millisecond.
        return None if text is None else _record(text), round(float(there) - now, 3)

    def _write(self, key: str, before: Record | None, after: Record) -> bool:
        """False if the row is no longer `before`."""
        text = msgspec.json.encode(after).decode()
        if before is None:
            statement = f"INSERT INTO {self._table} (name, fence, record) VALUES (?, ?, ?)"
            try:
                self._run(statement, key, after.fence, text)
            except self._taken:
                return False
            return True
        old = msgspec.json.encode(before).decode()
        statement = f"UPDATE {self._table} SET fence = ?, record = ? WHERE name = ? AND fence = ? AND record = ?"
        changed: int = self._run(statement, after.fence, text, key, before.fence, old)
        return changed == 1

    def _run(self, statement: str, *values: Any) -> Any:
        """Rows of a SELECT; the number of changed rows of anything else, committed."""
        connection = self._held().connection
        try:
            cursor = run(connection.cursor(), self._paramstyle, statement, values)
            found: Any = cursor.fetchall() if statement.startswith("SELECT") else cursor.rowcount
            connection.commit()
            cursor.close()
        except BaseException:
            # A connection that failed may be broken: the next call opens another.
            self._local.held.close()
            self._local.held = None
            raise
        return found

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


def _record(text: str) -> Record:
    return msgspec.json.decode(text, type=Record)
