"""Delayed empty answers, for clients that poll in a tight loop beyond the cap on waiting receives.

Strategy: a heap of due instants; the entry of a client that hung up is skipped when it is due. No message wakes these
tickets: their answer is decided and only sent later.
"""

from heapq import heappop, heappush
from typing import Any

from veilmq.model.instant import Instant


class Brake:
    """Tickets whose empty answer is due later."""

    def __init__(self) -> None:
        self._dues: list[tuple[Instant, int, Any]] = []
        self._held: set[Any] = set()
        self._places = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, ticket: Any, due: Instant) -> None:
        """Answer the ticket at `due`."""
        self._places += 1
        self._held.add(ticket)
        heappush(self._dues, (due, self._places, ticket))

    def cancel(self, ticket: Any) -> bool:
        """Forget the ticket of a client that is gone. Returns whether it was held."""
        held = ticket in self._held
        self._held.discard(ticket)
        return held

    def take_due(self, now: Instant) -> list[Any]:
        """Take out all whose answer is due."""
        due = []
        while self._dues and (self._dues[0][0] <= now or self._dues[0][2] not in self._held):
            ticket = heappop(self._dues)[2]
            if ticket in self._held:
                self._held.remove(ticket)
                due.append(ticket)
        return due

    def take_all(self) -> list[Any]:
        """Take out all tickets."""
        everybody = [ticket for _, _, ticket in sorted(self._dues, key=lambda due: due[:2]) if ticket in self._held]
        self._dues, self._held = [], set()
        return everybody

    def next_due(self) -> Instant | None:
        """The earliest due instant."""
        return self._dues[0][0] if self._dues else None
