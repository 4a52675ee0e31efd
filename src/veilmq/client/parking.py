"""Waiting calls that can be given up.

Strategy: an SDK cannot be interrupted in a long poll, so one that waits runs on a thread of its own while its caller
waits for either the answer or the end. Whoever gives it up (close, or an exception in the caller's thread) leaves the
answer to `late`, which releases what it still brings. Threads are reused, end after a minute without work or with the
queue, and are daemons: an open poll never holds up the interpreter's exit. A forked child has none of them.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from veilmq.model.errors import VeilError

_IDLE_SECONDS: Final = 60.0

Answer = TypeVar("Answer")


class _Job(Generic[Answer]):
    def __init__(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> None:
        self.call = call
        self.late = late
        self.reply: SimpleQueue[tuple[Answer | None, Exception | None]] = SimpleQueue()
        self._once = threading.Lock()

    def settle(self) -> bool:
        """True for the first who asks: theirs is the reply."""
        return self._once.acquire(blocking=False)

    def run(self) -> None:
        answer: Answer | None = None
        # What the caller sees if the call raises what no call may: this thread then ends with its traceback.
        failure: Exception | None = AssertionError("a waiting call failed: see its thread's traceback")
        try:
            answer, failure = self.call(), None
        except VeilError as error:
            failure = error
        finally:
            settled = self.settle()
            if settled:
                self.reply.put((answer, failure))
        if not settled and answer is not None:
            try:
                self.late(answer)
            except VeilError:
                pass  # the leases end by themselves


_Inbox = SimpleQueue["_Job[Any] | None"]


class _Idle:
    """Threads of one queue without work, by their inboxes."""

    def __init__(self) -> None:
        self.inboxes: deque[_Inbox] = deque()
        self.over = False

    def end(self) -> None:
        """No further work comes."""
        self.over = True
        while self.inboxes:
            try:
                self.inboxes.pop().put(None)
            except IndexError:
                break


class Parking:
    """The waiting calls of one queue."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle = _Idle()
        self._pid = os.getpid()
        # The threads do not hold their queue: one that nobody closes lets them go, too.
        weakref.finalize(self, self._idle.end).atexit = False
        self._jobs: set[_Job[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def wait(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> Answer | None:
        """The call's answer, or None if `interrupt` or `close` came first; then `late` gets it. Raises what the call
        raises."""
        job = _Job(call, late)
        with self._lock:
            if self._closed:
                return None
            self._jobs.add(job)
        try:
            self._start(job)
            answer, failure = job.reply.get()
        finally:
            job.settle()
            with self._lock:
                self._jobs.discard(job)
        if failure is not None:
            raise failure
        return answer

    def interrupt(self) -> None:
        """Give up all that wait now."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            if job.settle():
                job.reply.put((None, None))

    def close(self) -> None:
        """Give up all that wait, and take no more."""
        with self._lock:
            self._closed = True
        self.interrupt()
        self._idle.end()

    def _start(self, job: _Job[Any]) -> None:
        if self._pid != os.getpid():
            self._idle.inboxes.clear()
            self._pid = os.getpid()
        try:
            inbox = self._idle.inboxes.pop()
        except IndexError:
            inbox = SimpleQueue()
            name = f"veilmq-poll-{self._name}"
            threading.Thread(target=_serve, args=(inbox, self._idle), name=name, daemon=True).start()
        inbox.put(job)


def _serve(inbox: _Inbox, idle: _Idle) -> None:
    while True:
        try:
            job = inbox.get(timeout=_IDLE_SECONDS)
        except Empty:
            try:
                idle.inboxes.remove(inbox)
            except ValueError:
                continue  # a job is on its way
            return
        if job is None:
            return
        job.run()
        del job
        idle.inboxes.append(inbox)
        if idle.over:
            return
