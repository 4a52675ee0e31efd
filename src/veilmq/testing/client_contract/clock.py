"""A client clock that runs in real time and can be moved forward."""

import threading
import weakref

from veilmq.client.clock import SYSTEM


class MovableClock:
    """`veilmq.client.clock.Clock`: the system's clock plus the time added."""

    def __init__(self) -> None:
        self._added = 0.0
        self._sleepers: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return SYSTEM.monotonic() + self._added

    def wall(self) -> float:
        """See `Clock.wall`."""
        return SYSTEM.wall() + self._added

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass (not negative)."""
        assert seconds >= 0, "no clock of ours runs backwards"
        self._added += seconds
        with self._lock:
            sleepers = list(self._sleepers)
        for sleeper in sleepers:
            with sleeper:
                sleeper.notify_all()

    def wakes(self, sleeper: threading.Condition) -> None:
        """See `veilmq.client.clock.Moved`."""
        with self._lock:
            self._sleepers.add(sleeper)
