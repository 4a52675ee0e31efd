"""Messages between the client's words and the engine's.

Strategy: everything that a caller can get wrong is refused here with the name of the field, before a command is made;
durations become microseconds in one function. Nothing here waits or stores.
"""

from collections.abc import Mapping
from hashlib import md5
from typing import Any, Final

from veilmq.client.embedded import limits
from veilmq.client.messages import Message, Peeked, Received, Recommended, Sent, Template
from veilmq.client.queue_attributes import FIFO_SUFFIX
from veilmq.client.typed_attributes import ATTRIBUTES_MAX, LEASE_HINT_ATTRIBUTE, TYPE_ATTRIBUTE, typed, untyped
from veilmq.model import outcomes
from veilmq.model.commands import Origin, Send
from veilmq.model.errors import CapabilityMissing, ParameterInvalid
from veilmq.model.instant import SECOND_US
from veilmq.model.message import NO_EXTRAS, Attribute, Delivery, Extras, first_forbidden_character
from veilmq.model.plan import PlanState
from veilmq.model.queue import QueueKey, RedrivePolicy, SettingsChange

_PLAIN: Final = Message("")


def microseconds(seconds: Any, parameter: str, least: float, most: float) -> int:
    """A duration for a command. Raises ParameterInvalid."""
    if isinstance(seconds, (int, float)) and type(seconds) is not bool and least <= seconds <= most:
        return round(seconds * SECOND_US)
    raise ParameterInvalid(
        parameter=parameter, reason=f"must be a number of seconds from {least:g} to {most:g}, not {seconds!r}"
    )


def whole(value: Any, parameter: str, least: int, most: int) -> int:
    """A whole number in a range. Raises ParameterInvalid."""
    if type(value) is int and least <= value <= most:
        return value
    raise ParameterInvalid(parameter=parameter, reason=f"must be a whole number from {least} to {most}, not {value!r}")


def checked_body(body: Any) -> bytes:
    """The body in UTF-8. Raises ParameterInvalid."""
    if type(body) is not str:
        raise ParameterInvalid(parameter="body", reason=f"must be a str, not {type(body).__name__}: encode bytes")
    at = first_forbidden_character(body)
    if at is not None:
        raise ParameterInvalid(parameter="body", reason=f"U+{ord(body[at]):04X} at index {at} is not allowed in XML")
    return body.encode()


def digest(body: bytes) -> bytes:
    """The MD5 that is stored with a body."""
    return md5(body, usedforsecurity=False).digest()


def send_command(queue: QueueKey, origin: Origin, given: Any, fifo: bool) -> Send:
    """The command that sends a str or a Message to a (FIFO) queue. Raises ParameterInvalid, CapabilityMissing."""
    if type(given) is str:
        body, message = given, _PLAIN
    elif isinstance(given, Message):
        body, message = given.body, given
    else:
        raise ParameterInvalid(parameter="message", reason=f"must be a str or a Message, not {type(given).__name__}")
    raw = checked_body(body)
    send = Send(
        queue=queue, origin=origin, body=body, md5=digest(raw), size_bytes=len(raw), extras=NO_EXTRAS, wants_handle=True
    )
    if message is _PLAIN:
        return send
    if message.deduplication_id is not None and not fifo:
        raise CapabilityMissing(capability="deduplication")
    if message.delay is not None:
        send.delay_us = microseconds(message.delay, "delay", 0, 0 if fifo else limits.DELAY_MAX)
    if message.ttl is not None:
        send.ttl_us = microseconds(message.ttl, "ttl", limits.DURATION_MIN, limits.LIFE_MAX)
    if message.priority is not None:
        if fifo:
            raise CapabilityMissing(capability="priorities")
        send.priority = whole(message.priority, "priority", limits.PRIORITY_MIN, limits.PRIORITY_MAX)
    send.extras, attributes_bytes = _extras(message)
    send.size_bytes += attributes_bytes
    return send


