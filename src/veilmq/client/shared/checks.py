"""Checks before any I/O: numbers by their ranges, handles and messages by their types, and whether a queue can carry a
message.

Strategy: all adapters check here, so a bad argument is the same error on every queue, and a bad entry of a batch does
not affect the others. A duration is an int or a float, but not a bool; a count is an int. NaN is out of every range.
What only the service can know (rights, a queue's own smaller limits) is left to the service.

`sendable` decides by the queue's capabilities alone. The adapters of SQS, Azure and MNS use it when they send, and add
their protocol's rules. `check_sendable` is for patterns that first do something that cannot be undone: a transaction's
operation, the first copies of a publish. Only the engine has checks of its own: our server makes them for the veil
adapter, the embedded adapter before it makes a command.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from veilmq.client.messages import Extension, Message, Received, Template, named, size_bytes, with_fields
from veilmq.client.queue import Capabilities, Queue
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, ReceiptInvalid
from veilmq.model.messages import first_forbidden_character
from veilmq.model.settings.queue import PRIORITY_MAX, PRIORITY_MIN

T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)

_BITS_MAX: Final = 63
"""Of a duration, so that it converts to a float and fits into every protocol."""
_CHARACTERS_MAX: Final = 80
_RECEIVE_COUNT_MAX: Final = 1_000
"""As SQS's maxReceiveCount."""
_TEXTS: Final = ("group", "deduplication_id", "type", "tag")
_DURATIONS: Final = ("delay", "ttl", "lease_hint")
_TOKEN: Final = re.compile(r"[!-~]{1,128}")
"""SQS's rule for MessageGroupId and MessageDeduplicationId (API reference, SendMessage)."""


def choice(value: Any, kind: type[Choice], parameter: str) -> Choice:
    """One of the kind's members, or the text of one. Raises ParameterInvalid."""
    try:
        return kind(value)
    except ValueError:
        reason = f"must be one of {', '.join(kind)}, not {value!r}"
        raise ParameterInvalid(parameter=parameter, reason=reason) from None


def whole(value: Any, parameter: str, least: int, most: int) -> int:
    """A whole number in a range. Raises ParameterInvalid."""
    if isinstance(value, int) and type(value) is not bool and least <= value <= most:
        return value
    raise ParameterInvalid(
        parameter=parameter, reason=f"must be a whole number from {least} to {most}, not {_text_of(value)}"
    )


def seconds(value: Any, parameter: str, least: float, most: float) -> float:
    """A duration in a range. Raises ParameterInvalid."""
    return number(value, parameter, least, most, "a number of seconds")


def number(value: Any, parameter: str, least: float, most: float, kind: str = "a number") -> float:
    """A number in a range that is not a duration. Raises ParameterInvalid."""
    if _is_number(value) and least <= value <= most:
        return value  # type: ignore[no-any-return]
    reason = f"must be {kind} from {_shown(least)} to {_shown(most)}, not {_text_of(value)}"
    raise ParameterInvalid(parameter=parameter, reason=reason)


def positive(value: Any, parameter: str, *, may_be_endless: bool = False, kind: str = "number of seconds") -> float:
    """A duration, or what `kind` says, above 0. Raises ParameterInvalid."""
    if _is_number(value) and (0 < value < math.inf or (may_be_endless and value == math.inf)):
        return value  # type: ignore[no-any-return]
    raise ParameterInvalid(parameter=parameter, reason=f"{_text_of(value)} is not a finite {kind} above 0")


def not_negative(value: Any, parameter: str) -> float:
    """A duration of 0 or more, but finite. Raises ParameterInvalid."""
    if _is_number(value) and 0 <= value < math.inf:
        return value  # type: ignore[no-any-return]
    raise ParameterInvalid(parameter=parameter, reason=f"{_text_of(value)} is not a finite number of seconds from 0 on")


def remaining(value: Any, parameter: str) -> float:
    """The time left until an instant, which may be negative. Raises ParameterInvalid."""
    if _is_number(value) and not math.isnan(value):
        return value  # type: ignore[no-any-return]
    raise ParameterInvalid(parameter=parameter, reason=f"must be a number of seconds, not {_text_of(value)}")


