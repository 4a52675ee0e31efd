"""The threads that send extensions to the queue, and the thread that runs callbacks.

Strategy: tasks wait in a heap, the lease that ends first at the front. Threads are started as work waits for them, up
to a limit, and then stay. A task that raises ends its thread, the traceback goes to threading.excepthook, and another
thread is started for the remaining tasks: the pool never stays without threads.

Callbacks are the user's code. They run one after another in a separate thread that ends when all have run. A callback
that raises ends this thread like any unhandled error (threading.excepthook), and a new thread runs the rest. If no
thread can be started, the caller's thread runs them.
"""

import heapq
import threading
from collections import deque
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
        """Run `task` soon; after `close`, never. Returns False if there is no thread and none can be started."""
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
        """Drop the tasks that have not begun. Each thread ends after its current task."""
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
            # "can't start new thread": the machine has no more. The running threads continue.
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


class Teller:
    """Runs callbacks in order, in a separate thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def tell(self, calls: list[Callable[[], object]]) -> None:
        """Run `calls` soon."""
        if not calls:
            return
        with self._lock:
            self._calls.extend(calls)
            if self._running:
                return
            self._running = True
        self._start()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # "can't start new thread": better run them here than not at all
            self._run()

    def _run(self) -> None:
        done = False
        try:
            while True:
                with self._lock:
                    if not self._calls:
                        self._running, done = False, True
                        return
                    call = self._calls.popleft()
                call()
        finally:
            if not done:
                self._start()
