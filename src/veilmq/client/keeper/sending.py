"""The threads that carry extensions to the queue.

Strategy: a heap of tasks, those whose leases end first at the front; threads are started as work waits for them, up to
a limit, and stay. A task that breaks takes its thread with it, whose traceback goes to threading.excepthook, and the
next task starts another: no thread here can be dead for long.
"""

import heapq
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count


class SenderPool:
    """Runs tasks, lowest key first."""

    def __init__(self, threads_max: int, name: str) -> None:
        self.threads_max = threads_max
        self.started = 0
        self._name = name
        self._tasks: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._ready = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def put(self, key: float, task: Callable[[], None]) -> bool:
        """Run `task` soon; after `close`, never. False: there is no thread and none can be started."""
        with self._ready:
            if self._closed:
                return True
            heapq.heappush(self._tasks, (key, next(self._numbers), task))
            if self._idle >= len(self._tasks):
                self._ready.notify()
            else:
                self._grow()
            if self._threads:
                return True
            self._tasks.clear()
            return False

    def close(self) -> None:
        """Drop what has not begun; the threads end with what they are doing."""
        with self._ready:
            self._closed = True
            self._tasks.clear()
            self._ready.notify_all()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for each thread."""
        with self._ready:
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout)

    def _grow(self) -> None:
        if len(self._threads) < self.threads_max:
            self.started += 1
            thread = threading.Thread(target=self._run, name=f"{self._name} {self.started}", daemon=True)
            # "can't start new thread": the machine has no more; those that run go on.
            with suppress(RuntimeError):
                thread.start()
                self._threads.add(thread)

    def _run(self) -> None:
        try:
            while True:
                with self._ready:
                    while not self._tasks:
                        if self._closed:
                            return
                        self._idle += 1
                        self._ready.wait()
                        self._idle -= 1
                    task = heapq.heappop(self._tasks)[2]
                task()
        finally:
            with self._ready:
                self._threads.discard(threading.current_thread())
                if self._tasks and not self._closed:
                    self._grow()
