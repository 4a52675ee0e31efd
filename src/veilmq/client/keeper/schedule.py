"""When to look at which lease: a heap of instants, a set of leases each.

Strategy: instants are rounded down to slots, so that neighbours are looked at, and extended, together, and the heap
holds a few hundred keys for any number of leases. A slot is as wide as `width`, or as a sixteenth of the time that is
left where that is more: a look that comes too early for its lease only puts it into a finer slot. A lease leaves its
slot at once when it is done, so that nothing here keeps a body alive.
"""

import heapq
import math
from typing import Final, Generic, TypeVar

from veilmq.client.keeper.hold import Hold

_FINENESS: Final = 16
H = TypeVar("H", bound=Hold)


class Schedule(Generic[H]):
    """Each lease is in at most one slot: `hold.slot`, None if in none."""

    def __init__(self, width: float) -> None:
        self.width = width
        """Seconds: a look comes at most this much early."""
        self._slots: dict[float, set[H]] = {}
        self._heap: list[float] = []

    def put(self, hold: H, at: float, now: float) -> None:
        """Look at `hold` at `at`, or less than a slot before; replaces what was planned."""
        width = self.width
        if at - now > width * _FINENESS:
            width = math.ldexp(width, math.frexp((at - now) / (width * _FINENESS))[1] - 1)
        slot = max(at // width * width, 0.0)
        if slot == hold.slot:
            return
        if hold.slot is not None:
            self._slots[hold.slot].discard(hold)
        hold.slot = slot
        holds = self._slots.get(slot)
        if holds is None:
            holds = self._slots[slot] = set()
            heapq.heappush(self._heap, slot)
        holds.add(hold)

    def drop(self, hold: H) -> None:
        """Never look at `hold`."""
        if hold.slot is not None:
            self._slots[hold.slot].discard(hold)
            hold.slot = None

    def take(self, now: float, count_max: int) -> list[H]:
        """Up to `count_max` leases whose instant has come, earliest slots first; they are in no slot then."""
        taken: list[H] = []
        while self._heap and self._heap[0] <= now and len(taken) < count_max:
            holds = self._slots[self._heap[0]]
            while holds and len(taken) < count_max:
                hold = holds.pop()
                hold.slot = None
                taken.append(hold)
            if not holds:
                del self._slots[heapq.heappop(self._heap)]
        return taken

    def next(self) -> float:
        """The instant of the next look; infinite if there is none."""
        while self._heap and not self._slots[self._heap[0]]:
            del self._slots[heapq.heappop(self._heap)]
        return self._heap[0] if self._heap else math.inf
