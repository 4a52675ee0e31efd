"""A message in hand (`Hand`), and what its handler gets of it: the `Job` and its cancellation token.

Strategy: a `Hand` joins the message (its body unwrapped), its lease, the handler's token and the place of its progress,
from the receive until it is deleted, released or dead-lettered. A checkpoint extends the lease first: if the lease is
gone, nothing is saved. Calls on one message run one after another, each with the newest handle.

A `Job` is the same in a thread, in a child process and, with coroutines instead of calls, on an event loop. It calls
the message in hand or a pipe to it (`Calls`). To say more than "done" and "failed", a handler raises.

Cancellation: set once, from any thread, by whoever learns of the cause first: the lease keeper, the timer before the
lease's end, or a worker that shuts down. A handler checks `job.cancelled`, waits for it, or calls
`job.cancelled.check()`, which raises.
"""

import asyncio
import contextvars
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from enum import StrEnum
from numbers import Real
from typing import Any, Protocol

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper import Lease
from veilmq.client.messages import AttributeValue, Received
from veilmq.client.queue import Capabilities
from veilmq.client.shared.lifetimes import in_one_process
from veilmq.client.shared.threads import Entry
from veilmq.client.worker.job.checkpoints import Checkpoints, Saved, encode_state, unwrap, wrap
from veilmq.model.errors import CapabilityMissing, LeaseExpired, MessageTooLarge, ParameterInvalid

log = logging.getLogger("veilmq.worker")


class Cause(StrEnum):
    """Why a handler should stop."""

    LOST = "the lease was lost"
    EXPIRING = "the lease ends soon"
    SHUTDOWN = "the worker stops"


class Cancelled(Exception):
    """Raised by `Cancellation.check` in a handler that should stop; the worker treats it as an orderly stop."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else str(self.cause)


class Cancellation:
    """Cancellation token. True after it is set."""

    __slots__ = ("_callbacks", "_event", "_lock", "cause", "detail")

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.detail = ""
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def set(self, cause: Cause, detail: str = "") -> bool:
        """Set the token. True for the first call; later causes change nothing."""
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
        """Wait up to `timeout` seconds (None: for ever). Returns whether it is set. Use it instead of a sleep."""
        return self._event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def check(self) -> None:
        """Raise Cancelled if it is set."""
        if self.cause is not None:
            raise Cancelled(self.cause, self.detail)

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when it is set, in the thread that sets it; at once if it is set already."""
        with self._lock:
            if self.cause is None:
                self._callbacks.append(callback)
                return
        _call(callback)


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:
        # The caller (the keeper, a shutdown) must go on even if a handler's callback fails.
        log.exception("a cancellation callback failed")


