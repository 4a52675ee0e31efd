"""What goes into a queue and what comes out of it.

Strategy: plain frozen values. Durations are seconds. A queue's instants are Unix seconds. Only `lease_end` and `asked`
are on this process's monotonic clock (client/clock.py), read before the request left, so that a jump of the wall clock,
here or on the server, shortens no lease.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

AttributeValue = Any
"""str (SQS String), int, float or Decimal (Number), or bytes (Binary).

A Number comes back as an int; as a float if it is that float's text (`0.1`); else as a Decimal with all its digits.
"""


class Message(msgspec.Struct, frozen=True):
    """A message to send. A field that the queue cannot carry raises CapabilityMissing before anything is sent."""

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
    """The name under which processing times are learnt; travels as the attribute `veilmq.type` where attributes
    exist."""
    lease_hint: float | None = None
    """Seconds: the lease that the sender suggests, used by a receive that names none."""
    tag: str | None = None
    """Filter tag of a topic's subscriptions."""


class Sent(msgspec.Struct, frozen=True):
    """The queue has stored the message."""

    id: str
    handle: str | None = None
    """Where the protocol gives one (`Capabilities.handle_on_send`): extend reschedules the message, delete withdraws
    it."""
    sequence_number: int | None = None
    """Of a FIFO queue."""
    duplicate: bool = False
    """Dropped as a duplicate, where the protocol reports it."""


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
    """Unix seconds by the queue's clock, where the protocol reports it."""


class Received(Peeked, frozen=True, kw_only=True):
    """A message with its lease."""

    handle: str
    """All that extend, release and delete need; opaque."""
    lease_end: float
    """Seconds on this process's monotonic clock."""
    first_received: float | None = None
    """Unix seconds by the queue's clock, where the protocol reports it."""
    deduplication_id: str | None = None
    asked: float | None = None
    """When the request that got the message left: seconds on this process's monotonic clock. Set by a queue that caps a
    lease in total (`Capabilities.lease_total_max`), which counts from there."""


class Extension(msgspec.Struct, frozen=True):
    """One entry of an extend_batch."""

    handle: str
    lease: float
    """Seconds from now."""


class Recommended(msgspec.Struct, frozen=True):
    """The first leases that the pipeline has learnt for a queue; seconds."""

    lease: float | None = None
    """For messages of a type not named below; None: the queue's visibility timeout."""
    by_type: Mapping[str, float] = {}
    why: str = ""
    applied: bool = False
    """The server uses them for receives that name no lease."""


class Stats(msgspec.Struct, frozen=True):
    """The current state of a queue; None where the protocol does not report it."""

    visible: int
    delayed: int | None = None
    in_flight: int | None = None
    visibility_timeout: float | None = None
    retention: float | None = None
    delay: float | None = None
    incarnation: str | None = None
    """Changes if the queue is deleted and created again: its incarnation number or creation time."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a queue to create; None: the protocol's default. Seconds and bytes."""

    visibility_timeout: float | None = None
    delay: float | None = None
    retention: float | None = None
    wait: float | None = None
    message_bytes_max: int | None = None
    dead_letter_queue: str | None = None
    """Name of an existing queue of the same account."""
    receive_count_max: int | None = None
    """Receives before a message goes to the dead-letter queue."""
    fifo: bool = False
    content_deduplication: bool = False
    tags: Mapping[str, str] = {}
