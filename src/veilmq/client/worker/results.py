"""What became of a message in its handler, and how a handler is called.

Strategy: `call` is the edge at which a user's code may fail in any way: it turns every way into one `Result` a message.
It is the same in threads and child processes; `of_error` and `of_return` serve the coroutines too.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from veilmq.client.worker.cancellation import Cancelled
from veilmq.client.worker.job import JobView, Reject, Retry, checked_delay


class Verdict(StrEnum):
    """What to do with the message."""

    DONE = "done"
    """Delete it."""
    FAILED = "failed"
    """Release it with backoff, or dead-letter it."""
    RETRY = "retry"
    """Release it: the handler asked for it."""
    REJECTED = "rejected"
    """Dead-letter it: the handler said that it can never be worked."""
    STOPPED = "stopped"
    """Release it at once: the handler was told to stop, or never started."""


class HandlerFailed(Exception):
    """Stands for what a handler raised, in logs: its text is the traceback, also one of another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


class Result(msgspec.Struct, frozen=True):
    """One message's."""

    verdict: Verdict
    value: Any = None
    """What the handler returned, where it was for one message."""
    error: str = ""
    """Kind and text, in one line."""
    error_type: str = ""
    """The kind alone, of what the handler raised."""
    trace: str = ""
    delay: float | None = None
    """Seconds that the handler asked for."""


DONE = Result(Verdict.DONE)
STOPPED = Result(Verdict.STOPPED)


def of_error(error: BaseException) -> Result:
    """The result of each message of a handler that raised; of one that cannot even say what it is, too."""
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
    except BaseException:  # noqa: BLE001 its __str__, or a subclass without what its parent has
        kind = type(error).__name__
        return Result(Verdict.FAILED, error=kind, error_type=kind, trace=trace)


def of_return(jobs: Sequence[JobView], value: Any, batch: bool) -> list[Result]:
    """The results of a handler that returned: `value` of a batch handler names the failed ones, as jobs or ids.

    Raises TypeError if it names anything else.
    """
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
    """Call the handler on this thread; a result for each job, whatever happens."""
    try:
        return of_return(jobs, handler(list(jobs) if batch else jobs[0]), batch)
    except BaseException as error:  # noqa: BLE001 the handler's edge: even its sys.exit() ends no worker
        return [of_error(error)] * len(jobs)
