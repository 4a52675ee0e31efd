"""The history: what happened to every queue and message, without bodies.

Strategy: one flat struct for all kinds, so that a reader gets one table. The store packs the events of a commit into
one row; the offset of an event is the row's first offset plus its place. Repeated names (protocol, principal, client)
are stored once, by number, and joined for readers (`EventRecord`). Offsets order the log; instants need not: an expiry
carries the instant at which it was due, and is appended when it is first applied.

A snapshot is a series of SNAPSHOT events with other events in between: `begin`, a `queue` for each queue, `messages`
with some messages each, `end`. Each one states what was true at its own offset and overrides earlier knowledge; other
events apply as usual. A reader that starts at a `begin` knows the whole state at its `end`. A `begin` that is followed
by another before its `end` is void.
"""

from enum import IntEnum
from typing import Any, Final

import msgspec

from veilmq.model.instant import Instant
from veilmq.model.messages import id_text

SCHEMA_VERSION: Final = 1
_IDS: Final = ("target_message", "published")
"""Detail fields with a message id, stored in hexadecimal; no kind has both."""


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
    LEASE_RESUMED = 30
    """An extend with a current handle whose lease had ended: the message is in flight again."""
    RELEASED_FOR_RETRY = 31
    """The worker gave the message back for a retry after `lease_us`."""
    EXPIRED_AFTER_CHANGE = 32
    """A lease expired that its holder had shortened, most likely to give the message back with a delay."""
    RETRY_DUE = 33
    """The delay of RELEASED_FOR_RETRY is over."""
    QUARANTINE_DROPPED = 34
    """An operator deleted a message from quarantine. It left its queue, for the books, when it was QUARANTINED."""
    PEEKED = 35
    """Somebody read the body of the message by its id, without a lease."""
    OPERATOR_COMMAND = 36
    """What an operator asked for and the server did; the events of what it did come just before."""


class Refusal:
    """Reasons in `detail["reason"]` of refused deletes and extends."""

    STALE: Final = "stale"
    EXPIRED: Final = "expired"
    GONE: Final = "gone"


ENDED_BY_ITSELF: Final = (Kind.LEASE_EXPIRED, Kind.EXPIRED_AFTER_CHANGE, Kind.RETRY_DUE)
"""How a message in flight becomes visible by itself, by `LeaseEnding`. Only the first one indicates a dead worker."""


class LeaseEnding(IntEnum):
    """What the expiry of a lease will mean. Numbers are stored."""

    EXPIRED = 0
    CHANGED = 1
    """The last extend shortened the lease without giving a reason."""
    RETRY = 2


class Part:
    """The part of a snapshot, in `detail["part"]`."""

    BEGIN: Final = "begin"
    """`last`: the greatest sequence so far; messages with greater ones appear by their own events."""
    QUEUE: Final = "queue"
    """The fields of QUEUE_CREATED, and the instants `created` and `modified`."""
    MESSAGES: Final = "messages"
    """`messages`: some messages of one queue, by sequence (`HeldMessage`)."""
    END: Final = "end"
    """`begin`: the offset at which it began."""


class HeldMessage(msgspec.Struct, array_like=True, gc=False):
    """One message of a snapshot as stored; compact, because there may be millions."""

    sequence: int
    id: bytes
    priority: int
    sent: Instant
    own_expiry: Instant | None
    group: str | None
    type: str | None
    body_bytes: int
    attempt: int | None
    """None, like all fields up to `first`: the message is ready and was never delayed or received."""
    rotation: int | None
    hidden: int | None
    due: Instant | None
    granted: Instant | None
    first: Instant | None
    quarantined: Instant | None

    def shown(self) -> dict[str, Any]:
        """The message under the names of `GET /api/v1/snapshot`; empty fields are left out."""
        values: dict[str, Any] = {
            "sequence": self.sequence,
            "id": id_text(self.id),
            "priority": self.priority,
            "sent": self.sent,
            "expires": self.own_expiry,
            "group": self.group,
            "type": self.type,
            "body_bytes": self.body_bytes,
            "state": self._state(),
            "receive_count": self.attempt or 0,
            "rotation": self.rotation,
            "due": self.due,
            "granted": self.granted if self.attempt else None,
            "first_received": self.first,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _state(self) -> str:
        if self.quarantined is not None:
            return "quarantined"
        if not self.hidden:
            return "visible"
        return "in flight" if self.attempt else "delayed"


class Event(msgspec.Struct, array_like=True, gc=False):
    """One event as stored. Fields that its kind does not have are None."""

    kind: int
    at: Instant
    queue: int | None
    """The queue's incarnation."""
    origin: int | None = None
    """Row in the store's table of origins; for an expiry, the holder's."""
    message: bytes | None = None
    sequence: int | None = None
    attempt: int | None = None
    """For a refusal, the attempt in the handle."""
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
    """Fields of this kind alone: settings, counts, a dead-letter target, a reason ..."""


def shown_detail(kind: int, detail: dict[str, Any] | None) -> dict[str, Any] | None:
    """The detail for readers: a snapshot's messages with field names, ids as UUIDs."""
    if detail is None:
        return None
    for name in _IDS:
        if name in detail:
            return detail | {name: id_text(bytes.fromhex(detail[name]))}
    if kind != Kind.SNAPSHOT or "messages" not in detail:
        return detail
    held = msgspec.convert(detail["messages"], list[HeldMessage])
    return detail | {"messages": [message.shown() for message in held]}


class EventRecord(msgspec.Struct, kw_only=True, gc=False):
    """One event for readers: numbers replaced by names."""

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
