"""Read pins: protect history that is being read from trimming.

Strategy: a full history loses its oldest events all the time, and a reader that starts with them would never get to
read them. So a reader names the offset that it needs and for how long, and trimming keeps everything from there on.
Pins are bounded: they expire, they let the history grow by at most half its size and for at most ten minutes, and they
are ignored when disk space is low (trimming.py). Pins are kept in buckets of 10 s by expiry, so that any number of
readers takes a few numbers. Their time begins with the next sweep, because the readers' threads do not have the store's
clock.
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
        """The least pinned offset, by the number of ticks that it is to last: pins since the latest sweep."""
        self._held: dict[int, int] = {}
        """The least pinned offset, by the tick in which it expires."""
        self._first = 0

    def keep(self, offset: int, seconds: float) -> int:
        """Protect the history from `offset` on for `seconds` (at most `HOLD_S_MAX`) or some seconds more.

        Returns the first offset that is not trimmed: events before it count as gone, though they may still be readable.
        """
        ticks = ceil(min(seconds, HOLD_S_MAX) / _TICK_S)
        with self._lock:
            self._new[ticks] = min(offset, self._new.get(ticks, offset))
            return self._first

    @contextmanager
    def trimming(self, now: int) -> Iterator["Trimming"]:
        """While the body runs, no pin can be added."""
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
        """The batch that trimmed was rolled back: what it trimmed is there again."""
        with self._lock:
            self._first = 0


class Trimming:
    """One step of trimming: what it must keep, and what is left after it."""

    def __init__(self, held: int | None) -> None:
        self.held = held
        """The least pinned offset; None if there is none."""
        self.first = 0
        """If rows are dropped, set it to the first offset that is left."""
