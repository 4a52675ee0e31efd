"""The client's clocks: the one place of the client that reads them.

Strategy: everything that measures a lease takes a `Clock`; tests bring their own. `monotonic` judges leases, `wall`
only stamps what people and other processes read. A clock that tests move is told who sleeps by it, and wakes them.

Pauses: a thread that sleeps until an instant of a clock sleeps on a condition, and looks at the clock again whenever it
wakes. A clock that tests move wakes whoever sleeps by it.
"""

import threading
import time
from typing import Protocol, runtime_checkable


class Clock(Protocol):
    """Seconds."""

    def monotonic(self) -> float:
        """Never goes back; counts while the machine sleeps."""
        ...

    def wall(self) -> float:
        """Unix time."""
        ...


class SystemClock:
    """CLOCK_BOOTTIME where there is one, so that a suspended laptop knows that its leases ended."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def wall(self) -> float:
        return time.time()


SYSTEM = SystemClock()


@runtime_checkable
class Moved(Protocol):
    """What a clock has besides that tests move (`veilmq.testing.client_contract.clock.MovableClock`)."""

    def wakes(self, sleeper: threading.Condition) -> None:
        """Notify it whenever the clock was moved, as long as it lives."""
        ...


def sleeping_by(clock: Clock, sleeper: threading.Condition) -> threading.Condition:
    """`sleeper`, on which threads wait for an instant of `clock` and look again when they wake."""
    moved: object = clock
    if isinstance(moved, Moved):
        moved.wakes(sleeper)
    return sleeper


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
