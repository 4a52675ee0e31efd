"""The port: the interface that every adapter implements and every pattern uses.

Strategy: one `Queue`, small enough to wrap. A handle is one opaque string with everything that a later call needs
(Azure's message id with its pop receipt, a large message's object), so any process can use it. A batch returns one
result or one error for each entry, in order; it raises only if none of it can have happened. Something that a queue
cannot do raises CapabilityMissing before any I/O.

Capabilities: what a queue can do, as data. A pattern chooses its behaviour by these fields and never asks which cloud
it is on.

Native topics: a few calls, all idempotent: what exists with the same settings is left alone. The service carries out a
publish, to every subscription that wants it or to none. Source: the page of PublishMessage (MNS).

Identities: which objects stand for the same queue, so that receivers can share one long poll (receiver/). A
queue object may have an `identity`, a hashable value. Two objects have equal identities exactly if a receive from
either returns the same messages in the same form, and a handle from one works with the other. So it contains the
endpoint, the region, the credentials, the queue's name and everything else that changes what a receive returns. Secrets
enter only as fingerprints, keyed with a random key of this process. An object without an identity is equal to itself
only.
"""

import hmac
import re
import secrets
from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

import msgspec

from veilmq.client.messages import (
    ATTRIBUTES_MAX,
    Extension,
    Message,
    Peeked,
    Received,
    Recommended,
    Sent,
    Stats,
    Template,
)
from veilmq.model.errors import VeilError
from veilmq.model.messages import Failure


class HandleOnSend(StrEnum):
    """When a send returns a handle."""

    NEVER = "never"
    DELAYED = "delayed"
    ALWAYS = "always"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and abilities of one adapter's queue. An ability that is not set is absent. Durations in seconds, sizes in
    bytes as transmitted."""

    protocol: str
    """`embedded`, `veil`, `sqs`, `azure` or `mns`: only to be shown to people."""
    body_bytes_max: int
    """Largest `transmitted_bytes(body)`; with `base64_body` the caller's own body may be three quarters of it."""
    batch_messages_max: int
    """Most entries that send_batch and delete_batch send in one request; longer batches are split."""
    receive_messages_max: int
    lease_min: float
    """Shortest lease above 0 that a receive may ask for."""
    lease_max: float
    lease_total_max: float | None = None
    """Cap on a lease with all its extensions, counted from the receive (SQS: 12 h)."""
    wait_max: float
    """Longest wait of one request; a longer wait is refused. 0: the queue never waits."""
    delay_max: float
    batch_extend: bool = False
    """One request can extend many leases."""
    receipts_rotate: bool = False
    """An extend invalidates the handle that it was given."""
    handle_on_send: HandleOnSend = HandleOnSend.NEVER
    body_replaceable: bool = False
    retention_below_delay: bool = False
    """A message may expire before its delay ends."""
    base64_body: bool = False
    """The adapter encodes bodies: three bytes become four on the wire."""
    attributes: bool = False
    attributes_max: int = ATTRIBUTES_MAX
    """Attributes that every message may have, type and lease hint included; a pattern that adds its own leaves
    fewer."""
    fields_as_attributes: bool = False
    """A message's type and its lease hint travel as attributes, and count as such."""
    peek: bool = False
    priorities: bool = False
    ttl: bool = False
    groups: bool = False
    """Message groups on this queue (FIFO, or a fair standard queue)."""
    native_fifo: bool = False
    """This queue is a FIFO queue: group order, deduplication."""
    native_topics: bool = False
    lease_hints: bool = False
    """A receive that asks for no lease uses the sender's hint."""
    tags: bool = False
    """A message may have a tag."""
    body_bytes_min: int = 1
    """0 where an empty body can be sent."""
    extends_late: bool = False
    """An extend after the lease's end succeeds if nobody else has received the message since, and is refused otherwise.
    So an answer without an error means that the message is held."""
    release_min: float = 0
    """Shortest delay of a release; a shorter one is raised to this (MNS: 1 s)."""

    def transmitted_bytes(self, body: str | bytes) -> int:
        """Bytes of `body`, text or its UTF-8, on the wire: in base64 where the adapter encodes."""
        size_bytes = len(body.encode() if isinstance(body, str) else body)
        return (size_bytes + 2) // 3 * 4 if self.base64_body else size_bytes


