"""The history: what happened to every queue and message, without bodies.

Strategy: one flat struct for all kinds, so that a reader gets one table. The store packs the events of a commit into
one row; the offset of an event is the row's first offset plus its place. Names that repeat (protocol, principal,
client) are numbered once in the store and joined again for readers (`EventRecord`). Offsets order the log; instants
need not: an expiry carries the instant at which it was due, and is appended when it is first applied.
"""

from enum import IntEnum
from typing import Any, Final

import msgspec

from veilmq.model.instant import Instant

SCHEMA_VERSION: Final = 1


class Kind(IntEnum):
    """What happened. Numbers are stored: never reuse one."""

    QUEUE_CREATED = 1
    QUEUE_CHANGED = 2
    QUEUE_DELETED = 3
    SENT = 4
    RECEIVED = 5
    EXTENDED = 6
    RELEASED = 7
    LEASE_EXPIRED = 8
    DELETED = 9
    DELETE_REFUSED = 10
    EXTEND_REFUSED = 11
    DEAD_LETTERED = 12
    EXPIRED = 13
    MOVED = 14
    PURGED = 15
    UNDELIVERED = 16
    CONTENT_UPDATED = 17
    DUPLICATE_ABSORBED = 18
    PUSHED = 19
    POLLED = 20
    QUARANTINED = 21
    SNAPSHOT = 22
    TOPIC_CREATED = 23
    TOPIC_CHANGED = 24
    TOPIC_DELETED = 25
    SUBSCRIBED = 26
    SUBSCRIPTION_CHANGED = 27
    UNSUBSCRIBED = 28
    PUBLISHED = 29


class Refusal:
    """Reasons in `detail["reason"]` of refused deletes and extends."""

    STALE: Final = "stale"
    EXPIRED: Final = "expired"
    GONE: Final = "gone"


class Event(msgspec.Struct, array_like=True, gc=False):
    """One event as it is stored. What a kind does not have is None."""

    kind: int
    at: Instant
    queue: int | None
    """The queue's incarnation."""
    origin: int | None = None
    """Row of the store's table of origins; for an expiry, the holder's."""
    message: bytes | None = None
    sequence: int | None = None
    attempt: int | None = None
    """For a refusal, the handle's."""
    rotation: int | None = None
    lease_us: int | None = None
    """Length of the lease granted or set, from `at`."""
    source: int | None = None
    """`LeaseSource`."""
    sent: Instant | None = None
    visible_since: Instant | None = None
    held_us: int | None = None
    """From the grant of the lease to this event."""
    body_bytes: int | None = None
    group: str | None = None
    type: str | None = None
    detail: dict[str, Any] | None = None
    """What only this kind has: settings, counts, a dead-letter target, a reason ..."""


class EventRecord(msgspec.Struct, kw_only=True, gc=False):
    """One event as readers get it: numbers joined with their names."""

    offset: int
    kind: str
    at: Instant
    account: str | None = None
    region: str | None = None
    queue: str | None = None
    incarnation: int | None = None
    protocol: str | None = None
    principal: str | None = None
    client: str | None = None
    message: str | None = None
    sequence: int | None = None
    attempt: int | None = None
    rotation: int | None = None
    lease_us: int | None = None
    source: str | None = None
    sent: Instant | None = None
    visible_since: Instant | None = None
    held_us: int | None = None
    body_bytes: int | None = None
    group: str | None = None
    type: str | None = None
    detail: dict[str, Any] | None = None


class HistoryTrimmed(Exception):
    """The events below `first_offset` are gone (HTTP 410)."""

    def __init__(self, first_offset: int) -> None:
        super().__init__(f"the history begins at offset {first_offset}")
        self.first_offset = first_offset
