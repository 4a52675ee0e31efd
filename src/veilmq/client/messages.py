"""What goes into a queue and what comes out of it, and both as text.

Strategy: plain frozen values. Durations are seconds. A queue's instants are Unix seconds. Only `lease_end` and `asked`
are on this process's monotonic clock (client/clock.py), read before the request left, so that a jump of the wall clock,
here or on the server, shortens no lease.

Attributes as SQS's typed texts: pure functions of one attribute. All adapters with attributes use them, so a message
sent through one reads the same through another. A Number is text of up to 38 digits. It becomes a float only if that
float is exactly this number, so nothing is lost, and a float that was sent comes back as one. Source: SQS Developer
Guide, "Amazon SQS message metadata" and "message attribute data types".

A whole message as JSON, for logs and tables that store it before it is sent: msgspec's encoding of `Message`, except
for attributes that JSON and MessagePack cannot represent: bytes become base64, and Decimals and integers beyond 64 bits
become text, each under a key that names its type. An endless time to live is the largest float. Writing refuses a
message that cannot be sent. Reading checks the text; text of another origin gives None.
"""

import functools
import math
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from veilmq.model.errors import ParameterInvalid
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.messages import first_forbidden_character

AttributeValue = Any
"""str (SQS String), int, float or Decimal (Number), or bytes (Binary).

A Number comes back as an int; as a float if it is that float's text (`0.1`); else as a Decimal with all its digits.
"""


class Message(msgspec.Struct, frozen=True):
    """A message to send. A field that the queue cannot carry raises CapabilityMissing before anything is sent."""

    body: str
    """Text of XML 1.0 characters; encode bytes yourself."""
    attributes: Mapping[str, AttributeValue] = {}
    delay: float | None = None
    """Seconds until it becomes visible; None: the queue's own delay."""
    ttl: float | None = None
    """Seconds until it expires; None: the queue's retention."""
    priority: int | None = None
    """1 is most urgent, 16 least; None: 8."""
    group: str | None = None
    """FIFO message group, or tenant of a fair queue."""
    deduplication_id: str | None = None
    type: str | None = None
    """The name under which processing times are learnt; travels as the attribute `veilmq.type` where attributes
    exist."""
    lease_hint: float | None = None
    """Seconds: the lease that the sender suggests, used by a receive that names none."""
    tag: str | None = None
    """Filter tag of a topic's subscriptions."""


class Sent(msgspec.Struct, frozen=True):
    """The queue has stored the message."""

    id: str
    handle: str | None = None
    """Where the protocol gives one (`Capabilities.handle_on_send`): extend reschedules the message, delete withdraws
    it."""
    sequence_number: int | None = None
    """Of a FIFO queue."""
    duplicate: bool = False
    """Dropped as a duplicate, where the protocol reports it."""


class Peeked(msgspec.Struct, frozen=True):
    """A message as a peek shows it: no lease, no handle."""

    id: str
    body: str
    attributes: Mapping[str, AttributeValue] = {}
    receive_count: int = 0
    sent: float | None = None
    """Unix seconds by the queue's clock."""
    group: str | None = None
    sequence_number: int | None = None
    priority: int | None = None
    type: str | None = None
    expires: float | None = None
    """Unix seconds by the queue's clock, where the protocol reports it."""


class Received(Peeked, frozen=True, kw_only=True):
    """A message with its lease."""

    handle: str
    """All that extend, release and delete need; opaque."""
    lease_end: float
    """Seconds on this process's monotonic clock."""
    first_received: float | None = None
    """Unix seconds by the queue's clock, where the protocol reports it."""
    deduplication_id: str | None = None
    asked: float | None = None
    """When the request that got the message left: seconds on this process's monotonic clock. Set by a queue that caps a
    lease in total (`Capabilities.lease_total_max`), which counts from there."""


class Extension(msgspec.Struct, frozen=True):
    """One entry of an extend_batch."""

    handle: str
    lease: float
    """Seconds from now."""


class Recommended(msgspec.Struct, frozen=True):
    """The first leases that the pipeline has learnt for a queue; seconds."""

    lease: float | None = None
    """For messages of a type not named below; None: the queue's visibility timeout."""
    by_type: Mapping[str, float] = {}
    why: str = ""
    applied: bool = False
    """The server uses them for receives that name no lease."""


