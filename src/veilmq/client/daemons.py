"""A pool of daemon threads.

Strategy: as the standard library's ThreadPoolExecutor, for whose threads the interpreter waits when it ends, however
long a server that hangs lets them wait; these end with it. They start when they are needed, and hold the pool's line
and not the pool, so that one that nobody closes lets them go.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_Line = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class DaemonPool(Executor):
    """Runs calls on up to `threads_max` threads. Any thread may use it."""

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._line: _Line = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._started = 0
        self._end = weakref.finalize(self, _end, self._line, threads_max)
        self._end.atexit = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """See `concurrent.futures.Executor.submit`. Raises RuntimeError once it is shut down."""
        future: Future[R] = Future()
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("the pool was shut down")
            self._line.put((future, partial(fn, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and self._started < self._threads_max:
                self._started += 1
                name = f"{self._name} {self._started}"
                threading.Thread(target=_serve, args=(self._line, self._idle), name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Take no more; what was submitted is done. It does not wait, nor cancel. Twice is once."""
        with self._lock:
            self._end()


def _end(line: _Line, threads: int) -> None:
    for _ in range(threads):
        line.put(None)


def _serve(line: _Line, idle: threading.Semaphore) -> None:
    while (item := line.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del item, future, call  # nothing is held by a thread that waits
        idle.release()
