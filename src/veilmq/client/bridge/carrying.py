"""What of a message goes over from one queue to another, and what is lost; by the two queues' capabilities alone.

Strategy: `differences` and `carried` follow the same fields, so that what is announced is what happens. A deduplication
id is derived from the source's message id: the original one may have been used again for another message after five
minutes, which a FIFO target would drop as a duplicate.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from itertools import chain
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
    of_both = [_of_fields(source, target), _of_groups(source, target, group), _of_protocols(source, target)]
    moved = "what is still delayed at the source is moved when it becomes visible"
    return [
        *chain.from_iterable(of_both),
        _changed("message ids, send times and receive counts begin anew at the target"),
        _changed("the source counts one more receive of each message" if copies else moved),
    ]


def _lost(text: str) -> Difference:
    return Difference(text, is_lost=True)


def _changed(text: str) -> Difference:
    return Difference(text, is_lost=False)


def _of_fields(source: Capabilities, target: Capabilities) -> Iterator[Difference]:
    for able, text in _UNCARRIED:
        if getattr(source, able) and not getattr(target, able):
            yield _lost(text)


def _of_groups(source: Capabilities, target: Capabilities, group: str | None) -> Iterator[Difference]:
    if source.native_fifo and not target.native_fifo:
        yield _lost("order within a group: the target is no FIFO queue")
    if source.native_fifo and target.native_fifo:
        yield _lost("deduplication ids: each is replaced by one made of the source's message id")
    if target.native_fifo and not source.native_fifo:
        whose = "a group of its own (--group NAME: one for all)" if group is None else f"the group {group}"
        yield _changed(f"a message without a group gets {whose}")


def _of_protocols(source: Capabilities, target: Capabilities) -> Iterator[Difference]:
    if source.tags:
        yield _changed("a topic's filter tags do not go over: a receive does not show them")
    if source.lease_hints:
        yield _changed("senders' lease hints do not go over: a receive does not show them")
    if source.protocol == "amqp":
        yield from map(_changed, _FROM_AMQP)
    elif target.protocol == "amqp" and source.protocol == "azure":
        yield _changed("a message that expires later than in 49 days never expires")
    elif target.protocol == "amqp" and source.attributes:
        yield _changed("numbers with a fraction or many digits go over as text, if AMQP has no type")
    if source.protocol in _OF_SQS:
        yield _changed("custom attribute types (Number.int becomes Number) and X-Ray headers do not go over")
    if source.protocol == "azure" and target.ttl and target.protocol not in _FOR_EVER:
        yield _lost("a message that never expires, or later than in 14 days, expires in 14 days")
    if _body_bytes_max(target) < _body_bytes_max(source):
        yield _changed(f"a message of more than {_body_bytes_max(target)} bytes stays at the source")


_FROM_AMQP: Final = (
    "a body that is not UTF-8 goes over as base64, with the attribute content-encoding; headers that are neither text,"
    " number nor bytes go over as JSON",
    "a header named as a property that the message has, such as content_type, goes over as header_content_type",
    "a message_id goes over as an attribute; with message_ids=unique in FROM's URL, and only then, a FIFO target drops"
    " what is sent twice",
    "a time to live counts anew: RabbitMQ does not tell how much of it is over",
)
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
