"""A dictionary that forgets: the caches of the codecs.

Strategy: emptied when it is full. What fills it is cheap to compute again, a lookup costs what a dictionary's does,
and no client can make it grow.
"""

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
