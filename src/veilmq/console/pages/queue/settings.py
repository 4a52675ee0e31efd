"""The settings of a queue in words: what each is called, how it is said, typed and read back.

Strategy: one table, `SETTINGS`, of all that `/api/v1` can set; the queue's page and the form of its settings read it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.console.showing import (
    FormWrong,
    count,
    duration,
    duration_typed,
    number,
    pairs_read,
    pairs_typed,
    size,
    span_us,
)
from veilmq.model.settings.queue import (
    Adaptive,
    DeduplicationScope,
    QueueSettings,
    RedrivePermission,
    XmlBody,
)
from veilmq.model.wording import counted

Given = dict[str, str]
_NO: Final = "no"
_YES: Final = "yes"
_ANY: Final = ""
_ALLOWED: Final = {
    _ANY: "not set",
    RedrivePermission.ALLOW_ALL: "every queue",
    RedrivePermission.DENY_ALL: "no queue",
    RedrivePermission.BY_QUEUE: "these queues",
}


class Input(NamedTuple):
    """One input of the form. choices: value and words; else a text is typed, in several lines if it is `long`."""

    name: str
    label: str
    hint: str
    choices: Mapping[str, str] | None = None
    long: bool = False


class Setting(NamedTuple):
    """A setting. `of` takes its value from the settings that the API shows, in the form in which it is given back."""

    name: str
    label: str
    inputs: tuple[Input, ...]
    typed: Callable[[Any], Given]
    read: Callable[[Given], Any]
    """Raises FormWrong."""
    said: Callable[[Any], str]
    of: Callable[[Any], Any] = lambda value: value
    of_fifo_alone: bool = False


def _span(name: str, label: str, hint: str) -> Setting:
    fields = (Input(name, label, hint),)
    return Setting(
        name, label, fields, lambda us: {name: duration_typed(us)}, lambda given: span_us(label, given[name]), duration
    )


def _or_none(setting: Setting, none: str) -> Setting:
    """The same setting, which may be left empty: then nothing is set."""
    (field,) = setting.inputs
    return setting._replace(
        typed=lambda value: {field.name: ""} if value is None else setting.typed(value),
        read=lambda given: setting.read(given) if given[field.name].strip() else None,
        said=lambda value: none if value is None else setting.said(value),
    )


def _number(name: str, label: str, hint: str, said: Callable[[Any], str] = count) -> Setting:
    fields = (Input(name, label, hint),)
    return Setting(
        name, label, fields, lambda value: {name: str(value)}, lambda given: number(label, given[name].strip()), said
    )


def _choice(name: str, label: str, hint: str, choices: dict[str, str], *, fifo: bool = False) -> Setting:
    def read(given: Given) -> str:
        if given[name] not in choices:
            raise FormWrong(label, f"expected one of {', '.join(choices)}")
        return given[name]

    return Setting(
        name, label, (Input(name, label, hint, choices),), lambda value: {name: str(value)}, read,
        lambda value: choices[str(value)], of_fifo_alone=fifo,
    )  # fmt: skip


def _flag(name: str, label: str, hint: str) -> Setting:
    chosen = _choice(name, label, hint, {_NO: _NO, _YES: _YES}, fifo=True)
    return chosen._replace(
        typed=lambda value: {name: _YES if value else _NO},
        read=lambda given: chosen.read(given) == _YES,
        said=lambda value: _YES if value else _NO,
    )


def _text(name: str, label: str, hint: str) -> Setting:
    return Setting(
        name, label, (Input(name, label, hint),), lambda value: {name: value}, lambda given: given[name].strip(), str
    )


def _redrive_of(value: Any) -> Any:
    return None if value is None else value | {"target": value["target"]["name"]}


def _redrive_read(given: Given) -> Any:
    target, receives = given["target"].strip(), given.get("receive_count_max", "").strip()
    return {"target": target, "receive_count_max": number("After so many receives", receives)} if target else None


def _redrive_shown(value: Any) -> str:
    if value is None:
        return "nowhere"
    return f"to {value['target']} after {counted(value['receive_count_max'], 'receive')}"


def _redrive_typed(value: Any) -> Given:
    if value is None:
        return {"target": "", "receive_count_max": ""}
    return {"target": value["target"], "receive_count_max": str(value["receive_count_max"])}


def _allow_of(value: Any) -> Any:
    return None if value is None else value | {"sources": [each["name"] for each in value["sources"]]}


def _allow_read(given: Given) -> Any:
    permission = given["permission"]
    if permission not in _ALLOWED:
        raise FormWrong("dead letters from", f"expected one of {', '.join(_ALLOWED)}")
    sources = given.get("sources", "").replace(",", " ").split()
    if permission == _ANY:
        return None
    return {"permission": permission, "sources": sources if permission == RedrivePermission.BY_QUEUE else []}


def _allow_shown(value: Any) -> str:
    if value is None:
        return _ALLOWED[_ANY]
    return ", ".join(value["sources"]) if value["sources"] else _ALLOWED[value["permission"]]


def _allow_typed(value: Any) -> Given:
    value = value or {"permission": _ANY, "sources": []}
    return {"permission": value["permission"], "sources": " ".join(value["sources"])}


def _tags_shown(tags: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(tags.items())) or "none"


SETTINGS: Final = (
    _span("visibility_timeout_us", "visibility timeout", "How long a receive hides a message"),
    _span("delay_us", "delay", "How long a message that was sent cannot be received"),
    _span("retention_us", "retention", "How long a message lives"),
    _span("wait_us", "wait of a receive", "How long a receive waits for messages, if it does not say"),
    Setting(
        "redrive", "dead letters",
        (Input("target", "Dead letters to", "A queue of the same account and region; empty: nowhere"),
         Input("receive_count_max", "After so many receives", "A message that was received more often goes there")),
        _redrive_typed, _redrive_read, _redrive_shown, _redrive_of,
    ),
    Setting(
        "redrive_allow", "dead letters from",
        (Input("permission", "Dead letters from", "Which queues may send their dead letters here", _ALLOWED),
         Input("sources", "These queues", "Their names, with spaces between")),
        _allow_typed, _allow_read, _allow_shown, _allow_of,
    ),
    _number("message_bytes_max", "message size", "In bytes; a larger message is refused", size),
    _or_none(_number("receives_per_second_max", "messages a second", "To all receivers; empty: no limit"), "no limit"),
    _choice("adaptive", "timeout plans", "What becomes of leases that the pipeline learns",
            {Adaptive.OFF: "off", Adaptive.SUGGEST: "suggest", Adaptive.APPLY: "apply"}),
    _or_none(_span("first_lease_min_us", "first lease, at least", "How far a plan may shorten; empty: not at all"),
             "never shorter than the visibility timeout"),
    _choice("xml_body", "bodies of Azure and MNS", "How their clients' bodies are stored",
            {XmlBody.TEXT: "as they come", XmlBody.BASE64: "decoded from base64"}),
    _or_none(_text("alias", "alias", "Another name, for protocols that do not allow its own; empty: none"), "none"),
    _flag("content_deduplication", "deduplication by body", "Two messages with one body are one, if no id says else"),
    _choice("deduplication_scope", "deduplication within", "Where an id counts as the same",
            {DeduplicationScope.QUEUE: "the queue", DeduplicationScope.GROUP: "each group"}, fifo=True),
    _flag("throughput_per_group", "throughput for each group", "Needs deduplication within each group"),
    Setting(
        "tags", "tags", (Input("tags", "Tags", "A line of name=value for each", long=True),),
        lambda tags: {"tags": pairs_typed(tags)}, lambda given: pairs_read("tags", given["tags"]), _tags_shown,
    ),
)  # fmt: skip

_ALWAYS_SHOWN: Final = {"visibility_timeout_us", "delay_us", "retention_us", "wait_us", "redrive", "adaptive"}
"""On the queue's page; the others if they are not as in a new queue."""
_NEW: Final = QueueSettings()


def settings_of(settings: dict[str, Any]) -> list[Setting]:
    """Those that this queue can have."""
    return [each for each in SETTINGS if settings["fifo"] or not each.of_fifo_alone]


def settings_shown(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Those of the queue's page, as name and text."""
    shown = [("order", "FIFO" if settings["fifo"] else "standard")]
    for each in settings_of(settings):
        value = settings[each.name]
        if each.name in _ALWAYS_SHOWN or value not in (None, msgspec.to_builtins(getattr(_NEW, each.name))):
            shown.append((each.label, each.said(each.of(value))))
    return shown
