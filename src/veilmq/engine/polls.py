"""Counts of receives, by queue, principal and minute: the `polled` events.

Strategy: counted in memory and appended to the history once a minute; a crash loses the minute under way and nothing
else. What a sender of many user agents could blow up is bounded by counting per principal only.
"""

from veilmq.model.commands import Origin, PollCount, Receive
from veilmq.model.queue import QueueKey

POLLERS_MAX = 10_000
"""Distinct (queue, principal) pairs counted in one minute; more are not counted."""


class Polls:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[QueueKey, str], list[int]] = {}
        self._origins: dict[tuple[QueueKey, str], Origin] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, command: Receive, *, empty: bool, refused: bool = False) -> None:
        """A receive was answered."""
        key = (command.queue, command.origin.principal)
        counts = self._counts.get(key)
        if counts is None:
            if len(self._counts) >= POLLERS_MAX:
                return
            counts = self._counts[key] = [0, 0, 0]
            self._origins[key] = command.origin
        counts[0] += 1
        counts[1] += empty
        counts[2] += refused

    def take(self) -> tuple[PollCount, ...]:
        """All counts; the next minute begins."""
        taken = tuple(PollCount(key[0], self._origins[key], *counts) for key, counts in self._counts.items())
        self._counts = {}
        self._origins = {}
        return taken
