"""A timer: makes calls at given instants.

Strategy: one heap and one thread, which starts with the first call. Calls must be short. A cancelled entry drops its
call at once; the empty entry stays in the heap until its instant comes or most of the heap is empty entries.
"""

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from veilmq.client.clock import Clock, sleeping_by

_CANCELLED_MIN: Final = 64
"""With fewer empty entries than this, cleaning the heap costs more than keeping them."""

log = logging.getLogger("veilmq.worker")


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
