"""Base64 bodies, for the protocols whose SDKs send them.

Strategy: the adapter encodes and decodes by itself. A body that is not base64 then fails alone, not with the whole
response that it came in. It goes to the policy for unreadable messages and is never returned as if it were decoded.

Source: RFC 4648, section 4.
"""

import base64
import binascii
from collections.abc import Callable

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import Undecodable
from veilmq.client.messages import Peeked, Received
from veilmq.client.queue import Queue
from veilmq.client.unreadable import Policy, log, read_each, receive_readable
from veilmq.model.message import first_forbidden_character


def encode(raw: bytes) -> str:
    """The text in UTF-8, as base64."""
    return base64.b64encode(raw).decode("ascii")


def decode(body: str, message: str) -> str:
    """The decoded text. Raises Undecodable; `message`: the id to name in it."""
    try:
        text = base64.b64decode(body.encode("ascii"), validate=True).decode()
    except (UnicodeError, binascii.Error):
        raise Undecodable(message=message, reason="its body is not base64 of text") from None
    if first_forbidden_character(text) is not None:
        raise Undecodable(message=message, reason="its decoded body has a character that XML 1.0 cannot carry")
    return text


def decoded(message: Received) -> Received:
    """The message with its body decoded. Raises Undecodable."""
    return msgspec.structs.replace(message, body=decode(message.body, message.id))


def decoded_peeks(messages: list[Peeked], queue: str) -> list[Peeked]:
    """The messages that can be decoded."""
    found = []
    for message in messages:
        try:
            found.append(msgspec.structs.replace(message, body=decode(message.body, message.id)))
        except Undecodable as error:
            log.warning("queue %s: %s", queue, error)
    return found


def receive(
    queue: Queue, receive: Callable[[float], list[Received]], wait: float, policy: Policy, clock: Clock
) -> list[Received]:
    """What `receive` returns, decoded if the queue uses base64 bodies; `policy` gets the messages that are not
    base64."""
    if not queue.capabilities.base64_body:
        return receive(wait)
    return receive_readable(receive, lambda came: read_each(came, decoded, policy, queue), wait, clock)
