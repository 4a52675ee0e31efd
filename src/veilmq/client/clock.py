"""The client's clocks, where alone the client reads the time, and a timer that makes calls at given instants.

Strategy: everything that measures a lease takes a `Clock`, so tests pass their own. `monotonic` decides about leases;
`wall` only stamps what people and other processes read. A thread that sleeps until an instant waits on a condition and
reads the clock again whenever it wakes. A clock that tests move notifies these conditions.

The timer (`Alarm`): one heap and one thread, which starts with the first call. Calls must be short. A cancelled entry
drops its call at once; the empty entry stays in the heap until its instant comes or most of the heap is empty entries.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol, runtime_checkable


class Clock(Protocol):
    """Seconds."""

    def monotonic(self) -> float:
        """Never goes back; keeps counting while the machine is suspended."""
        ...

    def wall(self) -> float:
        """Unix time."""
        ...


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
        ...


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


_CANCELLED_MIN: Final = 64
"""With fewer empty entries than this, cleaning the heap costs more than keeping them."""

log = logging.getLogger("veilmq.worker")
"""The worker is the only one with an alarm."""


class Entry:
    """A planned call."""

    __slots__ = ("_alarm", "call")

    def __init__(self, alarm: "Alarm", call: Callable[[], object]) -> None:
        self._alarm = alarm
        self.call: Callable[[], object] | None = call
        """None after it was made or cancelled."""

    def cancel(self) -> None:
        """Cancel the call. Idempotent, and harmless after the call was made."""
        self._alarm.cancel(self)


class Alarm:
    """Makes calls at instants of the monotonic clock. Thread-safe."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._heap: list[tuple[float, int, Entry]] = []
        self._cancelled = 0
        """Cancelled entries in the heap."""
        self._numbers = count()
        self._changed = sleeping_by(clock, threading.Condition())
        self._started = False
        self._closed = False

    def at(self, when: float, call: Callable[[], object]) -> Entry:
        """Call `call()` at `when`, or a little later."""
        entry = Entry(self, call)
        with self._changed:
            if self._closed:
                return entry
            heapq.heappush(self._heap, (when, next(self._numbers), entry))
            if not self._started:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._started = True
            self._changed.notify()
            return entry

    def cancel(self, entry: Entry) -> None:
        """See `Entry.cancel`."""
        with self._changed:
            if entry.call is None:
                return
            entry.call = None
            self._cancelled += 1
            if self._cancelled >= _CANCELLED_MIN and self._cancelled * 2 > len(self._heap):
                self._heap = [each for each in self._heap if each[2].call is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def close(self) -> None:
        """Drop all calls."""
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
                entry = heapq.heappop(self._heap)[2]
                call, entry.call = entry.call, None
                if call is None:
                    self._cancelled -= 1
                    continue
            try:
                call()
            except Exception:
                log.exception("a timer's call failed")
            del call, entry  # so that the waiting thread keeps nothing alive
