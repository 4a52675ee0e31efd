"""Message attributes between Python's values and SQS's typed texts.

Strategy: pure functions of one attribute; both adapters that speak SQS's types use them, so that a message sent through
one reads the same through the other. Source: SQS Developer Guide, "Amazon SQS message metadata".
"""

import math
import re
from collections.abc import Mapping
from typing import Final

from veilmq.client.messages import AttributeValue
from veilmq.model.errors import ParameterInvalid

ATTRIBUTES_MAX: Final = 10
TYPE_ATTRIBUTE: Final = "veilmq.type"
"""Carries `Message.type` where the protocol has no place of its own for it."""
LEASE_HINT_ATTRIBUTE: Final = "veilmq.lease_hint"
"""Carries `Message.lease_hint`, in seconds."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]+\Z")


def typed(name: str, value: AttributeValue) -> tuple[str, str | bytes]:
    """(SQS type, content) of an attribute.

    str: String; int and float: Number; bytes: Binary. Raises ParameterInvalid naming the attribute for other values,
    for empty ones (SQS has none), and for numbers that are not finite.
    """
    kind: str
    content: str | bytes
    if isinstance(value, str):
        kind, content = "String", value
    elif isinstance(value, bool):
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="must be str, int, float or bytes, not bool")
    elif isinstance(value, int):
        return "Number", str(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="must be a finite number")
        return "Number", repr(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        kind, content = "Binary", bytes(value)
    else:
        reason = f"must be str, int, float or bytes, not {type(value).__name__}"
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason=reason)
    if not content:
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="must not be empty")
    return kind, content


def untyped(kind: str, content: str | bytes) -> AttributeValue:
    """The value of a typed attribute; a Number that Python cannot read stays text."""
    if isinstance(content, bytes) or kind.partition(".")[0] != "Number":
        return content
    if _INTEGER.match(content):
        return int(content)
    try:
        return float(content)
    except ValueError:
        return content


def size_bytes(attributes: Mapping[str, tuple[str, str | bytes]]) -> int:
    """What the attributes count for in the limit of a message: names, types and values."""
    return sum(
        len(name.encode()) + len(kind) + (len(content.encode()) if isinstance(content, str) else len(content))
        for name, (kind, content) in attributes.items()
    )
