"""Handles half of a surrogate pair in JSON: an escape such as `\\ud800` without its other half.

Strategy: msgspec refuses the whole body for one. Where the ordinary checks look, it is replaced by U+FFFE, which XML
cannot carry either, so those checks refuse only the batch entry that contains it, by name. Anywhere else the request is
refused with the position.
"""

import json
import re
from typing import Any, Final, NoReturn

from veilmq.protocols.sqs.errors import (
    INVALID_MESSAGE_CONTENTS,
    INVALID_PARAMETER_VALUE,
    Refusal,
    binary_character,
)

_ESCAPED: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF: Final = re.compile("[\ud800-\udfff]")
_FORBIDDEN: Final = "\ufffe"
_REPLACEMENT: Final = "\ufffd"

Way = tuple[str | int, ...]
"""The path from the input's root: names of members and keys, indices of lists."""

_EACH: Final = "*"


def _attributes(member: str) -> tuple[Way, ...]:
    return (member, _EACH), (member, _EACH, "DataType"), (member, _EACH, "StringValue")


_MESSAGE: Final[tuple[Way, ...]] = (
    ("MessageBody",),
    ("MessageGroupId",),
    ("MessageDeduplicationId",),
    *_attributes("MessageAttributes"),
    *_attributes("MessageSystemAttributes"),
)
_HANDLE: Final[tuple[Way, ...]] = (("ReceiptHandle",),)
_VEIL_MESSAGE: Final[tuple[Way, ...]] = (
    ("Body",),
    ("Group",),
    ("DeduplicationId",),
    ("Type",),
    ("Tag",),
    *_attributes("Attributes"),
)


def _in_each(member: str, ways: tuple[Way, ...]) -> tuple[Way, ...]:
    return tuple((member, _EACH, *way) for way in ways)


_CHECKED: Final[dict[str, tuple[Way, ...]]] = {
    "SendMessage": _MESSAGE,
    "SendMessageBatch": _in_each("Entries", _MESSAGE),
    "DeleteMessage": _HANDLE,
    "DeleteMessageBatch": _in_each("Entries", _HANDLE),
    "ChangeMessageVisibility": _HANDLE,
    "ChangeMessageVisibilityBatch": _in_each("Entries", _HANDLE),
    "CreateQueue": (("tags", _EACH),),
    "TagQueue": (("Tags", _EACH),),
    "Send": _in_each("Messages", _VEIL_MESSAGE),
    "Extend": _in_each("Entries", (("Body",), ("Handle",))),
    "Delete": (("Handles", _EACH),),
}
"""Operation -> places where a text, or the name of an element, is refused if XML cannot carry it."""


_NODES_MAX: Final = 20_000
"""Bound of visited values: several times as many as any valid input has, and few enough to be fast."""


def read(operation: str, body: bytes) -> Any:
    """The body as a tree with each half pair replaced; None if the body is invalid for another reason.

    Raises Refusal for a half pair that no check would find.
    """
    if not _ESCAPED.search(body):
        return None
    try:
        tree = json.loads(body.decode(), parse_constant=_no_constant)
        return _Replacing(_CHECKED.get(operation, ())).node(tree, ())
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(name)


class _Replacing:
    def __init__(self, checked: tuple[Way, ...]) -> None:
        self._checked = checked
        self._nodes_left = _NODES_MAX

    def node(self, node: Any, way: Way) -> Any:
        """The value with half pairs replaced. Raises Refusal."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise Refusal(INVALID_MESSAGE_CONTENTS, binary_character(_FORBIDDEN, "request"))
        if isinstance(node, str):
            return self._text(node, way)
        if isinstance(node, list):
            return [self.node(each, (*way, index)) for index, each in enumerate(node)]
        if isinstance(node, dict):
            return {self._text(key, (*way, key)): self.node(each, (*way, key)) for key, each in node.items()}
        return node

    def _text(self, text: str, way: Way) -> str:
        if _HALF.search(text) is None:
            return text
        if not any(_leads(pattern, way) for pattern in self._checked):
            place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in way)[:256]
            reason = f"Half of a surrogate pair is no character - at `${_HALF.sub(_REPLACEMENT, place)}`"
            raise Refusal(INVALID_PARAMETER_VALUE, reason)
        return _HALF.sub(_FORBIDDEN, text)


def _leads(pattern: Way, way: Way) -> bool:
    return len(pattern) == len(way) and all(step in (_EACH, taken) for step, taken in zip(pattern, way, strict=True))