def at_least(value: Any, parameter: str, least: int) -> int:
    """A whole number without an upper bound. Raises ParameterInvalid."""
    if isinstance(value, int) and type(value) is not bool and value >= least:
        return value
    raise ParameterInvalid(parameter=parameter, reason=f"must be a whole number from {least} on, not {_text_of(value)}")


def token(value: str | None, parameter: str) -> None:
    """A message group or a deduplication id, if given. Raises ParameterInvalid."""
    if value is not None and not _TOKEN.fullmatch(value):
        reason = f"must be 1 to 128 letters, digits and punctuation of ASCII, not {_text_of(value)}"
        raise ParameterInvalid(parameter=parameter, reason=reason)


def batch(value: Iterable[T], parameter: str = "messages") -> Sequence[T]:
    """The entries of a batch; those of an iterator as a list. Raises ParameterInvalid for a str, which Python treats as
    a sequence of characters, and for anything that is not a collection."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ParameterInvalid(parameter=parameter, reason=f"must be a collection, not {type(value).__name__}")
    return value if isinstance(value, Sequence) else list(value)


def whole_seconds(value: float, parameter: str, least: float, most: float) -> int:
    """Whole seconds for a service that has no fractions: rounded up. Raises ParameterInvalid."""
    return math.ceil(seconds(value, parameter, least, most))


def lease_hint(value: float | None, most: float) -> None:
    """A lease hint, if given. Raises ParameterInvalid."""
    if value is not None and not 0 < value <= most:
        reason = f"must be above 0 and at most {most:g} s, not {value}"
        raise ParameterInvalid(parameter="lease_hint", reason=reason)


def function(value: Any, parameter: str) -> None:
    """A callable. Raises ParameterInvalid."""
    if not callable(value):
        raise ParameterInvalid(parameter=parameter, reason=f"must be a function, not {type(value).__name__}")


def function_or_none(value: T, parameter: str) -> T:
    """A callable, or None for one that is not given. Raises ParameterInvalid."""
    if value is not None:
        function(value, parameter)
    return value


def object_with(value: Any, parameter: str, method: str) -> None:
    """An object that has the method; not a class. Raises ParameterInvalid."""
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        reason = f"must be an object with the method `{method}`, not {type(value).__name__}"
        raise ParameterInvalid(parameter=parameter, reason=reason)


def queue(value: Any, parameter: str = "queue") -> Queue:
    """A queue object. Raises ParameterInvalid for anything else, such as a URL, an account or an SDK's object."""
    if isinstance(getattr(value, "capabilities", None), Capabilities):
        found: Queue = value
        return found
    reason = f"must be a queue, as veilmq.connect(url) or account.queue(name) returns it, not {type(value).__name__}"
    raise ParameterInvalid(parameter=parameter, reason=reason)


def text(value: Any, parameter: str) -> str:
    """A name or an id, of which others decide what it may be. Raises ParameterInvalid if it is not a str."""
    if isinstance(value, str):
        return str.__str__(value)
    raise ParameterInvalid(parameter=parameter, reason=f"must be a str, not {type(value).__name__}")


def texts(value: Any, parameter: str) -> tuple[str, ...]:
    """A collection of names, not one name. Raises ParameterInvalid."""
    return tuple(text(each, parameter) for each in batch(value, parameter))


def path(value: Any, parameter: str) -> Path:
    """A path of the file system. Raises ParameterInvalid for anything else, such as None or bytes."""
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise ParameterInvalid(parameter=parameter, reason=f"must be a str or a Path, not {type(value).__name__}")


def mapping(value: Any, parameter: str) -> Mapping[Any, Any]:
    """Values by name. Raises ParameterInvalid if it is no mapping."""
    if isinstance(value, Mapping):
        return value
    raise ParameterInvalid(
        parameter=parameter, reason=f"must be a mapping of names to values, not {type(value).__name__}"
    )


def handle(value: Any) -> str:
    """A handle. Raises ReceiptInvalid if it is empty or not a str."""
    if not isinstance(value, str):
        advice = ": give its `handle`" if isinstance(value, Received) else ""
        raise ReceiptInvalid(reason=f"it is no str but a {type(value).__name__}{advice}")
    if not value:
        raise ReceiptInvalid(reason="it is empty")
    return str.__str__(value)


def received(value: Any, parameter: str) -> Received:
    """A received message. Raises ParameterInvalid for anything else, as its handle alone."""
    if isinstance(value, Received):
        return value
    raise ParameterInvalid(parameter=parameter, reason=f"must be a Received, not {type(value).__name__}")


