"""The port's messages as entries of SendMessage and BatchSendMessage.

Strategy: what MNS cannot carry is refused here, before any I/O, and so is what exceeds its limits. Attributes travel as
user properties under SQS's rules, so that every client can read them; those of tracing as system properties, where MNS
has them. Source: the page of SendMessage.
"""

import math
from typing import Any, Final

import msgspec
from mns.message_property import (  # type: ignore[import-untyped]
    MessagePropertyValue,
    MessageSystemPropertyValue,
    SystemPropertyName,
)
from mns.mns_request import SendMessageRequest, SendMessageRequestEntry  # type: ignore[import-untyped]

from veilmq.client import base64_bodies, checked
from veilmq.client.messages import Message
from veilmq.client.prepared import as_message, text_bytes
from veilmq.client.typed_attributes import ATTRIBUTES_MAX, LEASE_HINT_ATTRIBUTE, named, size_bytes
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.queue import PRIORITY_MAX, PRIORITY_MIN

MESSAGE_BYTES_MAX: Final = 65_536
LEASE_MAX: Final = 43_200
DELAY_MAX: Final = 604_800
TRACING: Final = frozenset({"traceparent", "tracestate", "baggage"})
"""System properties that are attributes of the same names."""

_TYPES: Final = {"String": "STRING", "Number": "NUMBER", "Binary": "BINARY"}
_CANNOT: Final = {"ttl": "ttl", "group": "groups", "deduplication_id": "deduplication", "tag": "tags"}
"""Field of a message -> the ability that it needs and MNS's queues lack."""


class Entry(msgspec.Struct, gc=False):
    """A message ready to travel."""

    body: str
    delay: int
    """-1: the queue's own, as the SDK has it."""
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


def entry_of(given: str | Message, base64: bool) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message = as_message(given)
    for field, capability in _CANNOT.items():
        if getattr(message, field) is not None:
            raise CapabilityMissing(capability=capability)
    raw = text_bytes(message.body)
    if not raw:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    priority = message.priority
    if priority is not None:
        checked.whole(priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    hint = message.lease_hint
    if hint is not None and not 0 < hint <= LEASE_MAX:
        raise ParameterInvalid(parameter="lease_hint", reason=f"must be above 0 and at most {LEASE_MAX} s, not {hint}")
    attributes = _attributes(message)
    body = base64_bodies.encode(raw) if base64 else message.body
    total_bytes = (len(body) if base64 else len(raw)) + size_bytes(attributes)
    if total_bytes > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(size_bytes=total_bytes, limit_bytes=MESSAGE_BYTES_MAX)
    return Entry(
        body=body,
        delay=-1 if message.delay is None else whole("delay", message.delay, 0, DELAY_MAX),
        priority=-1 if priority is None else priority,
        user={name: _user(*each) for name, each in attributes.items() if name not in TRACING},
        system={name: _system(name, *each) for name, each in attributes.items() if name in TRACING},
        size_bytes=total_bytes,
    )


def whole(parameter: str, seconds: float, least: int, most: int) -> int:
    """Seconds as the service has them: whole ones, rounded up. Raises ParameterInvalid."""
    return math.ceil(checked.seconds(seconds, parameter, least, most))


def _attributes(message: Message) -> dict[str, tuple[str, str | bytes]]:
    given = dict(message.attributes)
    for name, value in ((TYPE_ATTRIBUTE, message.type), (LEASE_HINT_ATTRIBUTE, message.lease_hint)):
        if value is not None:
            if name in given:
                raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is given as a field of the message")
            given[name] = value
    if len(given) > ATTRIBUTES_MAX:
        reason = f"{len(given)} are more than {ATTRIBUTES_MAX} (type and lease_hint count as one each)"
        raise ParameterInvalid(parameter="attributes", reason=reason)
    attributes = {}
    for name, value in given.items():
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
