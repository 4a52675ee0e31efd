"""Received messages that wait to be worked.

Strategy: one line. On FIFO queues each group has a lane and stands in the line once, and not at all while one of its
messages is worked; so no two messages of a group run at the same time and none overtakes another. Receives reserve
their places first, so the messages in hand never exceed the capacity. Only as many takers are woken as there are items,
because there may be hundreds. Generic over the items; starts no threads.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Grouped(Protocol):
    """An item that can wait here."""

    @property
    def lane(self) -> str | None: ...


Item = TypeVar("Item", bound=Grouped)


class Ready(Generic[Item]):
    """Up to `capacity` items, reserved or in hand (waiting or being worked). Thread-safe."""

    def __init__(self, capacity: int, quota: int | None = None) -> None:
        """quota: how many places can be reserved in total."""
        self.capacity = capacity
        self._quota = quota
        self.in_hand = 0
        self._reserved = 0
        self._line: deque[Item | str] = deque()
        self._lanes: dict[str, deque[Item]] = {}
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        """Notified when the line grows, for takers."""
        self._less = threading.Condition(self._lock)
        """Notified when fewer places are in use, for receives and `wait_until_free`."""
        self._closed = False

    def reserve(self, most: int, timeout: float | None = None) -> int:
        """Reserve places for a receive: at least 1, at most `most`.

        0 if it is closed, the quota is used up, or `timeout` seconds have passed.
        """
        with self._lock:
            self._less.wait_for(lambda: self._closed or self._used_up() or self._free() > 0, timeout)
            if self._closed:
                return 0
            found = max(0, min(most, self._free()))
            self._reserved += found
            if self._quota is not None:
                self._quota -= found
            return found

    def give_back(self, places: int) -> None:
        """Return reserved places that no item took."""
        with self._lock:
            self._reserved -= places
            if self._quota is not None:
                self._quota += places
            self._less.notify_all()

    def put(self, items: Sequence[Item]) -> bool:
        """Put all items in line, in reserved places. False if it is closed: the caller keeps the items and the
        places."""
        with self._lock:
            if self._closed:
                return False
            self._reserved -= len(items)
            self.in_hand += len(items)
            for item in items:
                self._append(item)
            self._more.notify(len(items))
            return True

    def take(self, most: int) -> list[Item]:
        """Wait for items and take up to `most`; empty when closed. Their groups wait until `done`."""
        with self._lock:
            while not self._line:
                if self._closed:
                    return []
                self._more.wait()
            taken: list[Item] = []
            while self._line and len(taken) < most:
                first = self._line.popleft()
                if not isinstance(first, str):
                    taken.append(first)
                    continue
                self._busy.add(first)
                lane = self._lanes[first]
                while lane and len(taken) < most:
                    taken.append(lane.popleft())
                if not lane:
                    del self._lanes[first]
            return taken

    def done(self, items: Sequence[Item]) -> None:
        """Report taken items as finished, whatever their outcome."""
        with self._lock:
            self.in_hand -= len(items)
            for lane in {item.lane for item in items} - {None}:
                assert lane is not None
                self._busy.discard(lane)
                if lane in self._lanes:
                    self._line.append(lane)
                    self._more.notify()
            self._less.notify_all()

    def holds(self, lane: str | None) -> bool:
        """Whether items of this group wait."""
        with self._lock:
            return lane in self._lanes

    def withdraw(self, lane: str) -> list[Item]:
        """Remove a group's waiting items, in order: they must not run after a failure. Their places become free."""
        with self._lock:
            rest = list(self._lanes.pop(lane, ()))
            self.in_hand -= len(rest)
            if lane not in self._busy and lane in self._line:
                self._line.remove(lane)
            self._less.notify_all()
            return rest

    def close(self) -> list[Item]:
        """Accept and hand out nothing more. Returns all waiting items, in order."""
        with self._lock:
            self._closed = True
            rest: list[Item] = []
            for each in self._line:
                rest += [each] if not isinstance(each, str) else self._lanes.pop(each)
            for lane in self._lanes.values():
                rest += lane
            self._line.clear()
            self._lanes.clear()
            self.in_hand -= len(rest)
            self._more.notify_all()
            self._less.notify_all()
            return rest

    def wait_until_free(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds until nothing is in hand. Returns whether that happened."""
        with self._lock:
            return self._less.wait_for(lambda: self.in_hand == 0, timeout)

    def wait_until_closed(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until it is closed. Returns whether it is."""
        with self._lock:
            return self._less.wait_for(lambda: self._closed, timeout)

    def _append(self, item: Item) -> None:
        lane = item.lane
        if lane is None:
            self._line.append(item)
            return
        waiting = self._lanes.get(lane)
        if waiting is None:
            waiting = self._lanes[lane] = deque()
            if lane not in self._busy:
                self._line.append(lane)
        waiting.append(item)

    def _free(self) -> int:
        free = self.capacity - self.in_hand - self._reserved
        return free if self._quota is None else min(free, self._quota)

    def _used_up(self) -> bool:
        return self._quota == 0 and self._reserved == 0
