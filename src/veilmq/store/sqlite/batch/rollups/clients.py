"""What each client did in the last hour, counted from the events of committed batches.

Strategy: windows of five minutes, each with the counts of the clients that did something in it. Thousands of events are
added at once: those of each kind are counted by client without a step of Python for each. It is in memory only: after a
restart it begins anew, and says since when it knows. What a client holds is not here, but in the leases.

Before changing it: the number of clients is bounded, and one that is forgotten leaves all windows. An expiry names the
holder of the lease, who was not there.
"""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import compress
from typing import Final

from veilmq.model.events import Event, Kind
from veilmq.model.instant import HOUR_US, MINUTE_US
from veilmq.store.rollups import CLIENT_COUNTS, SeenClients, is_failure, selecting

CLIENTS_MAX: Final = 10_000
WINDOW_US: Final = 5 * MINUTE_US
WINDOWS: Final = HOUR_US // WINDOW_US
_FOR_RETRY: Final = int(Kind.RELEASED_FOR_RETRY)
_EXPIRED: Final = int(Kind.LEASE_EXPIRED)
_RECEIVED, _DELETED, _EXTENDED, _RELEASED, _FAILED, _LOST, _REFUSED = range(len(CLIENT_COUNTS))
_COLUMNS: Final[dict[int, int]] = {
    int(Kind.RECEIVED): _RECEIVED,
    int(Kind.DELETED): _DELETED,
    int(Kind.EXTENDED): _EXTENDED,
    int(Kind.LEASE_RESUMED): _EXTENDED,
    int(Kind.RELEASED): _RELEASED,
    _FOR_RETRY: _RELEASED,
    _EXPIRED: _LOST,
    int(Kind.DELETE_REFUSED): _REFUSED,
    int(Kind.EXTEND_REFUSED): _REFUSED,
}
_SELECTING: Final = {kind: selecting(kind) for kind in _COLUMNS}


class Clients:
    """Counts by origin."""

    def __init__(self) -> None:
        self._since = 0
        """From when on everything is counted; 0: not known yet."""
        self._seen: dict[int, int] = {}
        """When each client did something last; 0 if only its lease ended."""
        self._windows: deque[tuple[int, dict[int, list[int]]]] = deque()
        """When each began, and its counts by client."""
        self._latest = 0
        """Instant of the latest events."""
        self._left_out = 0
        """Events of clients beyond the bound."""

    def turn(self, now: int) -> None:
        """Begin a window if the last one is over, and forget those of more than an hour ago. Call it once a minute."""
        self._since = self._since or now
        begun = now - now % WINDOW_US
        if self._windows and begun <= self._windows[-1][0]:
            return
        self._windows.append((begun, {}))
        while self._windows[0][0] < begun - HOUR_US:
            self._windows.popleft()
            self._since = max(self._since, self._windows[0][0])
        kept: set[int] = set().union(*(counts for _, counts in self._windows))
        self._seen = {origin: at for origin, at in self._seen.items() if origin in kept}

    def add(self, events: list[Event], kinds: bytes) -> None:
        """Count events. kinds: theirs, in their order."""
        present, seen = self._windows[-1][1], self._seen
        self._latest = at = max(self._latest, events[-1].at)
        origins = [event.origin for event in events]
        for kind, column in _COLUMNS.items():
            if kind not in kinds:
                continue
            for origin, count in _counted(origins, kinds, kind):
                counts = present.get(origin)
                if counts is None:
                    if origin not in seen and len(seen) >= CLIENTS_MAX:
                        self._left_out += count
                        continue
                    counts = present[origin] = [0] * len(CLIENT_COUNTS)
                counts[column] += count
                if kind != _EXPIRED:
                    seen[origin] = at
                elif origin not in seen:
                    seen[origin] = 0
        if _FOR_RETRY in kinds:
            for event in events:
                if event.kind == _FOR_RETRY and is_failure(event) and event.origin in present:
                    present[event.origin][_RELEASED] -= 1
                    present[event.origin][_FAILED] += 1

    def state(self, now: int) -> SeenClients:
        """What is known now: a copy, but for the counts of the present window, which go on."""
        self.turn(now)
        windows = [counts.copy() for _, counts in self._windows]
        recent_since = max(self._since, list(self._windows)[-2:][0][0])
        return SeenClients(now, self._since, recent_since, self._seen.copy(), windows, self._left_out)


def _counted(origins: list[int | None], kinds: bytes, kind: int) -> Iterable[tuple[int, int]]:
    """How many events of that kind there are of each client."""
    first = origins[0]
    if first is not None and origins.count(first) == len(origins):
        return [(first, kinds.count(kind))]
    of_kind = compress(origins, kinds.translate(_SELECTING[kind]))
    return [(origin, count) for origin, count in Counter(of_kind).items() if origin is not None]
