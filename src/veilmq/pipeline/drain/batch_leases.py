"""Holds the leases of one batch, from the receive until the batch is committed and its messages are deleted.

Strategy: most batches finish long before a lease runs out, so no lease is registered with a keeper during the first
third of the lease; then one lease keeper takes the whole batch.

Before changing it: a protocol may report a delete as done although the handle was stale. Such an answer proves that the
message is gone only if its lease was held without a gap, which `unbroken` reports.
"""

import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.keeper import Lease, LeaseKeeper, Reason
from veilmq.client.messages import Extension, Received
from veilmq.client.queue import Queue
from veilmq.model.errors import VeilError

_PARTS: Final = 3
"""Leases are registered after one part of the lease, and extended with half of it left."""
_MAX_HOLD: Final = 10.0 * 365 * 86_400


class BatchLeases:
    """Holds the leases of one batch. Thread-safe."""

    def __init__(self, queue: Queue, messages: Sequence[Received], lease: float, clock: Clock) -> None:
        self._queue, self._lease, self._clock = queue, lease, clock
        self._messages = list(messages)
        self._held: dict[int, Lease] = {}
        self._keeper: LeaseKeeper | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def start(self) -> None:
        """Hold the leases from now on; no I/O."""
        if not self._messages:
            return
        first = min(each.lease_end for each in self._messages) - self._clock.monotonic()
        self._timer = threading.Timer(max(0.0, first - self._lease * (_PARTS - 1) / _PARTS), self._take_over)
        self._timer.daemon = True
        self._timer.start()

    def revive(self) -> None:
        """Extend leases of another process, as far as they are still ours.

        Raises TransportError and other errors that say nothing about a single message.
        """
        now = self._clock.monotonic()
        extensions = [Extension(each.handle, self._lease) for each in self._messages]
        for place, answer in enumerate(self._queue.extend_batch(extensions)):
            if isinstance(answer, str):
                changed = {"handle": answer, "lease_end": now + self._lease}
                self._messages[place] = msgspec.structs.replace(self._messages[place], **changed)

    def renew(self, place: int, message: Received) -> None:
        """The message was received again; use its new lease."""
        with self._lock:
            self._messages[place] = message
            self._held.pop(place, None)
            if self._keeper is not None and not self._stopped:
                self._register(self._keeper, place)

    def stop(self) -> None:
        """Stop extending; the leases run until they expire."""
        with self._lock:
            self._stopped = True
            keeper = self._keeper
        if self._timer is not None:
            self._timer.cancel()
        if keeper is not None:
            keeper.close(release=False)

    def handle(self, place: int) -> str:
        """The newest handle."""
        held = self._held.get(place)
        return self._messages[place].handle if held is None else held.handle

    def unbroken(self, place: int) -> bool:
        """Whether the lease is held now and has been held since the receive without a gap."""
        held = self._held.get(place)
        if held is None:
            return self._messages[place].lease_end > self._clock.monotonic()
        return held.deadline > self._clock.monotonic() and held.lost.reason in (None, Reason.CLOSED)

    def _take_over(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._keeper = keeper = LeaseKeeper(
                self._queue,
                visibility_timeout=max(self._lease, self._queue.capabilities.lease_min),
                interval=self._lease / 3,
                minimal_life=self._lease / 6,
                max_hold=_MAX_HOLD,
                clock=self._clock,
            )
            for place in range(len(self._messages)):
                self._register(keeper, place)

    def _register(self, keeper: LeaseKeeper, place: int) -> None:
        message = self._messages[place]
        if message.lease_end <= self._clock.monotonic():
            return
        try:
            self._held[place] = keeper.register(message)
        except VeilError:
            # The lease is over or taken, which `unbroken` detects by the clock, or it expires and the message comes
            # again.
            return
