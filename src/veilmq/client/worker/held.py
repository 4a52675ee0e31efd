"""A lease that nobody keeps: for workers without a lease keeper.

Strategy: the same calls as the keeper's `Lease` (`Held` names the ones that a worker needs), so that everything above
is the same with and without a keeper. Calls on one message go one after another, each with the newest handle.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol

from veilmq.client.clock import Clock
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.model.errors import LeaseError, MessageGone, VeilError
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
