"""What a queue would refuse to send, found before anything else is done.

Strategy: by the queue's capabilities alone, for patterns that do something first that no refusal undoes: a
transaction's operation, the first copies of a publish. The adapters judge again as they send, by `check_abilities` and
by what their protocols allow; what only the service knows (rights, a queue's own smaller limits) is left to it.
"""

from typing import Final

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Message
from veilmq.client.prepared import text_bytes
from veilmq.client.typed_attributes import ATTRIBUTES_MAX, named, size_bytes
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid
from veilmq.model.queue import PRIORITY_MAX, PRIORITY_MIN

_NEEDED_FOR: Final = (
    ("priorities", "priority"),
    ("ttl", "ttl"),
    ("groups", "group"),
    ("native_fifo", "deduplication_id"),
    ("lease_hints", "lease_hint"),
    ("tags", "tag"),
)
"""Ability of a queue, and the field of a message that needs it."""


def check_sendable(message: Message, can: Capabilities) -> None:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge, as a queue that can do this would."""
    checked.fields(message)
    check_abilities(message, can)
    checked.token(message.group, "group")
    checked.token(message.deduplication_id, "deduplication_id")
    if message.delay is not None:
        checked.seconds(message.delay, "delay", 0, can.delay_max)
    if message.ttl is not None and not message.ttl > 0:
        raise ParameterInvalid(parameter="ttl", reason=f"must be above 0 s, not {message.ttl}")
    if message.priority is not None:
        checked.whole(message.priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    checked.lease_hint(message.lease_hint, can.lease_max)
    _check_size(message, can)


def check_abilities(message: Message, can: Capabilities) -> None:
    """Raises CapabilityMissing for a field that the queue cannot carry, ParameterInvalid without a group on a FIFO
    queue."""
    if not can.attributes and (message.attributes or message.type is not None):
        raise CapabilityMissing(capability="attributes")
    for ability, field in _NEEDED_FOR:
        if getattr(message, field) is not None and not getattr(can, ability):
            raise CapabilityMissing(capability="deduplication" if ability == "native_fifo" else ability)
    if message.group is None and can.native_fifo:
        raise ParameterInvalid(parameter="group", reason="is needed: the queue is FIFO")


def _check_size(message: Message, can: Capabilities) -> None:
    if len(text_bytes(message.body)) < can.body_bytes_min:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    if len(message.attributes) > ATTRIBUTES_MAX:
        reason = f"at most {ATTRIBUTES_MAX}, not {len(message.attributes)}"
        raise ParameterInvalid(parameter="attributes", reason=reason)
    attributes = {name: named(name, value) for name, value in message.attributes.items()}
    total_bytes = can.transmitted_bytes(message.body) + size_bytes(attributes)
    if total_bytes > can.body_bytes_max:
        raise MessageTooLarge(size_bytes=total_bytes, limit_bytes=can.body_bytes_max)
