"""Converts the port's messages to the form of VeilMQ.Send, and the wire's messages to the port's.

Strategy: pure functions, with a fast path first: most messages have only a body. Our server checks the values; only
what has no form on the wire is refused here. Source: docs/veil-protocol.md.
"""

from collections.abc import Mapping
from typing import Final

from veilmq.client import checks
from veilmq.client.adapters.service_errors import port_name
from veilmq.client.encoding import size_bytes, typed, untyped
from veilmq.client.errors import ServiceError
from veilmq.client.messages import AttributeValue, Message, Peeked, Received, Sent
from veilmq.model.errors import ParameterInvalid, VeilError, from_fields
from veilmq.model.queue import PRIORITY_MAX, PRIORITY_MIN
from veilmq.protocols.sqs.inputs import AttributeValue as WireValue
from veilmq.protocols.sqs.operations import veil_shapes as shapes
from veilmq.protocols.sqs.operations.veil_shapes import Failure, MessageIn, MessageOut, SentEntry

_DURATIONS: Final = (
    ("delay", shapes.DELAY_SECONDS_MAX),
    ("ttl", shapes.TIME_TO_LIVE_SECONDS_MAX),
    ("lease_hint", shapes.LEASE_SECONDS_MAX),
)
_NONE: Final[Mapping[str, AttributeValue]] = {}


def wire_of(message: str | Message) -> MessageIn:
    """Raises ParameterInvalid for an attribute whose type does not exist on the wire, and for a number out of range:
    JSON has no NaN or infinity."""
    if isinstance(message, str):
        return MessageIn(body=message)
    for field, seconds_max in _DURATIONS:
        seconds = getattr(message, field)
        if seconds is not None:
            checks.seconds(seconds, field, 0, seconds_max)
    if message.priority is not None:
        checks.whole(message.priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    return MessageIn(
        body=message.body,
        attributes=_wire_values(message.attributes) if message.attributes else None,
        delay=message.delay,
        time_to_live=message.ttl,
        priority=message.priority,
        group=message.group,
        deduplication_id=message.deduplication_id,
        type=message.type,
        lease_hint=message.lease_hint,
        tag=message.tag,
    )


def _wire_values(attributes: Mapping[str, AttributeValue]) -> dict[str, WireValue]:
    values = {}
    for name, value in attributes.items():
        kind, content = typed(name, value)
        if isinstance(content, str):
            values[name] = WireValue(data_type=kind, string_value=content)
        else:
            values[name] = WireValue(data_type=kind, binary_value=content)
    return values


def wire_bytes(message: MessageIn) -> int:
    """The message's share of a request's size."""
    body = message.body or ""
    body_bytes = len(body) if body.isascii() else len(body.encode(errors="replace"))
    if not message.attributes:
        return body_bytes
    return body_bytes + size_bytes(
        {
            name: (value.data_type or "", value.string_value or value.binary_value or "")
            for name, value in message.attributes.items()
        }
    )


def sent_of(line: SentEntry) -> Sent:
    """The entry of a message that was sent, in a Send's answer."""
    return Sent(line.id, line.handle, line.sequence_number, line.duplicate)


def failure_of(failure: Failure) -> VeilError:
    """The error that the server named; a ServiceError if this version does not know it."""
    fields = dict(failure.fields)
    try:
        if failure.name == ParameterInvalid.__name__:
            fields["parameter"] = port_name(str(fields["parameter"]))
        return from_fields(failure.name, fields)
    except (KeyError, TypeError):
        return ServiceError(code=failure.name, status=400, request_id="", message=failure.message)


def _values(message: MessageOut) -> Mapping[str, AttributeValue]:
    if not message.attributes:
        return _NONE
    return {
        name: untyped(
            value.data_type or "", value.string_value if value.string_value is not None else value.binary_value or b""
        )
        for name, value in message.attributes.items()
    }


def received_of(message: MessageOut, granted_by: float, asked_lease: float | None) -> Received:
    """`granted_by`: an instant not after the grant, on our monotonic clock."""
    lease = message.lease if message.lease is not None else asked_lease or 0.0
    return Received(
        message.id,
        message.body,
        _values(message),
        message.receive_count,
        message.sent,
        message.group,
        message.sequence_number,
        message.priority,
        message.type,
        message.expires,
        handle=message.handle,
        lease_end=granted_by + lease,
        first_received=message.first_received,
        deduplication_id=message.deduplication_id,
    )


def peeked_of(message: MessageOut) -> Peeked:
    """A message of a Peek."""
    return Peeked(
        message.id,
        message.body,
        _values(message),
        message.receive_count,
        message.sent,
        message.group,
        message.sequence_number,
        message.priority,
        message.type,
        message.expires,
    )
