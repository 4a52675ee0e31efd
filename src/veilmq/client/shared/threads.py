"""Threads that run tasks: a pool, the keeper's senders, callbacks, a timer.

The pool (`DaemonPool`): like the standard library's ThreadPoolExecutor, but the interpreter waits for that one's
threads when it ends, however long a server keeps them waiting; these threads are daemons. A thread starts when it is
needed. It ends after a minute without work, when the pool is shut down, or when the pool is garbage collected: threads
refer to the pool's queue of work, not to the pool. A forked child has no threads and starts its own. If no thread can
be started, the caller does the work itself.

The keeper's senders (`SenderPool`): tasks wait in a heap, the lease that ends first at the front. Threads are started
as work waits for them, up to a limit, and then stay. A task that raises ends its thread, the traceback goes to
threading.excepthook, and another thread is started for the remaining tasks: the pool never stays without threads.

Callbacks (`CallbackThread`) are the user's code. They run one after another in a thread that ends when all have
run. A callback that raises ends this thread like any unhandled error (threading.excepthook), and a new thread runs the
rest. If no thread can be started, the caller's thread runs them.

The timer (`Alarm`) makes calls at given instants: one heap and one thread, which starts with the first call. Calls must
be short. A cancelled entry drops its call at once; the empty entry stays in the heap until its instant comes or most of
the heap is empty entries.
"""

import heapq
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.shared.lifetimes import Anew, in_one_process

P = ParamSpec("P")
R = TypeVar("R")

IDLE_SECONDS: Final = 60.0


class _Task:
    """One call, and the future of its result."""

    def __init__(self, future: "Future[Any]", call: Callable[[], Any]) -> None:
        self._future = future
        self._call = call

    def run(self) -> None:
        if self._future.set_running_or_notify_cancel():
            try:
                result = self._call()
            except BaseException as error:  # noqa: BLE001 raised where the result is asked for
                self._future.set_exception(error)
            else:
                self._future.set_result(result)


_Inbox = SimpleQueue[_Task | None]


class _Work:
    """The calls to run, and the threads that run them."""

    def __init__(self, threads_max: int | None, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        # Reentrant: garbage collection may end the pool in a thread that already holds the lock.
        self._lock = threading.RLock()
        self._waiting: deque[_Task] = deque()
        self.idle: list[_Inbox] = []
        self._threads = 0
        self._numbers = 0
        self._over = False

    def put(self, task: _Task) -> bool:
        """Whether a thread will run the task, now or after others. False: there is no thread, and none can be started.
        Raises RuntimeError after the end."""
        with self._lock:
            if self._over:
                raise RuntimeError("the pool was shut down")
            if self.idle:
                self.idle.pop().put(task)
            elif self._threads_max is not None and self._threads >= self._threads_max:
                self._waiting.append(task)
            elif not self._start(task):
                if not self._threads or self._threads_max is None:
                    return False
                self._waiting.append(task)
            return True

    def end(self) -> None:
        """Accept no more tasks; those accepted are still run."""
        with self._lock:
            self._over = True
            while self.idle:
                self.idle.pop().put(None)

    def _start(self, task: _Task) -> bool:
        self._numbers += 1
        name = f"{self._name} {self._numbers}"
        self._threads += 1
        inbox: _Inbox = SimpleQueue()
        inbox.put(task)
        try:
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        except RuntimeError:  # "can't start new thread": the machine's limit
            self._threads -= 1
            return False
        return True

    def _serve(self, inbox: _Inbox) -> None:
        task = inbox.get()
        while task is not None:
            task.run()
            del task  # an idle thread must keep nothing alive
            task = self._next(inbox)

    def _next(self, inbox: _Inbox) -> _Task | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._over:
                return None
            self.idle.append(inbox)
        try:
            return inbox.get(timeout=IDLE_SECONDS)
        except Empty:
            with self._lock:
                if inbox in self.idle:
                    self.idle.remove(inbox)
                    self._threads -= 1
                    return None
            return inbox.get()  # a task was put meanwhile


class DaemonPool(Executor, Anew):
    """Runs calls on up to `threads_max` threads; None: no limit. Any thread may use it."""

    def __init__(self, threads_max: int | None, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._closed = False
        self._here()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """See `concurrent.futures.Executor.submit`. If no thread can be started, the call is done when this returns.

        Raises RuntimeError after shutdown.
        """
        self._here()
        future: Future[R] = Future()
        task = _Task(future, partial(fn, *args, **kwargs))
        if not self._work.put(task):
            task.run()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; those submitted are still run. Neither waits nor cancels. Idempotent."""
        self._closed = True
        self._end()

    def _begin(self) -> None:
        if self.inherited:
            self._end.detach()  # the lock of the parent's copy may never be free here
        self._work = _Work(self._threads_max, self._name)
        self._end: weakref.finalize[[], DaemonPool] = weakref.finalize(self, self._work.end)
        self._end.atexit = False
        if self._closed:
            self._end()


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


class CallbackThread:
    """Runs callbacks in order, in a separate thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def run_soon(self, calls: list[Callable[[], object]]) -> None:
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
                in_one_process(call)
        finally:
            if not done:
                self._start()


_CANCELLED_MIN: Final = 64
"""With fewer empty entries than this, cleaning the heap costs more than keeping them."""

log = logging.getLogger("veilmq.worker")
"""The worker is the only one with an alarm."""


class Entry:
    """A planned call."""

    __slots__ = ("_alarm", "call")

    def __init__(self, alarm: "Alarm", call: Callable[[], object]) -> None:
        self._alarm = alarm
        self.call: Callable[[], object] | None = call
        """None after it was made or cancelled."""

    def cancel(self) -> None:
        """Cancel the call. Idempotent, and harmless after the call was made."""
        self._alarm.cancel(self)


class Alarm:
    """Makes calls at instants of the monotonic clock. Thread-safe."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._heap: list[tuple[float, int, Entry]] = []
        self._cancelled = 0
        """Cancelled entries in the heap."""
        self._numbers = count()
        self._changed = sleeping_by(clock, threading.Condition())
        self._started = False
        self._closed = False

    def at(self, when: float, call: Callable[[], object]) -> Entry:
        """Call `call()` at `when`, or a little later."""
        entry = Entry(self, call)
        with self._changed:
            if self._closed:
                return entry
            heapq.heappush(self._heap, (when, next(self._numbers), entry))
            if not self._started:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._started = True
            self._changed.notify()
            return entry

    def cancel(self, entry: Entry) -> None:
        """See `Entry.cancel`."""
        with self._changed:
            if entry.call is None:
                return
            entry.call = None
            self._cancelled += 1
            if self._cancelled >= _CANCELLED_MIN and self._cancelled * 2 > len(self._heap):
                self._heap = [each for each in self._heap if each[2].call is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def close(self) -> None:
        """Drop all calls."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    pause = self._heap[0][0] - self._clock.monotonic() if self._heap else None
                    if pause is not None and pause <= 0:
                        break
                    self._changed.wait(None if pause is None else min(pause, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                entry = heapq.heappop(self._heap)[2]
                call, entry.call = entry.call, None
                if call is None:
                    self._cancelled -= 1
                    continue
            try:
                call()
            except Exception:
                log.exception("a timer's call failed")
            del call, entry  # so that the waiting thread keeps nothing alive