def _extras(message: Message) -> tuple[Extras, int]:
    """What more than a body the message has, and the bytes of it that count against the queue's limit (as in SQS)."""
    attributes = _attributes(message.attributes) if message.attributes else ()
    hint_us = None
    if message.lease_hint is not None:
        hint_us = microseconds(message.lease_hint, "lease_hint", limits.DURATION_MIN, limits.LEASE_MAX)
    names = (message.group, message.deduplication_id, message.type, message.tag)
    for field, name in zip(("group", "deduplication_id", "type", "tag"), names, strict=True):
        _check_text(name, field)
    if not attributes and hint_us is None and names == (None, None, None, None):
        return NO_EXTRAS, 0
    size_bytes = sum(
        len(each.name) + len(each.type) + len(each.value.encode() if type(each.value) is str else each.value)
        for each in attributes
    )
    group, deduplication_id, kind, tag = names
    extras = Extras(attributes, group, deduplication_id, type=kind, tag=tag, lease_hint_us=hint_us)
    return extras, size_bytes


def _check_text(text: Any, parameter: str) -> None:
    """A name: one to 256 characters that XML can carry."""
    if text is None:
        return
    if type(text) is not str or not 1 <= len(text) <= limits.TEXT_CHARACTERS_MAX:
        raise ParameterInvalid(
            parameter=parameter, reason=f"must be a str of 1 to {limits.TEXT_CHARACTERS_MAX} characters, not {text!r}"
        )
    at = first_forbidden_character(text)
    if at is not None:
        raise ParameterInvalid(parameter=parameter, reason=f"U+{ord(text[at]):04X} is not allowed in XML")


def _attributes(given: Mapping[str, Any]) -> tuple[Attribute, ...]:
    """Message attributes with SQS's types. Raises ParameterInvalid naming the attribute."""
    if len(given) > ATTRIBUTES_MAX:
        raise ParameterInvalid(parameter="attributes", reason=f"at most {ATTRIBUTES_MAX}, not {len(given)}")
    return tuple(_attribute(name, value) for name, value in given.items())


def _attribute(name: Any, value: Any) -> Attribute:
    parameter = f"attributes[{name!r}]"
    if type(name) is not str or len(name) > limits.TEXT_CHARACTERS_MAX or not limits.ATTRIBUTE_NAME.match(name):
        reason = "a name has 1 to 256 of A-Z a-z 0-9 _ - and single periods between them"
        raise ParameterInvalid(parameter=parameter, reason=reason)
    kind, content = typed(name, value)
    at = first_forbidden_character(content) if isinstance(content, str) else None
    if at is not None:
        raise ParameterInvalid(parameter=parameter, reason=f"U+{ord(str(content)[at]):04X} is not allowed in XML")
    return Attribute(name, kind, content)


def sent(outcome: outcomes.Sent, fifo: bool) -> Sent:
    """What a sender gets; sequence numbers mean something on a FIFO queue alone."""
    return Sent(
        id_text(outcome.id), outcome.handle or None, outcome.sequence if fifo else None, duplicate=outcome.duplicate
    )


def peeked(delivery: Delivery, fifo: bool) -> Peeked:
    """A message without a lease."""
    extras = delivery.extras
    attributes, kind = _attributes_of(extras)
    return Peeked(
        id=id_text(delivery.id),
        body=delivery.body,
        attributes=attributes,
        receive_count=delivery.receive_count,
        sent=delivery.sent / SECOND_US,
        group=extras.group,
        sequence_number=delivery.sequence if fifo else None,
        priority=delivery.priority,
        type=kind,
        expires=delivery.expires / SECOND_US,
    )


def received(delivery: Delivery, fifo: bool, lease_end: float) -> Received:
    """A message with its lease. lease_end: on the client's monotonic clock."""
    extras = delivery.extras
    attributes, kind = _attributes_of(extras)
    return Received(
        id=id_text(delivery.id),
        body=delivery.body,
        attributes=attributes,
        receive_count=delivery.receive_count,
        sent=delivery.sent / SECOND_US,
        group=extras.group,
        sequence_number=delivery.sequence if fifo else None,
        priority=delivery.priority,
        type=kind,
        expires=delivery.expires / SECOND_US,
        handle=delivery.handle,
        lease_end=lease_end,
        first_received=None if delivery.first_received is None else delivery.first_received / SECOND_US,
        deduplication_id=extras.deduplication_id,
    )


