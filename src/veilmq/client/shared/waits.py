"""Receives that wait: calls that can be cancelled, and polls of a service without long polls.

`CancellableWaits`: an SDK cannot be interrupted in a long poll. So each waiting call runs on a pool thread of its own,
and the caller waits for its answer or for a cancellation, whichever comes first. After a cancellation (close, or an
exception in the caller's thread) the late answer goes to `late`, which releases its messages. The pool's threads are
daemons, so an open poll never delays the interpreter's exit.

`PacedPolls`: the service has no long poll, and is polled less and less often. The first pause is short, so that a
message that is just arriving is found at once. Each pause is twice the last, up to one second, so that an idle wait
costs at most one request a second. The last request is made when the wait ends. A close ends a pause at once, and
messages of a request still in progress are given back. An interruption ends it too, but the caller still gets that
answer.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.messages import Received
from veilmq.client.shared.threads import Anew, DaemonPool
from veilmq.model.errors import VeilError

log = logging.getLogger("veilmq.client")

Answer = TypeVar("Answer")


class _Job(Generic[Answer]):
    def __init__(self, call: Callable[[], Answer], late: Callable[[Answer], None]) -> None:
        self._call = call
        self._late = late
        self.reply: SimpleQueue[tuple[Answer | None, BaseException | None]] = SimpleQueue()
        self._once = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only, which may put the reply."""
        return self._once.acquire(blocking=False)

    def run(self) -> None:
        answer: Answer | None = None
        failure: BaseException | None = None
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001 raised in the thread that waits for the answer
            failure = error
        if self.claim():
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
            job.claim()
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
            if job.claim():
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


_PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 1.0
"""Seconds between two requests."""


class PacedPolls:
    """The waits of one queue without long polls. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = sleeping_by(clock, threading.Condition())
        self._interrupts = 0
        self._closed = False

    def poll(
        self, ask: Callable[[], list[Received]], wait: float, give_back: Callable[[list[Received]], None]
    ) -> list[Received]:
        """Repeat `ask` until it returns messages or `wait` seconds are over; return the messages."""
        deadline = self._clock.monotonic() + wait
        interrupts = self._interrupts
        pause = _PAUSE_MIN
        while True:
            found = ask()
            if self._closed:
                give_back(found)
                return []
            left = deadline - self._clock.monotonic()
            if found or left <= 0:
                return found
            with self._changed:
                if self._interrupts == interrupts:
                    self._changed.wait(min(pause, left))
                if self._interrupts != interrupts:
                    return []
            pause = min(2 * pause, PAUSE_MAX)

    def interrupt(self) -> None:
        """End the current waits."""
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, and start no more."""
        self._closed = True
        self.interrupt()
