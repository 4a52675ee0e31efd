"""SQL through any DB-API driver: how its parameters are written, and how its connections are used.

Strategy: statements are written with `?`, and rewritten once for the driver's paramstyle (PEP 249); a value never
becomes text of a statement. Names of tables are checked, because they do.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from veilmq.model.errors import ParameterInvalid

PARAMSTYLES: Final = ("qmark", "numeric", "format", "pyformat", "named")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")

Connect = Callable[[], Any]
"""Makes a new DB-API connection, not in autocommit mode."""


def table_name(name: str) -> str:
    """A name that may stand in a statement: letters, digits, `_`, at most one dot. Raises ParameterInvalid."""
    if not _NAME.fullmatch(name):
        raise ParameterInvalid(parameter="table", reason=f"must be a plain name such as veilmq or app.veilmq: {name!r}")
    return name


def paramstyle_of(given: str | None, near: Any) -> str:
    """The style that was given, or that of the driver which `near` (a connection or cursor) belongs to.

    Raises ParameterInvalid for a style that PEP 249 does not know, or a driver that does not tell.
    """
    if given is None:
        package = type(near).__module__
        while package and given is None:
            given = getattr(sys.modules.get(package), "paramstyle", None)
            package = package.rpartition(".")[0]
    if given not in PARAMSTYLES:
        raise ParameterInvalid(parameter="paramstyle", reason=f"must be one of {', '.join(PARAMSTYLES)}, not {given!r}")
    return given


def transactional(connect: Connect) -> Any:
    """A new connection. Raises ParameterInvalid if each statement on it would be a transaction of its own."""
    connection = connect()
    if getattr(connection, "autocommit", False) is True or getattr(connection, "isolation_level", "") is None:
        connection.close()
        reason = "makes connections in autocommit mode: a transaction of several statements is needed"
        raise ParameterInvalid(parameter="connect", reason=reason)
    return connection


def run(cursor: Any, paramstyle: str, statement: str, values: Sequence[object] = ()) -> Any:
    """Execute a statement that was written with `?`; returns the cursor."""
    if not values:
        cursor.execute(statement)
    else:
        cursor.execute(*rewritten(statement, values, paramstyle))
    return cursor


def rewritten(statement: str, values: Sequence[object], paramstyle: str) -> tuple[str, Any]:
    """Statement and parameters in the driver's own form. `?` stands for parameters only."""
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
