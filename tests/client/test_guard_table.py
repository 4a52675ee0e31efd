"""A guard in a table: its connections end with it, with their threads, and stay the parent's in a forked child; its
claims end by the database's clock.
"""

import contextlib
import gc
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from tests.client.clocks_apart import HOUR, Apart, by
from tests.client.test_forked import code_of, in_child

from veilmq.client.records.tables import TableRecords
from veilmq.client.worker import TableGuard
from veilmq.client.worker.guard import Begun, Busy, Claim, Done, RecordGuard
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract.stage import MovableClock

CLAIM = Claim("orders 1", 1, now=1_000.0, until=1_030.0)


class Counted(sqlite3.Connection):
    """Knows in which process it is closed."""

    closed: ClassVar[list[tuple[int, int]]] = []

    def close(self) -> None:
        Counted.closed.append((id(self), os.getpid()))
        super().close()


def counted(path: Path, check: bool = False) -> Callable[[], sqlite3.Connection]:
    Counted.closed = []
    return lambda: sqlite3.connect(path, factory=Counted, check_same_thread=check)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@contextmanager
def elsewhere(guard: TableGuard) -> Iterator[None]:
    """While another thread, which has used the guard, lives."""
    ready, end = threading.Event(), threading.Event()

    def work() -> None:
        guard.begin("there", CLAIM)
        ready.set()
        end.wait(20)

    other = threading.Thread(target=work)
    other.start()
    assert ready.wait(20)
    try:
        yield
    finally:
        end.set()
        other.join()


def test_close_ends_the_connections_of_all_threads(tmp_path: Path) -> None:
    guard = TableGuard(counted(tmp_path / "guard.db"), paramstyle="qmark")
    with elsewhere(guard):
        with guard:
            assert isinstance(guard.begin("here", CLAIM), Begun)
            assert Counted.closed == []
        assert len({which for which, _ in Counted.closed}) == 2
        with pytest.raises(ParameterInvalid, match="closed"):
            guard.begin("more", CLAIM)
        guard.close()


def test_a_driver_that_binds_connections_to_threads_does_not_stop_the_close(tmp_path: Path) -> None:
    guard = TableGuard(counted(tmp_path / "guard.db", check=True), paramstyle="qmark")
    with elsewhere(guard):
        guard.close()


class Reset(sqlite3.Connection):
    """Its close meets a socket that is gone, and says so in the system's words, not in the driver's."""

    def close(self) -> None:
        super().close()
        raise ConnectionResetError


def test_an_error_of_the_system_does_not_stop_the_close(tmp_path: Path) -> None:
    guard = TableGuard(lambda: sqlite3.connect(tmp_path / "guard.db", factory=Reset), paramstyle="qmark")
    assert isinstance(guard.begin("here", CLAIM), Begun)
    guard.close()


class Unheard(sqlite3.Connection):
    """Loses the connection after the commits that `lose` counts, before anybody hears of them."""

    lose = 0

    def commit(self) -> None:
        super().commit()
        if Unheard.lose:
            Unheard.lose -= 1
            self.close()
            raise sqlite3.OperationalError("the server closed the connection")


def test_a_commit_whose_answer_was_lost_is_the_guards_own(tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "guard.db", factory=Unheard)

    class Losing(TableRecords):
        def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
            Unheard.lose = 1
            return super().replace(key, before, after, fence)

    with Losing(connect, "veilmq_guard", "qmark", owner="guard") as records:
        guard = RecordGuard(records)
        assert guard.begin("k", CLAIM) == Begun(1), "the row was new"
        guard.abandon("k", 1)
        assert guard.begin("k", CLAIM) == Begun(2), "the row was changed"
        guard.finish("k", 2, "ours")
        assert guard.begin("k", CLAIM) == Done("ours")


def test_what_is_no_connection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterInvalid, match="no DB-API driver"):
        TableGuard(lambda: tmp_path)
    with pytest.raises(ParameterInvalid, match="a new, empty database each time"):
        TableGuard(lambda: sqlite3.connect(":memory:"))
    with TableGuard(lambda: sqlite3.connect("file:guards?mode=memory&cache=shared", uri=True)) as guard:
        in_thread(lambda: guard.begin("key", CLAIM))
        assert isinstance(guard.begin("key", CLAIM), Busy), "one database of all threads"
        with contextlib.closing(sqlite3.connect("file:guards?mode=memory&cache=shared", uri=True)) as other:
            other.execute("DELETE FROM veilmq_guard")  # and holds its lock
            TableGuard(lambda: sqlite3.connect("file:guards?mode=memory&cache=shared", uri=True)).close()
    with contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as one:
        assert TableGuard(lambda: one).begin("key", CLAIM) == Begun(1), "the check did not close it"


