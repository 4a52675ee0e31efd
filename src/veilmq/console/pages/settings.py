"""The settings of a queue: a form with all that `/api/v1` can set, what would change, and the change.

Strategy: one row of `SETTINGS` for each setting: its inputs in the form, how a value is typed there, read back and
said. The form shows what would change before it does, and carries the version that was shown: if someone else changed
the queue meanwhile, the store refuses and the page says so. A setting whose inputs a form lacks stays as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from veilmq.console.calls import ApiRefused, queue_path
from veilmq.console.pages.queue import PATH, console_path, duration_typed, key_of
from veilmq.console.pages.queue_acts import (
    FormWrong,
    number,
    pairs_read,
    pairs_typed,
    queue_page,
    span_us,
)
from veilmq.console.sessions import Done
from veilmq.console.showing import count, duration, size
from veilmq.console.visit import Page, Visit, Work
from veilmq.model.settings.queue import (
    Adaptive,
    DeduplicationScope,
    QueueKey,
    RedrivePermission,
    XmlBody,
)

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
    return {"target": target, "receive_count_max": number("receives", receives)} if target else None


def _redrive_said(value: Any) -> str:
    return "nowhere" if value is None else f"to {value['target']} after {value['receive_count_max']}"


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


def _allow_said(value: Any) -> str:
    if value is None:
        return _ALLOWED[_ANY]
    return ", ".join(value["sources"]) if value["sources"] else _ALLOWED[value["permission"]]


def _allow_typed(value: Any) -> Given:
    value = value or {"permission": _ANY, "sources": []}
    return {"permission": value["permission"], "sources": " ".join(value["sources"])}


def _tags_said(tags: dict[str, str]) -> str:
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
        _redrive_typed, _redrive_read, _redrive_said, _redrive_of,
    ),
    Setting(
        "redrive_allow", "dead letters from",
        (Input("permission", "Dead letters from", "Which queues may send their dead letters here", _ALLOWED),
         Input("sources", "These queues", "Their names, with spaces between")),
        _allow_typed, _allow_read, _allow_said, _allow_of,
    ),
    _number("message_bytes_max", "message size, bytes", "A larger message is refused", size),
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
        lambda tags: {"tags": pairs_typed(tags)}, lambda given: pairs_read("tags", given["tags"]), _tags_said,
    ),
)  # fmt: skip


async def settings_form(visit: Visit) -> Response:
    """The settings, to be changed."""
    return await _page(visit, None, {})


async def _page(
    visit: Visit, error: ApiRefused | None, given: Given, changes: list[tuple[str, str, str]] | None = None
) -> Response:
    queue = await visit.api.get(queue_path(key_of(visit)))
    shown: Given = {}
    for each in _settings(queue["settings"]):
        shown |= each.typed(each.of(queue["settings"][each.name]))
    inputs = [field for each in _settings(queue["settings"]) for field in each.inputs]
    return await queue_page(visit, "settings.html", error, shown | given, queue, inputs=inputs, changes=changes)


def _settings(settings: dict[str, Any]) -> list[Setting]:
    """Those that this queue can have."""
    return [each for each in SETTINGS if settings["fifo"] or not each.of_fifo_alone]


async def change_settings(visit: Visit) -> Response:
    """Show what would change; after that is confirmed, change it."""
    given, _ = await visit.checked_form()
    key = key_of(visit)
    found = await visit.api.get(queue_path(key))
    try:
        change, changes = _change(found["settings"], given)
    except FormWrong as error:
        return await _page(visit, error, given)
    if "confirmed" not in given:
        return await _page(visit, None, given, changes)

    async def refused(given: Given, error: ApiRefused) -> Response:
        # What was typed is about settings that are no more: the form shows those of now.
        return await _page(visit, error, {} if error.error == "queue_changed" else given)

    return await visit.act(_changing(visit, key, change, changes), refused)


def _changing(visit: Visit, key: QueueKey, change: dict[str, Any], changes: list[tuple[str, str, str]]) -> Work:
    async def work(given: Given, once: str) -> Done:
        seen = {"if_version": given.get("version", "")}
        await visit.api.act("PATCH", queue_path(key), change | seen, once)
        return Done("Changed: " + "; ".join(f"{name} {new}" for name, _, new in changes) + ".", console_path(key))

    return work


def _change(settings: dict[str, Any], given: Given) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """What to ask the API for, and each change as name, old and new. Raises FormWrong."""
    change: dict[str, Any] = {}
    changes = []
    for each in _settings(settings):
        if each.inputs[0].name not in given:
            continue
        old, new = each.of(settings[each.name]), each.read(given)
        if new != old:
            change[each.name] = new
            changes.append((each.label, each.said(old), each.said(new)))
    return change, changes


SETTINGS_PAGES: Final = (Page(PATH + "/settings", settings_form), Page(PATH + "/settings", change_settings, "POST"))
