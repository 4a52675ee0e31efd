"""How a message carries its number.

Strategy: three forms behind one interface: an attribute if the queue has attributes, a prefix of the body if not, or
the document's own `#num#`, which can express neither an epoch nor "void". If a form cannot read a message, the message
is not ours, and `read` returns None. Source: document 002, OrderedQueueWrapper ("coloured" messages).
"""

import re
from typing import Final, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from veilmq.client.messages import Message, Peeked
from veilmq.client.queue import Capabilities
from veilmq.model.errors import ParameterInvalid

ATTRIBUTE: Final = "veilmq.order"
DOCUMENT: Final = "#num#"
_VOID: Final = "void"
_NUMBER: Final = r"([1-9]\d{0,17})"
_OURS: Final = re.compile(rf"{_NUMBER}\.{_NUMBER}(\.{_VOID})?")
_PREFIX: Final = re.compile(rf"#{_NUMBER}\.{_NUMBER}(\.{_VOID})?#")

Shown = TypeVar("Shown", bound=Peeked)


class Mark(NamedTuple):
    """A message's place. Numbers count from 1 in each epoch; a later epoch is greater."""

    epoch: int
    number: int
    void: bool = False
    """The number has no message, because its queue refused the message."""


class Marking(Protocol):
    """One form."""

    voids: bool
    """Whether a number can be declared void."""

    def write(self, message: Message, mark: Mark) -> Message:
        """The message to send."""
        ...

    def read(self, message: Shown) -> tuple[Mark, Shown] | None:
        """Its mark, and the message without it; None: it has no mark."""
        ...


class AttributeMarking:
    """`EPOCH.NUMBER` as an attribute."""

    voids = True

    def write(self, message: Message, mark: Mark) -> Message:
        return replace(message, attributes={**message.attributes, ATTRIBUTE: _text(mark)})

    def read(self, message: Shown) -> tuple[Mark, Shown] | None:
        value = message.attributes.get(ATTRIBUTE)
        found = _OURS.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return None
        rest = {name: value for name, value in message.attributes.items() if name != ATTRIBUTE}
        return _mark(found), replace(message, attributes=rest)


class BodyMarking:
    """`#EPOCH.NUMBER#` before the body."""

    voids = True

    def write(self, message: Message, mark: Mark) -> Message:
        return replace(message, body=f"#{_text(mark)}#{message.body}")

    def read(self, message: Shown) -> tuple[Mark, Shown] | None:
        found = _PREFIX.match(message.body)
        return None if found is None else (_mark(found), replace(message, body=message.body[found.end() :]))


class NumberMarking:
    """Only a number before the body, in a form such as the document's `#num#`. There is one epoch, 1."""

    voids = False

    def __init__(self, form: str) -> None:
        self._before, _, self._after = form.partition("num")
        self._pattern = re.compile(re.escape(self._before) + _NUMBER + re.escape(self._after))

    def write(self, message: Message, mark: Mark) -> Message:
        return replace(message, body=f"{self._before}{mark.number}{self._after}{message.body}")

    def read(self, message: Shown) -> tuple[Mark, Shown] | None:
        found = self._pattern.match(message.body)
        return None if found is None else (Mark(1, int(found[1])), replace(message, body=message.body[found.end() :]))


def marking_of(form: str, capabilities: Capabilities) -> Marking:
    """form: `auto` (an attribute if the queue has attributes, else the body), `attribute`, `body`, or a text with `num`
    between marks, such as the document's `#num#`. Raises ParameterInvalid.
    """
    if form == "auto":
        return AttributeMarking() if capabilities.attributes else BodyMarking()
    if form == "attribute":
        if not capabilities.attributes:
            raise ParameterInvalid(parameter="marking", reason=f"{capabilities.protocol} has no attributes: use body")
        return AttributeMarking()
    if form == "body":
        return BodyMarking()
    _, found, after = form.partition("num")
    if not found or not after or after[0].isdigit() or "num" in after:
        reason = f"must be auto, attribute, body or a form such as {DOCUMENT}, not {form!r}"
        raise ParameterInvalid(parameter="marking", reason=reason)
    return NumberMarking(form)


def _text(mark: Mark) -> str:
    return f"{mark.epoch}.{mark.number}.{_VOID}" if mark.void else f"{mark.epoch}.{mark.number}"


def _mark(found: re.Match[str]) -> Mark:
    return Mark(int(found[1]), int(found[2]), found[3] is not None)
