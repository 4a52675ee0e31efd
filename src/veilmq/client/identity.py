"""Which objects stand for the same queue, so that receivers over them can share one parked poll (receiver/polling.py).

Strategy: a queue object may have an `identity`, a hashable value. It is equal for two objects exactly if a receive over
either brings the same messages in the same form, and a handle that came over one works over the other. So it holds the
endpoint, the region, the credentials, the queue's name and whatever else changes what a receive returns. Of secrets it
holds only a fingerprint, under a key that this process draws. An object without an identity stands for itself alone.
"""

import hmac
import secrets
from collections.abc import Hashable, Mapping
from typing import Any, Final

_KEY: Final = secrets.token_bytes(32)


class ById:
    """Equal only for the same object, whatever the object says of itself."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def identity_of(thing: object) -> Hashable:
    """The identity of a queue, or of what a queue is made with; that of the object if it says none."""
    found: Hashable | None = getattr(thing, "identity", None)
    return ById(thing) if found is None else found


def is_closed(queue: object) -> bool:
    """Whether a queue object says that it is closed: requests over it can only fail."""
    return bool(getattr(queue, "closed", False))


def fingerprint(*secret_parts: str | bytes | None) -> bytes:
    """Equal for equal secrets within this process. Tells nothing else about them, to other processes neither."""
    return hmac.digest(_KEY, repr(secret_parts).encode(), "sha256")


def options_identity(options: Mapping[str, Any]) -> Hashable | None:
    """A fingerprint of plain options, which may hold credentials; None if one of them is an object."""
    return fingerprint(repr(sorted(options.items()))) if _is_plain(dict(options)) else None


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, bytes, int, float, bool)
