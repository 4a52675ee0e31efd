"""SQL through any DB-API driver: parameter styles, connections, and the database's clock.

Strategy: statements are written with `?` and rewritten for the driver's paramstyle (PEP 249); a value never becomes
text of a statement. Table names do, so they are checked. What several machines decide by time is decided by the one
clock that they share, the database's (`clock_of`).
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

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


def table_name(name: str) -> str:
    """A name that is safe in a statement: letters, digits, `_`, at most one dot. Raises ParameterInvalid."""
    if not _NAME.fullmatch(name):
        raise ParameterInvalid(parameter="table", reason=f"must be a plain name such as veilmq or app.veilmq: {name!r}")
    return name


def paramstyle_of(given: str | None, near: Any) -> str:
    """The given style, or else that of the driver which `near` (a connection or cursor) belongs to.

    Raises ParameterInvalid for a style that PEP 249 does not have, or if the driver does not name its style.
    """
    if given is None:
        given = _of_driver(near, "paramstyle")
    if given not in PARAMSTYLES:
        raise ParameterInvalid(parameter="paramstyle", reason=f"must be one of {', '.join(PARAMSTYLES)}, not {given!r}")
    return given


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


def driver_error(connection: Any, name: str) -> type[Exception]:
    """One of the driver's exceptions: an attribute of its module or of its connections (PEP 249).

    Raises ParameterInvalid.
    """
    found = _of_driver(connection, name) or getattr(connection, name, None)
    if not isinstance(found, type):
        raise ParameterInvalid(parameter="connect", reason=f"its driver has no {name}: it is no DB-API driver")
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