class Stats(msgspec.Struct, frozen=True):
    """The current state of a queue; None where the protocol does not report it."""

    visible: int
    delayed: int | None = None
    in_flight: int | None = None
    visibility_timeout: float | None = None
    retention: float | None = None
    delay: float | None = None
    incarnation: str | None = None
    """Changes if the queue is deleted and created again: its incarnation number or creation time."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a queue to create; None: the protocol's default. Seconds and bytes."""

    visibility_timeout: float | None = None
    delay: float | None = None
    retention: float | None = None
    wait: float | None = None
    message_bytes_max: int | None = None
    dead_letter_queue: str | None = None
    """Name of an existing queue of the same account."""
    receive_count_max: int | None = None
    """Receives before a message goes to the dead-letter queue."""
    fifo: bool = False
    content_deduplication: bool = False
    tags: Mapping[str, str] = {}


ATTRIBUTES_MAX: Final = 10
NUMBER_DIGITS_MAX: Final = 38
NUMBER_EXPONENTS: Final = range(-128, 127)
LEASE_HINT_ATTRIBUTE: Final = "veilmq.lease_hint"
"""Carries `Message.lease_hint`, in seconds."""

_KINDS: Final = "must be str, int, float, Decimal or bytes"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\Z")
_NAME_CHARACTERS_MAX: Final = 256
_NAME_FORM: Final = "a name has 1 to 256 of A-Z a-z 0-9 _ - and single periods between them"
_RESERVED: Final = ("aws.", "amazon.")
"""Prefixes that SQS reserves, in any letter case."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]+\Z")


def with_fields(message: Message) -> dict[str, AttributeValue]:
    """A message's attributes including its type and its lease hint. Raises ParameterInvalid if one of these two is also
    given as an attribute, or if there are too many."""
    given = dict(message.attributes)
    for name, value in ((TYPE_ATTRIBUTE, message.type), (LEASE_HINT_ATTRIBUTE, message.lease_hint)):
        if value is not None:
            if name in given:
                raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is given as a field of the message")
            given[name] = value
    if len(given) > ATTRIBUTES_MAX:
        reason = f"{len(given)} are more than {ATTRIBUTES_MAX} (type and lease_hint count as one each)"
        raise ParameterInvalid(parameter="attributes", reason=reason)
    return given


def named(name: str, value: AttributeValue) -> tuple[str, str | bytes]:
    """Like `typed`; also raises ParameterInvalid for a name that SQS refuses, and for text that XML cannot carry."""
    fault = _NAME_FORM if len(name) > _NAME_CHARACTERS_MAX else _fault_of(name)
    if fault is not None:
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=fault)
    kind, content = typed(name, value)
    at = first_forbidden_character(content) if kind == "String" and isinstance(content, str) else None
    if at is not None:
        reason = f"U+{ord(str(content)[at]):04X} is not allowed in XML"
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=reason)
    return kind, content


@functools.lru_cache(maxsize=1_024)
def _fault_of(name: str) -> str | None:
    if not _NAME.match(name):
        return _NAME_FORM
    return "a name does not begin with AWS. or Amazon." if name.lower().startswith(_RESERVED) else None


def typed(name: str, value: AttributeValue) -> tuple[str, str | bytes]:
    """(SQS type, content) of an attribute.

    str: String; int, float and Decimal: Number; bytes: Binary. Raises ParameterInvalid naming the attribute for other
    types, for empty values (SQS has none), and for numbers that are not finite, have more than 38 digits, or lie
    outside 10^-128 to 10^126.
    """
    kind: str
    content: str | bytes
    # Use the base types' own text: a subclass (an enumeration, numpy's float64) may print itself differently.
    if isinstance(value, str):
        kind, content = "String", str.__str__(value)
    elif isinstance(value, bool):
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=f"{_KINDS}, not bool")
    elif isinstance(value, int):
        return "Number", _in_range(name, _digits(name, value))
    elif isinstance(value, float | Decimal):
        if not (math.isfinite(value) if isinstance(value, float) else value.is_finite()):
            raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="must be a finite number")
        return "Number", _in_range(name, float.__repr__(value) if isinstance(value, float) else Decimal.__str__(value))
    elif isinstance(value, bytes | bytearray | memoryview):
        kind, content = "Binary", bytes(value)
    else:
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=f"{_KINDS}, not {type(value).__name__}")
    if not content:
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="must not be empty")
    return kind, content


def _digits(name: str, value: int) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # more digits than Python prints
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="has too many digits") from None


def _in_range(name: str, text: str) -> str:
    exact = Decimal(text)
    digits = "".join(map(str, exact.as_tuple().digits)).rstrip("0")
    if exact and (len(digits) > NUMBER_DIGITS_MAX or exact.adjusted() not in NUMBER_EXPONENTS):
        reason = f"is out of range: {NUMBER_DIGITS_MAX} digits, 10^-128 to 10^126"
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=reason)
    return text


def untyped(kind: str, content: str | bytes) -> AttributeValue:
    """The value of a typed attribute. A Number that is invalid, or that Python cannot read, stays text.

    A Number of digits alone is an int; any other is a float if it is that float's text (`0.1`), else a Decimal with all
    its digits. `Decimal(str(value))` is always the number that was sent.
    """
    if isinstance(content, bytes) or kind.partition(".")[0] != "Number":
        return content
    try:
        if _INTEGER.match(content):
            return int(content)
        exact = Decimal(content)
    except (ValueError, ArithmeticError):
        return content
    if not exact.is_finite():
        return content
    near = float(exact)
    return near if math.isfinite(near) and Decimal(repr(near)) == exact else exact


def hint_of(value: AttributeValue | None) -> float | None:
    """The seconds of a lease hint; None if the value is not one: other senders may use the name for anything."""
    if not isinstance(value, int | float | Decimal) or not value > 0:
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if 0 < seconds < math.inf else None


def size_bytes(attributes: Mapping[str, tuple[str, str | bytes]]) -> int:
    """The attributes' share of a message's size: names, types and values."""
    return sum(
        len(name.encode()) + len(kind) + (len(content.encode()) if isinstance(content, str) else len(content))
        for name, (kind, content) in attributes.items()
    )


_BITS_MAX: Final = 63
ENDLESS: Final = sys.float_info.max
"""A time to live of math.inf, which JSON cannot write."""


def plain(message: Message) -> Message:
    """The message as JSON and MessagePack can represent it. Raises ParameterInvalid for a value that no queue can
    carry."""
    for field in ("type", "group", "deduplication_id", "tag"):
        _check_characters(field, getattr(message, field))
    for field in ("delay", "ttl", "lease_hint"):
        value = getattr(message, field)
        if value is not None and not (math.isfinite(value) or (field == "ttl" and value == math.inf)):
            raise ParameterInvalid(parameter=field, reason=f"must be a finite number of seconds, not {value}")
    return replace(
        message,
        attributes={name: _plain(name, value) for name, value in message.attributes.items()},
        ttl=ENDLESS if message.ttl == math.inf else message.ttl,
    )


def original(message: Message) -> Message:
    """The reverse of `plain`. Raises ValueError, KeyError, TypeError for a message that `plain` did not make."""
    return replace(
        message,
        attributes={name: _original(value) for name, value in message.attributes.items()},
        ttl=math.inf if message.ttl == ENDLESS else message.ttl,
    )


def to_text(message: Message) -> str:
    """JSON of the message."""
    return msgspec.json.encode(plain(message)).decode()


def from_text(text: str) -> Message | None:
    """The message; None if the text is not one."""
    try:
        return original(msgspec.json.decode(text, type=Message))
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _check_characters(parameter: str, text: str | None) -> None:
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise ParameterInvalid(
            parameter=parameter, reason="has half of a surrogate pair, which is no character"
        ) from None


def _plain(name: str, value: AttributeValue) -> Any:
    _check_characters(f"attributes[{name!r}]", name)
    kind, content = typed(name, value)
    if isinstance(content, str):
        _check_characters(f"attributes[{name!r}]", content)
    if isinstance(content, bytes):
        return {"base64": b64encode(content).decode()}
    if isinstance(value, Decimal):
        return {"decimal": content}
    simple = untyped(kind, content)
    return {"integer": content} if isinstance(simple, int) and simple.bit_length() > _BITS_MAX else simple


def _original(value: Any) -> AttributeValue:
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    try:
        return _READERS[kind](text)
    except ArithmeticError as error:
        raise ValueError(text) from error


_READERS: Final[dict[str, Callable[[str], AttributeValue]]] = {
    "base64": lambda text: b64decode(text, validate=True),
    "decimal": Decimal,
    "integer": int,
}
