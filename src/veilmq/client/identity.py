"""Identities: which objects stand for the same queue, so that receivers can share one long poll (receiver/receiver.py).

Strategy: a queue object may have an `identity`, a hashable value. Two objects have equal identities exactly if a
receive from either returns the same messages in the same form, and a handle from one works with the other. So it
contains the endpoint, the region, the credentials, the queue's name and everything else that changes what a receive
returns. Secrets enter only as fingerprints, keyed with a random key of this process. An object without an identity is
equal to itself only.
"""

import hmac
import secrets
from collections.abc import Hashable, Mapping
from typing import Any, Final

_KEY: Final = secrets.token_bytes(32)


class ById:
    """Equal only to the same object, however the object itself compares."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def identity_of(thing: object) -> Hashable:
    """The identity of a queue, or of a part of one; the object itself if it has none."""
    found: Hashable | None = getattr(thing, "identity", None)
    return ById(thing) if found is None else found


def is_closed(queue: object) -> bool:
    """Whether a queue object reports that it is closed, so that requests through it can only fail."""
    return bool(getattr(queue, "closed", False))


def fingerprint(*secret_parts: str | bytes | None) -> bytes:
    """Equal for equal secrets within this process. Reveals nothing else about them, and nothing at all to other
    processes."""
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
