"""Counts of receives, by queue, principal and minute: the `polled` events.

Strategy: counted in memory and appended to the history once a minute; a crash loses only the current minute. Counting
per principal, not per user agent, bounds the memory: a client can send any number of user agents.
"""

from veilmq.model.commands import Origin, PollCount, Receive
from veilmq.model.settings.queue import QueueKey

POLLERS_MAX = 10_000
"""Distinct (queue, principal) pairs counted in one minute; more are not counted."""


class Polls:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[QueueKey, str], list[int]] = {}
        self._origins: dict[tuple[QueueKey, str], Origin] = {}
        # A client that polls in a loop has the same two values each time.
        self._queue: QueueKey | None = None
        self._origin: Origin | None = None
        self._last = [0, 0, 0]

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, command: Receive, *, empty: bool, refused: bool = False) -> None:
        """A receive was answered."""
        if command.queue is not self._queue or command.origin is not self._origin:
            counts = self._find(command)
            if counts is None:
                return
            self._queue, self._origin, self._last = command.queue, command.origin, counts
        self._last[0] += 1
        self._last[1] += empty
        self._last[2] += refused

    def _find(self, command: Receive) -> list[int] | None:
        key = (command.queue, command.origin.principal)
        counts = self._counts.get(key)
        if counts is None and len(self._counts) < POLLERS_MAX:
            counts = self._counts[key] = [0, 0, 0]
            self._origins[key] = command.origin
        return counts

    def take(self) -> tuple[PollCount, ...]:
        """All counts; the next minute begins."""
        taken = tuple(PollCount(key[0], self._origins[key], *counts) for key, counts in self._counts.items())
        self._counts = {}
        self._origins = {}
        self._queue = self._origin = None
        return taken
