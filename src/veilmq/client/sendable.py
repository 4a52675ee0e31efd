"""Finds what a queue would refuse to send, before anything else is done.

Strategy: decides by the queue's capabilities alone, for patterns that first do something that cannot be undone: a
transaction's operation, the first copies of a publish. The adapters check again when they send, by `check_abilities`
and by their protocol's rules. What only the service knows (rights, a queue's own smaller limits) is left to it.

Preparing: an entry that cannot be sent stays here; its error takes its place in the answer, as the port promises.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.messages import Message, Sent
from veilmq.client.queue import Queue
from veilmq.client.typed_attributes import ATTRIBUTES_MAX, named, size_bytes
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, VeilError
from veilmq.model.message import first_forbidden_character
from veilmq.model.queue import PRIORITY_MAX, PRIORITY_MIN

T = TypeVar("T")
R = TypeVar("R")


def as_message(given: Any) -> Message:
    """The given Message, or a str as the message with that body. Raises ParameterInvalid for anything else, and for a
    message with a field of the wrong type."""
    if isinstance(given, Message):
        return checked.fields(given)
    if isinstance(given, str):
        return Message(given)
    raise ParameterInvalid(parameter="message", reason=f"must be a str or a Message, not {type(given).__name__}")


def text_bytes(body: Any) -> bytes:
    """The body in UTF-8. Raises ParameterInvalid if it is not text of XML 1.0 characters."""
    text = checked.body(body)
    at = first_forbidden_character(text)
    if at is not None:
        raise ParameterInvalid(parameter="body", reason=f"U+{ord(text[at]):04X} at index {at} is not allowed in XML")
    return text.encode()


def send_prepared(queue: Queue, prepared: Sequence[Message | VeilError]) -> list[Sent | VeilError]:
    """Send the messages as one batch; the errors stay where they are."""

    def send(messages: Sequence[Message]) -> list[Sent | VeilError]:
        return queue.send_batch(messages)

    return through(prepared, send)


def through(entries: Sequence[T | VeilError], call: Callable[[Sequence[T]], Sequence[R]]) -> list[R | VeilError]:
    """Call `call` with the entries that are no errors; return its results in their places."""
    good = [entry for entry in entries if not isinstance(entry, VeilError)]
    results = iter(call(good) if good else ())
    return [entry if isinstance(entry, VeilError) else next(results) for entry in entries]


def attempt(make: Callable[[T], R], given: T) -> R | VeilError:
    """The result of `make`, or the typed error that it raises."""
    try:
        return make(given)
    except VeilError as error:
        return error


_NEEDED_FOR: Final = (
    ("priorities", "priority"),
    ("ttl", "ttl"),
    ("groups", "group"),
    ("native_fifo", "deduplication_id"),
    ("lease_hints", "lease_hint"),
    ("tags", "tag"),
)
"""A queue's ability, and the field of a message that needs it."""


def check_sendable(message: Message, can: Capabilities) -> None:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge, as a queue with these capabilities would."""
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
