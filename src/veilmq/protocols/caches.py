"""What the codecs keep from one request to the next: bounded caches, and HMAC keys.

Strategy: a cache is a dictionary that is emptied when it is full. Its values are cheap to compute again, a look-up
costs as much as a dictionary's, and no client can make it grow, neither with many texts nor with long ones.

For HMAC (RFC 2104) with a key that is used many times, the two hash states after the key's blocks are computed once and
copied for each text. That takes a third of the time of hmac.digest, which starts from the key each time
(bench/codec.py).
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

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


_BLOCK_BYTES: Final = 64
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))


class Keyed:
    """One key, for a hash of blocks of 64 bytes (SHA-1, SHA-256)."""

    __slots__ = ("_inner", "_outer", "key")

    def __init__(self, key: bytes, algorithm: "Callable[[bytes], Any]" = sha256) -> None:
        self.key = algorithm(key).digest() if len(key) > _BLOCK_BYTES else key
        block = self.key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = algorithm(block.translate(_INNER_PAD))
        self._outer = algorithm(block.translate(_OUTER_PAD))

    def digest(self, text: bytes) -> bytes:
        """The text's HMAC."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        digest: bytes = outer.digest()
        return digest
