"""The thread that commits, beside the loop.

Strategy: one job at a time, each reported back to the loop. Who hands over a job waits until it has begun: a thread
that is woken needs the interpreter, and a loop that goes on gives it away between two callbacks only, for less time
than a wake takes. Commits began 0.3 ms late by that, after seven wakes (decision 0007).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from veilmq.model.errors import StoreFailed, StoreUnknown

_BEGIN_S: Final = 0.001
"""How long the loop waits for a job to begin, where all cores are busy."""

logger = logging.getLogger("veilmq.shell")

Report = Callable[[StoreFailed | StoreUnknown | None, Any, int], None]
"""Called on the loop: why the job failed or None, what it returned, and how long it took in microseconds."""


class Committer:
    """One thread, from construction to `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Report) -> None:
        self._loop = loop
        self._report = report
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._begun = threading.Lock()
        """Free as soon as the job has begun."""
        self._begun.acquire()
        self._thread = threading.Thread(target=self._work, name="veilmq-commit", daemon=True)
        self._thread.start()

    def begin(self, job: Callable[[], Any]) -> None:
        """Hand over a job; the one before must have been reported."""
        self._begun.acquire(blocking=False)  # free if the loop did not wait long enough for the job before
        self._jobs.put(job)
        self._begun.acquire(timeout=_BEGIN_S)

    async def stop(self, deadline_s: float) -> None:
        """End the thread once its job is done, or leave it to itself after `deadline_s`."""
        self._jobs.put(None)
        await self._loop.run_in_executor(None, self._thread.join, deadline_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._begun.locked():
                self._begun.release()
            started = perf_counter()
            error: StoreFailed | StoreUnknown | None = None
            result: Any = None
            try:
                result = job()
            except (StoreFailed, StoreUnknown) as failure:
                error = failure
            except Exception as failure:
                logger.exception("commit")
                error = StoreUnknown(reason=str(failure))
            elapsed_us = int((perf_counter() - started) * 1e6)
            self._loop.call_soon_threadsafe(self._report, error, result, elapsed_us)
