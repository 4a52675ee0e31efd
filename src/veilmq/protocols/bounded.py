"""A dictionary that forgets, and readers that remember: the caches of the codecs.

Strategy: a dictionary is emptied when it is full. What fills it is cheap to compute again, a lookup costs what a
dictionary's does, and no client can make it grow: neither by many texts nor by long ones.
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
        """Remember the value, and return it."""
        if len(self) >= self._entries_max:
            self.clear()
        self[key] = value
        return value


Text = TypeVar("Text", bytes, str)


def remembered(longest: int) -> Callable[[Callable[[Text], Value | None]], Callable[[Text], Value | None]]:
    """Decorates a reader: it remembers, and what is longer than anything it reads is None, and not remembered."""

    def remembering(read: Callable[[Text], Value | None]) -> Callable[[Text], Value | None]:
        known = lru_cache(1_024)(read)

        @wraps(known)
        def short(text: Text) -> Value | None:
            return known(text) if len(text) <= longest else None

        return short

    return remembering
