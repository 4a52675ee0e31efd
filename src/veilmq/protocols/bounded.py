"""Bounded caches for the codecs.

Strategy: a cache is a dictionary that is emptied when it is full. Its values are cheap to compute again, a look-up
costs as much as a dictionary's, and no client can make it grow, neither with many texts nor with long ones.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """Holds at most `entries_max` entries."""

    __slots__ = ("_entries_max",)

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def keep(self, key: Key, value: Value) -> Value:
        """Store the value, and return it."""
        if len(self) >= self._entries_max:
            self.clear()
        self[key] = value
        return value


Text = TypeVar("Text", bytes, str)


def remembered(longest: int) -> Callable[[Callable[[Text], Value | None]], Callable[[Text], Value | None]]:
    """Decorator that caches a parser's results. A text longer than `longest` gives None and is not cached."""

    def remembering(read: Callable[[Text], Value | None]) -> Callable[[Text], Value | None]:
        known = lru_cache(1_024)(read)

        @wraps(known)
        def short(text: Text) -> Value | None:
            return known(text) if len(text) <= longest else None

        return short

    return remembering
