"""Converts messages between the client's values and the engine's, within the embedded adapter's limits.

Strategy: everything that a caller can get wrong is refused here with the name of the field, before a command is made;
one function converts durations to microseconds. Nothing here waits or stores.

Limits: the engine itself has few. These keep messages valid in the other protocols where that is free (attributes as in
SQS), and bound everything else. Durations in seconds.
"""

import re
from collections.abc import Mapping
from hashlib import md5
from typing import Any, Final

import msgspec

from veilmq.client.messages import (
    ATTRIBUTES_MAX,
    LEASE_HINT_ATTRIBUTE,
    Message,
    Peeked,
    Received,
    Recommended,
    Sent,
    Template,
    named,
    untyped,
)
from veilmq.client.queue import Capabilities, HandleOnSend
from veilmq.client.shared import checks
from veilmq.client.shared.checks import as_message, text_bytes
from veilmq.model import outcomes
from veilmq.model.commands import Origin, Send
from veilmq.model.errors import CapabilityMissing, ParameterInvalid
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.messages import NO_EXTRAS, Attribute, Delivery, Extras, first_forbidden_character, id_text
from veilmq.model.settings.queue import (
    FIFO_SUFFIX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    PlanState,
    QueueKey,
    QueueSettings,
    RedrivePolicy,
    SettingsChange,
)

DURATION_MIN: Final = 0.001
LEASE_MAX: Final = 7.0 * DAY_US / SECOND_US
DELAY_MAX: Final = LEASE_MAX
WAIT_MAX: Final = 3_600.0
LIFE_MAX: Final = 3_650.0 * DAY_US / SECOND_US
"""Longest retention, and longest time to live."""
MESSAGES_MAX: Final = 1_000
"""Messages in one request. Each request is one batch of the engine, which serves nobody else meanwhile."""
REQUEST_BYTES_MAX: Final = 16 << 20
"""Bodies of one request, unless it has a single larger one."""
BODY_BYTES_MAX: Final = 64 << 20
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,120}(?:\.fifo)?\Z")
TEXT_CHARACTERS_MAX: Final = 256
"""Of a type or tag."""
TAGS_MAX: Final = 50

CAPABILITIES: Final = Capabilities(
    protocol="embedded",
    body_bytes_max=1 << 20,
    batch_messages_max=MESSAGES_MAX,
    receive_messages_max=MESSAGES_MAX,
    lease_min=DURATION_MIN,
    lease_max=LEASE_MAX,
    wait_max=WAIT_MAX,
    delay_max=DELAY_MAX,
    batch_extend=True,
    handle_on_send=HandleOnSend.ALWAYS,
    body_replaceable=True,
    retention_below_delay=True,
    attributes=True,
    peek=True,
    priorities=True,
    ttl=True,
    groups=True,
    native_topics=True,
    lease_hints=True,
    tags=True,
    extends_late=True,
)
"""Of a queue with the default largest body."""


def capabilities_of(settings: QueueSettings) -> Capabilities:
    """Of a queue with these settings. A FIFO queue has one delay for all its messages, and one order."""
    return msgspec.structs.replace(
        CAPABILITIES,
        body_bytes_max=settings.message_bytes_max,
        delay_max=0 if settings.fifo else DELAY_MAX,
        priorities=not settings.fifo,
        native_fifo=settings.fifo,
        extends_late=not settings.fifo,
    )


_PLAIN: Final = Message("")


def microseconds(seconds: Any, parameter: str, least: float, most: float) -> int:
    """A duration for a command. Raises ParameterInvalid."""
    return round(checks.seconds(seconds, parameter, least, most) * SECOND_US)


def checked_body(body: Any) -> bytes:
    """The body in UTF-8. Raises ParameterInvalid, also if it is empty: only other protocols can send empty bodies."""
    raw = text_bytes(body)
    if not raw:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    return raw


def digest(body: bytes) -> bytes:
    """The MD5 that is stored with a body."""
    return md5(body, usedforsecurity=False).digest()


