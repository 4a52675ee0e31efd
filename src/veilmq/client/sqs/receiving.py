"""SQS's received messages as the port's.

Strategy: the texts of system attributes become numbers, the two attributes that carry the port's own fields leave the
mapping. Source: ReceiveMessage in the SQS API Reference.
"""

from typing import Any

from veilmq.client.messages import AttributeValue, Received
from veilmq.client.sqs.calls import member
from veilmq.client.typed_attributes import LEASE_HINT_ATTRIBUTE, TYPE_ATTRIBUTE, untyped


def received_of(message: dict[str, Any], lease_end: float) -> tuple[Received, float | None]:
    """The message, and the sender's lease hint in seconds."""
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
        lease_end=lease_end,
        first_received=_seconds(system.get("ApproximateFirstReceiveTimestamp")),
        deduplication_id=system.get("MessageDeduplicationId"),
    )
    return received, _hint(hint)


def _hint(value: AttributeValue | None) -> float | None:
    """A hint that some other sender wrote may be anything: then it is none."""
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000