def template(value: Any) -> Template:
    """The settings of a queue to create; None: nothing but defaults. Raises ParameterInvalid for anything else."""
    if value is None:
        return Template()
    if isinstance(value, Template):
        _check_dead_letters(value)
        return msgspec.structs.replace(value, tags=_plain_tags(value.tags))
    raise ParameterInvalid(parameter="template", reason=f"must be a Template, not {type(value).__name__}")


def _check_dead_letters(given: Template) -> None:
    if given.dead_letter_queue is not None:
        text(given.dead_letter_queue, "dead_letter_queue")
    if given.receive_count_max is not None:
        whole(given.receive_count_max, "receive_count_max", 1, _RECEIVE_COUNT_MAX)
    if (given.dead_letter_queue is None) is not (given.receive_count_max is None):
        lacking = "dead_letter_queue" if given.dead_letter_queue is None else "receive_count_max"
        raise ParameterInvalid(parameter=lacking, reason="dead_letter_queue and receive_count_max need each other")


def _plain_tags(tags: Any) -> dict[str, str]:
    found = {}
    for name, value in mapping(tags, "tags").items():
        if not isinstance(name, str) or not isinstance(value, str):
            reason = f"must be text by text, not {_text_of(value)} by {_text_of(name)}"
            raise ParameterInvalid(parameter="tags", reason=reason)
        found[text(name, "tags")] = text(value, "tags")
    return found


def extension(value: Any) -> Extension:
    """An entry of an extend_batch. Raises ParameterInvalid, ReceiptInvalid."""
    if not isinstance(value, Extension):
        raise ParameterInvalid(parameter="extension", reason=f"must be an Extension, not {type(value).__name__}")
    plain_handle = handle(value.handle)
    return value if plain_handle is value.handle else msgspec.structs.replace(value, handle=plain_handle)


def body(value: Any) -> str:
    """A body. Raises ParameterInvalid if it is not a str."""
    if isinstance(value, str):
        return str.__str__(value)
    raise ParameterInvalid(parameter="body", reason=f"must be a str, not {type(value).__name__}: encode bytes")


def plain(value: Any) -> str | int | float:
    """What a value of a subclass is, such as an enumeration's member or NumPy's float64: JSON and the store take no
    subclasses. Raises TypeError for anything else."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(type(value).__name__)


def fields(message: Message) -> Message:
    """The message, with plain values. Raises ParameterInvalid for a field of the wrong type, whether the queue supports
    the field or not."""
    changed: dict[str, Any] = {}
    if type(message.body) is not str:
        changed["body"] = body(message.body)
    for field in _TEXTS:
        value = getattr(message, field)
        if value is not None and type(value) is not str:
            changed[field] = text(value, field)
    for field in _DURATIONS:
        value = getattr(message, field)
        if value is not None and not _is_number(value):
            raise ParameterInvalid(parameter=field, reason=f"must be a number of seconds, not {_text_of(value)}")
        if value is not None and type(value) not in (int, float):
            changed[field] = plain(value)
    priority: Any = message.priority
    if priority is not None and (not isinstance(priority, int) or type(priority) is bool):
        raise ParameterInvalid(parameter="priority", reason=f"must be a whole number, not {_text_of(priority)}")
    if priority is not None and type(priority) is not int:
        changed["priority"] = int(priority)
    names = mapping(message.attributes, "attributes")
    if names and set(map(type, names)) != {str}:
        changed["attributes"] = {_attribute_name(name): value for name, value in names.items()}
    return msgspec.structs.replace(message, **changed) if changed else message


def _attribute_name(name: Any) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    reason = f"a name must be a str, not {type(name).__name__}"
    raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=reason)


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return type(value) is not bool and value.bit_length() <= _BITS_MAX
    return isinstance(value, float)


def _shown(bound: float) -> str:
    return str(int(bound)) if math.isfinite(bound) and bound == int(bound) else str(bound)


def _text_of(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        return "so many digits"
    return text if len(text) <= _CHARACTERS_MAX else f"{text[:_CHARACTERS_MAX]}..."


def as_message(given: Any) -> Message:
    """The given Message, or a str as the message with that body. Raises ParameterInvalid for anything else, and for a
    message with a field of the wrong type."""
    if isinstance(given, Message):
        return fields(given)
    if isinstance(given, str):
        return Message(str.__str__(given))
    raise ParameterInvalid(parameter="message", reason=f"must be a str or a Message, not {type(given).__name__}")


def text_bytes(value: Any) -> bytes:
    """The body in UTF-8. Raises ParameterInvalid if it is not text of XML 1.0 characters."""
    text = body(value)
    at = first_forbidden_character(text)
    if at is not None:
        raise ParameterInvalid(parameter="body", reason=f"U+{ord(text[at]):04X} at index {at} is not allowed in XML")
    return text.encode()


_NEEDED_FOR: Final = (
    ("priorities", "priority"),
    ("ttl", "ttl"),
    ("groups", "group"),
    ("native_fifo", "deduplication_id"),
    ("lease_hints", "lease_hint"),
    ("tags", "tag"),
)
"""A queue's ability, and the field of a message that needs it."""


