"""Numbers in a database table, over any DB-API driver: SQLite, PostgreSQL, MySQL.

Strategy: one row for each storage, changed only by `UPDATE ... WHERE version = ?`: a process that lost the race changes
nothing and gets an error. The row also names the holder, with an expiry by the database's clock (records/holders.py).
One connection, used by one thread at a time. `saving` lends a cursor, so that the application's own rows and the
acknowledged number are one transaction: then nothing is done twice, wherever the process dies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import StateInvalid, StorageLost
from veilmq.client.ordered.storage import OwnedStorage
from veilmq.client.records.holders import HOLD_SECONDS, Owner
from veilmq.client.records.tables import (
    EXACT,
    TEXT,
    Connect,
    OneConnection,
    paramstyle_of,
    row_lock_of,
    run,
    table_name,
)
from veilmq.model.errors import ParameterInvalid, VeilError

NAME_CHARACTERS_MAX: Final = 120


class TableStorage(OwnedStorage):
    """A row of a table. Any thread, one at a time; the driver must allow its connection to change threads (sqlite3:
    check_same_thread=False).
    """

    def __init__(
        self,
        connect: Connect,
        name: str,
        *,
        table: str = "veilmq_numbers",
        create: bool = True,
        paramstyle: str | None = None,
        clock: Clock = SYSTEM,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """connect: opens a connection. name: which row; sender and receiver need one each. create: create the table if
        it is missing. paramstyle: the driver's; None: ask its module. hold_seconds: after this long without a renewal
        another process may take over.

        Raises ParameterInvalid; later, the driver's errors.
        """
        if not 1 <= len(name) <= NAME_CHARACTERS_MAX:
            reason = f"must have 1 to {NAME_CHARACTERS_MAX} characters, not {name!r}"
            raise ParameterInvalid(parameter="name", reason=reason)
        self.name = name
        self._table = table_name(table)
        self._create = create
        self._paramstyle = paramstyle
        self._connection = OneConnection(connect)
        super().__init__(str(self), clock, hold_seconds)
        self._version = 0
        self._acquired = False

    def __str__(self) -> str:
        return f"table {self._table}, {self.name}"

    @property
    def ddl(self) -> str:
        """The statement that creates the table, for users who create their tables themselves."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self._table} (name VARCHAR({NAME_CHARACTERS_MAX}) NOT NULL PRIMARY KEY,"
            f" version BIGINT NOT NULL, holder TEXT, state {TEXT}) {EXACT}"
        )

    def _take(self) -> None:
        """Raises StorageLost if another process was faster."""
        if self._create:
            self._make()
        with self._cursor() as cursor:
            self._look_at_clock(cursor)
            row = self._row(cursor)
            if row is None:
                # Two at once: the primary key admits one of them, and the driver's error stops the other.
                values = (self.name, _text(self._watch.owner()))
                self._run(cursor, f"INSERT INTO {self._table} VALUES (?, 1, ?, NULL)", values)
                self._version = 1
            else:
                self._version, holder, _ = row
                self._watch.admit(holder)
                self._change(cursor, "holder = ?", _text(self._watch.owner()))
        self._acquired = True

    def _make(self) -> None:
        try:
            with self._cursor() as cursor:
                self._run(cursor, self.ddl)
        except VeilError:
            raise
        except Exception:  # noqa: BLE001 drivers may raise anything
            # No right to create tables, or another process creates it now (PostgreSQL): it only matters that it exists.
            with self._cursor() as cursor:
                self._row(cursor)

    def _give_up(self) -> None:
        try:
            if self._acquired:
                with self._cursor() as cursor:
                    self._change(cursor, "holder = NULL")
        except StorageLost:
            pass
        finally:
            self._connection.close()
        self._acquired = False

    def _state_now(self) -> bytes | None:
        with self._cursor() as cursor:
            row = self._row(cursor)
        return None if row is None or row[2] is None else row[2].encode()

    def _write(self, state: bytes) -> None:
        with self._cursor() as cursor:
            self._store(cursor, state)

    @contextmanager
    def saving(self, state: bytes) -> Iterator[Any]:
        """See `Transactional.saving`. Raises like `save`.

        The hold cannot be renewed meanwhile, because the connection is lent. So the row is locked, and nobody takes
        over however long the block lasts. SQLite locks only on a change: there the lock begins with the cursor's first
        change.
        """
        self._watch.enter()
        with self._lock:
            self._watch.check_held()
            with self._cursor() as cursor:
                if row_lock := row_lock_of(self._connection.clock):
                    row = self._row(cursor, row_lock)
                    self._watch.check(None if row is None else row[1])
                yield cursor
                self._store(cursor, state)

    def _store(self, cursor: Any, state: bytes) -> None:
        self._change(cursor, "holder = ?, state = ?", _text(self._watch.owner()), state.decode())

    def _prolong(self) -> None:
        with self._cursor() as cursor:
            self._look_at_clock(cursor)
            self._change(cursor, "holder = ?", _text(self._watch.owner()))

    def _look_at_clock(self, cursor: Any) -> None:
        """Read the database's clock at every renewal, because two clocks drift apart over months."""
        if self._connection.clock is not None:
            self._run(cursor, f"SELECT {self._connection.clock}")
            self._watch.clock_reads(float(cursor.fetchone()[0]))

    def _row(self, cursor: Any, row_lock: str = "") -> tuple[int, Owner | None, str | None] | None:
        statement = f"SELECT version, holder, state FROM {self._table} WHERE name = ?{row_lock}"
        self._run(cursor, statement, (self.name,))
        row = cursor.fetchone()
        if row is None:
            return None
        version, holder, state = row
        try:
            owner = None if holder is None else msgspec.json.decode(holder, type=Owner)
        except (ValueError, RecursionError) as error:
            raise StateInvalid(storage=str(self), reason=f"holds something else: {error}") from None
        return version, owner, state

    def _change(self, cursor: Any, what: str, *values: object) -> None:
        """Write the next version, unless another process did."""
        statement = f"UPDATE {self._table} SET version = ?, {what} WHERE name = ? AND version = ?"
        self._run(cursor, statement, (self._version + 1, *values, self.name, self._version))
        if cursor.rowcount != 1:
            row = self._row(cursor)
            self._watch.check(None if row is None else row[1])
            assert row is not None
            # Our commit succeeded but its answer was lost: the data is ours, and only the version is unknown here.
            self._version = row[0]
            self._run(cursor, statement, (self._version + 1, *values, self.name, self._version))
            if cursor.rowcount != 1:
                raise StorageLost(storage=str(self), holder="another process")
        self._changed = True

    def _run(self, cursor: Any, statement: str, values: tuple[object, ...] = ()) -> None:
        run(cursor, paramstyle_of(self._paramstyle, cursor), statement, values)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """A cursor in a transaction."""
        self._changed = False
        with self._connection.transaction() as cursor:
            yield cursor
        self._version += self._changed


def _text(owner: Owner) -> str:
    return msgspec.json.encode(owner).decode()
