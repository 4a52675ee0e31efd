"""The frames of the peer port, and how commands and outcomes are packed into them.

Strategy: a frame is a msgspec struct, packed as an array with a number for its kind; its commands and outcomes are maps
with names, so that a field that a release adds may have a default. Commands carry their tag already. Outcomes get one
around them; an error is its name and fields. msgspec decodes a whole frame at once; `settle` then decodes what the
model leaves open (changes of settings, an operator's commands).

An instant never crosses: a call says how long ago it arrived, and the owner counts back from its own clock.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Final, get_args, get_type_hints

import msgspec

from veilmq.cluster.peer import AGE_US_MAX
from veilmq.model.commands import (
    AnyCommand,
    AnyTopicCommand,
    ChangeQueue,
    ChangeSubscription,
    ChangeTopic,
    CreateQueue,
    CreateTopic,
    Delete,
    Extend,
    ListQueues,
    MoveCommand,
    Operate,
    Peek,
    QueueCommand,
    RecordPeek,
)
from veilmq.model.errors import StoreUnknown, VeilError, as_fields, from_fields
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Operated, Outcome, Result
from veilmq.model.settings.access import SessionCommand
from veilmq.model.settings.queue import QueueSettings, TemplateCommand
from veilmq.model.settings.topic import SubscriptionSettings, TopicSettings

LENGTH_BYTES: Final = 4

_Plain = (
    QueueCommand | MoveCommand | ListQueues | Peek | RecordPeek | SessionCommand | TemplateCommand | AnyTopicCommand
)
PeerCommand = Operate | _Plain
"""What a peer may ask for. Sweeps, the record of polls and pushes, and the clock's check are the owner's own."""
ACCEPTED: Final[frozenset[type]] = frozenset(get_args(PeerCommand))


MALFORMED: Final = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding bytes of a stranger may raise: text that is no UTF-8 and deep nesting have errors of their own."""


class Garbage(Exception):
    """The peer sent what is no frame."""


class Call(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Commands that are applied together."""

    id: int
    """Unique on this connection."""
    age_us: int
    """How long ago it arrived, by the caller's own clock."""
    commands: tuple[PeerCommand, ...]


class Cancel(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The client is gone."""

    id: int


class AnswerSoon(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The client has ended its input: its receive waits no longer."""

    id: int


class Outcomes(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The end of a call: one outcome for each command, packed; none if it was cancelled."""

    id: int
    outcomes: list[Any]


class NotOwner(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The end of a call that this server did not carry out, as it does not own the shard."""

    id: int
    owner: str | None
    """Who does, if this server knows."""


class Ping(msgspec.Struct, array_like=True, tag=6, gc=False):
    """This side is alive."""


class Bye(msgspec.Struct, array_like=True, tag=7, gc=False):
    """The owner's last frame. It has carried out no call with a greater id, and none that it has not answered."""

    last: int


class _Error(msgspec.Struct, array_like=True, tag="error", gc=False):
    name: str
    fields: dict[str, Any]


class _Operated(msgspec.Struct, array_like=True, tag="Operated", gc=False):
    outcomes: list[Any]
    repeated: bool
    mismatch: bool


def _packed(kind: type) -> type:
    """The struct with a tag around an outcome of that kind."""
    return msgspec.defstruct(f"Packed{kind.__name__}", [("value", kind)], array_like=True, tag=kind.__name__, gc=False)


_PACKED: Final[dict[type, Callable[[Any], Any]]] = {
    kind: _packed(kind) for kind in Result.__subclasses__() if kind is not Operated
}
_ONE: Final[Any] = reduce(or_, _PACKED.values(), _Error)
_OPERATED: Final[Any] = msgspec.defstruct(
    "Operated",
    [("outcomes", list[_ONE]), ("repeated", bool), ("mismatch", bool)],
    array_like=True,
    tag="Operated",
    gc=False,
)
_OUTCOMES: Final[Any] = msgspec.defstruct(
    "Outcomes", [("id", int), ("outcomes", list[_ONE | _OPERATED])], array_like=True, tag=4, gc=False
)

ENCODER: Final = msgspec.msgpack.Encoder()
FROM_CALLER: Final = msgspec.msgpack.Decoder(Call | Cancel | AnswerSoon | Ping)
FROM_OWNER: Final[Any] = msgspec.msgpack.Decoder(_OUTCOMES | NotOwner | Ping | Bye)
_COMMAND: Final[Any] = _Plain


def outcomes_of(id_: int, outcomes: Iterable[Outcome]) -> Outcomes:
    """The end of a call."""
    return Outcomes(id_, [_pack(each) for each in outcomes])


def _pack(outcome: Outcome) -> Any:
    pack = _PACKED.get(type(outcome))
    if pack is not None:
        return pack(outcome)
    if isinstance(outcome, VeilError):
        return _Error(type(outcome).__name__, as_fields(outcome))
    assert isinstance(outcome, Operated)
    return _Operated([_pack(each) for each in outcome.outcomes], outcome.repeated, outcome.mismatch)


def unpacked(outcomes: Iterable[Any]) -> list[Outcome]:
    """The outcomes of an `Outcomes` that was decoded. An error that this release does not know is a StoreUnknown."""
    return [_unpack(each) for each in outcomes]


def _unpack(packed: Any) -> Outcome:
    kind = type(packed)
    if kind is _Error:
        try:
            return from_fields(packed.name, packed.fields)
        except (KeyError, TypeError):
            return StoreUnknown(reason=f"the owner is of another release, and says {packed.name}")
    if kind is _OPERATED:
        return Operated(unpacked(packed.outcomes), packed.repeated, packed.mismatch)
    return packed.value  # type: ignore[no-any-return]


def settle(commands: Sequence[AnyCommand], age: int, arrived: Instant) -> Instant:
    """Complete decoded commands in place; returns when they arrived, by the owner's clock. Raises Garbage.

    age: of their call. arrived: when its frame did.
    """
    began = Instant(arrived - min(max(age, 0), AGE_US_MAX))
    for command in commands:
        complete = _COMPLETE.get(type(command))
        if complete is not None:
            complete(command, began)
    return began


def _arrived(command: Delete | Extend, began: Instant) -> None:
    command.arrived = began


def _operate(command: Operate, began: Instant) -> None:
    try:
        inner = msgspec.convert(command.commands, tuple[_COMMAND, ...])
    except msgspec.ValidationError as error:
        raise Garbage(str(error)) from error
    settle(inner, 0, began)
    command.commands = inner


def _changes(settings: type, *names: str) -> Callable[[Any, Instant], None]:
    hints = get_type_hints(settings)

    def complete(command: Any, began: Instant) -> None:
        try:
            for name in names:
                given: dict[str, Any] = getattr(command, name)
                setattr(command, name, {field: msgspec.convert(value, hints[field]) for field, value in given.items()})
        except (KeyError, msgspec.ValidationError) as error:
            raise Garbage(f"a setting: {error}") from error

    return complete


_COMPLETE: Final[dict[type, Callable[[Any, Instant], None]]] = {
    Delete: _arrived,
    Extend: _arrived,
    Operate: _operate,
    CreateQueue: _changes(QueueSettings, "change", "defaults"),
    ChangeQueue: _changes(QueueSettings, "change", "expected"),
    CreateTopic: _changes(TopicSettings, "change"),
    ChangeTopic: _changes(TopicSettings, "change"),
    ChangeSubscription: _changes(SubscriptionSettings, "change"),
}
