"""Guards, outboxes and storages over what drivers do in ways of their own: each is SQLite with one manner of another
driver's."""

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.ordered import TableStorage
from veilmq.client.outbox import Failure, Outbox, Relay
from veilmq.client.queue import Queue
from veilmq.client.records.tables import EXACT, TEXT
from veilmq.client.worker import TableGuard
from veilmq.client.worker.guard import Begun, Busy, Claim, Done, Superseded
from veilmq.model.errors import ParameterInvalid

OUTBOX = Outbox()
CLAIM = Claim("orders 1", 1, now=1_000.0, until=1_030.0)

Connect = Callable[[], Any]


@pytest.fixture
def orders(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("orders")
    return embedded.account.queue("orders")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "application.db"
    with sqlite3.connect(path) as there:
        for statement in OUTBOX.ddl():
            there.execute(statement)
    there.close()
    return path


def connecting(path: Path, kind: type[sqlite3.Connection]) -> Connect:
    return lambda: sqlite3.connect(path, check_same_thread=False, factory=kind)


def add(path: Path, *bodies: str) -> None:
    with sqlite3.connect(path) as there:
        for body in bodies:
            OUTBOX.add(there.cursor(), body)
    there.close()


# MySQL's text.


def as_mysql(statement: str) -> str:
    """MySQL executes what is in such a comment; the others do not."""
    return re.sub(r"/\*! (.*?) \*/", r"\1", statement)


def test_mysql_keeps_texts_whole_and_names_apart(path: Path) -> None:
    assert as_mysql(TEXT) == "TEXT (4294967295)"
    exact = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    assert as_mysql(EXACT) == exact
    assert as_mysql(TableStorage(sqlite3.Connection, "s").ddl).endswith(f" state TEXT (4294967295)) {exact}")
    statements: list[str] = []

    def traced() -> sqlite3.Connection:
        connection = sqlite3.connect(path)
        connection.set_trace_callback(statements.append)
        return connection

    TableGuard(traced).close()
    (made,) = (as_mysql(each) for each in statements if each.startswith("CREATE"))
    assert made.endswith(f" record TEXT (4294967295) NOT NULL) {exact}")
    table, _ = OUTBOX.ddl("mysql")
    assert "message LONGTEXT NOT NULL" in table
    assert table.endswith(exact)


def test_keys_that_a_database_would_cut_or_take_for_one_are_told_apart(path: Path) -> None:
    keys = ["k", "k ", "k  ", "k\0", "k\0l", "x" * 255, "x" * 256, "x" * 256 + "y", "x" * 5_000]
    with TableGuard(lambda: sqlite3.connect(path)) as guard:
        assert [guard.begin(key, CLAIM) for key in keys] == [Begun(1)] * len(keys)
        assert isinstance(guard.begin("k ", Claim("orders 2", 1, CLAIM.now, CLAIM.until)), Busy)
        guard.finish("x" * 256, 1, "done")
        assert guard.begin("x" * 256, CLAIM) == Done("done")
    with sqlite3.connect(path) as there:
        names = [name for (name,) in there.execute("SELECT name FROM veilmq_guard")]
    there.close()
    assert len(set(names)) == len(keys)
    assert all(len(name) <= 255 and name == name.rstrip(" ") and "\0" not in name for name in names)


# Connections.


class Setting(sqlite3.Connection):
    """PyMySQL, mysqlclient: `autocommit` sets the mode, and `get_autocommit` tells it."""

    mode: ClassVar[bool] = True

    def autocommit(self, on: bool) -> None:
        raise AssertionError("it is not asked to")

    def get_autocommit(self) -> bool:
        return self.mode


@pytest.mark.parametrize("mode", [True, False])
def test_a_driver_whose_autocommit_is_a_method_is_asked(
    path: Path, orders: Queue, mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setting, "mode", mode)
    relay = Relay(Outbox(paramstyle="qmark"), connecting(path, Setting), orders)
    if mode:
        with pytest.raises(ParameterInvalid, match="autocommit"):
            relay.run_once()
    else:
        assert relay.run_once() == 0
        relay.close()


class Pooled:
    """SQLAlchemy's pool: the driver's connection in another, which passes everything on."""

    def __init__(self, inside: sqlite3.Connection) -> None:
        self.dbapi_connection = inside

    def __getattr__(self, name: str) -> Any:
        if name in ("Error", "IntegrityError"):
            raise AttributeError(name)  # not every driver's connections have them
        return getattr(self.dbapi_connection, name)


def test_a_connection_of_a_pool_is_one_of_its_driver_s(path: Path, orders: Queue) -> None:
    def connect() -> Any:
        return Pooled(sqlite3.connect(path, check_same_thread=False))

    with TableGuard(connect) as guard:
        assert guard.begin("k", CLAIM) == Begun(1)
    storage = TableStorage(connect, "s")
    storage.acquire()
    storage.save(b"[1]")
    storage.release()
    add(path, "1")
    relay = Relay(OUTBOX, connect, orders)
    assert relay.run_once() == 1
    relay.close()


class Extended(sqlite3.Connection):
    """pg8000: errors are attributes of connections too, and a warning tells not to use them."""

    @property
    def Error(self) -> type[Exception]:  # type: ignore[override]
        raise AssertionError("an extension is used")


Extended.__module__ = "sqlite3"


def test_a_driver_s_errors_are_its_module_s(path: Path) -> None:
    with TableGuard(connecting(path, Extended)) as guard:
        assert guard.begin("k", CLAIM) == Begun(1)


def test_rows_that_are_mappings_are_refused(path: Path, orders: Queue) -> None:
    made: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.row_factory = lambda cursor, row: {
            column[0]: value for column, value in zip(cursor.description, row, strict=True)
        }
        made.append(connection)
        return connection

    for use in (
        lambda: TableGuard(connect),
        lambda: TableStorage(connect, "s").acquire(),
        lambda: Relay(OUTBOX, connect, orders).run_once(),
    ):
        with pytest.raises(ParameterInvalid, match="mappings") as caught:
            use()
        assert caught.value.parameter == "connect"
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


class Unread(sqlite3.Connection):
    """MySQL Connector: what was not fetched stands in the way of a commit."""

    last: sqlite3.Cursor | None = None

    def cursor(self, *options: Any) -> sqlite3.Cursor:
        self.last = super().cursor(*options)
        return self.last

    def commit(self) -> None:
        if self.last is not None and self.last.fetchone() is not None:
            raise sqlite3.InternalError("Unread result found")
        super().commit()


def test_a_part_of_the_failures_is_all_that_is_read(path: Path, orders: Queue) -> None:
    with sqlite3.connect(path) as there:
        for name in "abc":
            there.execute("INSERT INTO veilmq_outbox (id, message, failure) VALUES (?, '', 'why')", (name,))
    there.close()
    relay = Relay(Outbox(paramstyle="qmark"), connecting(path, Unread), orders)
    assert relay.failures(2) == [Failure("a", "why"), Failure("b", "why")]
    relay.close()


# Connections that are lost.


class Mortal(sqlite3.Connection):
    """A connection whose server was restarted: nothing works any more, and it may say so before it is used (MySQL
    Connector) and when it is closed (pg8000)."""

    alive: ClassVar[set[int]] = set()
    made: ClassVar[int] = 0

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.alive.add(id(self))
        Mortal.made += 1

    def _check(self) -> None:
        if id(self) not in self.alive:
            raise sqlite3.OperationalError("the connection is lost")

    def cursor(self, *options: Any) -> sqlite3.Cursor:
        self._check()
        return super().cursor(*options)

    def rollback(self) -> None:
        self._check()
        super().rollback()

    def close(self) -> None:
        super().close()
        self._check()


@pytest.fixture
def connect(path: Path) -> Connect:
    Mortal.alive.clear()
    Mortal.made = 0
    return connecting(path, Mortal)


def test_a_guard_whose_connection_was_lost_stores_the_result_over_another(connect: Connect) -> None:
    with TableGuard(connect, paramstyle="qmark") as guard:
        assert guard.begin("k", CLAIM) == Begun(1)
        Mortal.alive.clear()
        guard.finish("k", 1, "done")
        assert Mortal.made == 2
        Mortal.alive.clear()
        assert guard.begin("k", CLAIM) == Done("done")


def test_a_storage_whose_connection_was_lost_has_another_next_time(connect: Connect) -> None:
    storage = TableStorage(connect, "s", paramstyle="qmark")
    storage.acquire()
    Mortal.alive.clear()
    with pytest.raises(sqlite3.OperationalError, match="lost"):
        storage.save(b"[1]")
    storage.save(b"[2]")
    assert storage.load() == b"[2]"
    Mortal.alive.clear()
    with pytest.raises(sqlite3.OperationalError, match="lost"):
        storage.release()
    storage.release()
    other = TableStorage(connect, "s", paramstyle="qmark")
    other.acquire()
    other.release()


def test_a_relay_whose_connection_was_lost_takes_another(connect: Connect, path: Path, orders: Queue) -> None:
    relay = Relay(Outbox(paramstyle="qmark"), connect, orders)
    assert relay.run_once() == 0
    add(path, "1")
    Mortal.alive.clear()
    assert relay.run_once() == 1
    Mortal.alive.clear()
    relay.close()


class Deadlocked(sqlite3.Connection):
    """MySQL picks the transaction that it rolls back."""

    victims: ClassVar[list[str]] = []
    """Parts of the next statements that are picked."""
    winner: ClassVar[Callable[[], object]] = staticmethod(lambda: None)

    def cursor(self, *options: Any) -> sqlite3.Cursor:
        return super().cursor(Victim)


class Victim(sqlite3.Cursor):
    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if Deadlocked.victims and Deadlocked.victims[0] in statement:
            Deadlocked.victims.pop(0)
            Deadlocked.winner()
            raise sqlite3.OperationalError("Deadlock found when trying to get lock; try restarting transaction")
        return super().execute(statement, *values)


@pytest.mark.parametrize("victim", ["SELECT position", "held_until =", "sent = ", "DELETE"])
def test_a_relay_s_transaction_that_was_rolled_back_for_another_s_is_tried_again(
    path: Path, orders: Queue, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path, "1", "2")
    relay = Relay(Outbox(paramstyle="qmark"), connecting(path, Deadlocked), orders)
    monkeypatch.setattr(Deadlocked, "victims", [victim])
    assert relay.run_once() == 2
    assert relay.prune(-1) == 2
    assert Deadlocked.victims == []
    assert [message.body for message in orders.receive(10)] == ["1", "2"]
    relay.close()


def test_a_relay_does_not_try_for_ever(path: Path, orders: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(Outbox(paramstyle="qmark"), connecting(path, Deadlocked), orders)
    monkeypatch.setattr(Deadlocked, "victims", ["SELECT position"] * 3)
    with pytest.raises(sqlite3.OperationalError, match="Deadlock"):
        relay.run_once()
    assert Deadlocked.victims == []
    relay.close()


def test_a_claim_that_was_rolled_back_for_another_s_finds_that(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what tells so an IntegrityError everywhere (pg8000)."""
    with (
        TableGuard(lambda: sqlite3.connect(path)) as other,
        TableGuard(connecting(path, Deadlocked), paramstyle="qmark") as guard,
    ):
        monkeypatch.setattr(Deadlocked, "victims", ["INSERT", "INSERT"])
        with pytest.raises(sqlite3.OperationalError, match="Deadlock"):
            guard.begin("k", CLAIM)
        winner = Claim("orders 2", 1, CLAIM.now, CLAIM.until)
        monkeypatch.setattr(Deadlocked, "winner", staticmethod(lambda: other.begin("k", winner)))
        assert isinstance(guard.begin("k", CLAIM), Busy)
        assert Deadlocked.victims == []


def test_a_result_that_was_rolled_back_for_another_s_claim_is_superseded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        TableGuard(lambda: sqlite3.connect(path)) as other,
        TableGuard(connecting(path, Deadlocked), paramstyle="qmark") as guard,
    ):
        assert guard.begin("k", CLAIM) == Begun(1)
        monkeypatch.setattr(Deadlocked, "victims", ["UPDATE", "UPDATE"])
        with pytest.raises(sqlite3.OperationalError, match="Deadlock"):
            guard.finish("k", 1, "done")
        later = Claim("orders 1", 2, CLAIM.now, CLAIM.until)
        monkeypatch.setattr(Deadlocked, "winner", staticmethod(lambda: other.begin("k", later)))
        with pytest.raises(Superseded):
            guard.finish("k", 1, "done")
        assert Deadlocked.victims == []