class Retry(Exception):
    """Raised by a handler: not now. The message becomes visible after `delay` seconds (None: the worker's backoff).

    The metrics do not count it as a failure, but the receive counts: `poison_after` ends the retries. Raises
    ParameterInvalid for a delay that is not a finite number of seconds (below 0 is 0): then the handler has failed.
    """

    def __init__(self, delay: float | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = checked_delay(delay)
        self.reason = reason


def checked_delay(delay: Any) -> float | None:
    """The delay of a Retry, in seconds; 0 for an instant that has passed. Raises ParameterInvalid."""
    if delay is None:
        return None
    seconds = math.nan if isinstance(delay, bool) or not isinstance(delay, Real) else float(delay)
    if not math.isfinite(seconds):
        raise ParameterInvalid(parameter="delay", reason=f"{delay!r} is not a number of seconds")
    return max(seconds, 0.0)


class Reject(Exception):
    """Raised by a handler: this message can never be worked. It goes to the worker's dead-letter queue at once.

    If there is none, it is retried with backoff until the queue's own dead-letter rule takes it.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Calls(Protocol):
    """The calls of a job to the message in hand. Both return the deadline that it then has, and raise like
    `Queue.extend`."""

    def checkpoint(self, state: Any, lease: float | None) -> float: ...

    def extend(self, seconds: float) -> float: ...


class JobView:
    """A message as its handler sees it; the fields of `Received` have their own names.

    `state` is what the last checkpoint saved, in this or an earlier receive; None: nothing. `deadline` is when the
    handler must be done, in seconds on the worker's monotonic clock: with a keeper the end of the longest hold, else
    the lease's end minus `stop_before_expiry`.
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

        state: any JSON value. A redelivered message starts with it (`job.state`). Raises LeaseExpired, LeaseTaken or
        MessageGone (nothing was saved: stop), ParameterInvalid (state), CapabilityMissing (the body cannot be replaced
        and the worker has no `checkpoints`), MessageTooLarge, TransportError, ServiceError.
        """
        self.deadline = self._calls.checkpoint(state, lease)
        self.state = state

    def extend(self, seconds: float) -> None:
        """Let the lease end `seconds` from now; a keeper continues from there. Raises like `Queue.extend`."""
        self.deadline = self._calls.extend(seconds)


class AsyncJob(JobView):
    """A message in a coroutine."""

    def __init__(self, pool: Executor, *view: Any) -> None:
        """pool: runs blocking calls; the loop's own threads would delay the program's exit. view: `JobView`'s
        arguments."""
        super().__init__(*view)
        self._pool = pool

    async def checkpoint(self, state: Any, lease: float | None = None) -> None:
        """Like `Job.checkpoint`, without blocking the loop."""
        self.deadline = await self._blocking(self._calls.checkpoint, state, lease)
        self.state = state

    async def extend(self, seconds: float) -> None:
        """Like `Job.extend`, without blocking the loop."""
        self.deadline = await self._blocking(self._calls.extend, seconds)

    async def _blocking(self, call: Callable[..., float], *values: Any) -> float:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._pool, context.run, call, *values)


class HeldClaim(msgspec.Struct):
    """The claim that the guard granted."""

    key: str
    fence: int
    until: float
    """On the monotonic clock."""


class Hand:
    """One message. `message` has the original body; `state` is its last checkpoint. Thread-safe."""

    def __init__(
        self,
        queue: str,
        message: Received,
        lease: Lease,
        *,
        capabilities: Capabilities,
        lane: str | None,
        seconds: float,
        stop_before: float,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.state: Any = None
        if capabilities.body_replaceable:
            body, self.state = unwrap(message.body)
            if body is not message.body:
                message = msgspec.structs.replace(message, body=body)
        self.message = message
        self.lease = lease
        self.seconds = seconds
        """Length of the lease that a checkpoint sets."""
        self.cancelled = Cancellation()
        self.key = f"{queue}/{message.id}"
        self.lane = lane
        """Messages of one lane are worked one after the other."""
        self.fence = message.receive_count
        """The number under which side records are written."""
        self.on_extended: Callable[[], object] | None = None
        """Called after the handler has changed the lease's end."""
        self.held_claim: HeldClaim | None = None
        """The claim on the guard's record, while this message has it."""
        self.keep_claim: Callable[[], object] | None = None
        """Called after the handler has changed the lease's end, to change the claim's too. Raises LeaseTaken, and the
        errors of the guard's storage."""
        self.before_release: Callable[[], object] | None = None
        """Called before this message is given back: gives back the later messages of its group that we hold."""
        self.timer: Entry | None = None
        """Notifies the handler before its time is over."""
        self.settled = False
        """It has its outcome."""
        self.abandoned = False
        """A shutdown gives it back."""
        self._fate = threading.Lock()
        self._deleting = False
        self._capabilities = capabilities
        self._stop_before = stop_before
        self._checkpoints = checkpoints

    @property
    def deadline(self) -> float:
        """When its handler must be done, on the monotonic clock."""
        return self.lease.held_until - self._stop_before

    @property
    def lost(self) -> bool:
        """Whether its lease is known to be gone."""
        return self.cancelled.cause is Cause.LOST

    def abandon(self) -> bool:
        """A shutdown gives it back: its deletion does not begin any more. False if it has begun."""
        with self._fate:
            self.abandoned = True
            return not self._deleting

    def may_delete(self) -> bool:
        """Whether its deletion may begin, which is noted."""
        with self._fate:
            self._deleting = not self.abandoned
            return self._deleting

    def settle(self) -> bool:
        """Note that it has its outcome. False if it had one."""
        with self._fate:
            had, self.settled = self.settled, True
            return not had

    def disarm(self) -> None:
        """Cancel its timer, which would keep the body alive until a deadline that may be hours away."""
        timer, self.timer, self.on_extended = self.timer, None, None
        if timer is not None:
            timer.cancel()

    def load(self) -> None:
        """Read the side record, if there is one. Raises the storage's errors."""
        if self._checkpoints is None:
            return
        saved = in_one_process(self._checkpoints.load, self.key)
        if saved is not None:
            self.state = saved.state
            self.fence = max(self.fence, saved.fence + 1)

    def drop_progress(self) -> None:
        """Delete the side record: the message is done. Raises the storage's errors."""
        if self._checkpoints is not None:
            in_one_process(self._checkpoints.drop, self.key)

    def extend(self, seconds: float, body: str | None = None) -> float:
        """Let the lease end `seconds` from now, and the guard's claim with it. Returns the deadline. Raises like
        `Queue.extend`."""
        self.lease.extend(seconds, body)
        if self.on_extended is not None:
            self.on_extended()
        if self.keep_claim is not None:
            self.keep_claim()
        return self.deadline

    def checkpoint(self, state: Any, lease: float | None) -> float:
        """See `Job.checkpoint`."""
        seconds = self.seconds if lease is None else lease
        if self.lost:
            raise LeaseExpired(sequence=0, attempt=self.message.receive_count)
        if self._checkpoints is not None:
            encode_state(state)
            self._extend_or_go_on(seconds)
            in_one_process(self._checkpoints.save, self.key, Saved(self.fence, state))
        elif self._capabilities.body_replaceable:
            body = wrap(self.message.body, state)
            size_bytes = self._capabilities.transmitted_bytes(body)
            if size_bytes > self._capabilities.body_bytes_max:
                raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=self._capabilities.body_bytes_max)
            self.extend(seconds, body)
        else:
            raise CapabilityMissing(capability="checkpoint (bodies stay here: give the worker `checkpoints`)")
        return self.deadline

    def _extend_or_go_on(self, seconds: float) -> None:
        """Extend the lease; if the queue cannot be reached, go on: the lease still runs, so progress can be saved."""
        try:
            self.extend(seconds)
        except (TransportError, ServiceError) as error:
            if self.lease.remaining() <= 0:
                raise
            log.warning("%s: its lease was not extended, and its checkpoint is saved all the same: %s", self.key, error)
