"""A message in hand: from its receive until it is settled.

Strategy: one record joins the message (its body unwrapped), its lease, the handler's token and the place of its
progress; jobs in any thread or process call it. A checkpoint extends the lease first: if the lease is gone, nothing is
saved.

Leases: `Held` names the calls of the keeper's `Lease` that a worker needs, so the code above is the same with and
without a keeper. Calls on one message run one after another, each with the newest handle.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.worker.alarm import Entry
from veilmq.client.worker.checkpoints import Checkpoints, Saved, encode_state, unwrap, wrap
from veilmq.client.worker.job import Cancellation, Cause
from veilmq.model.errors import CapabilityMissing, LeaseError, LeaseExpired, MessageGone, MessageTooLarge, VeilError
from veilmq.model.reports import Failure


class Held(Protocol):
    """A message's lease. The calls raise like those of `Queue`."""

    deadline: float
    """When the lease ends, as far as this process knows, on the monotonic clock."""

    def remaining(self) -> float: ...

    def extend(self, seconds: float, body: str | None = None) -> None: ...

    def release(self, delay: float = 0, *, failure: Failure | None = None) -> None: ...

    def delete(self) -> None: ...

    def forget(self) -> None: ...

    def on_lost(self, callback: Callable[[Any], object]) -> None: ...


class PlainLease:
    """A lease without a keeper: only its handler extends it."""

    def __init__(self, queue: Queue, message: Received, clock: Clock) -> None:
        self.message = message
        self.handle = message.handle
        self.deadline = message.lease_end
        self._queue = queue
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = False
        self._maybe_deleted = False
        self._lost: list[Callable[[Any], object]] = []

    def remaining(self) -> float:
        """Seconds until the lease ends."""
        return self.deadline - self._clock.monotonic()

    def extend(self, seconds: float, body: str | None = None) -> None:
        """Let the lease end `seconds` from now. Raises like `Queue.extend`."""
        try:
            with self._lock:
                before = self._clock.monotonic()
                self.handle = self._queue.extend(self.handle, seconds, body=body)
                self.deadline = before + seconds
        except LeaseError:
            for callback in self._lost:
                callback(self)
            raise

    def release(self, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back. Raises like `Queue.release`; a second call does nothing."""
        with self._lock:
            if not self._ended:
                self._queue.release(self.handle, delay, failure=failure)
                self._ended = True

    def delete(self) -> None:
        """Delete the message. Raises like `Queue.delete`; a second call does nothing."""
        with self._lock:
            if self._ended:
                return
            try:
                self._queue.delete(self.handle)
            except MessageGone:
                if not self._maybe_deleted:
                    raise
            except VeilError as error:
                # The delete may have happened although its answer was lost. The next try then finds the message gone.
                self._maybe_deleted = self._maybe_deleted or bool(getattr(error, "may_have_happened", False))
                raise
            self._ended = True

    def forget(self) -> None:
        """Nothing to do: nobody extends the lease, so the message comes back when it ends."""

    def on_lost(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(lease)` when an extension is refused."""
        self._lost.append(callback)


log = logging.getLogger("veilmq.worker")


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
        lease: Held,
        *,
        capabilities: Capabilities,
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
        self.lane = message.group if capabilities.native_fifo else None
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
        self._capabilities = capabilities
        self._stop_before = stop_before
        self._checkpoints = checkpoints

    @property
    def deadline(self) -> float:
        """When its handler must be done, on the monotonic clock."""
        return self.held_until - self._stop_before

    @property
    def held_until(self) -> float:
        """Until when the message can be ours, on the monotonic clock; with a keeper, the end of the longest hold."""
        kept: float | None = getattr(self.lease, "hold_end", None)
        return self.lease.deadline if kept is None else kept

    @property
    def lost(self) -> bool:
        """Whether its lease is known to be gone."""
        return self.cancelled.cause is Cause.LOST

    def disarm(self) -> None:
        """Cancel its timer, which would keep the body alive until a deadline that may be hours away."""
        timer, self.timer, self.on_extended = self.timer, None, None
        if timer is not None:
            timer.cancel()

    def load(self) -> None:
        """Read the side record, if there is one. Raises the storage's errors."""
        if self._checkpoints is None:
            return
        saved = self._checkpoints.load(self.key)
        if saved is not None:
            self.state = saved.state
            self.fence = max(self.fence, saved.fence + 1)

    def forget(self) -> None:
        """Delete the side record: the message is done. Raises the storage's errors."""
        if self._checkpoints is not None:
            self._checkpoints.drop(self.key)

    def extend(self, seconds: float) -> None:
        """Let the lease end `seconds` from now. Raises like `Queue.extend`."""
        self._extend(seconds)

    def checkpoint(self, state: Any, lease: float | None) -> None:
        """See `Job.checkpoint`."""
        seconds = self.seconds if lease is None else lease
        if self.lost:
            raise LeaseExpired(sequence=0, attempt=self.message.receive_count)
        if self._checkpoints is not None:
            encode_state(state)
            self._extend_or_go_on(seconds)
            self._checkpoints.save(self.key, Saved(self.fence, state))
        elif self._capabilities.body_replaceable:
            body = wrap(self.message.body, state)
            size_bytes = self._capabilities.transmitted_bytes(body)
            if size_bytes > self._capabilities.body_bytes_max:
                raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=self._capabilities.body_bytes_max)
            self._extend(seconds, body)
        else:
            raise CapabilityMissing(capability="checkpoint (bodies stay here: give the worker `checkpoints`)")

    def _extend(self, seconds: float, body: str | None = None) -> None:
        self.lease.extend(seconds, body)
        if self.on_extended is not None:
            self.on_extended()
        if self.keep_claim is not None:
            self.keep_claim()

    def _extend_or_go_on(self, seconds: float) -> None:
        """Extend the lease; if the queue cannot be reached, go on: the lease still runs, so progress can be saved."""
        try:
            self._extend(seconds)
        except (TransportError, ServiceError) as error:
            if self.lease.remaining() <= 0:
                raise
            log.warning("%s: saving a checkpoint without an extension: %s", self.key, error)
