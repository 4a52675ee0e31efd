"""SQS's received messages as the port's.

Strategy: the texts of system attributes become numbers, the two attributes that carry the port's own fields leave the
mapping. Source: ReceiveMessage in the SQS API Reference.
"""

from typing import Any

from veilmq.client.messages import Received
from veilmq.client.sqs.calls import member
from veilmq.client.typed_attributes import LEASE_HINT_ATTRIBUTE, hint_of, untyped
from veilmq.model.message_type import TYPE_ATTRIBUTE


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
