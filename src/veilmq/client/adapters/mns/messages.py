"""The port's messages as entries of SendMessage and BatchSendMessage, and the service's answers as messages.

Strategy: what MNS cannot carry, and what exceeds its limits, is refused here before any I/O. Attributes travel as user
properties under SQS's rules, so that every client can read them; tracing attributes travel as system properties, where
MNS has them. Source: the page of SendMessage.

Reading: user properties become attributes by their types, and so do the tracing system properties. The two that carry
the port's own fields are removed from the mapping. Source: the page of ReceiveMessage.
"""

from typing import Any, Final

import msgspec
from mns.message_property import (  # type: ignore[import-untyped]
    MessagePropertyValue,
    MessageSystemPropertyValue,
    SystemPropertyName,
)
from mns.mns_request import SendMessageRequest, SendMessageRequestEntry  # type: ignore[import-untyped]

from veilmq.client import checks
from veilmq.client.adapters.cloud import encode_base64
from veilmq.client.checks import as_message, check_abilities, text_bytes
from veilmq.client.encoding import LEASE_HINT_ATTRIBUTE, hint_of, named, size_bytes, untyped, with_fields
from veilmq.client.messages import AttributeValue, Message, Peeked, Received
from veilmq.client.queue import Capabilities
from veilmq.model.errors import MessageTooLarge, ParameterInvalid
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.queue import PRIORITY_MAX, PRIORITY_MIN

MESSAGE_BYTES_MAX: Final = 65_536
LEASE_MAX: Final = 43_200
DELAY_MAX: Final = 604_800
TRACING: Final = frozenset({"traceparent", "tracestate", "baggage"})
"""System properties that become attributes of the same names."""

_TYPES: Final = {"String": "STRING", "Number": "NUMBER", "Binary": "BINARY"}


class Entry(msgspec.Struct, gc=False):
    """A message ready to be sent."""

    body: str
    delay: int
    """-1: the queue's own, as in the SDK."""
    priority: int
    user: dict[str, Any]
    system: dict[str, Any]
    size_bytes: int

    def request(self, queue: str) -> Any:
        """SendMessage."""
        return self._with_properties(SendMessageRequest(queue, self.body, self.delay, self.priority, False))

    def entry(self) -> Any:
        """An entry of BatchSendMessage."""
        return self._with_properties(SendMessageRequestEntry(self.body, self.delay, self.priority))

    def _with_properties(self, message: Any) -> Any:
        message.user_properties, message.system_properties = self.user, self.system
        return message


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message = as_message(given)
    check_abilities(message, capabilities)
    raw = text_bytes(message.body)
    if not raw:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    priority = message.priority
    if priority is not None:
        checks.whole(priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    checks.lease_hint(message.lease_hint, LEASE_MAX)
    attributes = _attributes(message)
    base64 = capabilities.base64_body
    body = encode_base64(raw) if base64 else message.body
    total_bytes = (len(body) if base64 else len(raw)) + size_bytes(attributes)
    if total_bytes > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(size_bytes=total_bytes, limit_bytes=MESSAGE_BYTES_MAX)
    return Entry(
        body=body,
        delay=-1 if message.delay is None else checks.whole_seconds(message.delay, "delay", 0, DELAY_MAX),
        priority=-1 if priority is None else priority,
        user={name: _user(*each) for name, each in attributes.items() if name not in TRACING},
        system={name: _system(name, *each) for name, each in attributes.items() if name in TRACING},
        size_bytes=total_bytes,
    )


def _attributes(message: Message) -> dict[str, tuple[str, str | bytes]]:
    attributes = {}
    for name, value in with_fields(message).items():
        if SystemPropertyName.is_valid(name) and name not in TRACING:
            raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is the service's own")
        attributes[name] = named(name, value)
    return attributes


def _user(kind: str, content: str | bytes) -> Any:
    return MessagePropertyValue(_TYPES[kind], content)


def _system(name: str, kind: str, content: str | bytes) -> Any:
    if kind != "String":
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is of tracing: it must be a str")
    return MessageSystemPropertyValue("STRING", content)


def received_of(entry: Any, lease_end: float) -> tuple[Received, float | None]:
    """The message of an SDK's ReceiveMessageResponseEntry, and the sender's lease hint in seconds."""
    attributes = _values(entry)
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
    attributes = _values(entry)
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


def _values(entry: Any) -> dict[str, AttributeValue]:
    attributes = {}
    for name, value in entry.user_properties.items():
        kind, content = value.get_data_type(), value.get_raw_value()
        attributes[name] = untyped("Number", content) if kind == "NUMBER" else content
    for name, value in entry.system_properties.items():
        if name in TRACING:
            attributes[name] = value.get_string_value_by_type()
    return attributes