def _attributes_of(extras: Extras) -> tuple[dict[str, Any], str | None]:
    """Attributes by name, and the message type, which may have come as one of them."""
    if not extras.attributes:
        return {}, extras.type
    attributes = {each.name: untyped(each.type, each.value) for each in extras.attributes}
    attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    kind = attributes.pop(TYPE_ATTRIBUTE, None)
    return attributes, extras.type or (None if kind is None else str(kind))


def id_text(message: bytes) -> str:
    """A message id as the other protocols print it: a UUID's text."""
    digits = message.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def checked_name(name: Any) -> str:
    """A queue's name. Raises ParameterInvalid."""
    if type(name) is not str or not limits.NAME.match(name):
        reason = f"a queue has 1 to 120 of A-Z a-z 0-9 _ - (and .fifo) for its name, not {name!r}"
        raise ParameterInvalid(parameter="name", reason=reason)
    return name


def settings_change(template: Template, queue: QueueKey) -> SettingsChange:
    """The settings that a template names; a name that ends in .fifo is a FIFO queue's. Raises ParameterInvalid."""
    change: SettingsChange = {}
    if queue.name.endswith(FIFO_SUFFIX):
        change["fifo"] = True
    elif template.fifo:
        raise ParameterInvalid(parameter="name", reason=f"a FIFO queue's name must end in {FIFO_SUFFIX}: {queue.name}")
    for field, setting, least, most in (
        ("visibility_timeout", "visibility_timeout_us", 0.0, limits.LEASE_MAX),
        ("delay", "delay_us", 0.0, limits.DELAY_MAX),
        ("retention", "retention_us", limits.DURATION_MIN, limits.LIFE_MAX),
        ("wait", "wait_us", 0.0, limits.WAIT_MAX),
    ):
        if getattr(template, field) is not None:
            change[setting] = microseconds(getattr(template, field), field, least, most)
    if template.message_bytes_max is not None:
        change["message_bytes_max"] = whole(template.message_bytes_max, "message_bytes_max", 1, limits.BODY_BYTES_MAX)
    redrive = _redrive(template, queue)
    if redrive is not None:
        change["redrive"] = redrive
    if template.content_deduplication:
        change["content_deduplication"] = True
    if template.tags:
        change["tags"] = _tags(template.tags)
    return change


def _redrive(template: Template, queue: QueueKey) -> RedrivePolicy | None:
    target, count = template.dead_letter_queue, template.receive_count_max
    if target is None and count is None:
        return None
    if target is None or count is None:
        missing = "receive_count_max" if count is None else "dead_letter_queue"
        raise ParameterInvalid(parameter=missing, reason="dead_letter_queue and receive_count_max come together")
    key = QueueKey(queue.account, queue.region, checked_name(target))
    return RedrivePolicy(key, whole(count, "receive_count_max", 1, limits.RECEIVE_COUNT_MAX))


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    if len(tags) > limits.TAGS_MAX:
        raise ParameterInvalid(parameter="tags", reason=f"at most {limits.TAGS_MAX}, not {len(tags)}")
    for name, value in tags.items():
        _check_text(name, "tags")
        if value:
            _check_text(value, f"tags[{name!r}]")
    return dict(tags)


def recommended(plans: PlanState) -> Recommended | None:
    """What was learnt for a queue: what is in force, else what is suggested."""
    plan = plans.applied or plans.suggested
    if plan is None:
        return None
    return Recommended(
        lease=None if plan.lease_us is None else plan.lease_us / SECOND_US,
        by_type={kind: lease_us / SECOND_US for kind, lease_us in plan.by_type.items()},
        why=plan.why,
        applied=plans.applied is not None,
    )
