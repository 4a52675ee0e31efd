"""A whole message as JSON text, for logs and tables that keep it before it is sent.

Strategy: msgspec's own form of `Message`, but for what JSON (or MessagePack) has not among the attributes: bytes are
base64, Decimals and integers beyond 64 bits text, each under a key that says so. What cannot be sent is refused when it
is written. What is read is checked; text of other origin is None.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from veilmq.client.messages import AttributeValue, Message
from veilmq.client.typed_attributes import typed, untyped

_BITS_MAX: Final = 63


def plain(message: Message) -> Message:
    """The message with attributes that JSON and MessagePack have. Raises ParameterInvalid for what none can carry."""
    return replace(message, attributes={name: _plain(name, value) for name, value in message.attributes.items()})


def original(message: Message) -> Message:
    """The message that `plain` got. Raises ValueError, KeyError, TypeError for what it did not make."""
    return replace(message, attributes={name: _original(value) for name, value in message.attributes.items()})


def to_text(message: Message) -> str:
    """JSON of the message."""
    return msgspec.json.encode(plain(message)).decode()


def from_text(text: str) -> Message | None:
    """The message; None if the text holds none."""
    try:
        return original(msgspec.json.decode(text, type=Message))
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _plain(name: str, value: AttributeValue) -> Any:
    kind, content = typed(name, value)
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
