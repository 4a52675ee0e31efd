"""What a queue would refuse to send, found before anything else is done.

Strategy: by the queue's capabilities alone, for patterns that do something first that no refusal undoes: a
transaction's operation, the first copies of a publish. The adapters judge again as they send; what only the service
knows (rights, a queue's own smaller limits) is left to it.
"""

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Message
from veilmq.client.prepared import text_bytes
from veilmq.client.typed_attributes import ATTRIBUTES_MAX, named, size_bytes
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid
from veilmq.model.queue import PRIORITY_MAX, PRIORITY_MIN


def check_sendable(message: Message, can: Capabilities) -> None:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge, as a queue that can do this would."""
    checked.fields(message)
    _check_abilities(message, can)
    checked.token(message.group, "group")
    checked.token(message.deduplication_id, "deduplication_id")
    if message.delay is not None:
        checked.seconds(message.delay, "delay", 0, can.delay_max)
    if message.ttl is not None and not message.ttl > 0:
        raise ParameterInvalid(parameter="ttl", reason=f"must be above 0 s, not {message.ttl}")
    if message.priority is not None:
        checked.whole(message.priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    if message.lease_hint is not None and not 0 < message.lease_hint <= can.lease_max:
        reason = f"must be above 0 and at most {can.lease_max:g} s, not {message.lease_hint}"
        raise ParameterInvalid(parameter="lease_hint", reason=reason)
    _check_size(message, can)


def _check_abilities(message: Message, can: Capabilities) -> None:
    """Which field needs which ability."""
    needed = {
        "attributes": bool(message.attributes) or message.type is not None,
        "priorities": message.priority is not None,
        "ttl": message.ttl is not None,
        "groups": message.group is not None,
        "lease_hints": message.lease_hint is not None,
        "tags": message.tag is not None,
    }
    for ability, is_needed in needed.items():
        if is_needed and not getattr(can, ability):
            raise CapabilityMissing(capability=ability)
    if message.deduplication_id is not None and not can.native_fifo:
        raise CapabilityMissing(capability="deduplication")
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
