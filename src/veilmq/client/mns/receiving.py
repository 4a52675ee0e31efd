"""MNS's messages as the port's.

Strategy: user properties become attributes by their types, and so do the system properties of tracing; the two that
carry the port's own fields leave the mapping. Source: the page of ReceiveMessage.
"""

from typing import Any

from veilmq.client.messages import AttributeValue, Peeked, Received
from veilmq.client.mns.sending import TRACING
from veilmq.client.typed_attributes import LEASE_HINT_ATTRIBUTE, hint_of, untyped
from veilmq.model.message_type import TYPE_ATTRIBUTE


def received_of(entry: Any, lease_end: float) -> tuple[Received, float | None]:
    """The message of an SDK's ReceiveMessageResponseEntry, and the sender's lease hint in seconds."""
    attributes = _attributes(entry)
    hint = attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    received = Received(
        **_told(entry, attributes),
        handle=entry.receipt_handle,
        lease_end=lease_end,
        first_received=entry.first_dequeue_time / 1000,
    )
    return received, hint_of(hint)


def peeked_of(entry: Any) -> Peeked:
    """The message of an SDK's PeekMessageResponseEntry."""
    attributes = _attributes(entry)
    attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    return Peeked(**_told(entry, attributes))


def _told(entry: Any, attributes: dict[str, AttributeValue]) -> dict[str, Any]:
    kind = attributes.pop(TYPE_ATTRIBUTE, None)
    return {
        "id": entry.message_id,
        "body": entry.message_body,
        "attributes": attributes,
        "receive_count": entry.dequeue_count,
        "sent": entry.enqueue_time / 1000,
        "group": getattr(entry, "message_group_id", "") or None,
        "priority": entry.priority,
        "type": None if kind is None else str(kind),
    }


def _attributes(entry: Any) -> dict[str, AttributeValue]:
    attributes = {}
    for name, value in entry.user_properties.items():
        kind, content = value.get_data_type(), value.get_raw_value()
        attributes[name] = untyped("Number", content) if kind == "NUMBER" else content
    for name, value in entry.system_properties.items():
        if name in TRACING:
            attributes[name] = value.get_string_value_by_type()
    return attributes
