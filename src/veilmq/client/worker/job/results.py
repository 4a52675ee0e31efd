"""What came of a handler's work: one `Result` for each message, with a verdict on what to do with it.

Strategy: `call` is the edge where the user's code may fail in any way: it turns every failure into results, in threads
and child processes alike. `of_error` and `of_return` serve the coroutines too.
"""

import asyncio
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Any

import msgspec

from veilmq.client.shared.lifetimes import InOneProcess
from veilmq.client.worker.job import Cancelled, JobView, Reject, Retry, checked_delay


class Verdict(StrEnum):
    """What to do with the message."""

    DONE = "done"
    """Delete it."""
    FAILED = "failed"
    """Release it with backoff, or dead-letter it."""
    RETRY = "retry"
    """Release it: the handler asked for a retry."""
    REJECTED = "rejected"
    """Dead-letter it: the handler said that it can never be worked."""
    STOPPED = "stopped"
    """Release it at once: the handler stopped as asked, or never started."""


class HandlerFailed(Exception):
    """Stands for a handler's exception in logs: its text is the traceback, also from another process."""

    def __str__(self) -> str:
        return f"where it failed:\n{str(self.args[0]).rstrip()}" if self.args else ""


class Result(msgspec.Struct, frozen=True):
    """The result of one message."""

    verdict: Verdict
    value: Any = None
    """What the handler returned, if it was called with a single message."""
    error: str = ""
    """Type and text, in one line."""
    error_type: str = ""
    """Only the type of the exception."""
    trace: str = ""
    delay: float | None = None
    """Seconds of delay that the handler asked for."""


DONE = Result(Verdict.DONE)
STOPPED = Result(Verdict.STOPPED)


def of_error(error: BaseException) -> Result:
    """The result for each message of a handler that raised, even if the exception cannot be turned into text."""
    trace = ""
    try:
        if isinstance(error, Cancelled):
            return Result(Verdict.STOPPED, error=str(error))
        if isinstance(error, Retry):
            return Result(Verdict.RETRY, error=error.reason, delay=checked_delay(error.delay))
        if isinstance(error, Reject):
            return Result(Verdict.REJECTED, error=error.reason or "rejected by the handler")
        trace = "".join(traceback.format_exception(error))
        kind = type(error).__name__
        return Result(Verdict.FAILED, error=f"{kind}: {error}", error_type=kind, trace=trace)
    except BaseException:  # noqa: BLE001 its __str__ failed, or a subclass lacks its parent's attributes
        kind = type(error).__name__
        return Result(Verdict.FAILED, error=kind, error_type=kind, trace=trace)


def of_return(jobs: Sequence[JobView], value: Any, batch: bool) -> list[Result]:
    """The results of a handler that returned. `value` of a batch handler names the failed messages, as jobs or ids.

    Raises TypeError if it names anything else, or is work that may not be done: a coroutine, a generator or a future.
    """
    if asyncio.isfuture(value) or isinstance(value, Future):
        raise TypeError(f"the handler returned a {type(value).__name__}, not its result: wait for that in the handler")
    if inspect.iscoroutine(value):
        value.close()
    if inspect.isawaitable(value) or inspect.isasyncgen(value) or (not batch and inspect.isgenerator(value)):
        raise TypeError(f"the handler returned a {type(value).__name__} and did nothing: use an async def handler")
    if not batch:
        return [Result(Verdict.DONE, value)]
    if value is None:
        return [DONE] * len(jobs)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"a batch handler returns the jobs that failed, or None, not {type(value).__name__}")
    failed = {each.id if isinstance(each, JobView) else each for each in value}
    unknown = failed - {job.id for job in jobs}
    if unknown:
        raise TypeError(f"a batch handler returned what it was not given: {sorted(map(repr, unknown))}")
    lost = Result(Verdict.FAILED, error="returned as failed by the batch handler")
    return [lost if job.id in failed else DONE for job in jobs]


def call(handler: Callable[[Any], Any], jobs: Sequence[JobView], batch: bool) -> list[Result]:
    """Call the handler in this thread. Always returns one result for each job."""
    try:
        with InOneProcess(os.getpid()):
            return of_return(jobs, handler(list(jobs) if batch else jobs[0]), batch)
    except BaseException as error:  # noqa: BLE001 the handler's edge: even its sys.exit() must not end a worker
        return [of_error(error)] * len(jobs)
