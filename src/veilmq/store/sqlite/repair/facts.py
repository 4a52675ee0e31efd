"""What the history says about messages whose rows are in doubt.

Strategy: go through all events that can be read, and remember for the wanted messages whether they are still there. An
event names a message by sequence and id, so one damaged number makes no statement about another message. Where events
are missing, a message counts as there: it is delivered once more rather than lost.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from veilmq.model.events import Event, Kind, Part
from veilmq.store.sqlite.tools.books import Entered, entered, note_settings

_LEAVES = frozenset({Kind.DELETED, Kind.EXPIRED, Kind.DEAD_LETTERED, Kind.MOVED, Kind.QUARANTINE_DROPPED})
_EMPTIES = frozenset({Kind.PURGED, Kind.QUEUE_DELETED})


class Received(NamedTuple):
    """The latest lease of a message."""

    at: int
    due: int
    origin: int
    attempt: int


class Facts:
    """What became of the wanted messages."""

    def __init__(self, wanted: Callable[[int], bool]) -> None:
        """wanted: whether a sequence is in doubt."""
        self._wanted = wanted
        self.alive: dict[int, Entered] = {}
        """By sequence: those that were in a queue at the end."""
        self.left: set[tuple[int, bytes]] = set()
        """Sequences and ids of those that had left."""
        self.updated: set[int] = set()
        """Sequences of those that got another body."""
        self.received: dict[int, Received] = {}
        self.has_snapshot = False
        """Whether a snapshot came to its end: it names every message."""
        self.settings: dict[int, dict[str, Any]] = {}
        """By incarnation: the account, region, name and settings of a queue."""

    def learn(self, events: Iterable[Event]) -> None:
        """Take these events into account, in their order."""
        for event in events:
            self._learn(event)

    def _learn(self, event: Event) -> None:
        kind, sequence = event.kind, event.sequence
        if event.queue is None:
            self.has_snapshot |= kind == Kind.SNAPSHOT and (event.detail or {}).get("part") == Part.END
            return
        note_settings(self.settings, event)
        if kind in _EMPTIES:
            self._empty(event.queue)
        elif sequence is not None and event.message is not None and self._wanted(sequence):
            if kind in _LEAVES:
                self.left.add((sequence, event.message))
                self.alive.pop(sequence, None)
            elif kind == Kind.CONTENT_UPDATED:
                self.updated.add(sequence)
            elif kind == Kind.RECEIVED:
                due = event.at + (event.lease_us or 0)
                self.received[sequence] = Received(event.at, due, event.origin or 0, event.attempt or 1)
        for each in entered(event):
            if self._wanted(each.sequence):
                self.alive[each.sequence] = each

    def _empty(self, queue: int) -> None:
        for sequence in [each for each, fact in self.alive.items() if fact.queue == queue]:
            self.left.add((sequence, self.alive.pop(sequence).id))
