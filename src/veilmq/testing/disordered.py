"""A queue that swaps neighbouring messages, as a queue spread over many servers does.

Strategy: receive a few more messages than requested, keep them under their leases, and draw at random which is returned
next. Each is passed over at most `window` times, so it comes at most that many places late. The seed determines the
draws. Source: document 002's run of a plain queue: 1 3 2 5 4 7 6 9 8 10.
"""

import threading
from contextlib import suppress

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import LeaseError, ParameterInvalid
from veilmq.testing import chance


class Disordered(Wrapping):
    """`queue`, with messages up to `window` places late. Thread-safe. Messages it keeps come back when their leases
    end. One that was kept is returned under the lease of the receive that took it, of which less is left."""

    def __init__(self, queue: Queue, window: int = 1, seed: int = 0, clock: Clock = SYSTEM) -> None:
        """Raises ParameterInvalid for a window below 1."""
        if window < 1:
            raise ParameterInvalid(parameter="window", reason=f"must be at least 1, not {window}")
        super().__init__(queue)
        self.window = window
        self._chance = chance(seed)
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: list[Received] = []
        self._passed: dict[str, int] = {}
        """By handle: how often a later message was returned first."""

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """See `Queue.receive`. Returns fewer messages than exist rather than wait for neighbours. `lease` is of the
        messages taken now; `lease_end` says what is left of each."""
        with self._lock:
            self._drop_expired()
            wanted = count_max + self.window - len(self._kept)
            patience = 0 if self._kept else wait
            while wanted > 0:
                came = self.inner.receive(
                    min(wanted, self.capabilities.receive_messages_max), lease=lease, wait=patience
                )
                self._kept += came
                wanted -= len(came)
                patience = 0
                if not came:
                    break
            return [self._draw() for _ in range(min(count_max, len(self._kept)))]

    def close(self) -> None:
        """Give back the messages kept. A receive that waits returns."""
        self.inner.interrupt()
        with self._lock:
            kept, self._kept = self._kept, []
        try:
            for message in kept:
                if message.lease_end > self._clock.monotonic():
                    with suppress(LeaseError):  # by the queue's clock it had ended
                        self.inner.release(message.handle)
        finally:
            self.inner.close()

    def _drop_expired(self) -> None:
        now = self._clock.monotonic()
        self._kept = [message for message in self._kept if message.lease_end > now]

    def _draw(self) -> Received:
        # The oldest message was passed over most often.
        due = self._passed.get(self._kept[0].handle, 0) >= self.window
        place = 0 if due else self._chance.randrange(min(len(self._kept), self.window + 1))
        for message in self._kept[:place]:
            self._passed[message.handle] = self._passed.get(message.handle, 0) + 1
        drawn = self._kept.pop(place)
        self._passed.pop(drawn.handle, None)
        return drawn
