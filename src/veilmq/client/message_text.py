"""A whole message as JSON text, for logs and tables that store it before it is sent.

Strategy: msgspec's encoding of `Message`, except for attributes that JSON and MessagePack cannot represent: bytes
become base64, and Decimals and integers beyond 64 bits become text, each under a key that names its type. Writing
refuses a message that cannot be sent. Reading checks the text; text of another origin gives None.
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
    """The message with attributes that JSON and MessagePack can represent. Raises ParameterInvalid for a value that no
    queue can carry."""
    return replace(message, attributes={name: _plain(name, value) for name, value in message.attributes.items()})


def original(message: Message) -> Message:
    """The reverse of `plain`. Raises ValueError, KeyError, TypeError for a message that `plain` did not make."""
    return replace(message, attributes={name: _original(value) for name, value in message.attributes.items()})


def to_text(message: Message) -> str:
    """JSON of the message."""
    return msgspec.json.encode(plain(message)).decode()


def from_text(text: str) -> Message | None:
    """The message; None if the text is not one."""
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
