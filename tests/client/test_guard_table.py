"""A guard in a table: its connections end with it, with their threads, and stay the parent's in a forked child."""

import gc
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from tests.client.test_forked import code_of, in_child

from veilmq.client.worker import TableGuard
from veilmq.client.worker.guard import Begun, Claim, Done
from veilmq.model.errors import ParameterInvalid

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
    parents = guard._connection()

    def work() -> bool:
        fence = guard.begin("child", CLAIM)
        assert isinstance(fence, Begun)
        guard.finish("child", fence.fence, "done")
        own = guard._connection() is not parents
        gc.collect()
        guard.close()
        return own and id(parents) not in {which for which, _ in Counted.closed}

    assert code_of(in_child(work)) == 0
    assert guard._connection() is parents
    assert guard.begin("child", CLAIM) == Done("done")
    guard.close()
