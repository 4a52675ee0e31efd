"""A whole message as JSON text, for logs and tables that keep it before it is sent.

Strategy: msgspec's own form of `Message`, but for bytes among the attributes, which JSON has not: those are base64
under a key that says so. What is read is checked; text of other origin is None.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from veilmq.client.messages import Message


def plain(message: Message) -> Message:
    """The message with attributes that JSON has."""
    attributes = {
        name: {"base64": b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in message.attributes.items()
    }
    return replace(message, attributes=attributes)


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
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError):
        return None


def _original(value: Any) -> Any:
    return b64decode(value["base64"], validate=True) if isinstance(value, Mapping) else value
