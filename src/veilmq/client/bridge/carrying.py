"""What of a message goes over from one queue to another, and what is lost; by the two queues' capabilities alone.

Strategy: `differences` and `carried` follow the same fields, so that what is announced is what happens. A deduplication
id is derived from the source's message id: the original one may have been used again for another message after five
minutes, which a FIFO target would drop as a duplicate.
"""

import hashlib
import math
import re
from typing import Final, NamedTuple

import msgspec

from veilmq.client.messages import Message, Received
from veilmq.client.queue import Capabilities

_TOKEN: Final = re.compile(r"[!-~]{1,128}")
_TTL_MAX: Final = 14 * 86_400.0
"""Seconds; the longest time to live that our own servers and directories take."""
_NEVER: Final = 2_000_000_000.0
"""Seconds: what lives longer than sixty years never expires."""
_FOR_EVER: Final = {"azure", "amqp"}
"""Protocols by which a message may live for ever."""
_OF_SQS: Final = {"sqs", "veil", "embedded"}
"""Protocols by which a message may come that an SDK of SQS has sent."""
_AMQP_TTL_MAX: Final = 4_294_967.0
"""Seconds: RabbitMQ takes at most 2^32 - 1 ms as an expiration (its page "Time-To-Live and Expiration")."""


class Difference(NamedTuple):
    """One thing that is not at the target as it was at the source."""

    text: str
    is_lost: bool
    """False: it is so for every copy, or nothing of the sender's is gone."""


def differences(source: Capabilities, target: Capabilities, group: str | None, *, copies: bool) -> list[Difference]:
    """What does not go over, before anything is received: of any message that has it."""
    missing = (text for able, text in _UNCARRIED if getattr(source, able) and not getattr(target, able))
    found = [Difference(text, True) for text in missing]
    if source.native_fifo and not target.native_fifo:
        found.append(Difference("order within a group: the target is no FIFO queue", True))
    if source.native_fifo and target.native_fifo:
        found.append(Difference("deduplication ids: each is replaced by one made of the source's message id", True))
    if target.native_fifo and not source.native_fifo:
        whose = "a group of its own (--group NAME: one for all)" if group is None else f"the group {group}"
        found.append(Difference(f"a message without a group gets {whose}", False))
    if source.tags:
        found.append(Difference("a topic's filter tags do not go over: a receive does not show them", False))
    if source.lease_hints:
        found.append(Difference("senders' lease hints do not go over: a receive does not show them", False))
    if source.protocol == "amqp":
        text = "a body that is not UTF-8 goes over as base64, with the attribute content-encoding; headers that are"
        found.append(Difference(f"{text} neither text, number nor bytes go over as JSON", False))
        text = "a header named as a property that the message has, such as content_type, goes over as"
        found.append(Difference(f"{text} header_content_type", False))
        text = "a message_id goes over as an attribute; with message_ids=unique in FROM's URL, and only then, a FIFO"
        found.append(Difference(f"{text} target drops what is sent twice", False))
        found.append(Difference("a time to live counts anew: RabbitMQ does not tell how much of it is over", False))
    elif target.protocol == "amqp" and source.protocol == "azure":
        found.append(Difference("a message that expires later than in 49 days never expires", False))
    elif target.protocol == "amqp" and source.attributes:
        found.append(Difference("numbers with a fraction or many digits go over as text, if AMQP has no type", False))
    if source.protocol in _OF_SQS:
        text = "custom attribute types (Number.int becomes Number) and X-Ray headers do not go over"
        found.append(Difference(text, False))
    if source.protocol == "azure" and target.ttl and target.protocol not in _FOR_EVER:
        found.append(Difference("a message that never expires, or later than in 14 days, expires in 14 days", True))
    if _body_bytes_max(target) < _body_bytes_max(source):
        text = f"a message of more than {_body_bytes_max(target)} bytes stays at the source"
        found.append(Difference(text, False))
    found.append(Difference("message ids, send times and receive counts begin anew at the target", False))
    if copies:
        found.append(Difference("the source counts one more receive of each message", False))
    else:
        found.append(Difference("what is still delayed at the source is moved when it becomes visible", False))
    return found


_UNCARRIED: Final = (
    ("attributes", "message attributes, and the message type"),
    ("groups", "message groups"),
    ("priorities", "priorities"),
    ("ttl", "the instant at which a message expires: the target's retention counts from now"),
)


def _body_bytes_max(can: Capabilities) -> int:
    """Of the caller's own body."""
    return can.body_bytes_max // 4 * 3 if can.base64_body else can.body_bytes_max


def carried(
    message: Received,
    target: Capabilities,
    group: str | None,
    now: float,
    *,
    named: bool = False,
    source: Capabilities | None = None,
) -> Message:
    """The message to send. now: Unix seconds, for its time to live. named: always with a deduplication id.

    group: of a message without one, if the target is a FIFO queue; None: one for each message. source: a message of an
    Azure queue without an expiry never expires; elsewhere nothing is known of it.
    """
    expires = message.expires
    if expires is None and source is not None and source.protocol == "azure":
        expires = math.inf
    attributes = dict(message.attributes) if target.attributes else {}
    sent = Message(
        message.body,
        attributes,
        ttl=None if expires is None else time_to_live(expires - now, target),
        priority=message.priority if target.priorities else None,
        group=message.group if target.groups else None,
        type=message.type if target.attributes else None,
    )
    own = _token(message.id)
    if not target.native_fifo:
        # RabbitMQ: as its message_id, for consumers that compare them.
        named = named or target.protocol == "amqp"
        return msgspec.structs.replace(sent, deduplication_id=own) if named else sent
    return msgspec.structs.replace(sent, group=sent.group or group or own, deduplication_id=own)


def _token(message_id: str) -> str:
    """The id, or its digest if it has characters that a deduplication id may not have."""
    return message_id if _TOKEN.fullmatch(message_id) else hashlib.sha256(message_id.encode()).hexdigest()


def time_to_live(left: float, target: Capabilities) -> float | None:
    """The time to live of a message that has `left` seconds yet; None where the target has none, or needs none."""
    if not target.ttl:
        return None
    if target.protocol == "amqp":
        return None if left > _AMQP_TTL_MAX else max(1.0, left)
    if target.protocol == "azure":
        return math.inf if left > _NEVER else max(1.0, left)
    return min(max(1.0, left), _TTL_MAX)
