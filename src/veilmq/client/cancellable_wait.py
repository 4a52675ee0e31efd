"""Waiting calls that can be cancelled.

Strategy: an SDK cannot be interrupted in a long poll. So each waiting call runs on a pool thread of its own, and the
caller waits for its answer or for a cancellation, whichever comes first. After a cancellation (close, or an exception
in the caller's thread) the late answer goes to `late`, which releases its messages. The pool's threads are daemons, so
an open poll never delays the interpreter's exit.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from veilmq.client.daemons import DaemonPool
from veilmq.client.forked import Anew
from veilmq.client.unreadable import log
from veilmq.model.errors import VeilError

Answer = TypeVar("Answer")


class _Job(Generic[Answer]):
    def __init__(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> None:
        self._call = call
        self._late = late
        self.reply: SimpleQueue[tuple[Answer | None, BaseException | None]] = SimpleQueue()
        self._once = threading.Lock()

    def settle(self) -> bool:
        """True for the first caller only, which then decides the reply."""
        return self._once.acquire(blocking=False)

    def run(self) -> None:
        answer: Answer | None = None
        failure: BaseException | None = None
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001 raised in the thread that waits for the answer
            failure = error
        if self.settle():
            self.reply.put((answer, failure))
        elif answer is not None:
            try:
                self._late(answer)
            except VeilError as error:
                log.info("what came late goes back when its lease ends: %s", error)
        elif not isinstance(failure, VeilError):
            log.error("a call that nobody waits for any more failed", exc_info=failure)


class CancellableWaits(Anew):
    """The waiting calls of one queue."""

    def __init__(self, name: str) -> None:
        self._pool = DaemonPool(None, f"veilmq-poll-{name}")
        self._closed = False
        self._here()

    def wait(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> Answer | None:
        """Return the call's answer, or None if `interrupt` or `close` came first; the answer then goes to `late`.
        Raises what the call raises."""
        self._here()
        job = _Job(call, late)
        with self._lock:
            if self._closed:
                return None
            self._jobs.add(job)
        try:
            with suppress(RuntimeError):  # the pool is shut down: this wait was already cancelled
                self._pool.submit(job.run)
            answer, failure = job.reply.get()
        finally:
            job.settle()
            with self._lock:
                self._jobs.discard(job)
        if failure is not None:
            raise failure
        return answer

    def interrupt(self) -> None:
        """Cancel all calls that wait now."""
        self._here()
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            if job.settle():
                job.reply.put((None, None))

    def close(self) -> None:
        """Cancel all calls that wait, and accept no more."""
        self._closed = True
        self.interrupt()
        self._pool.shutdown()

    def _begin(self) -> None:
        """The parent's waits stay in the parent."""
        self._jobs: set[_Job[Any]] = set()
        self._lock = threading.Lock()
