"""Records in a table, and SQL through any DB-API driver: parameter styles, connections, and the database's clock.

Strategy: statements are written with `?` and rewritten for the driver's paramstyle (PEP 249); a value never becomes
text of a statement. Table names do, so they are checks. What several machines decide by time is decided by the one
clock that they share, the database's (`clock_of`).

Records: one row for each key. A change is one statement that names the content it expects, so it is correct at any
isolation level; after a conflict the decision is made again.

Connections: `OneConnection` is for objects that one thread uses at a time; it is opened again after any error.
`ThreadConnections` has one for each thread, closed with the thread or with the whole; a forked child neither uses nor
closes its parent's.
"""

import hashlib
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

from veilmq.client.records import Seen
from veilmq.client.shared.lifetimes import KEPT, Anew, Closing, OfProcess
from veilmq.model.errors import ParameterInvalid

PARAMSTYLES: Final = ("qmark", "numeric", "format", "pyformat", "named")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")

_CLOCKS: Final = (
    "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)",
    "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)",
    "((julianday('now') - 2440587.5) * 86400.0)",
)
"""For PostgreSQL, MySQL and SQLite; each is refused by the other two. Unix seconds, constant within a statement,
whatever the session's time zone, and without a character that a paramstyle uses."""

TEXT: Final = "TEXT /*! (4294967295) */"
"""A text column without a length limit. Only MySQL reads this comment; its plain TEXT ends at 64 KiB."""
EXACT: Final = "/*! CHARACTER SET utf8mb4 COLLATE utf8mb4_bin */"
"""Follows a table's columns. MySQL's default collations treat `order-a` and `ORDER-A` as equal, and any two emoji."""

Connect = Callable[[], Any]
"""Makes a new DB-API connection, not in autocommit mode."""


def table_name(name: Any) -> str:
    """A name that is safe in a statement: letters, digits, `_`, at most one dot. Raises ParameterInvalid."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise ParameterInvalid(parameter="table", reason=f"must be a plain name such as veilmq or app.veilmq: {name!r}")
    return found[0]


def paramstyle_of(given: str | None, near: Any) -> str:
    """The given style, or else that of the driver which `near` (a connection or cursor) belongs to.

    Raises ParameterInvalid for a style that PEP 249 does not have, or if the driver does not name its style.
    """
    if given is None:
        given = _of_driver(near, "paramstyle")
    if given not in PARAMSTYLES:
        raise ParameterInvalid(parameter="paramstyle", reason=f"must be one of {', '.join(PARAMSTYLES)}, not {given!r}")
    return given


def _opener(connect: Any) -> Connect:
    """The function. Raises ParameterInvalid for anything else, such as a connection: sqlite3's can be called, too."""
    if callable(connect) and (isinstance(connect, type) or not hasattr(connect, "cursor")):
        found: Connect = connect
        return found
    reason = (
        f"must be a function that opens a connection, as lambda: sqlite3.connect(path), not {type(connect).__name__}"
    )
    raise ParameterInvalid(parameter="connect", reason=reason)


def transactional(connect: Connect) -> Any:
    """A new connection. Raises ParameterInvalid if it is in autocommit mode."""
    connection = connect()
    each = getattr(connection, "autocommit", None)
    if callable(each):  # it sets the mode (PyMySQL, mysqlclient); another method reads it
        each = getattr(connection, "get_autocommit", lambda: None)()
    # sqlite3's isolation_level None means autocommit; psycopg's means the server's default, and its autocommit is
    # False.
    if each is True or (each is not False and getattr(connection, "isolation_level", "") is None):
        connection.close()
        reason = "makes connections in autocommit mode: a transaction of several statements is needed"
        raise ParameterInvalid(parameter="connect", reason=reason)
    return connection


def driver_error(connection: Any) -> type[Exception]:
    """The driver's own error: an attribute of its module or of its connections (PEP 249).

    Raises ParameterInvalid.
    """
    found = _of_driver(connection, "Error") or getattr(connection, "Error", None)
    if not isinstance(found, type):
        raise ParameterInvalid(parameter="connect", reason="its driver has no Error: it is no DB-API driver")
    kind: type[Exception] = found
    return kind


def clock_of(connection: Any) -> str | None:
    """The SQL expression for the database's time in Unix seconds; None for a database that we do not know. The
    connection must have no open transaction, and has none afterwards. Raises ParameterInvalid if its rows are mappings;
    closes the connection if it raises."""
    try:
        for expression in _CLOCKS:
            cursor, rows = connection.cursor(), None
            with suppress(Exception):  # the expression of another database; a broken connection fails again later
                cursor.execute(f"SELECT {expression}")
                rows = cursor.fetchall()
            connection.rollback()
            if rows and isinstance(rows[0], Mapping):
                reason = "makes connections whose rows are mappings (a dict cursor or row factory), not tuples"
                raise ParameterInvalid(parameter="connect", reason=reason)
            if rows:
                return expression
    except BaseException:
        end(connection)
        raise
    return None


