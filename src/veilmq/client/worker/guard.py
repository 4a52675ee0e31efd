"""The idempotency guard: work that is done is not done again.

Strategy: a record for each key says "in progress" or "done, with this result". `judge`, a pure function over the stored
record, makes every decision; a guard stores the result and makes read and write one atomic step. A record in progress
can be taken over by a later delivery of the same message (the queue has fenced off the earlier one), and by anybody
after its `until`; everybody else waits. Each takeover raises the fence, and only the holder of the newest fence may
finish. If the guard is `Prolonging`, a handler that extends its lease extends `until` too.

In a directory: one file for each key, replaced by rename with fsync. An flock on one of 256 lock files makes read and
write atomic. Meant for the processes of one machine: on network file systems flock may not be reliable.

In a table: one row for each key. Every change is one statement that names the fence it expects, so it is correct at any
isolation level; it is retried after a conflict. Claims end by the database's clock, so the machines' clocks need not
agree. If the table is in the database that the handler writes to, both survive the same crashes. Each thread has its
own connection, which is closed with the thread or the guard; a forked child neither uses nor closes its parent's.

Source: document 003, 3 ("idempotent and resume-able").
"""

import fcntl
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

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
from veilmq.model.errors import Overloaded, ParameterInvalid
from veilmq.store.files import durable_write, make_directory


class Claim(msgspec.Struct, frozen=True):
    """Who wants to do the work of a key, and until when."""

    owner: str
    """Queue and message id."""
    attempt: int
    """Receive count of the message."""
    now: float
    """Unix seconds."""
    until: float
    """Unix seconds: from then on the owner cannot hold its message."""


class Record(msgspec.Struct, frozen=True):
    """What is stored for a key."""

    fence: int
    owner: str
    attempt: int
    until: float
    done: bool = False
    result: Any = None
    """Any JSON value."""


class Begun(msgspec.Struct, frozen=True):
    """The claim was granted: do the work, then call `finish` or `abandon` with this fence."""

    fence: int


class Done(msgspec.Struct, frozen=True):
    """The work is done already."""

    result: Any


class Busy(msgspec.Struct, frozen=True):
    """Somebody else is doing the work."""

    until: float
    """Unix seconds: by then the work is done or may be taken over."""


Answer = Begun | Done | Busy


class Superseded(Exception):
    """A newer claim took over the key: this result was not stored."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} was taken over by a newer delivery")
        self.key = key


class Guard(Protocol):
    """Records by key. Safe for any thread and process. Implementations raise their storage's errors."""

    def begin(self, key: str, claim: Claim) -> Answer:
        """Claim the key. The check and the claim are one atomic step."""
        ...

    def finish(self, key: str, fence: int, result: Any) -> None:
        """Store the result durably. Raises Superseded, and TypeError if JSON cannot represent the result."""
        ...

    def abandon(self, key: str, fence: int) -> None:
        """The work was not done: the next delivery may begin. Does nothing if the fence is not the newest."""
        ...


@runtime_checkable
class Prolonging(Protocol):
    """An optional ability of a guard. Without it a claim ends when the lease ended at the start of the work."""

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """The owner holds its message at least until `until`; both times as in `Claim`. Raises Superseded."""
        ...


def judge(record: Record | None, claim: Claim) -> Record | Done | Busy:
    """The answer to a claim: the record to write, or why the claim is refused."""
    if record is None:
        return Record(fence=1, owner=claim.owner, attempt=claim.attempt, until=claim.until)
    if record.done:
        return Done(record.result)
    later = record.owner == claim.owner and record.attempt < claim.attempt
    if not later and claim.now < record.until:
        return Busy(record.until)
    return Record(fence=record.fence + 1, owner=claim.owner, attempt=claim.attempt, until=claim.until)


def _is_held(record: Record | None, fence: int) -> TypeGuard[Record]:
    """Whether the work is in progress under this fence."""
    return record is not None and record.fence == fence and not record.done


def finished(record: Record | None, key: str, fence: int, result: Any) -> Record:
    """The record of finished work. Raises Superseded."""
    if not _is_held(record, fence):
        raise Superseded(key)
    return msgspec.structs.replace(record, done=True, result=result)


def prolonged(record: Record | None, key: str, fence: int, until: float) -> Record | None:
    """The record of a claim that lasts until `until`; None: there is nothing to write. Raises Superseded."""
    if not _is_held(record, fence):
        raise Superseded(key)
    return msgspec.structs.replace(record, until=until) if until > record.until else None


def abandoned(record: Record | None, fence: int) -> Record | None:
    """The record of a key that the next delivery may begin at once; None: there is nothing to write."""
    if not _is_held(record, fence):
        return None
    return msgspec.structs.replace(record, owner="", until=0.0)


