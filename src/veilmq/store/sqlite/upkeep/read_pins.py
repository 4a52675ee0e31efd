"""Read pins: offsets from which the history is being read, so that it is not trimmed from there on.

Strategy: a full history loses its oldest events all the time, and a reader that starts with them would never get to
read them. So a reader names the offset that it needs and for how long, and trimming spares everything from there on.
Pins are bounded: they end by themselves, they let the history grow by no more than half its size and ten minutes, and
they are ignored on a low disk (trimming.py). Pins are bucketed by 10 s of expiry, so any number of readers is a few
numbers. Their time begins with the next sweep, because readers' threads have no clock of the store's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Final

from veilmq.model.instant import SECOND_US
from veilmq.store.reader import HOLD_S_MAX

_TICK_S: Final = 10


class ReadPins:
    """The offsets that readers of one store need. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[int, int] = {}
        """The least offset by ticks from now on ..."""
        self._held: dict[int, int] = {}
        """... and by the tick in which its time is over."""
        self._first = 0

    def keep(self, offset: int, seconds: float) -> int:
        """Spare what comes from `offset` on for so long, at most `HOLD_S_MAX`, or some seconds more.

        Returns the first offset that trimming has left: what is before it is gone, though it may still be seen.
        """
        ticks = ceil(min(seconds, HOLD_S_MAX) / _TICK_S)
        with self._lock:
            self._new[ticks] = min(offset, self._new.get(ticks, offset))
            return self._first

    @contextmanager
    def trimming(self, now: int) -> Iterator["Trimming"]:
        """While the body runs, no pin begins."""
        with self._lock:
            tick = now // (_TICK_S * SECOND_US)
            self._held = {end: offset for end, offset in self._held.items() if end > tick}
            for ticks, offset in self._new.items():
                end = tick + ticks + 1
                self._held[end] = min(offset, self._held.get(end, offset))
            self._new = {}
            step = Trimming(min(self._held.values(), default=None))
            yield step
            self._first = max(self._first, step.first)

    def forget(self) -> None:
        """What was trimmed is back: its batch was rolled back."""
        with self._lock:
            self._first = 0


class Trimming:
    """One step of it: what it has to spare, and what it leaves."""

    def __init__(self, held: int | None) -> None:
        self.held = held
        """The least offset that is held; None if nothing is."""
        self.first = 0
        """To be set to the first offset that is left, if something goes."""
