"""Finds the type of a message whose protocol has no field for it; processing times are learnt per type.

Strategy: the sender's own field wins; then an attribute of the configured name; then, if configured, a JSON pointer
into the body. A message without a usable name there has no type and is sent all the same.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from veilmq.model.commands import Send
from veilmq.model.messages import NO_EXTRAS, first_forbidden_character

TYPE_ATTRIBUTE: Final = "veilmq.type"
"""The attribute that our own client uses when the protocol has no field."""
BODY_CHARACTERS_MAX: Final = 65_536
"""Longer bodies are not parsed: a batch waits while one is parsed."""
TYPE_CHARACTERS_MAX: Final = 256
POINTER: Final = re.compile(r"(?:/(?:[^~/]|~[01])*)+")
"""A JSON pointer (RFC 6901) that names a member: "/type", say."""

_decode: Final[Callable[[str], Any]] = msgspec.json.Decoder().decode


def parse_pointer(text: str) -> tuple[str, ...]:
    """The steps of a pointer. Raises ValueError for an invalid pointer."""
    if not POINTER.fullmatch(text):
        raise ValueError("a JSON pointer begins with /, and after ~ it has 0 or 1")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in text[1:].split("/"))


class MessageTypes:
    """Finds the type of what is sent."""

    def __init__(self, attribute: str = TYPE_ATTRIBUTE, pointer: str = "") -> None:
        """pointer: "" parses no body. Raises ValueError."""
        self._attribute = attribute
        self._steps = parse_pointer(pointer) if pointer else ()

    @property
    def reads_bodies(self) -> bool:
        """Whether a message without attributes may have a type."""
        return bool(self._steps)

    def typed(self, command: Send) -> Send:
        """The command with its type filled in. The common case costs two comparisons."""
        extras = command.extras
        if (extras is NO_EXTRAS and not self._steps) or extras.type is not None:
            return command
        for each in extras.attributes:
            if each.name == self._attribute:
                found = _name(each.value)
                break
        else:
            found = _name(self._in_body(command.body)) if self._steps else None
        if found is None:
            return command
        return msgspec.structs.replace(command, extras=msgspec.structs.replace(extras, type=found))

    def _in_body(self, body: str) -> Any:
        if len(body) > BODY_CHARACTERS_MAX or not body.lstrip(" \t\r\n").startswith(("{", "[")):
            return None
        try:
            value = _decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None
        for step in self._steps:
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and step.isdecimal() and step.isascii() and int(step[:9]) < len(value):
                value = value[int(step[:9])]
            else:
                return None
        return value


def _name(value: Any) -> str | None:
    """A value as a type's name: text as it is, a whole number in digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= TYPE_CHARACTERS_MAX:
        return None
    return value if first_forbidden_character(value) is None else None
