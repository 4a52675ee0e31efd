"""The pool of daemon threads, and that no worker whose queue hangs holds up the interpreter's end."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from veilmq.client.daemons import DaemonPool

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

queue = Hanging(veilmq.connect(f"veil://{sys.argv[1]}?queue=jobs&create=1"))
queue.send_batch(["a", "b", "c"])

async def one(job): ...

def some(jobs): ...

handler, options = {"async": (one, {"kind": "async"}), "batch": (some, {"batch": 3})}[sys.argv[2]]
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
        while not pool._idle._value:
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


@pytest.mark.parametrize("kind", ["async", "batch"])
def test_a_program_ends_though_its_worker_hangs(kind: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), kind]
    done = subprocess.run(program, capture_output=True, text=True, timeout=END_SECONDS)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
