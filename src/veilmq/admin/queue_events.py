"""Counts the events of each queue, for /metrics: rates, and how leases end.

Strategy: a queue gets a place at its first event, up to a bound; a deleted queue frees its place. Events of queues
without a place are counted in one sum, so that no counter decreases and no sum loses an event.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from veilmq.model.queue import QueueKey

QUEUES_MAX: Final = 200


class QueueEvents:
    """Counts by queue and name of the event. One thread at a time."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._counts: dict[int, Counter[str]] = {}
        self._rest: Counter[str] = Counter()

    def count(self, incarnation: int, name: str) -> None:
        """One event of a queue."""
        found = self._counts.get(incarnation)
        if found is None:
            found = self._place(incarnation)
        found[name] += 1

    def _place(self, incarnation: int) -> Counter[str]:
        if len(self._counts) >= QUEUES_MAX:
            return self._rest
        return self._counts.setdefault(incarnation, Counter())

    def keep(self, alive: Mapping[int, QueueKey]) -> None:
        """Forget deleted queues; if there is a place for all existing queues, each gets its own from now on."""
        for incarnation in self._counts.keys() - alive.keys():
            del self._counts[incarnation]
        if len(alive) <= QUEUES_MAX:
            for incarnation in alive:
                self._place(incarnation)

    def shown(self, alive: Mapping[int, QueueKey]) -> Iterator[tuple[tuple[str, str, str, str], int]]:
        """((account, region, queue, event), count), zeros too; empty names: all other queues."""
        for incarnation, counts in self._counts.items():
            key = alive.get(incarnation)
            if key is not None:
                for name in self._names:
                    yield (key.account, key.region, key.name, name), counts[name]
        if self._rest or len(alive) > len(self._counts):
            for name in self._names:
                yield ("", "", "", name), self._rest[name]