def send_command(queue: QueueKey, origin: Origin, given: Any, fifo: bool) -> Send:
    """The command that sends a str or a Message to a (FIFO) queue. Raises ParameterInvalid, CapabilityMissing."""
    if type(given) is str:
        body, message = given, _PLAIN
    else:
        message = as_message(given)
        body = message.body
    raw = checked_body(body)
    send = Send(
        queue=queue, origin=origin, body=body, md5=digest(raw), size_bytes=len(raw), extras=NO_EXTRAS, wants_handle=True
    )
    if message is _PLAIN:
        return send
    if message.deduplication_id is not None and not fifo:
        raise CapabilityMissing(capability="deduplication")
    if message.delay is not None:
        send.delay_us = microseconds(message.delay, "delay", 0, 0 if fifo else DELAY_MAX)
    if message.ttl is not None:
        send.ttl_us = microseconds(message.ttl, "ttl", DURATION_MIN, LIFE_MAX)
    if message.priority is not None:
        if fifo:
            raise CapabilityMissing(capability="priorities")
        send.priority = checks.whole(message.priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    send.extras, attributes_bytes = _extras(message)
    send.size_bytes += attributes_bytes
    return send


def _extras(message: Message) -> tuple[Extras, int]:
    """Everything that the message has besides its body, and its bytes that count against the queue's limit (as in
    SQS)."""
    attributes = _attributes(message.attributes) if message.attributes else ()
    hint_us = None
    if message.lease_hint is not None:
        hint_us = microseconds(message.lease_hint, "lease_hint", DURATION_MIN, LEASE_MAX)
    names = (message.group, message.deduplication_id, message.type, message.tag)
    checks.token(message.group, "group")
    checks.token(message.deduplication_id, "deduplication_id")
    _check_text(message.type, "type")
    _check_text(message.tag, "tag")
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
    """A name, if given: 1 to 256 characters that XML can carry. Raises ParameterInvalid."""
    if text is None:
        return
    if type(text) is not str or not 1 <= len(text) <= TEXT_CHARACTERS_MAX:
        raise ParameterInvalid(
            parameter=parameter, reason=f"must be a str of 1 to {TEXT_CHARACTERS_MAX} characters, not {text!r}"
        )
    at = first_forbidden_character(text)
    if at is not None:
        raise ParameterInvalid(parameter=parameter, reason=f"U+{ord(text[at]):04X} is not allowed in XML")


def _attributes(given: Mapping[str, Any]) -> tuple[Attribute, ...]:
    """Message attributes with SQS's types. Raises ParameterInvalid naming the attribute."""
    if len(given) > ATTRIBUTES_MAX:
        raise ParameterInvalid(parameter="attributes", reason=f"at most {ATTRIBUTES_MAX}, not {len(given)}")
    return tuple(Attribute(name, *named(name, value)) for name, value in given.items())


def sent(outcome: outcomes.Sent, fifo: bool) -> Sent:
    """The result for a sender; only a FIFO queue has meaningful sequence numbers."""
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
    """Attributes by name, and the message type, which may be one of them."""
    if not extras.attributes:
        return {}, extras.type
    attributes = {each.name: untyped(each.type, each.value) for each in extras.attributes}
    attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    kind = attributes.pop(TYPE_ATTRIBUTE, None)
    return attributes, extras.type or (None if kind is None else str(kind))


def checked_name(name: Any) -> str:
    """A queue's name. Raises ParameterInvalid."""
    text = checks.text(name, "name")
    if not NAME.match(text):
        reason = f"a queue has 1 to 120 of A-Z a-z 0-9 _ - (and .fifo) for its name, not {text!r}"
        raise ParameterInvalid(parameter="name", reason=reason)
    return text


def settings_change(template: Template, queue: QueueKey) -> SettingsChange:
    """The settings that a template names; a name that ends in .fifo makes a FIFO queue. Raises ParameterInvalid."""
    change: SettingsChange = {}
    if queue.name.endswith(FIFO_SUFFIX):
        change["fifo"] = True
    elif template.fifo:
        raise ParameterInvalid(parameter="name", reason=f"a FIFO queue's name must end in {FIFO_SUFFIX}: {queue.name}")
    for field, setting, least, most in (
        ("visibility_timeout", "visibility_timeout_us", 0.0, LEASE_MAX),
        ("delay", "delay_us", 0.0, DELAY_MAX),
        ("retention", "retention_us", DURATION_MIN, LIFE_MAX),
        ("wait", "wait_us", 0.0, WAIT_MAX),
    ):
        if getattr(template, field) is not None:
            change[setting] = microseconds(getattr(template, field), field, least, most)
    if template.message_bytes_max is not None:
        body_bytes_max = template.message_bytes_max
        change["message_bytes_max"] = checks.whole(body_bytes_max, "message_bytes_max", 1, BODY_BYTES_MAX)
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
    if target is None or count is None:  # `checks.template` refuses one without the other
        return None
    return RedrivePolicy(QueueKey(queue.account, queue.region, checked_name(target)), count)


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    if len(tags) > TAGS_MAX:
        raise ParameterInvalid(parameter="tags", reason=f"at most {TAGS_MAX}, not {len(tags)}")
    for name, value in tags.items():
        _check_text(name, "tags")
        if value:
            _check_text(value, f"tags[{name!r}]")
    return dict(tags)


def recommended(plans: PlanState) -> Recommended | None:
    """What was learnt for a queue: the plan in force, else the suggested one."""
    plan = plans.applied or plans.suggested
    if plan is None:
        return None
    return Recommended(
        lease=None if plan.lease_us is None else plan.lease_us / SECOND_US,
        by_type={kind: lease_us / SECOND_US for kind, lease_us in plan.by_type.items()},
        why=plan.why,
        applied=plans.applied is not None,
    )
