"""The worker: runs handlers on messages, in threads, processes or coroutines; with checkpoints and an idempotency
guard.

Strategy: the class here is the public face; its parameters are checked when it is created. A `Run` (run/), made anew
for each run, does the work, so a worker can be created at import time and started anywhere. The run receives messages.
Each becomes a `Hand` (job/) and waits in line until a runner takes it (runners/: flow.py, then threads, coroutines or
processes). After the handler it is deleted, released or dead-lettered (runners/settling.py).

Source: the issues of documents 003 and 004 on processing times; docs/patterns/worker.md, docs/patterns/checkpoint.md.
"""

import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack

from veilmq.client.adapters.connect import connect, parse_url
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.queue import Queue
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Anew, Unpicklable
from veilmq.client.shared.signals import StopSignals
from veilmq.client.worker.guard import (
    Begun,
    Busy,
    Claim,
    DirectoryGuard,
    Done,
    Guard,
    Prolonging,
    Superseded,
    TableGuard,
)
from veilmq.client.worker.job import AsyncJob, Cancellation, Cancelled, Cause, Job, Reject, Retry
from veilmq.client.worker.job.checkpoints import Checkpoints, FileCheckpoints, ObjectCheckpoints, Saved
from veilmq.client.worker.metrics import Counts, Meter, PrometheusMeter
from veilmq.client.worker.options import Backoff, Kind, Options, check_queue, complete
from veilmq.client.worker.run import Run, RunEvent
from veilmq.client.worker.runners.processes import reference
from veilmq.model.errors import ParameterInvalid, VeilError

__all__ = [
    "AsyncJob",
    "Backoff",
    "Begun",
    "Busy",
    "Cancellation",
    "Cancelled",
    "Cause",
    "Checkpoints",
    "Claim",
    "Counts",
    "DirectoryGuard",
    "Done",
    "FileCheckpoints",
    "Guard",
    "Job",
    "Kind",
    "Meter",
    "ObjectCheckpoints",
    "Options",
    "Prolonging",
    "PrometheusMeter",
    "Reject",
    "Retry",
    "Saved",
    "Superseded",
    "TableGuard",
    "Worker",
    "worker",
]

log = logging.getLogger("veilmq.worker")


