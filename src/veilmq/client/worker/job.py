"""What a handler gets: the message, its deadline, its token, and where it left off.

Strategy: a `Job` is the same in a thread, in a child process and, with coroutines in the place of calls, on an event
loop; what it calls (`Calls`) is the message in hand or a pipe to it. What a handler wants to say beyond "done" and
"failed", it raises.

Cancellation: set once, from any thread, by whoever learns it first: the lease keeper, the timer before the lease's end,
the worker that shuts down. A handler looks (`if job.cancelled`), waits, or lets itself be thrown out
(`job.cancelled.check()`).

Results: `call` is the edge at which a user's code may fail in any way: it turns every way into one `Result` a message.
It is the same in threads and child processes; `of_error` and `of_return` serve the coroutines too.
"""

import asyncio
import contextvars
import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from enum import StrEnum
from numbers import Real
from typing import Any, Protocol

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.messages import AttributeValue, Received
from veilmq.model.errors import ParameterInvalid

log = logging.getLogger("veilmq.worker")


class Cause(StrEnum):
    """Why a handler should stop."""

    LOST = "the lease was lost"
    EXPIRING = "the lease ends soon"
    SHUTDOWN = "the worker stops"


class Cancelled(Exception):
    """Raised by `Cancellation.check` in a handler that was told to stop; the worker takes it for an orderly stop."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else str(self.cause)


class Cancellation:
    """Cancellation token. True once it is set."""

    __slots__ = ("_callbacks", "_event", "_lock", "cause", "detail")

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.detail = ""
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def set(self, cause: Cause, detail: str = "") -> bool:
        """Tell the handler; True for the first who does. Later causes change nothing."""
        with self._lock:
            if self.cause is not None:
                return False
            self.detail = detail
            self.cause = cause
            callbacks, self._callbacks = self._callbacks, []
        self._event.set()
        for callback in callbacks:
            _call(callback)
        return True

    def is_set(self) -> bool:
        """True: stop."""
        return self.cause is not None

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever); whether it is set. A sleep that ends when work must end."""
        return self._event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def check(self) -> None:
        """Raise Cancelled if it is set."""
        if self.cause is not None:
            raise Cancelled(self.cause, self.detail)

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when it is set, in the thread that sets it; at once if it is."""
        with self._lock:
            if self.cause is None:
                self._callbacks.append(callback)
                return
        _call(callback)


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:
        # Who sets the token (the keeper, a shutdown) must go on, whatever a handler's own callback does.
        log.exception("a cancellation callback failed")


class Retry(Exception):
    """Raised by a handler: not now. The message is visible again after `delay` seconds (None: the worker's backoff).

    It is no failure in the metrics, but receives count: `poison_after` ends it. Raises ParameterInvalid for a delay
    that is no finite number of seconds (below 0 is 0): then the handler has failed.
    """

    def __init__(self, delay: float | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = checked_delay(delay)
        self.reason = reason


def checked_delay(delay: Any) -> float | None:
    """The delay of a Retry, in seconds: of an instant that has passed meanwhile, 0. Raises ParameterInvalid."""
    if delay is None:
        return None
    seconds = math.nan if isinstance(delay, bool) or not isinstance(delay, Real) else float(delay)
    if not math.isfinite(seconds):
        raise ParameterInvalid(parameter="delay", reason=f"{delay!r} is not a number of seconds")
    return max(seconds, 0.0)


class Reject(Exception):
    """Raised by a handler: this message can never be worked. It goes to the worker's dead-letter queue at once.

    Without one it is retried with backoff, so that the queue's own dead-letter rule gets it.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Calls(Protocol):
    """What a job asks of the message in hand. Both raise what `Queue.extend` raises."""

    def checkpoint(self, state: Any, lease: float | None) -> None: ...

    def extend(self, seconds: float) -> None: ...


class JobView:
    """A message as its handler sees it; the fields of `Received` under their own names.

    `state` is what the last checkpoint saved, also one of an earlier receive; None: there is none. `deadline` is when
    the handler must be done, in seconds on the worker's monotonic clock: the end of the longest hold with a keeper, the
    lease's end less `stop_before_expiry` without one.
    """

    def __init__(
        self, message: Received, calls: Calls, cancelled: Cancellation, state: Any, deadline: float, clock: Clock
    ) -> None:
        self.message = message
        self.cancelled = cancelled
        self.state = state
        self.deadline = deadline
        self._calls = calls
        self._clock = clock

    @property
    def id(self) -> str:
        """The queue's id of the message."""
        return self.message.id

    @property
    def body(self) -> str:
        """The body as it was sent."""
        return self.message.body

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        """The sender's attributes."""
        return self.message.attributes

    @property
    def receive_count(self) -> int:
        """1 at the first receive."""
        return self.message.receive_count

    @property
    def group(self) -> str | None:
        """FIFO message group."""
        return self.message.group

    def remaining(self) -> float:
        """Seconds until `deadline`; negative after it."""
        return self.deadline - self._clock.monotonic()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, receive_count={self.receive_count})"


class Job(JobView):
    """A message in a handler that runs in a thread or a child process."""

    def checkpoint(self, state: Any, lease: float | None = None) -> None:
        """Save progress, and extend the lease to `lease` seconds (None: the worker's) in the same step.

        state: what JSON can say. A redelivered message starts with it (`job.state`). Raises LeaseExpired, LeaseTaken or
        MessageGone (nothing was saved: stop), ParameterInvalid (state), CapabilityMissing (neither can the body be
        replaced nor has the worker `checkpoints`), MessageTooLarge, TransportError, ServiceError.
        """
        self._calls.checkpoint(state, lease)
        self.state = state

    def extend(self, seconds: float) -> None:
        """The lease ends `seconds` from now; with a keeper it goes on from there. Raises as `Queue.extend`."""
        self._calls.extend(seconds)


class AsyncJob(JobView):
    """A message in a coroutine."""

    def __init__(self, pool: Executor, *view: Any) -> None:
        """pool: what blocks runs there; the loop's own threads would hold up the program's end. view: a `JobView`'s."""
        super().__init__(*view)
        self._pool = pool

    async def checkpoint(self, state: Any, lease: float | None = None) -> None:
        """As `Job.checkpoint`, without blocking the loop."""
        await self._blocking(self._calls.checkpoint, state, lease)
        self.state = state

    async def extend(self, seconds: float) -> None:
        """As `Job.extend`, without blocking the loop."""
        await self._blocking(self._calls.extend, seconds)

    async def _blocking(self, call: Callable[..., None], *values: Any) -> None:
        context = contextvars.copy_context()
        await asyncio.get_running_loop().run_in_executor(self._pool, context.run, call, *values)


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
