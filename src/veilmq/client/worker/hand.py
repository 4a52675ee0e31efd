"""A message in the worker's hand, from its receive until it is settled.

Strategy: one record joins the message (its body unwrapped), its lease, the handler's token and where its progress is
kept; jobs, in whatever thread or process, call it. A checkpoint asks the queue first: if the lease is gone nothing is
saved.

Leases: the same calls as the keeper's `Lease` (`Held` names the ones that a worker needs), so that everything above is
the same with and without a keeper. Calls on one message go one after another, each with the newest handle.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from veilmq.client.capabilities import Capabilities
from veilmq.client.clock import Clock
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.worker.alarm import Entry
from veilmq.client.worker.checkpoints import Checkpoints, Saved, encode_state, unwrap, wrap
from veilmq.client.worker.job import Cancellation, Cause
from veilmq.model.errors import CapabilityMissing, LeaseError, LeaseExpired, MessageGone, MessageTooLarge, VeilError
from veilmq.model.reports import Failure


class Held(Protocol):
    """A message's lease. The calls raise as those of `Queue`."""

    deadline: float
    """When it ends, by what is known here, on the monotonic clock."""

    def remaining(self) -> float: ...

    def extend(self, seconds: float, body: str | None = None) -> None: ...

    def release(self, delay: float = 0, *, failure: Failure | None = None) -> None: ...

    def delete(self) -> None: ...

    def forget(self) -> None: ...

    def on_lost(self, callback: Callable[[Any], object]) -> None: ...


class PlainLease:
    """A lease as it was received, extended by its handler alone."""

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
        """The lease ends `seconds` from now. Raises as `Queue.extend`."""
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
        """Give the message back. Raises as `Queue.release`; a second call does nothing."""
        with self._lock:
            if not self._ended:
                self._queue.release(self.handle, delay, failure=failure)
                self._ended = True

    def delete(self) -> None:
        """Done with it. Raises as `Queue.delete`; a second call does nothing."""
        with self._lock:
            if self._ended:
                return
            try:
                self._queue.delete(self.handle)
            except MessageGone:
                if not self._maybe_deleted:
                    raise
            except VeilError as error:
                # The answer may have been lost on its way: the next try then finds the message gone, and that is well.
                self._maybe_deleted = self._maybe_deleted or bool(getattr(error, "may_have_happened", False))
                raise
            self._ended = True

    def forget(self) -> None:
        """It comes back at its end: nobody extends it anyway."""

    def on_lost(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(lease)` when an extension is refused."""
        self._lost.append(callback)


log = logging.getLogger("veilmq.worker")


class HeldClaim(msgspec.Struct):
    """What the guard granted."""

    key: str
    fence: int
    until: float
    """On the monotonic clock."""


class Hand:
    """One message. `message` has the original body; `state` its last checkpoint. Any thread."""

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
        """Length of the lease that a checkpoint gives."""
        self.cancelled = Cancellation()
        self.key = f"{queue}/{message.id}"
        self.lane = message.group if capabilities.native_fifo else None
        self.fence = message.receive_count
        """Number of this hand's side records."""
        self.on_extended: Callable[[], object] | None = None
        """Called after its handler has moved the lease's end."""
        self.held_claim: HeldClaim | None = None
        """On the guard's record, while this hand has it."""
        self.keep_claim: Callable[[], object] | None = None
        """Called after its handler has moved the lease's end: so must the claim's. Raises LeaseTaken, and what the
        guard's storage raises."""
        self.before_release: Callable[[], object] | None = None
        """Gives back what we hold of its group behind it; called before it is given back itself."""
        self.timer: Entry | None = None
        """Tells its handler before its time is over."""
        self.settled = False
        """It has got its outcome."""
        self._capabilities = capabilities
        self._stop_before = stop_before
        self._checkpoints = checkpoints

    @property
    def deadline(self) -> float:
        """When its handler must be done, on the monotonic clock."""
        return self.held_until - self._stop_before

    @property
    def held_until(self) -> float:
        """How long the message can be ours, on the monotonic clock: with a keeper to the end of the longest hold."""
        kept: float | None = getattr(self.lease, "hold_end", None)
        return self.lease.deadline if kept is None else kept

    @property
    def lost(self) -> bool:
        """Its lease is known to be gone."""
        return self.cancelled.cause is Cause.LOST

    def disarm(self) -> None:
        """Its timer is not wanted any more: it would hold the body until a deadline that may be hours away."""
        timer, self.timer, self.on_extended = self.timer, None, None
        if timer is not None:
            timer.cancel()

    def load(self) -> None:
        """Read the side record, if there are any. Raises what the storage raises."""
        if self._checkpoints is None:
            return
        saved = self._checkpoints.load(self.key)
        if saved is not None:
            self.state = saved.state
            self.fence = max(self.fence, saved.fence + 1)

    def forget(self) -> None:
        """Drop the side record: the message is done with. Raises what the storage raises."""
        if self._checkpoints is not None:
            self._checkpoints.drop(self.key)

    def extend(self, seconds: float) -> None:
        """The lease ends `seconds` from now. Raises as `Queue.extend`."""
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
        """A queue that cannot be reached for a moment takes no progress away: the lease runs on."""
        try:
            self._extend(seconds)
        except (TransportError, ServiceError) as error:
            if self.lease.remaining() <= 0:
                raise
            log.warning("%s: saving a checkpoint without an extension: %s", self.key, error)
