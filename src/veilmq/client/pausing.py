"""Pauses that end early: told to stop, or because a test moved the clock.

Strategy: a thread that sleeps until an instant of a clock sleeps on a condition, and looks at the clock again whenever
it wakes. A clock that tests move wakes whoever sleeps by it.
"""

import threading

from veilmq.client.clock import Clock, sleeping_by


class Stop:
    """As threading.Event, but that its waits go by a clock. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = sleeping_by(clock, threading.Condition())
        self._set = False

    def set(self) -> None:
        """All waits end."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Begin anew."""
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds of the clock; whether it is set."""
        end = self._clock.monotonic() + seconds
        with self._changed:
            while not self._set and (left := end - self._clock.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            return self._set