def row_lock_of(clock: str | None) -> str:
    """The clause that makes a SELECT lock its rows until the transaction ends, in the database of that clock
    (`clock_of`). Empty for SQLite, whose transaction locks everything from its first change on, and for an unknown
    database."""
    return " FOR UPDATE" if clock in _CLOCKS[:2] else ""


def end(connection: Any) -> None:
    """Close the connection, which rolls back an open transaction (PEP 249). A failure to close is ignored: it is broken
    anyway."""
    with suppress(Exception):
        connection.close()


def lost(connection: Any) -> bool:
    """Whether the connection is dead: the server was restarted, or closed it as idle. Rolls back."""
    try:
        connection.rollback()
        cursor = connection.cursor()
        cursor.execute("SELECT 1")
        cursor.fetchall()
        connection.rollback()
    except Exception:  # noqa: BLE001 drivers raise any exception
        return True
    return False


def _of_driver(near: Any, name: str) -> Any:
    """An attribute of the module that this connection or cursor belongs to, or of a package around it."""
    near = getattr(near, "dbapi_connection", None) or near  # SQLAlchemy's pool wraps the driver's connection
    package, found = type(near).__module__, None
    while package and found is None:
        found = getattr(sys.modules.get(package), name, None)
        package = package.rpartition(".")[0]
    return found


def run(cursor: Any, paramstyle: str, statement: str, values: Sequence[object] = ()) -> Any:
    """Execute a statement written with `?`; return the cursor."""
    if not values:
        cursor.execute(statement)
    else:
        cursor.execute(*rewritten(statement, values, paramstyle))
    return cursor


def rewritten(statement: str, values: Sequence[object], paramstyle: str) -> tuple[str, Any]:
    """Statement and parameters in the driver's own form. `?` may stand for parameters only."""
    if paramstyle == "qmark":
        return statement, tuple(values)
    parts = statement.split("?")
    assert len(parts) == len(values) + 1, "as many values as question marks"
    if paramstyle == "format":
        return "%s".join(parts), tuple(values)
    marks = {"numeric": ":{}", "named": ":p{}", "pyformat": "%(p{})s"}[paramstyle]
    text = parts[0] + "".join(marks.format(place) + part for place, part in enumerate(parts[1:], 1))
    if paramstyle == "numeric":
        return text, tuple(values)
    return text, {f"p{place}": value for place, value in enumerate(values, 1)}


class OneConnection:
    """A connection for one thread at a time: opened when needed, and again after any error. Raises ParameterInvalid if
    `connect` is not a function."""

    def __init__(self, connect: Connect) -> None:
        self._connect = _opener(connect)
        self._connection: Any = None
        self.clock: str | None = None
        """See `clock_of`; known once there was a connection."""

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A cursor in a transaction: committed at the end; after any error rolled back, and the connection closed.

        Raises ParameterInvalid if the connections are in autocommit mode.
        """
        connection = self._open()
        done = False
        try:
            cursor = connection.cursor()  # one driver notices a lost connection here
            yield cursor
            connection.commit()
            cursor.close()
            done = True
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """Close it; the next use opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            end(connection)

    def leave(self) -> None:
        """In a forked child: leave the connection to the parent."""
        if self._connection is not None:
            KEPT.append(self._connection)
            self._connection = None

    def _open(self) -> Any:
        if self._connection is None:
            connection = transactional(self._connect)
            self.clock = clock_of(connection)
            self._connection = connection
        return self._connection


class _OfThread(OfProcess):
    """A connection that lives as long as its thread or the whole."""

    def __init__(self, connection: Any) -> None:
        self._pid = self._this()
        self.connection = connection
        driver_error(connection)  # refuse what is no connection before asking it for the time
        self.clock = clock_of(connection)

    def close(self) -> None:
        """Close it. A driver may bind a connection to its thread and refuse."""
        end(self.connection)

    def __del__(self) -> None:
        if self.inherited:
            KEPT.append(self.connection)
        else:
            self.close()


class ThreadConnections(Closing, Anew):
    """A connection for each thread, opened when needed, and again after it was lost."""

    def __init__(self, connect: Connect, owner: str) -> None:
        """owner: what it belongs to, for the error after `close`."""
        self._connect = _opener(connect)
        self._owner = owner
        self._closed = False
        self._here()

    def mine(self) -> _OfThread:
        """This thread's. Raises ParameterInvalid after `close`, and the driver's errors."""
        self._here()
        mine: _OfThread | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = _OfThread(self._connect())
            with self._lock:
                self._all.add(mine)
            self._local.mine = mine
        if self._closed:
            mine.close()
            raise ParameterInvalid(parameter=self._owner, reason="it is closed")
        return mine

    def drop(self) -> None:
        """Close this thread's: it may be broken. The next use opens a new one."""
        self._local.mine.close()
        self._local.mine = None

    def close(self) -> None:
        """Close those of all threads. If the driver binds a connection to its thread (sqlite3, unless
        check_same_thread=False), that one is closed when the thread ends. Idempotent."""
        self._here()
        with self._lock:
            self._closed = True
            every = list(self._all)
        for each in every:
            each.close()

    def _begin(self) -> None:
        self._local = threading.local()
        self._all: weakref.WeakSet[_OfThread] = weakref.WeakSet()
        self._lock = threading.Lock()


