"""The client's clocks, where alone the client reads the time.

Strategy: everything that measures a lease takes a `Clock`, so tests pass their own. `monotonic` decides about leases;
`wall` only stamps what people and other processes read. A thread that sleeps until an instant waits on a condition and
reads the clock again whenever it wakes. A clock that tests move notifies these conditions.
"""

import threading
import time
from typing import Protocol, runtime_checkable


class Clock(Protocol):
    """Seconds."""

    def monotonic(self) -> float:
        """Never goes back; keeps counting while the machine is suspended."""

    def wall(self) -> float:
        """Unix time."""


class SystemClock:
    """CLOCK_BOOTTIME where available, so that a laptop that was suspended notices that its leases have ended."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def wall(self) -> float:
        return time.time()


SYSTEM = SystemClock()


@runtime_checkable
class Moved(Protocol):
    """The additional method of a clock that tests move (`veilmq.testing.client_contract.stage.MovableClock`)."""

    def wakes(self, sleeper: threading.Condition) -> None:
        """Notify `sleeper` whenever the clock is moved, as long as `sleeper` exists."""


def sleeping_by(clock: Clock, sleeper: threading.Condition) -> threading.Condition:
    """Return `sleeper`, registered with `clock` if tests move that. Threads wait on it for an instant and read the
    clock again when they wake."""
    moved: object = clock
    if isinstance(moved, Moved):
        moved.wakes(sleeper)
    return sleeper


class Stop:
    """Like threading.Event, but its waits follow a clock. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = sleeping_by(clock, threading.Condition())
        self._set = False

    def set(self) -> None:
        """End all waits."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Reset."""
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` by the clock; return whether it is set."""
        end = self._clock.monotonic() + seconds
        with self._changed:
            while not self._set and (left := end - self._clock.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            return self._set
