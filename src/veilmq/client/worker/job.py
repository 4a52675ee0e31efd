"""What a handler gets: the message, its deadline, its token, and where it left off.

Strategy: a `Job` is the same in a thread, in a child process and, with coroutines in the place of calls, on an event
loop; what it calls (`Calls`) is the message in hand or a pipe to it. What a handler wants to say beyond "done" and
"failed", it raises.
"""

import asyncio
import contextvars
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from numbers import Real
from typing import Any, Protocol

from veilmq.client.clock import Clock
from veilmq.client.messages import AttributeValue, Received
from veilmq.client.worker.cancellation import Cancellation
from veilmq.model.errors import ParameterInvalid


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