class Worker(Unpicklable, Anew):
    """Runs `handler` on the messages of `queue`, a `Queue` or a URL that is connected when the worker runs.

    If the handler returns, the message is deleted. If it raises, the message has failed and becomes visible again after
    a backoff. It may raise `Retry`, `Reject` and, when cancelled, `Cancelled`. Raises ParameterInvalid for parameters
    that cannot work.
    """

    def __init__(
        self, queue: Queue | str, handler: Callable[[Any], Any], *, clock: Clock = SYSTEM, **options: Unpack[Options]
    ) -> None:
        self.queue = queue
        self.handler = handler
        self.options = complete(options)
        self._clock = clock
        _check_handler(handler, self.options)
        if not isinstance(queue, str):
            check_queue(self.options, queue)
        self._here()

    def _begin(self) -> None:
        # A forked process has a copy of the worker, but not of the threads that run it, start it or stop it.
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[RunEvent | BaseException] = SimpleQueue()
        self._stopping = False
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self._runs_in: threading.Thread | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        self._here()
        state = "idle" if self._runs_in is None else "stopping" if self._stopping else "running"
        # not a handler's own repr: that of a functools.partial has its arguments, which may be secret
        handler = getattr(self.handler, "__qualname__", type(self.handler).__name__)
        return f"Worker({_shown(self.queue)}, {handler}, {state})"

    @classmethod
    def decorate(cls, queue: Queue | str, **options: Unpack[Options]) -> Callable[[Callable[[Any], Any]], Self]:
        """`@Worker.decorate(queue, ...)` turns a handler into a worker; calling the worker calls the handler."""
        if not isinstance(queue, str):
            checks.queue(queue)  # now, for `@worker` without a queue would hide the handler without a word
        return lambda handler: cls(queue, handler, **options)

    def __call__(self, job: Any) -> Any:
        """Call the handler itself, for example in a test."""
        return self.handler(job)

    @property
    def counts(self) -> Counts | None:
        """Counts of this process's latest run; None before the first."""
        self._here()
        return None if self._run is None else self._run.counts

    @property
    def pids(self) -> list[int]:
        """Process ids of the handlers' processes now, with kind=processes."""
        self._here()
        return list(getattr(self._run.runners, "pids", ())) if self._run is not None else []

    def run(self, *, signals: bool = False, until_empty: bool = False, messages_max: int | None = None) -> Counts:
        """Work until `stop`, or with `until_empty` until a poll brings nothing and nothing is in hand.

        messages_max: receive this many messages (a redelivery counts again), and end when they are finished.

        signals: only in the main thread; the first SIGTERM or SIGINT stops it with a drain, the second without. Raises
        QueueMissing, ParameterInvalid, CapabilityMissing (before anything is received, or from a receive), and the
        error of receives that failed for longer than `give_up_after`. If the worker runs already:
        ParameterInvalid("worker").
        """
        if signals and threading.current_thread() is not threading.main_thread():
            raise ParameterInvalid(parameter="signals", reason="only the main thread hears them")
        if messages_max is not None:
            checks.at_least(messages_max, "messages_max", 1)
        self._here()
        with self._lock:
            self._check_idle()
            self._runs_in = threading.current_thread()
        try:
            return self._work(signals, until_empty, messages_max)
        finally:
            self._runs_in = None

    def _check_idle(self) -> None:
        if self._runs_in is not None and self._runs_in.is_alive():
            reason = "it runs already: `concurrency` is for more messages at a time, or make another Worker"
            raise ParameterInvalid(parameter="worker", reason=reason)

    def _work(self, signals: bool, until_empty: bool, messages_max: int | None) -> Counts:
        connected = isinstance(self.queue, str)
        queue = connect(self.queue) if isinstance(self.queue, str) else self.queue
        try:
            given = queue, self.handler, self.options, self._clock, self._inbox
            run = self._run = Run(*given, until_empty=until_empty, messages_max=messages_max)
            with StopSignals(self.stop) if signals else nullcontext():
                run.go()
            return run.counts
        finally:
            self._inbox, self._stopping = SimpleQueue(), False
            if connected:
                queue.close()

    def start(self) -> None:
        """Run in a separate thread. Raises ParameterInvalid if it runs already."""
        self._here()
        with self._lock:
            self._check_idle()
            self._error = None
            # A stop that came after the last run's end must not stop this one.
            self._inbox, self._stopping = SimpleQueue(), False
            self._thread = threading.Thread(target=self._run_aside, name="veilmq worker", daemon=True)
            self._runs_in = self._thread
            self._thread.start()

    def stop(self) -> None:
        """Stop with a drain; a second call stops without. Returns at once; safe in a signal handler."""
        self._here()
        self._stopping = True
        self._inbox.put(RunEvent.STOP)

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for a started worker. Returns whether it has ended. Raises the error that ended
        it."""
        self._here()
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        if thread.is_alive():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stopping:  # a second stop would cut the drain short
            self.stop()
        self.join()

    def _run_aside(self) -> None:
        try:
            self._work(signals=False, until_empty=False, messages_max=None)
        except BaseException as error:  # raised again by join, which perhaps nobody calls
            self._error = error
            what = "a worker" if self._run is None else f"queue {self._run.name}: the worker"
            log.error("%s ends: %s", what, error, exc_info=None if isinstance(error, VeilError) else error)
        finally:
            self._runs_in = None


def worker(queue: Queue | str, **options: Unpack[Options]) -> Callable[[Callable[[Any], Any]], Worker]:
    """`@worker(queue, concurrency=4)` over a handler: see `Worker.decorate`."""
    return Worker.decorate(queue, **options)


def _shown(queue: Queue | str) -> str:
    """The queue without secrets, as a URL may have one."""
    try:
        return repr(parse_url(queue) if isinstance(queue, str) else queue)
    except ParameterInvalid:
        return "an invalid URL"


def _check_handler(handler: Any, options: Options) -> None:
    if not callable(handler):
        raise ParameterInvalid(parameter="handler", reason=f"{handler!r} cannot be called")
    kind = options["kind"]
    called = [handler] if isinstance(handler, type) else [handler, handler.__call__]  # which may be async
    generator = options["batch"] is None and any(map(inspect.isgeneratorfunction, called))
    if generator or any(map(inspect.isasyncgenfunction, called)):
        reason = "is a generator function, of which nothing would run: let it return, in the place of yield"
        raise ParameterInvalid(parameter="handler", reason=reason)
    coroutine = any(map(inspect.iscoroutinefunction, called))
    if coroutine != (kind is Kind.ASYNC):
        reason = "is a coroutine function: kind=async runs it" if coroutine else "kind=async needs a coroutine function"
        raise ParameterInvalid(parameter="handler", reason=reason)
    _check_arguments(handler)
    if kind is Kind.PROCESSES:
        reference(handler)


def _check_arguments(handler: Any) -> None:
    # Otherwise each message would fail until it is dead-lettered.
    try:
        # What a decorator wraps may take more arguments, which the decorator adds.
        signature = inspect.signature(handler, follow_wrapped=False)
    except Exception:  # noqa: BLE001 some written in C have none; from 3.14 on annotations run, and may fail in any way
        return
    try:
        signature.bind(None)
    except TypeError as error:
        reason = f"is called with one argument, the job, or with batch=N the list of jobs: {error}"
        raise ParameterInvalid(parameter="handler", reason=reason) from None
