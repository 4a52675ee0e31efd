"""What both sides share: how a message carries its number, what each side keeps, and that only its owner may use it.

Strategy, marking: three forms behind one interface: an attribute if the queue has attributes, a prefix of the body if
not, or the document's own `#num#`, which can express neither an epoch nor "void". If a form cannot read a message, the
message is not ours, and `read` returns None. Source: document 002, OrderedQueueWrapper ("coloured" messages).

State: one small JSON document each, tagged with its role, so that a storage of the other side, of another queue, or
written by another program is refused. The sender's document contains the bodies of open messages, as msgpack in base64:
protect the storage like the queue.
"""

import re
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from veilmq.client.errors import QueueRecreated, StateInvalid, StorageHeld, TransportError
from veilmq.client.messages import Message, Peeked, original, plain
from veilmq.client.ordered.storage import LockedStorage
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Closing, OfProcess
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

    def read(self, message: Shown) -> tuple[Mark, Shown] | None:
        """Its mark, and the message without it; None: it has no mark."""


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
    if checks.text(form, "marking") == "auto":
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


class Pending(msgspec.Struct, frozen=True):
    """A numbered message that was sent and may have arrived."""

    number: int
    message: bytes
    """msgpack of the caller's message."""
    void: bool = False


class SenderState(msgspec.Struct, tag="ordered sender", kw_only=True):
    """All numbers below `next` are given out; those in `pending` may not have arrived."""

    queue: str
    incarnation: str | None
    epoch: int
    next: int = 1
    pending: list[Pending] = []


class ReceiverState(msgspec.Struct, tag="ordered receiver", kw_only=True):
    """All numbers below `next` are acknowledged, except the skipped ones."""

    queue: str
    incarnation: str | None
    epoch: int | None = None
    """None: the epoch of the next message that comes."""
    next: int = 1
    done: list[int] = []
    """Acknowledged numbers beyond `next`."""
    skipped: list[tuple[int, int]] = []
    """First and last number of each gap that was given up: a message that still comes is late, not a duplicate."""


State = TypeVar("State", SenderState, ReceiverState)


def decode(kind: type[State], data: bytes, storage: str) -> State:
    """The state in `data`. Raises StateInvalid."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise StateInvalid(storage=storage, reason=f"holds no state of this kind: {error}") from None


def check_queue(state: SenderState | ReceiverState, queue: str, incarnation: str | None, storage: str) -> None:
    """Raises StateInvalid (the numbers belong to another queue), QueueRecreated."""
    if state.queue != queue:
        raise StateInvalid(storage=storage, reason=f"holds the numbers of queue {state.queue}, not of {queue}")
    if None not in (state.incarnation, incarnation) and state.incarnation != incarnation:
        raise QueueRecreated(queue=queue, was=str(state.incarnation), found=str(incarnation))


def packed(message: Message) -> bytes:
    """A message in `Pending`'s form. Raises ParameterInvalid for an attribute that no queue can carry."""
    return msgspec.msgpack.encode(plain(message))


def unpacked(data: bytes) -> Message:
    """The message that was packed."""
    return original(msgspec.msgpack.decode(data, type=Message))


class Side(Closing, OfProcess):
    """The sending or the receiving side of an ordered queue."""

    queue: Queue
    _storage: LockedStorage
    _role: str
    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _enter(self) -> None:
        """Call it before anything else, including locks. Raises StorageHeld in a forked child: its parent has the
        storage."""
        if self.inherited:
            raise StorageHeld(storage=str(self._storage), holder=f"pid {self._pid}")

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> TransportError:
        reason = f"the ordered {self._role} of queue {self.queue.name} is closed"
        return TransportError(reason=reason, may_have_happened=False)
