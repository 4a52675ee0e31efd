"""Who commits: the loop while commits are short, a thread where the disk is slow.

Strategy: to wake a thread and to pass the interpreter to it and back costs more than the sync of a good disk takes,
and whoever waits for an answer waits for the commit anyway. So a commit is done on the loop as long as such commits
take less than a millisecond on average. Else the thread does it, so that the loop goes on, and one in 64 is tried on
the loop again. After a long one on the loop the sockets are read before it is reported: who hung up meanwhile gets no
message. Who hands a job to the thread waits until it has begun: else the loop would go on and give the
interpreter away between two callbacks only, for less time than a wake takes, and commits began 0.3 ms late
(docs/decisions/0011-short-commits.md).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from veilmq.model.errors import StoreFailed, StoreUnknown

SHORT_US: Final = 1_000
"""Commits that take no longer on average are done on the loop."""
TRIED_EVERY: Final = 64
"""Of the commits in the thread, each so many-th is done on the loop, to see whether they are short again."""
LONG_US: Final = 10_000
"""What clients did during a commit of such length on the loop is looked at before their answers leave."""
_WEIGHT: Final = 1 / 16
_BEGIN_S: Final = 0.001
"""How long the loop waits for a job to begin, where all cores are busy."""

logger = logging.getLogger("veilmq.shell")

Report = Callable[[StoreFailed | StoreUnknown | None, Any, int], None]
"""Called on the loop: why the job failed or None, what it returned, and how long it took in microseconds."""


class Committer:
    """Does one job at a time, from construction to `stop`; all calls on the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Report, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._loop = loop
        self._report = report
        self._clock = clock
        self._average_us = 0.0
        """Of the commits on the loop, the latest ones above all."""
        self._apart = 0
        """Commits in the thread since the latest on the loop."""
        self._on_loop = True
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._begun = threading.Lock()
        """Free as soon as the thread's job has begun."""
        self._begun.acquire()
        self._thread = threading.Thread(target=self._work, name="veilmq-commit", daemon=True)
        self._thread.start()

    def commit(self, job: Callable[[], Any], *, takes_long: bool = False) -> None:
        """Do a commit, here or in the thread; the job before must have been reported.

        takes_long: it is known to do more than others.
        """
        if takes_long or not self._on_loop or (self._average_us > SHORT_US and self._apart < TRIED_EVERY - 1):
            self._apart += 1
            self.run_apart(job)
            return
        self._apart = 0
        error, result, elapsed_us = self._done(job)
        self._average_us += (elapsed_us - self._average_us) * _WEIGHT
        if elapsed_us > LONG_US:
            # asyncio's own loop turns to what it has found at its sockets one turn later.
            self._loop.call_soon(self._loop.call_soon, self._report, error, result, elapsed_us)
        else:
            self._report(error, result, elapsed_us)

    def leave_loop(self) -> None:
        """From now on all commits are done in the thread, so that one that hangs does not keep the loop from a
        deadline."""
        self._on_loop = False

    def run_apart(self, job: Callable[[], Any]) -> None:
        """Do a job in the thread; the one before must have been reported."""
        self._begun.acquire(blocking=False)  # free if the loop did not wait long enough for the job before
        self._jobs.put(job)
        self._begun.acquire(timeout=_BEGIN_S)

    async def stop(self, deadline_s: float) -> None:
        """End the thread once its job is done, or leave it to itself after `deadline_s`."""
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

    def _done(self, job: Callable[[], Any]) -> tuple[StoreFailed | StoreUnknown | None, Any, int]:
        started = self._clock()
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