_NAME_CHARACTERS_MAX: Final = 255


class TableRecords(Closing):
    """Records in a table, which is created if it is missing. All calls raise the driver's errors."""

    def __init__(self, connect: Connect, table: str, paramstyle: str | None, owner: str) -> None:
        """See `ThreadConnections` and `paramstyle_of`. Raises ParameterInvalid."""
        self._table = table_name(table)
        self._connections = ThreadConnections(connect, owner)
        connection = self._connections.mine().connection
        self._paramstyle = paramstyle_of(paramstyle, connection)
        self._error = driver_error(connection)
        try:
            self._run(
                f"CREATE TABLE IF NOT EXISTS {table} (name VARCHAR({_NAME_CHARACTERS_MAX}) PRIMARY KEY,"
                f" fence BIGINT NOT NULL, record {TEXT} NOT NULL) {EXACT}"
            )
        except self._error:
            # No right to create tables, or another process creates it now (PostgreSQL): it only matters that it exists.
            self._content("")
        if self._connections.mine().clock == _CLOCKS[2]:
            self._check_shared(connect)

    def _check_shared(self, connect: Connect) -> None:
        """Raises ParameterInvalid if each connection to SQLite has a database of its own: other threads would miss the
        table at every message."""
        if self._run("SELECT file FROM pragma_database_list WHERE name = 'main'")[0][0]:
            return
        other = connect()
        if other is self._connections.mine().connection:  # to close it would close ours
            return
        place, dot, name = self._table.rpartition(".")
        with closing(other):
            cursor = other.cursor()
            try:
                # The table itself may be locked, if others share it.
                cursor.execute(f"SELECT 1 FROM {place}{dot}sqlite_master WHERE name = '{name}' COLLATE NOCASE")
                if cursor.fetchall():
                    return
            except self._error:
                return
        self.close()
        reason = 'opens a new, empty database each time, as ":memory:" is one, and each thread connects: name a file'
        raise ParameterInvalid(parameter="connect", reason=reason)

    def look(self, key: str) -> Seen:
        """See `Records.look`: the row and the clock in one statement."""
        clock = self._connections.mine().clock
        if clock is None:
            return Seen(self._content(key))
        statement = f"SELECT (SELECT record FROM {self._table} WHERE name = ?), {clock}"
        ((text, now),) = self._run(statement, _name(key))
        return Seen(_bytes(text), float(now))

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
        try:
            if before is None:
                statement = f"INSERT INTO {self._table} (name, fence, record) VALUES (?, ?, ?)"
                self._run(statement, _name(key), fence, after.decode())
                return True
            statement = f"UPDATE {self._table} SET fence = ?, record = ? WHERE name = ? AND record = ?"
            changed: int = self._run(statement, fence, after.decode(), _name(key), before.decode())
            # A commit whose answer was lost: the second try met what the first one wrote.
            return changed == 1 or self._content(key) == after
        except self._error:
            # An IntegrityError (if the driver follows PEP 249), a deadlock, or a serialization failure: what matters is
            # whether another process changed the row.
            found = self._content(key)
            if found == before:
                raise
            return found == after

    def close(self) -> None:
        """See `ThreadConnections.close`."""
        self._connections.close()

    def _content(self, key: str) -> bytes | None:
        rows = self._run(f"SELECT record FROM {self._table} WHERE name = ?", _name(key))
        return _bytes(rows[0][0]) if rows else None

    def _run(self, statement: str, *values: Any) -> Any:
        """Rows of a SELECT; for other statements the number of changed rows, committed. Retried once if the connection
        was lost: a change names the row that it expects, so it is not made twice."""
        for again in (True, False):
            connection = self._connections.mine().connection
            try:
                cursor = run(connection.cursor(), self._paramstyle, statement, values)
                found: Any = cursor.fetchall() if statement.startswith("SELECT") else cursor.rowcount
                connection.commit()
                cursor.close()
                return found
            except BaseException as error:
                # The failed connection may be broken: the next call opens a new one.
                again = again and isinstance(error, Exception) and lost(connection)
                self._connections.drop()
                if not again:
                    raise
        raise AssertionError("the last try returns or raises")


def _bytes(text: Any) -> bytes | None:
    """The content of a text column, which some drivers return as bytes."""
    return None if text is None else text.encode() if isinstance(text, str) else bytes(text)


def _name(key: str) -> str:
    """The key as a name that every database stores whole and distinct: MySQL ignores spaces at the end of names,
    PostgreSQL takes no NUL, and the column has a width."""
    if len(key) <= _NAME_CHARACTERS_MAX and not key.endswith(" ") and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
