"""The port's messages as entries of SendMessage and SendMessageBatch.

Strategy: what SQS cannot carry is refused here, before any I/O; what is left are SQS's own limits on size and
characters, which are checked too, so that an entry that cannot pass never costs its neighbours a request. Source:
SendMessage in the SQS API Reference.
"""

import math
from typing import Any, Final

import msgspec

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Message
from veilmq.client.prepared import as_message, text_bytes
from veilmq.client.typed_attributes import ATTRIBUTES_MAX, LEASE_HINT_ATTRIBUTE, size_bytes, typed
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid
from veilmq.model.message_type import TYPE_ATTRIBUTE


class Entry(msgspec.Struct, gc=False):
    """A message ready to travel."""

    given: dict[str, Any]
    """Members of SendMessage, without QueueUrl."""
    size_bytes: int
    """What counts against the limit."""


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message = as_message(given)
    _check_missing(message, capabilities)
    raw = text_bytes(message.body)
    if not raw:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    attributes = _attributes(message)
    total_bytes = len(raw) + size_bytes(attributes)
    if total_bytes > capabilities.body_bytes_max:
        raise MessageTooLarge(size_bytes=total_bytes, limit_bytes=capabilities.body_bytes_max)
    members: dict[str, Any] = {"MessageBody": message.body}
    if attributes:
        members["MessageAttributes"] = {name: _value(*each) for name, each in attributes.items()}
    if message.delay is not None and not capabilities.native_fifo:
        members["DelaySeconds"] = math.ceil(message.delay)
    if message.group is not None:
        members["MessageGroupId"] = message.group
    if message.deduplication_id is not None:
        members["MessageDeduplicationId"] = message.deduplication_id
    return Entry(members, total_bytes)


_CANNOT: Final = {"ttl": "ttl", "priority": "priorities", "tag": "tags"}
"""Field of a message -> the ability that it needs and SQS lacks."""


def _check_missing(message: Message, capabilities: Capabilities) -> None:
    for field, capability in _CANNOT.items():
        if getattr(message, field) is not None:
            raise CapabilityMissing(capability=capability)
    if message.deduplication_id is not None and not capabilities.native_fifo:
        raise CapabilityMissing(capability="deduplication")
    if message.group is None and capabilities.native_fifo:
        raise ParameterInvalid(parameter="group", reason="a FIFO queue's messages need one")
    if message.delay is not None:
        checked.seconds(message.delay, "delay", 0, capabilities.delay_max)
    if message.lease_hint is not None and not 0 < message.lease_hint <= capabilities.lease_max:
        reason = f"must be above 0 and at most {capabilities.lease_max:g} s, not {message.lease_hint}"
        raise ParameterInvalid(parameter="lease_hint", reason=reason)


def _attributes(message: Message) -> dict[str, tuple[str, str | bytes]]:
    attributes = {name: typed(name, value) for name, value in message.attributes.items()}
    for name, value in ((TYPE_ATTRIBUTE, message.type), (LEASE_HINT_ATTRIBUTE, message.lease_hint)):
        if value is not None:
            if name in attributes:
                raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is given as a field of the message")
            attributes[name] = typed(name, value)
    if len(attributes) > ATTRIBUTES_MAX:
        reason = f"{len(attributes)} are more than {ATTRIBUTES_MAX} (type and lease_hint count as one each)"
        raise ParameterInvalid(parameter="attributes", reason=reason)
    return attributes


def _value(kind: str, content: str | bytes) -> dict[str, Any]:
    return {"DataType": kind, "StringValue" if isinstance(content, str) else "BinaryValue": content}
