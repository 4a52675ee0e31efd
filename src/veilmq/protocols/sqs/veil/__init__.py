"""VeilMQ's own operations on SQS's port, which say what neither SQS nor its SDKs can: here the JSON shapes of their
inputs and results.

Strategy: the same JSON form and signature as SQS, with another target. The codec and the client's adapter both use
these structs, so that they cannot differ; so this imports nothing of the codec. Members are in Pascal case, like SQS's.
A member with its default value is not written, and unknown members are ignored, so that later ones (plans, hints) break
nobody. All durations are seconds and all instants Unix seconds by the server's clock, both as numbers with fractions.
docs/veil-protocol.md documents them.
"""

import msgspec

from veilmq.protocols.sqs.forms import AttributeValue

ENTRIES_MAX = 256
"""Messages of a Send, entries of an Extend, handles of a Delete."""
REQUEST_BYTES_MAX = 1_048_576
"""All messages of a Send together: bodies, attribute names, types and values; also a single message."""
RECEIVE_COUNT_MAX = 64
"""Messages of a Receive or Peek; at 1 MiB each, this is what server and client can hold."""
LEASE_SECONDS_MAX = 7 * 86_400
DELAY_SECONDS_MAX = 7 * 86_400
TIME_TO_LIVE_SECONDS_MAX = 14 * 86_400
WAIT_SECONDS_MAX = 60
LABEL_CHARACTERS_MAX = 256
"""Length of a message type and of a tag."""


class _Shape(msgspec.Struct, rename="pascal", omit_defaults=True, gc=False):
    """A shape: members by their names on the wire."""


class MessageIn(_Shape):
    """A message of a Send."""

    body: str | None = None
    attributes: dict[str, AttributeValue] | None = None
    """As SQS's MessageAttributes."""
    delay: float | None = None
    """Until it becomes visible; default: the queue's delay."""
    time_to_live: float | None = None
    """Until it expires; default: the queue's retention."""
    priority: int | None = None
    group: str | None = None
    deduplication_id: str | None = None
    type: str | None = None
    lease_hint: float | None = None
    tag: str | None = None


class SendInput(_Shape):
    """VeilMQ.Send."""

    queue: str | None = None
    messages: list[MessageIn] | None = None
    want_handles: bool = False
    """Return a handle for each message: Extend reschedules it, Delete takes it back."""


class ReceiveInput(_Shape):
    """VeilMQ.Receive."""

    queue: str | None = None
    count_max: int = 1
    lease: float | None = None
    """Default: the message's lease hint, or the queue's visibility timeout."""
    wait: float | None = None
    """Wait for the first message; default: the queue's own wait; 0: none."""


class ExtendEntry(_Shape):
    """One lease of an Extend."""

    handle: str | None = None
    lease: float | None = None
    """From now; 0 releases."""
    body: str | None = None
    """Replaces the message's body."""


class ExtendInput(_Shape):
    """VeilMQ.Extend."""

    queue: str | None = None
    entries: list[ExtendEntry] | None = None


class DeleteInput(_Shape):
    """VeilMQ.Delete."""

    queue: str | None = None
    handles: list[str] | None = None


class PeekInput(_Shape):
    """VeilMQ.Peek."""

    queue: str | None = None
    count_max: int = 1


class QueueInput(_Shape):
    """VeilMQ.DescribeQueue, VeilMQ.DeleteQueue and VeilMQ.PurgeQueue."""

    queue: str | None = None


class Failure(_Shape):
    """The error of one entry, with its data."""

    name: str
    """LeaseTaken, MessageGone, ParameterInvalid ...: docs/veil-protocol.md lists them."""
    fields: dict[str, str | int]
    message: str


class SentEntry(_Shape):
    """The result of one message of a Send: an id, or an error."""

    id: str = ""
    """UUID."""
    handle: str | None = None
    sequence_number: int | None = None
    """On a FIFO queue."""
    duplicate: bool = False
    """Absorbed by deduplication: the id is the first message's."""
    error: Failure | None = None


class SendResult(_Shape):
    """Result of VeilMQ.Send: one entry for each message, in order."""

    results: list[SentEntry]


class FailedEntry(_Shape):
    """An entry of an Extend or Delete that was not carried out."""

    index: int
    """Place in the request, from 0."""
    error: Failure


class FailuresResult(_Shape):
    """Answer of VeilMQ.Extend and VeilMQ.Delete: what is not listed is done."""

    failures: list[FailedEntry] | None = None


class MessageOut(_Shape):
    """A message of a Receive or Peek."""

    id: str
    body: str
    sent: float
    expires: float
    handle: str = ""
    """Empty in a Peek."""
    lease: float | None = None
    """Length of the lease just granted."""
    receive_count: int = 0
    first_received: float | None = None
    priority: int = 8
    sequence_number: int | None = None
    """On a FIFO queue."""
    attributes: dict[str, AttributeValue] | None = None
    group: str | None = None
    deduplication_id: str | None = None
    type: str | None = None
    tag: str | None = None
    dead_letter_source: str | None = None
    """Name of the queue that dead-lettered it, if one did."""
    dead_letter_receives: int | None = None
    """How often the queues that dead-lettered it had handed it out."""
    last_error: "LastError | None" = None


class LastError(_Shape):
    """Why a worker last gave the message back, where it said so. Either may be empty."""

    type: str = ""
    text: str = ""
    """First line of the error's text."""


class MessagesResult(_Shape):
    """Answer of VeilMQ.Receive and VeilMQ.Peek."""

    messages: list[MessageOut] = []
    waited: float = 0.0
    """From the arrival of the request to the grant of the leases."""


class PlanShown(_Shape):
    """First leases that were learnt for a queue; seconds."""

    lease: float | None = None
    by_type: dict[str, float] = {}
    why: str = ""
    applied: bool = False
    """The server uses it for receives that name no lease."""


class DescribeQueueResult(_Shape):
    """Answer of VeilMQ.DescribeQueue."""

    name: str
    account: str
    region: str
    incarnation: int
    """Differs for a queue that was deleted and created again."""
    created: float
    modified: float
    visible: int
    delayed: int
    in_flight: int
    visibility_timeout: float
    delay: float
    retention: float
    wait: float
    message_bytes_max: int
    fifo: bool = False
    content_deduplication: bool = False
    dead_letter_queue: str | None = None
    """Its name; it is of the same account and region."""
    receive_count_max: int | None = None
    tags: dict[str, str] = {}
    plan: PlanShown | None = None


class CreateQueueResult(_Shape):
    """Answer of VeilMQ.CreateQueue."""

    created: bool
    """False: it was there before, with the same settings."""
    incarnation: int


class PurgeQueueResult(_Shape):
    """Answer of VeilMQ.PurgeQueue and VeilMQ.DeleteQueue."""

    count: int
    """Messages that went."""


VeilResult = SendResult | FailuresResult | MessagesResult | DescribeQueueResult | CreateQueueResult | PurgeQueueResult
