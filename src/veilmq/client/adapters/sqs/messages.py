"""The port's messages as entries of SendMessage and SendMessageBatch, and SQS's answers as messages.

Strategy: what SQS cannot carry is refused here, before any I/O. SQS's limits on size and characters are checked too, so
that an invalid entry never spoils the request of the others. Source: SendMessage in the SQS API Reference.

Reading: the texts of system attributes become numbers; the two attributes that carry the port's own fields are removed
from the mapping. Source: ReceiveMessage in the SQS API Reference.
"""

import math
from typing import Any

import msgspec

from veilmq.client import checks
from veilmq.client.adapters.sqs.calls import member
from veilmq.client.checks import as_message, check_abilities, text_bytes
from veilmq.client.encoding import LEASE_HINT_ATTRIBUTE, hint_of, size_bytes, typed, untyped, with_fields
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Capabilities
from veilmq.model.errors import MessageTooLarge, ParameterInvalid
from veilmq.model.message_type import TYPE_ATTRIBUTE


class Entry(msgspec.Struct, gc=False):
    """A message ready to be sent."""

    given: dict[str, Any]
    """Members of SendMessage, without QueueUrl."""
    size_bytes: int
    """What counts against the limit."""


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message = as_message(given)
    check_abilities(message, capabilities)
    if message.delay is not None:
        checks.seconds(message.delay, "delay", 0, capabilities.delay_max)
    checks.lease_hint(message.lease_hint, capabilities.lease_max)
    raw = text_bytes(message.body)
    if not raw:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    attributes = {name: typed(name, value) for name, value in with_fields(message).items()}
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


def _value(kind: str, content: str | bytes) -> dict[str, Any]:
    return {"DataType": kind, "StringValue" if isinstance(content, str) else "BinaryValue": content}


def received_of(message: dict[str, Any], asked: float, lease: float) -> tuple[Received, float | None]:
    """The message, and the sender's lease hint in seconds. asked: when the request left; lease: seconds from then."""
    system: dict[str, str] = message.get("Attributes", {})
    attributes = {
        name: untyped(value.get("DataType", ""), value.get("StringValue", value.get("BinaryValue", "")))
        for name, value in message.get("MessageAttributes", {}).items()
    }
    kind = attributes.pop(TYPE_ATTRIBUTE, None)
    hint = attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    sequence = system.get("SequenceNumber")
    received = Received(
        id=member(message, "MessageId"),
        body=member(message, "Body"),
        attributes=attributes,
        receive_count=int(system.get("ApproximateReceiveCount", 0)),
        sent=_seconds(system.get("SentTimestamp")),
        group=system.get("MessageGroupId"),
        sequence_number=None if sequence is None else int(sequence),
        type=None if kind is None else str(kind),
        handle=member(message, "ReceiptHandle"),
        lease_end=asked + lease,
        first_received=_seconds(system.get("ApproximateFirstReceiveTimestamp")),
        deduplication_id=system.get("MessageDeduplicationId"),
        asked=asked,
    )
    return received, hint_of(hint)


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000