class DirectoryGuard:
    """A guard in a directory. All calls raise OSError. Done records stay until `sweep`."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        make_directory(self.directory, 0o700)

    def begin(self, key: str, claim: Claim) -> Answer:
        """See `Guard.begin`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            answer = judge(_read(path), claim)
            if not isinstance(answer, Record):
                return answer
            durable_write(path, msgspec.json.encode(answer))
            return Begun(answer.fence)

    def finish(self, key: str, fence: int, result: Any) -> None:
        """See `Guard.finish`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            durable_write(path, msgspec.json.encode(finished(_read(path), key, fence, result)))

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """See `Prolonging.prolong`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            record = prolonged(_read(path), key, fence, until)
            if record is not None:
                durable_write(path, msgspec.json.encode(record))

    def abandon(self, key: str, fence: int) -> None:
        """See `Guard.abandon`."""
        path = self._path(key)
        with locked(path.parent / ".lock"):
            record = abandoned(_read(path), fence)
            if record is not None:
                durable_write(path, msgspec.json.encode(record))

    def sweep(self, before: float) -> int:
        """Delete records that are done or overdue and were last written before `before` (Unix seconds). Returns how
        many."""
        swept = 0
        for folder in self.directory.iterdir():
            for path in folder.glob("[0-9a-f]*"):
                with locked(folder / ".lock"):
                    record = _read(path)
                    if record is None or path.stat().st_mtime >= before or not (record.done or record.until < before):
                        continue
                    path.unlink()
                    swept += 1
        return swept

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        folder = self.directory / name[:2]
        make_directory(folder, 0o700)
        return folder / name


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on this file, among all threads and processes of the machine."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        # Closing it does not unlock it: a child forked in the meantime has it open too.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


_TRIES: Final = 20
_NAME_CHARACTERS_MAX: Final = 255


class _Held(OfProcess):
    """A connection that lives as long as its thread or its guard."""

    def __init__(self, connection: Any) -> None:
        self._pid = self._this()
        self.connection = connection
        driver_error(connection, "Error")  # refuse what is no connection before asking it for the time
        self.clock = clock_of(connection)

    def close(self) -> None:
        """Close it. A driver may bind a connection to its thread and refuse."""
        end(self.connection)

    def __del__(self) -> None:
        if self.inherited:
            KEPT.append(self.connection)
        else:
            self.close()


class TableGuard(Closing, Anew):
    """A guard in a table. All calls raise the driver's errors, and Overloaded if too many want one key at the same
    time.

    connect: makes a new connection; each thread keeps one and reconnects when it is lost. table: created if missing.
    paramstyle: the driver's, if the driver does not name it. Raises ParameterInvalid, the driver's errors. Close it
    after its workers: after that all calls raise ParameterInvalid.
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
            # No right to create tables, or another process creates it now (PostgreSQL): it only matters that it exists.
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
        """Close the connections of all threads. If the driver binds a connection to its thread (sqlite3, unless
        check_same_thread=False), that one is closed when the thread ends. Idempotent."""
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
        """The stored record, and how many seconds the database's clock is ahead of `now`."""
        clock = self._held().clock
        if clock is None:
            return self._read(key), 0.0
        ((text, there),) = self._run(f"SELECT (SELECT record FROM {self._table} WHERE name = ?), {clock}", _name(key))
        # Rounded to milliseconds: no more is needed.
        return None if text is None else _record(text), round(float(there) - now, 3)

    def _write(self, key: str, before: Record | None, after: Record) -> bool:
        """Write the record. False if the row is no longer `before`."""
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
            # An IntegrityError (if the driver follows PEP 249), a deadlock, or a serialization failure: what matters is
            # whether another process changed the row.
            if self._read(key) == before:
                raise
            return False

    def _run(self, statement: str, *values: Any) -> Any:
        """Rows of a SELECT; for other statements the number of changed rows, committed. Retried once if the connection
        was lost: a change names the row that it expects, so it is not made twice."""
        for again in (True, False):
            connection = self._held().connection
            try:
                cursor = run(connection.cursor(), self._paramstyle, statement, values)
                found: Any = cursor.fetchall() if statement.startswith("SELECT") else cursor.rowcount
                connection.commit()
                cursor.close()
                return found
            except BaseException as error:
                # The failed connection may be broken: the next call opens a new one.
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
    """The key as a name that every database stores whole and distinct: MySQL ignores spaces at the end of names,
    PostgreSQL takes no NUL, and the column has a width."""
    if len(key) <= _NAME_CHARACTERS_MAX and not key.endswith(" ") and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _record(text: str) -> Record:
    return msgspec.json.decode(text, type=Record)
