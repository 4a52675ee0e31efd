"""A timer: calls that are due at an instant.

Strategy: one heap, one thread that starts with the first call. Calls must be short. What is no longer wanted is not
taken out: the call looks for itself.
"""

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count

from veilmq.client.clock import Clock, sleeping_by

log = logging.getLogger("veilmq.worker")


class Alarm:
    """Runs calls at instants of the monotonic clock. Any thread."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._changed = sleeping_by(clock, threading.Condition())
        self._started = False
        self._closed = False

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Call `call()` at `when`, or a little later."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (when, next(self._numbers), call))
            if not self._started:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._started = True
            self._changed.notify()

    def close(self) -> None:
        """Forget all calls."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    pause = self._heap[0][0] - self._clock.monotonic() if self._heap else None
                    if pause is not None and pause <= 0:
                        break
                    self._changed.wait(None if pause is None else min(pause, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                call = heapq.heappop(self._heap)[2]
            try:
                call()
            except Exception:
                log.exception("a timer's call failed")