class Sendable(NamedTuple):
    """A message that a queue can carry, and what its adapter needs of it."""

    message: Message
    raw: bytes
    """The body in UTF-8."""
    attributes: dict[str, tuple[str, str | bytes]]
    """SQS's type and content of each."""
    size_bytes: int
    """What counts against the limit: the body as transmitted, and the attributes."""


def check_sendable(message: Message, can: Capabilities) -> None:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge, as a queue with these capabilities would."""
    sendable(message, can)


def attributes_room(message: Message, can: Capabilities) -> int:
    """How many attributes a pattern may add to the message, so that every layer below has room for its own."""
    taken = len(message.attributes) + (message.type is not None) + (message.lease_hint is not None)
    return max(0, can.attributes_max - taken) if can.attributes else 0


def transmitted_bytes(message: Message, can: Capabilities) -> int:
    """The size that counts at the queue: body and attributes. Raises ParameterInvalid."""
    attributes = {name: named(name, value) for name, value in with_fields(message).items()}
    return can.transmitted_bytes(text_bytes(message.body)) + size_bytes(attributes)


def sendable(given: str | Message, can: Capabilities) -> Sendable:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge, as a queue with these capabilities would."""
    message = as_message(given)
    if can.native_fifo or not isinstance(given, str):  # a text alone has no fields
        _check_abilities(message, can)
        _check_fields(message, can)
    raw = text_bytes(message.body)
    if len(raw) < can.body_bytes_min:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    values = with_fields(message) if can.fields_as_attributes and not isinstance(given, str) else message.attributes
    if len(values) > can.attributes_max:
        raise ParameterInvalid(parameter="attributes", reason=f"at most {can.attributes_max}, not {len(values)}")
    attributes = {name: named(name, value) for name, value in values.items()}
    total_bytes = can.transmitted_bytes(raw)
    if attributes:
        total_bytes += size_bytes(attributes)
    if total_bytes > can.body_bytes_max:
        raise MessageTooLarge(size_bytes=total_bytes, limit_bytes=can.body_bytes_max)
    return Sendable(message, raw, attributes, total_bytes)


def _check_fields(message: Message, can: Capabilities) -> None:
    token(message.group, "group")
    token(message.deduplication_id, "deduplication_id")
    if message.delay is not None:
        seconds(message.delay, "delay", 0, can.delay_max)
    if message.ttl is not None and not message.ttl > 0:
        raise ParameterInvalid(parameter="ttl", reason=f"must be above 0 s, not {message.ttl}")
    if message.priority is not None:
        whole(message.priority, "priority", PRIORITY_MIN, PRIORITY_MAX)
    lease_hint(message.lease_hint, can.lease_max)


def _check_abilities(message: Message, can: Capabilities) -> None:
    """Raises CapabilityMissing for a field that the queue cannot carry, ParameterInvalid without a group on a FIFO
    queue."""
    if not can.attributes and (message.attributes or message.type is not None):
        raise CapabilityMissing(capability="attributes")
    for ability, field in _NEEDED_FOR:
        if getattr(message, field) is not None and not getattr(can, ability):
            raise CapabilityMissing(capability="deduplication" if ability == "native_fifo" else ability)
    if message.group is None and can.native_fifo:
        raise ParameterInvalid(parameter="group", reason="is needed: the queue is FIFO")
