"""The keeper's threads that send and tell: what runs first, and what a task that breaks costs the others."""

import threading
from collections.abc import Iterator

import pytest

from veilmq.client.shared.threads import CallbackThread, SenderPool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def _threads_end_here() -> Iterator[None]:
    """A thread that breaks says so after the next one has begun: within the test that broke it, not in a later one."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)


@pytest.fixture
def pool() -> Iterator[SenderPool]:
    pool = SenderPool(1, "sender")
    yield pool
    pool.close()
    pool.join(10)


def broken() -> None:
    raise KeyError("a fault of the adapter")


def test_what_ends_first_goes_first(pool: SenderPool) -> None:
    gate, done, order = threading.Event(), threading.Event(), list[int]()
    pool.put(0, gate.wait)
    for key in (5, 2, 9, 4):
        pool.put(key, lambda key=key: order.append(key))
    pool.put(10, done.set)
    gate.set()
    assert done.wait(30)
    assert order == [2, 4, 5, 9]
    assert pool.started == 1


def test_the_next_task_outlives_one_that_breaks(pool: SenderPool) -> None:
    gate, done = threading.Event(), threading.Event()
    pool.put(0, gate.wait)
    for key in range(1, 4):
        pool.put(key, broken)
    pool.put(9, done.set)
    gate.set()
    assert done.wait(30), "without another task to start a thread"
    again = threading.Event()
    pool.put(0, again.set)
    assert again.wait(30)
    assert pool.started == 4


def test_threads_are_started_as_work_waits() -> None:
    pool = SenderPool(3, "sender")
    gate, running = threading.Event(), threading.Semaphore(0)

    def task() -> None:
        running.release()
        gate.wait()

    for _ in range(5):
        pool.put(0, task)
    for _ in range(3):
        assert running.acquire(timeout=30)
    assert pool.started == 3
    assert not running.acquire(blocking=False)
    gate.set()
    for _ in range(2):
        assert running.acquire(timeout=30)
    pool.close()
    pool.join(10)
    pool.put(0, broken)


def test_everyone_is_told_though_some_raise() -> None:
    thread = CallbackThread("callbacks")
    told, done = list[int](), threading.Event()
    thread.run_soon([broken, lambda: told.append(1), broken, lambda: told.append(2), done.set])
    assert done.wait(30)
    again = threading.Event()
    thread.run_soon([again.set])
    assert again.wait(30)
    assert told == [1, 2]
