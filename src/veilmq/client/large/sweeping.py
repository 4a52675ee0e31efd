"""Removes objects whose messages are gone, left by crashes, lost answers and expired messages.

Strategy: an object is old enough when no message can point to it any more: after a message's life in its queue, plus
its life in the dead-letter queues that it moves to, plus an hour for clock differences and for the time between upload
and send. A smaller `older_than` is refused. An object has two ages, by its name and by the store; the younger counts. A
sweep judges objects without their messages, so all that it needs is in the name:

    QUEUE/1767225600-0-5f0c...        sent at that Unix second; lives as long as its queue retains messages
    QUEUE/1767225600-86400-5f0c...    a message with its own time to live
"""

import math
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.queue import Queue
from veilmq.client.records.objects import Found, ObjectStore
from veilmq.model.errors import ParameterInvalid

_CHANCE_BYTES: Final = 16
_STAMP: Final = re.compile(r"(?:\A|/)([0-9]{1,12})-([0-9]{1,12})-[0-9a-f]{32}(?:/|\Z)")


def new_stamp(clock: Clock, ttl: Any) -> str:
    """A name for a new object. Raises ParameterInvalid for a ttl that is not a number of seconds."""
    if ttl is not None and not (isinstance(ttl, int | float) and math.isfinite(ttl) and ttl > 0):
        raise ParameterInvalid(parameter="ttl", reason=f"must be a number of seconds above 0, not {ttl!r}")
    life = 0 if ttl is None else math.ceil(ttl)
    return f"{int(clock.wall())}-{life}-{secrets.token_hex(_CHANCE_BYTES)}"


def made_and_life(key: str) -> tuple[float, float] | None:
    """Unix seconds of the send, and the message's own time to live or 0, from a key; None if it has another form."""
    found = _STAMP.search(key)
    return None if found is None else (float(found[1]), float(found[2]))


MARGIN: Final = 3_600.0
"""Seconds."""


class Swept(msgspec.Struct, frozen=True):
    """Objects that a sweep removed, and those that it kept because they are too young."""

    objects: int
    size_bytes: int
    left: int


def longest_life(queue: Queue, retention: float | None, dead_letters: Sequence[Queue]) -> float:
    """Seconds that a message without its own time to live may live, in this queue and those it moves to.

    Raises ParameterInvalid if a queue does not report its retention and none was given.
    """
    life = _retention(queue) if retention is None else retention
    return life + sum(_retention(each) for each in dead_letters)


def checked_age(older_than: float, life: float) -> float:
    """The age. Raises ParameterInvalid if an object of that age may still belong to a live message."""
    if not older_than >= life + MARGIN:  # also refuses NaN
        reason = (
            f"must be {life + MARGIN:.0f} s at least: messages live {life:.0f} s, and clocks differ; not {older_than}"
        )
        raise ParameterInvalid(parameter="older_than", reason=reason)
    return older_than


def sweep(store: ObjectStore, below: str, older_than: float, now: float) -> Swept:
    """Remove objects that are older. `now` is Unix seconds. Raises ObjectStoreFailed; can be repeated."""
    objects = size_bytes = left = 0
    for found in store.list(below):
        if not _is_over(found, older_than, now):
            left += 1
            continue
        store.remove(found.key)
        objects += 1
        size_bytes += found.size_bytes
    return Swept(objects, size_bytes, left)


def _is_over(found: Found, older_than: float, now: float) -> bool:
    named = made_and_life(found.key)
    made = [made for made in (found.modified, named and named[0]) if made is not None]
    if not made:
        return False
    own_life = named[1] + MARGIN if named and named[1] else 0.0
    return now - max(made) > max(older_than, own_life)


def _retention(queue: Queue) -> float:
    told = queue.stats().retention
    if told is None:
        raise ParameterInvalid(parameter="retention", reason=f"queue {queue.name} does not tell it: name it")
    return told