class Queue(Protocol):
    """A queue of some cloud, server or directory; also every pattern over one. Thread-safe.

    All calls raise QueueMissing, TransportError (unreachable, or outcome unknown), ServiceError (a refusal for which we
    have no own error), and the errors that each call names.
    """

    @property
    def name(self) -> str:
        """Its name, as the cloud has it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do. No I/O."""

    @property
    def account(self) -> "Account":
        """The account that it belongs to, for patterns that need more queues."""

    def send(self, message: str | Message) -> Sent:
        """The message is durable when this returns. Raises MessageTooLarge, ParameterInvalid, CapabilityMissing,
        CapacityError."""

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """Any number; split into requests of at most `Capabilities.batch_messages_max` and the protocol's size
        limit."""

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """Up to `count_max` messages, each leased for `lease` seconds.

        lease=None: the sender's `lease_hint`; without one, on our server and in directories, the applied plan's lease;
        else the queue's visibility timeout. 0, where the service allows it: the lease ends at once.

        Waits up to `wait` seconds for the first message; 0 never waits, whatever the queue's own setting is. A count
        above `Capabilities.receive_messages_max` is ParameterInvalid.
        """

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """Let the lease end `lease` seconds from now; return the handle to use next.

        `body` replaces the body where `Capabilities.body_replaceable`. After the lease's end, the message is leased
        again if nobody else received it; on FIFO queues and MNS that is LeaseExpired. Raises LeaseExpired, LeaseTaken,
        MessageGone, ReceiptInvalid.
        """

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """Any number, in as few requests as the protocol allows; for each entry, the handle to use next or an error."""

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        """Give the message back, visible after `delay` seconds. Raises as `extend` does.

        `failure`: the reason, for our server's history; it never causes an extra request, and clouds ignore it.
        """

    def delete(self, handle: str) -> None:
        """Delete a message that is done. Raises LeaseTaken, MessageGone or LeaseExpired where the protocol reports it,
        ReceiptInvalid."""

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """Any number; None for each that was deleted."""

    def peek(self, count_max: int = 1) -> list[Peeked]:
        """Look without a lease. Raises CapabilityMissing where the protocol has no peek."""

    def stats(self) -> Stats:
        """The current state of the queue."""

    def recommended(self) -> Recommended | None:
        """The first leases learnt for this queue, for producers and people; None if nothing was published yet, or the
        service has no such feature. Our server and directories have it."""

    def interrupt(self) -> None:
        """End the receives that wait in other threads: they return at once, empty unless a message was on its way. The
        queue stays open. If a poll cannot be ended, the messages that it still returns are released. Raises nothing."""

    def close(self) -> None:
        """Close connections; a receive that waits in another thread ends. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Account(Protocol):
    """A set of queues: a data directory, or one account and region of a server or cloud."""

    def queue(self, name: str) -> Queue:
        """An existing queue. Raises QueueMissing."""

    def capabilities(self, name: str) -> Capabilities:
        """What a queue of that name can do, whether it exists or not. No I/O."""

    def create(self, name: str, template: Template | None = None) -> bool:
        """Make sure the queue exists; True if it is new. Raises QueueExists if its settings differ."""

    def delete(self, name: str) -> None:
        """Delete the queue with all its messages. Raises QueueMissing."""

    def names(self, prefix: str = "") -> list[str]:
        """The names of the queues."""

    def close(self) -> None:
        """Close connections, those of its queues too."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NativeSubscription(NamedTuple):
    """A queue that gets what is published."""

    name: str
    queue: str
    tag: str | None
    """Gets messages with this tag; None: all."""


class NativePublished(NamedTuple):
    """The service has accepted the message."""

    id: str
    copies: int | None
    """How many queues got it, where the service reports it."""


class NativeTopics(Protocol):
    """The topics of an account. Any thread; all calls raise TransportError, ServiceError."""

    def fits(self, topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
        """Whether the service allows these names and tags. No I/O."""

    def carries(self, message: Message) -> bool:
        """Whether a publish can carry everything in the message; it always carries tag and type. No I/O."""

    def create(self, topic: str, queues: Collection[str]) -> bool:
        """Make sure the topic exists; True if it is new. Its size limit is the smallest of these queues' limits.

        Raises QueueMissing.
        """

    def subscriptions(self, topic: str) -> list[NativeSubscription]:
        """All subscriptions; one that is not to a queue has an empty queue name. Raises TopicMissing."""

    def subscribe(self, topic: str, subscription: NativeSubscription) -> None:
        """Add it unless the same one exists. Raises TopicMissing, QueueMissing, SubscriptionExists."""

    def delete(self, topic: str) -> None:
        """Delete the topic with its subscriptions. Idempotent."""

    def publish(self, topic: str, messages: Sequence[Message]) -> list[NativePublished | VeilError]:
        """One result or error a message, in order."""


TAG_CHARACTERS_MAX: Final = 16
SUBSCRIPTIONS_MAX: Final = 100
"""Of a topic."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")
_TOPIC_CHARACTERS_MAX: Final = 120
_SUBSCRIPTION_CHARACTERS_MAX: Final = 255


def are_names(topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
    """Whether these names are allowed."""
    return (
        _is_name(topic, _TOPIC_CHARACTERS_MAX)
        and len(subscriptions) <= SUBSCRIPTIONS_MAX
        and all(_is_name(each.name, _SUBSCRIPTION_CHARACTERS_MAX) for each in subscriptions)
        and all(each.tag is None or len(each.tag) <= TAG_CHARACTERS_MAX for each in subscriptions)
    )


def _is_name(name: str, characters_max: int) -> bool:
    return len(name) <= characters_max and _NAME.match(name) is not None


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