def test_a_connection_ends_with_its_thread(tmp_path: Path) -> None:
    with TableGuard(counted(tmp_path / "guard.db", check=True), paramstyle="qmark") as guard:
        for number in range(3):
            in_thread(lambda number=number: guard.begin(str(number), CLAIM))
        gc.collect()
        assert len(Counted.closed) == 3


def test_a_forked_child_has_connections_of_its_own(tmp_path: Path) -> None:
    """Over the parent's, a database server would mix up the answers of both."""
    guard = TableGuard(counted(tmp_path / "guard.db"), paramstyle="qmark")
    guard.begin("parent", CLAIM)
    parents = guard._table._connections.mine().connection

    def work() -> bool:
        fence = guard.begin("child", CLAIM)
        assert isinstance(fence, Begun)
        guard.finish("child", fence.fence, "done")
        own = guard._table._connections.mine().connection is not parents
        gc.collect()
        guard.close()
        return own and id(parents) not in {which for which, _ in Counted.closed}

    assert code_of(in_child(work)) == 0
    assert guard._table._connections.mine().connection is parents
    assert guard.begin("child", CLAIM) == Done("done")
    guard.close()


@pytest.mark.parametrize("apart", [-HOUR, HOUR])
def test_a_claim_ends_for_a_machine_whose_clock_is_an_hour_off_when_it_ends_for_all(
    tmp_path: Path, apart: float
) -> None:
    clock = MovableClock()

    def connect() -> sqlite3.Connection:
        return by(clock.wall, sqlite3.connect(tmp_path / "guard.db"))

    def claim(owner: str, wall: float) -> Claim:
        return Claim(owner, 1, wall, wall + 30)

    other = Apart(clock, apart)
    with TableGuard(connect) as guard:
        assert guard.begin("order 7", claim("a", clock.wall())) == Begun(1)
        busy = guard.begin("order 7", claim("b", other.wall()))
        assert isinstance(busy, Busy)
        assert busy.until - other.wall() == pytest.approx(30, abs=5)
        clock.advance(31)
        assert guard.begin("order 7", claim("b", other.wall())) == Begun(2)
        busy = guard.begin("order 7", claim("a", clock.wall()))
        assert isinstance(busy, Busy)
        assert busy.until - clock.wall() == pytest.approx(30, abs=5)


def test_a_record_of_an_older_version_ends_when_its_writer_said(tmp_path: Path) -> None:
    clock = MovableClock()
    until = clock.wall() + 30
    record = f'{{"fence":3,"owner":"a","attempt":1,"until":{until},"done":false,"result":null}}'
    with TableGuard(lambda: by(clock.wall, sqlite3.connect(tmp_path / "guard.db"))) as guard:
        with contextlib.closing(sqlite3.connect(tmp_path / "guard.db")) as there, there:
            there.execute("INSERT INTO veilmq_guard VALUES ('k', 3, ?)", (record,))
        assert isinstance(guard.begin("k", Claim("b", 1, clock.wall(), clock.wall() + 30)), Busy)
        clock.advance(31)
        assert guard.begin("k", Claim("b", 1, clock.wall(), clock.wall() + 30)) == Begun(4)


def test_work_that_is_finished_while_it_is_taken_over_is_done(tmp_path: Path) -> None:
    class Meanwhile(TableRecords):
        def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
            if not self._finished:
                self._finished = True
                first.finish("k", 1, "theirs")
            return super().replace(key, before, after, fence)

        _finished = False

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "guard.db")

    with TableGuard(connect) as first, Meanwhile(connect, "veilmq_guard", None, owner="guard") as records:
        second = RecordGuard(records)
        assert first.begin("k", Claim("a", 1, now=1_000.0, until=1_000.0)) == Begun(1)
        assert second.begin("k", Claim("b", 1, now=1_001.0, until=1_030.0)) == Done("theirs")
