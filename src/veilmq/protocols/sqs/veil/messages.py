"""Checks a message of VeilMQ.Send and makes its command; converts errors of an entry.

Strategy: one function raises our errors with the wire name of the wrong member; they become that entry's failure. Field
names in the store's errors are translated to members too. Rules that SQS shares (attributes, groups, deduplication ids)
use SQS's own functions.
"""

from typing import Final

from veilmq.model.commands import Origin, Send
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, VeilError, as_fields
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import NO_EXTRAS, Attribute, Extras, first_forbidden_character, is_plain
from veilmq.model.settings.queue import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, QueueKey
from veilmq.protocols.sqs import limits, veil
from veilmq.protocols.sqs.addresses import is_fifo
from veilmq.protocols.sqs.errors import Refusal
from veilmq.protocols.sqs.operations.message_attributes import body_md5, message_attributes

_FIFO: Final = "is not for FIFO queues"
_MEMBERS: Final = {
    "group": "Group",
    "deduplication_id": "DeduplicationId",
    "delay_us": "Delay",
    "ttl_us": "TimeToLive",
    "lease_us": "Lease",
}
"""Field of a command -> the member that it came from."""


def message_of(given: veil.MessageIn, queue: QueueKey, origin: Origin, wants_handle: bool) -> Send:
    """Raises ParameterInvalid naming the member, MessageTooLarge."""
    if given.body is None:
        raise ParameterInvalid(parameter="Body", reason="must be given")
    raw, md5 = checked_body(given.body)
    fifo = is_fifo(queue.name)
    if fifo:
        _check_fifo(given)
    extras, attributes_bytes = _extras(given, fifo)
    size_bytes = len(raw) + attributes_bytes
    if size_bytes > veil.REQUEST_BYTES_MAX:
        raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=veil.REQUEST_BYTES_MAX)
    delay_us, ttl_us = None, None
    if given.delay is not None:
        delay_us = _microseconds("Delay", given.delay, veil.DELAY_SECONDS_MAX)
    if given.time_to_live is not None:
        ttl_us = _microseconds("TimeToLive", given.time_to_live, veil.TIME_TO_LIVE_SECONDS_MAX)
        if not ttl_us:
            raise ParameterInvalid(parameter="TimeToLive", reason="must be above 0")
    priority = given.priority
    if priority is None:
        priority = PRIORITY_DEFAULT
    elif not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        reason = f"must be from {PRIORITY_MIN} to {PRIORITY_MAX}, not {priority}"
        raise ParameterInvalid(parameter="Priority", reason=reason)
    return Send(
        queue=queue,
        origin=origin,
        body=given.body,
        md5=md5,
        size_bytes=size_bytes,
        priority=priority,
        delay_us=delay_us,
        ttl_us=ttl_us,
        extras=extras,
        wants_handle=wants_handle,
    )


def failure_of(error: VeilError) -> veil.Failure:
    """An entry's error on the wire."""
    if isinstance(error, ParameterInvalid):
        error = ParameterInvalid(parameter=_MEMBERS.get(error.parameter, error.parameter), reason=error.reason)
    return veil.Failure(name=type(error).__name__, fields=as_fields(error), message=str(error))


def checked_body(body: str) -> tuple[bytes, bytes]:
    """The body's bytes and their MD5. Raises ParameterInvalid."""
    raw = body.encode()
    if not raw:
        raise ParameterInvalid(parameter="Body", reason="must not be empty")
    if not is_plain(raw):
        _check_text("Body", body)
    return raw, body_md5(raw)


def _check_text(name: str, text: str) -> None:
    index = first_forbidden_character(text)
    if index is not None:
        reason = f"has a character outside the allowed set at index {index}: U+{ord(text[index]):04X}"
        raise ParameterInvalid(parameter=name, reason=reason)


def _microseconds(name: str, seconds: float, seconds_max: int) -> int:
    if not 0 <= seconds <= seconds_max:
        raise ParameterInvalid(parameter=name, reason=f"must be from 0 to {seconds_max} seconds, not {seconds}")
    return round(seconds * SECOND_US)


def _check_fifo(given: veil.MessageIn) -> None:
    if not given.group:
        raise ParameterInvalid(parameter="Group", reason="must be given on a FIFO queue")
    if given.delay:
        raise ParameterInvalid(parameter="Delay", reason=f"{_FIFO}: their delay is the queue's")
    if given.priority is not None:
        raise ParameterInvalid(parameter="Priority", reason=f"{_FIFO}: they keep the order of a group")
    given.delay = None


def _extras(given: veil.MessageIn, fifo: bool) -> tuple[Extras, int]:
    """The message's fields beyond its body, and their size in bytes."""
    attributes: tuple[Attribute, ...] = ()
    size_bytes, lease_hint_us = 0, None
    if given.attributes:
        try:
            attributes, size_bytes = message_attributes(given.attributes)
        except Refusal as refusal:
            raise ParameterInvalid(parameter="Attributes", reason=refusal.message) from None
    if given.group is not None:
        _check_token("Group", given.group)
    if given.deduplication_id is not None:
        if not fifo:
            raise ParameterInvalid(parameter="DeduplicationId", reason="is for FIFO queues alone")
        _check_token("DeduplicationId", given.deduplication_id)
    if given.type is not None:
        _check_label("Type", given.type)
    if given.tag is not None:
        _check_label("Tag", given.tag)
    if given.lease_hint is not None:
        lease_hint_us = _microseconds("LeaseHint", given.lease_hint, veil.LEASE_SECONDS_MAX)
        if not lease_hint_us:
            raise ParameterInvalid(parameter="LeaseHint", reason="must be above 0")
    extras = Extras(
        attributes=attributes,
        group=given.group,
        deduplication_id=given.deduplication_id,
        type=given.type,
        tag=given.tag,
        lease_hint_us=lease_hint_us,
    )
    return (NO_EXTRAS if extras == NO_EXTRAS else extras), size_bytes


def _check_token(name: str, token: str) -> None:
    if not limits.TOKEN.match(token):
        raise ParameterInvalid(parameter=name, reason="must be 1 to 128 letters, digits and punctuation of ASCII")


def _check_label(name: str, label: str) -> None:
    if not 1 <= len(label) <= veil.LABEL_CHARACTERS_MAX:
        reason = f"must be of 1 to {veil.LABEL_CHARACTERS_MAX} characters"
        raise ParameterInvalid(parameter=name, reason=reason)
    _check_text(name, label)
