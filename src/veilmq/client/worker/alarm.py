"""A timer: calls that are due at an instant.

Strategy: one heap, one thread that starts with the first call. Calls must be short. What is cancelled lets go of its
call at once; its empty entry stays in the heap until its instant comes, or until most of the heap is such entries.
"""

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from veilmq.client.clock import Clock, sleeping_by

_CANCELLED_MIN: Final = 64
"""So few empty entries cost less than to sort them out."""

log = logging.getLogger("veilmq.worker")


class Entry:
    """A call that is to come."""

    __slots__ = ("_alarm", "call")

    def __init__(self, alarm: "Alarm", call: Callable[[], object]) -> None:
        self._alarm = alarm
        self.call: Callable[[], object] | None = call
        """None once it was made or cancelled."""

    def cancel(self) -> None:
        """It is not wanted any more. After it was made, and a second time, nothing happens."""
        self._alarm.cancel(self)


class Alarm:
    """Runs calls at instants of the monotonic clock. Any thread."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._heap: list[tuple[float, int, Entry]] = []
        self._cancelled = 0
        """Entries in the heap that nobody wants."""
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
                entry = heapq.heappop(self._heap)[2]
                call, entry.call = entry.call, None
                if call is None:
                    self._cancelled -= 1
                    continue
            try:
                call()
            except Exception:
                log.exception("a timer's call failed")
            del call, entry  # nothing is held by a thread that waits
