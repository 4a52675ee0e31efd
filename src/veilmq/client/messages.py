"""What goes into a queue and what comes out of it, in the client's words.

Strategy: plain frozen values. Durations are seconds; instants of the queue are Unix seconds; `lease_end` alone is on
this process's monotonic clock (client/clock.py), read before the request that got the lease left, so that a wall clock
that jumps, here or there, shortens no lease.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

AttributeValue = Any
"""str (SQS String), int, float or Decimal (Number), or bytes (Binary).

A Number comes back as an int, as a float if that is written as this number (`0.1`), else as a Decimal with all its
digits.
"""


class Message(msgspec.Struct, frozen=True):
    """A message to send. What a queue cannot carry is refused with CapabilityMissing before anything is sent."""

    body: str
    """Text of XML 1.0 characters; encode bytes yourself."""
    attributes: Mapping[str, AttributeValue] = {}
    delay: float | None = None
    """Seconds until it becomes visible; None: the queue's own delay."""
    ttl: float | None = None
    """Seconds until it expires; None: the queue's retention."""
    priority: int | None = None
    """1 is most urgent, 16 least; None: 8."""
    group: str | None = None
    """FIFO message group, or tenant of a fair queue."""
    deduplication_id: str | None = None
    type: str | None = None
    """Under which name processing times are learnt; travels as the attribute `veilmq.type` where there are any."""
    lease_hint: float | None = None
    """Seconds: the sender's wish for the first lease, honoured by receives that name none."""
    tag: str | None = None
    """Filter tag of a topic's subscriptions."""


class Sent(msgspec.Struct, frozen=True):
    """The queue has it."""

    id: str
    handle: str | None = None
    """Where the protocol gives one (`Capabilities.handle_on_send`): extend reschedules, delete takes it back."""
    sequence_number: int | None = None
    """Of a FIFO queue."""
    duplicate: bool = False
    """Absorbed by deduplication, where the protocol tells."""


class Peeked(msgspec.Struct, frozen=True):
    """A message as a peek shows it: no lease, no handle."""

    id: str
    body: str
    attributes: Mapping[str, AttributeValue] = {}
    receive_count: int = 0
    sent: float | None = None
    """Unix seconds by the queue's clock."""
    group: str | None = None
    sequence_number: int | None = None
    priority: int | None = None
    type: str | None = None
    expires: float | None = None
    """Unix seconds by the queue's clock, where the protocol tells."""


class Received(Peeked, frozen=True, kw_only=True):
    """A message with its lease."""

    handle: str
    """All that extend, release and delete need; opaque."""
    lease_end: float
    """Seconds on this process's monotonic clock."""
    first_received: float | None = None
    """Unix seconds by the queue's clock, where the protocol tells."""
    deduplication_id: str | None = None
    asked: float | None = None
    """Seconds on this process's monotonic clock: when the request that got it left. A queue that caps its leases in
    total (`Capabilities.lease_total_max`) counts from there, and tells it."""


class Extension(msgspec.Struct, frozen=True):
    """One entry of an extend_batch."""

    handle: str
    lease: float
    """Seconds from now."""


class Recommended(msgspec.Struct, frozen=True):
    """First leases that the pipeline learnt for a queue; seconds."""

    lease: float | None = None
    """For messages of no type named below; None: the queue's visibility timeout."""
    by_type: Mapping[str, float] = {}
    why: str = ""
    applied: bool = False
    """The server uses them for receives that name no lease."""


class Stats(msgspec.Struct, frozen=True):
    """A queue as it stands; None where the protocol does not tell."""

    visible: int
    delayed: int | None = None
    in_flight: int | None = None
    visibility_timeout: float | None = None
    retention: float | None = None
    delay: float | None = None
    incarnation: str | None = None
    """Differs for a queue that was deleted and created again: its incarnation number or creation time."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a queue to create; None: the protocol's default. Seconds and bytes."""

    visibility_timeout: float | None = None
    delay: float | None = None
    retention: float | None = None
    wait: float | None = None
    message_bytes_max: int | None = None
    dead_letter_queue: str | None = None
    """Name of a queue of the same account that exists."""
    receive_count_max: int | None = None
    """Receives before a message goes to the dead-letter queue."""
    fifo: bool = False
    content_deduplication: bool = False
    tags: Mapping[str, str] = {}
