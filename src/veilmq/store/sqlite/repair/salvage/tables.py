"""What a row of each table must look like, and where the rows of a backup come from.

Strategy: the columns and their types are those of a new database. A row that was read by flipping a bit must also prove
itself, if it can: by the MD5 of its body, the number of its events, settings that can be decoded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw
import msgspec

from veilmq.model.events import Event
from veilmq.model.moves import Act, Filter, MoveFailure, MoveStatus
from veilmq.model.settings.queue import PlanState, QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicSettings
from veilmq.store import Options
from veilmq.store.directory import DatabaseFailed
from veilmq.store.rollups import unpacked
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER
from veilmq.store.sqlite.disk import open_reader, reason_of
from veilmq.store.sqlite.disk.rows import MessageRow, readable_row
from veilmq.store.sqlite.disk.schema import check_ours
from veilmq.store.sqlite.raw import Accepts, Values
from veilmq.store.sqlite.raw.logs import is_whole

_TYPES: Final = {"INTEGER": int, "TEXT": str, "BLOB": bytes}
EVENTS: Final = msgspec.msgpack.Decoder(list[Event])
JOURNAL: Final = msgspec.msgpack.Decoder(list[MessageRow])


def read(connection: apsw.Connection, statement: str, values: Values = ()) -> list[Values]:
    """All rows of a query."""
    return connection.execute(statement, values).fetchall()


class Table(NamedTuple):
    """A table of the database."""

    name: str
    types: list[type]
    nullable: list[bool]
    key: int | None
    """The column that is the rowid."""

    def row(self, rowid: int, values: Values) -> Values:
        """The values with the rowid in its column."""
        return values if self.key is None else (*values[: self.key], rowid, *values[self.key + 1 :])

    @property
    def accepts(self) -> Accepts:
        """For the reader of pages."""
        return partial(_accepts, self, _PROOFS.get(self.name))

    @property
    def insert(self) -> str:
        """The statement that inserts a row unless there is one."""
        return f"INSERT OR IGNORE INTO {self.name} VALUES ({', '.join('?' * len(self.types))})"


def tables(connection: apsw.Connection) -> dict[str, Table]:
    """All tables of a new database, by name."""
    found = {}
    for (name,) in read(connection, "SELECT name FROM sqlite_schema WHERE type = 'table'"):
        columns = read(connection, f"PRAGMA table_info({name})")
        types = [_TYPES[column[2]] for column in columns]
        keys = [at for at, column in enumerate(columns) if column[5]]
        is_rowid = len(keys) == 1 and types[keys[0]] is int
        nullable = [not column[3] for column in columns]
        found[name] = Table(name, types, nullable, keys[0] if is_rowid else None)
    return found


class Backup:
    """One state of a backup's database. Everything raises DatabaseFailed if that cannot be read."""

    def __init__(self, database: Path) -> None:
        """Raises NotOurs and SchemaRefused, too."""
        self.database = database
        with self._reading():
            self._connection = open_reader(database, Options())
            check_ours(self._connection)
            self._connection.execute("BEGIN")

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    def read(self, statement: str, values: Values = ()) -> Iterator[Values]:
        """The rows of a query."""
        with self._reading():
            yield from self._connection.cursor().execute(statement, values)

    def unflushed(self) -> Iterator[Values]:
        """The messages that have no rows yet."""
        for (packed,) in self.read("SELECT messages FROM memtable"):
            with self._reading():
                batch = JOURNAL.decode(packed)
            yield from map(msgspec.structs.astuple, batch)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (apsw.Error, msgspec.MsgspecError) as error:
            what = f"the backup {self.database.parent} cannot be read ({reason_of(error)})"
            raise DatabaseFailed(f"{what}: name another one, or none") from error


def accepts_schema(_rowid: int, values: Values, _surely: bool) -> bool:
    """Whether this is a row of `sqlite_schema`: type, name, table, root page, statement."""
    return len(values) == 5 and isinstance(values[1], str) and isinstance(values[3], int)


def _accepts(table: Table, proof: Callable[[Values], bool] | None, rowid: int, values: Values, surely: bool) -> bool:
    if len(values) != len(table.types):
        return False
    for at, (value, kind) in enumerate(zip(values, table.types, strict=True)):
        if at == table.key:
            if value is not None:
                return False
        elif not (table.nullable[at] if value is None else type(value) is kind):
            return False
    try:
        return not surely or (rowid > 0 and readable_row(values) == values and (proof is None or proof(values)))
    except (ValueError, RecursionError):
        return False


def _is_message(values: Values) -> bool:
    *_, extras, digest, body = values
    return len(values[5]) == 16 and is_whole(body, digest, extras)


def _is_history(values: Values) -> bool:
    return bool(len(EVENTS.decode(values[5])) == values[1])


def _decodes(decoder: Any, column: int) -> Callable[[Values], bool]:
    def proof(values: Values) -> bool:
        decoder.decode(values[column])
        return True

    return proof


def _is_lease(values: Values) -> bool:
    hidden, attempt, first = values[4], values[6], values[9]
    return values[3] in (0, 1) and hidden in (0, 1) and attempt >= 0 and (attempt > 0) == (first is not None)


_KEY: Final = msgspec.msgpack.Decoder(QueueKey)
_FILTER: Final = msgspec.msgpack.Decoder(Filter)
_ACTS: Final = frozenset(Act)
_STATUSES: Final = frozenset(MoveStatus)
_FAILURES: Final = frozenset({None, *MoveFailure})


def _is_move_task(values: Values) -> bool:
    destination, status, failure = values[3], values[5], values[6]
    return (destination is None or _decodes(_KEY, 3)(values)) and status in _STATUSES and failure in _FAILURES


def _is_job(values: Values) -> bool:
    act, destination, status, failure = values[2], values[4], values[8], values[9]
    _FILTER.decode(values[5])
    is_known = act in _ACTS and status in _STATUSES and failure in _FAILURES
    return is_known and (destination is None or _decodes(_KEY, 4)(values))


def _is_rollup(values: Values) -> bool:
    return unpacked(values[1]).state is not None


_PROOFS: Final[dict[str, Callable[[Values], bool]]] = {
    "message": _is_message,
    "lease": _is_lease,
    "history": _is_history,
    "memtable": _decodes(JOURNAL, 1),
    "queue": _decodes(SETTINGS_DECODER, 9),
    "topic": _decodes(msgspec.msgpack.Decoder(TopicSettings), 6),
    "subscription": _decodes(msgspec.msgpack.Decoder(SubscriptionSettings), 5),
    "plan": _decodes(msgspec.msgpack.Decoder(PlanState), 1),
    "retiming": _decodes(msgspec.msgpack.Decoder(list[int]), 2),
    "move_task": _is_move_task,
    "job": _is_job,
    "send_template": _decodes(msgspec.json.Decoder(), 2),
    "rollup_minute": _is_rollup,
    "rollup_hour": _is_rollup,
}
