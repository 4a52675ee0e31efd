"""Runs in a trace: repeated events of one message become one line with a count and a time span.

Strategy: events are equal if everything but their times and lease lengths is. A run is one event or a sequence of up to
three (an extension that stores a checkpoint is two events) that repeats at least three times without a gap. Any kind of
event is folded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_LENGTH_MAX: Final = 3
"""Longest sequence that is recognized as repeating."""
_TIMES_MIN: Final = 3
_ALIKE: Final = ("kind", "account", "region", "queue", "attempt", "protocol", "principal", "client", "detail")


class Run(NamedTuple):
    """Events shown in one line: a repeated sequence of `length` events, or one event."""

    events: Sequence[Mapping[str, Any]]
    length: int = 1

    @property
    def times(self) -> int:
        """How often the sequence occurs."""
        return len(self.events) // self.length

    @property
    def span_us(self) -> int:
        """From the first event to the last."""
        return int(self.events[-1]["at"]) - int(self.events[0]["at"])


def runs(events: Sequence[Mapping[str, Any]]) -> list[Run]:
    """All events, in their order."""
    keys = [tuple(repr(event.get(name)) for name in _ALIKE) for event in events]
    found, at = [], 0
    while at < len(events):
        length, count = _longest(keys, at)
        found.append(Run(events[at : at + length * count], length))
        at += length * count
    return found


def _longest(keys: list[tuple[str, ...]], at: int) -> tuple[int, int]:
    """The longest run from `at` on: (length of the sequence, repetitions); (1, 1) if nothing repeats."""
    best = (1, 1)
    for length in range(1, _LENGTH_MAX + 1):
        pattern, count = keys[at : at + length], 1
        while keys[at + count * length : at + (count + 1) * length] == pattern:
            count += 1
        if count >= _TIMES_MIN and length * count > best[0] * best[1]:
            best = (length, count)
    return best
