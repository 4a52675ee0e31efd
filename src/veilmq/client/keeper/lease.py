"""One held message, as its handler sees it.

Strategy: a `Lease` is the keeper's own record plus the handler's calls. Each call goes through the keeper, so it waits
for an extension in progress and uses the newest handle. Reading needs no lock.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from veilmq.client.clock import Clock
from veilmq.client.keeper.states import Hold, Reason, State
from veilmq.client.messages import Received
from veilmq.model.errors import VeilError
from veilmq.model.reports import Failure


class Calls(Protocol):
    """What a lease needs from its keeper."""

    clock: Clock

    def extend(self, lease: "Lease", seconds: float, body: str | None = None) -> None: ...
    def release(self, lease: "Lease", delay: float = 0, *, failure: Failure | None = None) -> None: ...
    def delete(self, lease: "Lease") -> None: ...
    def forget(self, lease: "Lease") -> None: ...
    def watch(self, lease: "Lease", callback: Callable[["Lease"], object]) -> None: ...
    def event_of(self, lease: "Lease") -> threading.Event: ...


class Loss:
    """A handler's cancellation token: set once, when the lease is lost."""

    __slots__ = ("_lease",)

    def __init__(self, lease: "Lease") -> None:
        self._lease = lease

    def is_set(self) -> bool:
        """True: stop working; another receiver has the message or will soon get it."""
        return self._lease.reason is not None

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever) for the loss. Returns whether it happened."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        return self.is_set() or self._lease.keeper.event_of(self._lease).wait(timeout)

    @property
    def reason(self) -> Reason | None:
        """Why the lease was lost; None before that."""
        return self._lease.reason

    @property
    def error(self) -> VeilError | None:
        """The error of the last extension, if it failed."""
        return self._lease.error


class Lease(Hold):
    """A message that the keeper holds. `extend`, `release` and `delete` may be called from any thread."""

    __slots__ = ("callbacks", "event", "keeper")

    def __init__(
        self,
        keeper: Calls,
        message: Received,
        *,
        lead: float,
        fixed: float | None,
        hold_end: float,
        now: float,
    ) -> None:
        super().__init__(message, lead=lead, fixed=fixed, hold_end=hold_end, now=now)
        self.keeper = keeper
        self.callbacks: list[Callable[[Lease], object]] | None = None
        self.event: threading.Event | None = None

    @property
    def handle(self) -> str:
        """The newest handle."""
        return self.newest

    @property
    def state(self) -> State:
        """HELD, EXTENDING, ENDING, DONE or LOST."""
        return self.status

    @property
    def lost(self) -> Loss:
        """The handler's cancellation token."""
        return Loss(self)

    def remaining(self) -> float:
        """Seconds until the lease ends, as far as this process knows; negative after that."""
        return self.deadline - self.keeper.clock.monotonic()

    def on_lost(self, callback: Callable[["Lease"], object]) -> None:
        """Call `callback(lease)` when the lease is lost, in a separate thread; at once if it is lost already."""
        self.keeper.watch(self, callback)

    def extend(self, seconds: float, body: str | None = None) -> None:
        """Let the lease end `seconds` from now; the keeper continues from there. `body` as in `Queue.extend`.

        Raises ParameterInvalid for seconds that the queue cannot give, else like `Queue.extend`. After a refusal the
        lease is LOST.
        """
        self.keeper.extend(self, seconds, body)

    def release(self, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back, visible after `delay` seconds, and stop extending. Raises like `Queue.release`.

        After an error that is not a refusal, the message stays held.
        """
        self.keeper.release(self, delay, failure=failure)

    def delete(self) -> None:
        """Delete the message with the newest handle and stop extending. Idempotent.

        Raises like `Queue.delete`. After an error that is not a refusal, the message stays held and the delete may be
        retried. A LOST lease is sent to the queue too: perhaps nobody else has received the message yet.
        """
        self.keeper.delete(self)

    def forget(self) -> None:
        """Stop extending, without a call to the queue: the message comes back when its lease ends.

        Waits for a call in progress. ParameterInvalid in a forked child.
        """
        self.keeper.forget(self)
