"""The pool of daemon threads, and that no worker whose queue hangs holds up the interpreter's end."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from tests.client.test_forked import code_of, in_child

from veilmq.client.adapters.cloud import CancellableWaits
from veilmq.client.shared import Singly, threads
from veilmq.client.shared.threads import DaemonPool
from veilmq.testing.for_each import for_each

END_SECONDS = 30

PROGRAM = """
import sys, threading
import veilmq
from veilmq.client.worker import Worker
from veilmq.client.wrapping import Wrapping

deleting, never = threading.Event(), threading.Event()

class Hanging(Wrapping):
    def delete(self, handle):
        deleting.set()
        never.wait()

    def extend(self, handle, lease, *, body=None):
        self.delete(handle)

queue = Hanging(veilmq.connect(f"veil://{sys.argv[1]}?queue=jobs&create=1"))
queue.send_batch(["a", "b", "c"])

async def one(job): ...

async def saving(job):
    await job.checkpoint("half")

def some(jobs): ...

handler, options = {
    "async": (one, {"kind": "async"}),
    "batch": (some, {"batch": 3}),
    "checkpoint": (saving, {"kind": "async", "keeper": False}),
}[sys.argv[2]]
Worker(queue, handler, wait=1, **options).start()
assert deleting.wait(20)
print("ends")
"""


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_calls_give_what_they_return_or_raise() -> None:
    with DaemonPool(4, "results") as pool:
        assert list(pool.map(lambda number: number * 2, range(100))) == list(range(0, 200, 2))
        future = pool.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            future.result(END_SECONDS)
        assert 1 <= len(named("results ")) <= 4


def test_threads_are_used_again() -> None:
    with DaemonPool(4, "again") as pool:
        pool.submit(int).result(END_SECONDS)
        (thread,) = named("again ")
        while not pool._work.idle:
            thread.join(0.001)
        assert pool.submit(threading.current_thread).result(END_SECONDS) is thread
        assert thread.daemon


def test_what_was_submitted_before_the_end_is_done_and_nothing_after() -> None:
    gate = threading.Event()
    pool = DaemonPool(1, "ended")
    first, second = pool.submit(gate.wait), pool.submit(int, "7")
    pool.shutdown()
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)
    gate.set()
    assert first.result(END_SECONDS)
    assert second.result(END_SECONDS) == 7


def test_one_that_nobody_closed_lets_its_threads_go() -> None:
    pool = DaemonPool(2, "left")
    pool.submit(int).result(END_SECONDS)
    (thread,) = named("left ")
    del pool
    thread.join(END_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["async", "batch", "checkpoint"])
def test_a_program_ends_though_its_worker_hangs(kind: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), kind]
    done = subprocess.run(program, capture_output=True, text=True, timeout=END_SECONDS)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_the_caller_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with DaemonPool(4, "none") as pool:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert pool.submit(threading.get_ident).result(0) == threading.get_ident()
        monkeypatch.undo()
        assert pool.submit(threading.get_ident).result(END_SECONDS) != threading.get_ident()


def test_a_pool_that_cannot_grow_does_all_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with DaemonPool(4, "few") as pool:
        first = pool.submit(gate.wait)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        rest = [pool.submit(threading.current_thread) for _ in range(3)]
        assert not any(each.done() for each in rest)
        gate.set()
        (thread,) = named("few ")
        assert first.result(END_SECONDS)
        assert [each.result(END_SECONDS) for each in rest] == [thread] * 3


def test_a_batch_is_sent_once_where_threads_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    sent: list[int] = []
    assert Singly("short").run(range(5), sent.append) == [None] * 5
    assert sent == list(range(5))


def test_a_wait_where_no_thread_can_be_started_is_made_by_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    parking = CancellableWaits("none")
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert parking.wait(threading.get_ident, lambda late: None) == threading.get_ident()
    parking.close()
    assert parking.wait(threading.get_ident, lambda late: None) is None


def test_threads_without_work_end_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.001)
    with DaemonPool(1, "idle") as pool:
        for _ in range(50):
            thread = pool.submit(threading.current_thread).result(END_SECONDS)
            assert thread.name.startswith("idle ")
        thread.join(END_SECONDS)
        assert not thread.is_alive()
        assert pool.submit(threading.current_thread).result(END_SECONDS) is not thread


def test_a_thread_that_waits_holds_nothing_of_what_it_did() -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    with DaemonPool(1, "holds") as pool:
        pool.submit(id, held).result(END_SECONDS)
        (thread,) = named("holds ")
        while not pool._work.idle:
            thread.join(0.001)
        del held
        assert gone() is None


def test_what_a_call_raises_is_raised_by_the_wait_for_it() -> None:
    parking = CancellableWaits("raises")
    with pytest.raises(ZeroDivisionError):
        parking.wait(lambda: 1 / 0, lambda late: None)
    parking.close()


@for_each("closed", [False, True])
def test_a_forked_child_begins_anew_though_the_lock_was_taken(closed: bool) -> None:
    pool, parking = DaemonPool(1, "parent"), CancellableWaits("parent")
    pool.submit(int).result(END_SECONDS)
    if closed:
        pool.shutdown()
        parking.close()

    def work() -> bool:
        signal.alarm(END_SECONDS)
        if closed:
            with pytest.raises(RuntimeError, match="shut down"):
                pool.submit(int)
            return parking.wait(int, lambda late: None) is None
        return pool.submit(int).result(END_SECONDS) == 0 == parking.wait(int, lambda late: None)

    with pool._work._lock, parking._lock:
        pid = os.fork()
        if not pid:
            code = 2
            try:
                code = 0 if work() else 1
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    parking.close()
    pool.shutdown()


def test_a_forked_child_lets_a_pool_go_whose_lock_another_thread_had() -> None:
    pools = [DaemonPool(1, "parent")]
    line, held, free = pools[0]._work, threading.Event(), threading.Event()

    def hold() -> None:
        with line._lock:
            held.set()
            free.wait(END_SECONDS)

    def work() -> bool:
        done = pools[0].submit(int).result(END_SECONDS)
        pools.clear()
        return done == 0

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(END_SECONDS)
    pid = in_child(work)
    free.set()
    holder.join()
    assert code_of(pid) == 0
