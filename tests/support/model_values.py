"""Hypothesis strategies for the model's commands, outcomes and errors: any value that the types allow.

Strategy: a struct is built from its fields' annotations. Where an annotation says Any, `_OPEN` says what may be there.
"""

import types
import typing
from enum import Enum
from functools import cache
from typing import Any, Final, NewType, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from veilmq.model import commands, outcomes
from veilmq.model.errors import VeilError, leaves
from veilmq.model.instant import Instant
from veilmq.model.messages import Attribute
from veilmq.model.settings.queue import QueueSettings, TemplateCommand
from veilmq.model.settings.topic import SubscriptionSettings, TopicSettings

ARRIVED: Final = Instant(1_700_000_000_000_000)
"""The instant in every field `arrived`."""
TEXTS: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INTEGERS: Final = st.integers(-(2**63), 2**63 - 1)
_LEAVES: Final = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXTS
_JSON: Final = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


def _change(settings: type) -> st.SearchStrategy[Any]:
    fields = {name: _of(hint) for name, hint in get_type_hints(settings).items()}
    return st.fixed_dictionaries({}, optional=fields)


def _within_operate() -> st.SearchStrategy[Any]:
    inner = list(get_args(commands.QueueCommand | commands.MoveCommand | commands.AnyTopicCommand | TemplateCommand))
    return st.lists(st.sampled_from(inner).flatmap(value_of), max_size=3).map(tuple)


def _within_operated() -> st.SearchStrategy[Any]:
    inner: list[Any] = [
        kind for kind in (*outcomes.Result.__subclasses__(), *leaves()) if kind is not outcomes.Operated
    ]
    return st.lists(st.sampled_from(inner).flatmap(value_of), max_size=3)


_OPEN: Final[dict[tuple[type, str], Any]] = {
    (Attribute, "value"): lambda: TEXTS | st.binary(max_size=12),
    (commands.CreateQueue, "change"): lambda: _change(QueueSettings),
    (commands.CreateQueue, "defaults"): lambda: _change(QueueSettings),
    (commands.ChangeQueue, "change"): lambda: _change(QueueSettings),
    (commands.ChangeQueue, "expected"): lambda: _change(QueueSettings),
    (commands.CreateTopic, "change"): lambda: _change(TopicSettings),
    (commands.ChangeTopic, "change"): lambda: _change(TopicSettings),
    (commands.ChangeSubscription, "change"): lambda: _change(SubscriptionSettings),
    (commands.Operate, "asked"): lambda: st.dictionaries(TEXTS, _JSON, max_size=3),
    (commands.Operate, "commands"): _within_operate,
    (outcomes.Operated, "outcomes"): _within_operated,
}


@cache
def value_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a struct or of an error class."""
    if issubclass(kind, VeilError):
        return st.builds(
            kind, **{name: _of(hint) for name, hint in get_type_hints(kind).items() if name in kind.fields}
        )
    assert issubclass(kind, msgspec.Struct), kind
    fields = {name: _field(kind, name, hint) for name, hint in get_type_hints(kind).items()}
    return st.builds(kind, **fields)


def _field(kind: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name == "arrived":
        return st.just(ARRIVED)
    found = _OPEN.get((kind, name))
    return _of(hint) if found is None else found()


def _of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation; one that is not known here is a mistake."""
    if isinstance(hint, NewType):
        return _of(hint.__supertype__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(_of, arguments))
    if origin is tuple:
        assert arguments[1] is ..., hint
        return st.lists(_of(arguments[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_of(arguments[0]), _of(arguments[1]), max_size=3)
    plain = {str: TEXTS, int: INTEGERS, bool: st.booleans(), bytes: st.binary(max_size=20), type(None): st.none()}
    if hint in plain:
        return plain[hint]
    assert isinstance(hint, type), hint
    return st.sampled_from(hint) if issubclass(hint, Enum) else value_of(hint)  # type: ignore[arg-type]
