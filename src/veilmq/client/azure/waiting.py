"""Waiting without a long poll: Queue Storage is polled, less and less often.

Strategy: the first pause is short, so that a message that is just arriving is found at once. Each pause is twice the
last, up to one second, so that an idle wait costs at most one request a second. The last request is made when the wait
ends. A close ends a pause at once, and messages of a request still in progress are given back. An interruption ends it
too, but the caller still gets that answer.
"""

import threading
from collections.abc import Callable
from typing import Final

from veilmq.client.clock import Clock, sleeping_by
from veilmq.client.messages import Received

_PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 1.0
"""Seconds between two requests."""


class Waiting:
    """The waits of one queue. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = sleeping_by(clock, threading.Condition())
        self._interrupts = 0
        self._closed = False

    def poll(
        self, ask: Callable[[], list[Received]], wait: float, give_back: Callable[[list[Received]], None]
    ) -> list[Received]:
        """Repeat `ask` until it returns messages or `wait` seconds are over; return the messages."""
        deadline = self._clock.monotonic() + wait
        interrupts = self._interrupts
        pause = _PAUSE_MIN
        while True:
            found = ask()
            if self._closed:
                give_back(found)
                return []
            left = deadline - self._clock.monotonic()
            if found or left <= 0:
                return found
            with self._changed:
                if self._interrupts == interrupts:
                    self._changed.wait(min(pause, left))
                if self._interrupts != interrupts:
                    return []
            pause = min(2 * pause, PAUSE_MAX)

    def interrupt(self) -> None:
        """End the current waits."""
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, and start no more."""
        self._closed = True
        self.interrupt()
