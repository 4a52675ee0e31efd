"""Runs commits: on the loop while they are short, on a thread if the disk is slow.

Strategy: waking a thread and passing it the interpreter and back costs more than the sync of a good disk, and every
caller waits for the commit anyway. So commits run on the loop while they take less than a millisecond on average.
Otherwise a thread runs them, so that the loop goes on, and one in 64 is tried on the loop again. After a long commit on
the loop the sockets are read before the commit is reported, so that a client that hung up meanwhile gets no message.
A commit that another machine has to confirm has begun already. It ends on the loop once it is confirmed; if the answer
is another one, or none comes for long, the thread finds out.

Before changing it: the caller waits until the thread has picked up the job. Without that wait the loop gives the
interpreter away only between two callbacks, for less time than a wake takes, and commits began 0.3 ms late
(docs/decisions/0011-short-commits.md).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final

from veilmq.model.errors import StoreFailed, StoreUnknown

SHORT_US: Final = 1_000
"""Commits run on the loop while their average is at most this."""
TRIED_EVERY: Final = 64
"""While the thread commits, every n-th commit runs on the loop, to see whether commits are short again."""
LONG_US: Final = 10_000
"""After a commit of this length on the loop, the sockets are read before answers are sent."""
CONFIRM_S: Final = 1.0
"""How long the loop waits for a commit to be confirmed; then the thread finds out what became of it."""
_WEIGHT: Final = 1 / 16
_BEGIN_S: Final = 0.001
"""How long the loop waits for the thread to pick up a job when all cores are busy."""

logger = logging.getLogger("veilmq.shell")

Report = Callable[[StoreFailed | StoreUnknown | None, Any, int], None]
"""Called on the loop with the job's error or None, its result, and its duration in microseconds."""


class Committer:
    """Runs one job at a time, from construction to `stop`; call it only on the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Report, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._loop = loop
        self._report = report
        self._clock = clock
        self._average_us = 0.0
        """Moving average of the commits on the loop."""
        self._apart = 0
        """Commits on the thread since the last one on the loop."""
        self.on_loop = True
        """Whether short commits run there; from `leave_loop` on none does."""
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._begun = threading.Lock()
        """Released when the thread has begun its job."""
        self._begun.acquire()
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="veilmq-commit", daemon=True)
        self._thread.start()

    def commit(self, job: Callable[[], Any], *, takes_long: bool = False) -> None:
        """Run a commit on the loop or the thread; the previous job must have been reported.

        takes_long: this commit is known to be longer than others.
        """
        if takes_long or not self.on_loop or (self._average_us > SHORT_US and self._apart < TRIED_EVERY - 1):
            self._apart += 1
            self.run_apart(job)
            return
        self._apart = 0
        error, result, elapsed_us = self._done(job)
        self._average_us += (elapsed_us - self._average_us) * _WEIGHT
        if elapsed_us > LONG_US:
            # asyncio handles what it found at the sockets one turn later.
            self._loop.call_soon(self._loop.call_soon, self._report, error, result, elapsed_us)
        else:
            self._report(error, result, elapsed_us)

    def end_commit(self, descriptor: int, confirmed: Callable[[], bool | None], job: Callable[[], Any]) -> None:
        """Run the end of a commit that has begun, on the loop if it is confirmed, otherwise on the thread; the previous
        job must have been reported.

        descriptor: readable when an answer has arrived. confirmed: as `Store.commit_confirmed`.
        """
        started = self._clock()

        def look() -> None:
            answer = confirmed()
            if answer is not None:
                end(on_loop=answer)

        def end(*, on_loop: bool) -> None:
            self._loop.remove_reader(descriptor)
            timer.cancel()
            if on_loop:
                self._report(*self._done(job, started))
            else:
                self.run_apart(job)

        self._loop.add_reader(descriptor, look)
        timer = self._loop.call_later(CONFIRM_S, partial(end, on_loop=False))

    def leave_loop(self) -> None:
        """Run all further commits on the thread, so that a hanging one does not block the loop's deadlines."""
        self.on_loop = False

    def run_apart(self, job: Callable[[], Any]) -> None:
        """Run a job on the thread; the previous one must have been reported."""
        self._begun.acquire(blocking=False)  # still free if the loop gave up waiting for the previous job
        self._jobs.put(job)
        self._begun.acquire(timeout=_BEGIN_S)

    async def stop(self, deadline_s: float) -> None:
        """End the thread when its job is done; abandon it after `deadline_s`."""
        self._jobs.put(None)
        try:
            await self._loop.run_in_executor(None, self._thread.join, deadline_s)
        except RuntimeError:  # "can't start new thread"
            self._thread.join(deadline_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._begun.locked():
                self._begun.release()
            self._loop.call_soon_threadsafe(self._report, *self._done(job))

    def _done(
        self, job: Callable[[], Any], started: float | None = None
    ) -> tuple[StoreFailed | StoreUnknown | None, Any, int]:
        started = self._clock() if started is None else started
        error: StoreFailed | StoreUnknown | None = None
        result: Any = None
        try:
            result = job()
        except (StoreFailed, StoreUnknown) as failure:
            error = failure
        except Exception as failure:
            logger.exception("commit")
            error = StoreUnknown(reason=str(failure))
        return error, result, int((self._clock() - started) * 1e6)
