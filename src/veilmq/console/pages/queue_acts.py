"""Acts on one queue: send, purge, redrive, change settings.

Strategy: what cannot be taken back has a page before it that names what and how many. The form of the settings shows
what would change before it does, and carries when the queue was modified: if someone else changed it meanwhile, the
page says so and nothing is changed.
"""

from typing import Any, Final

from starlette.responses import Response

from veilmq.console.calls import ApiRefused, queue_path
from veilmq.console.pages.queue import PATH, UNITS_US, console_path, duration_typed, key_of
from veilmq.console.sessions import Done
from veilmq.console.showing import count, duration
from veilmq.console.visit import Page, Visit
from veilmq.model.settings.queue import QueueKey

_SPANS: Final = (
    ("visibility_timeout_us", "visibility timeout"),
    ("delay_us", "delay"),
    ("retention_us", "retention"),
    ("wait_us", "wait of a receive"),
)


class FormWrong(ApiRefused):
    """A field that cannot be understood."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(400, {"error": "form", "field": field, "message": message})


async def queue_page(
    visit: Visit, template: str, error: ApiRefused | None, given: dict[str, str], queue: Any = None, **values: Any
) -> Response:
    """The page of the form, with what was typed and what is wrong. queue: if it was asked for already."""
    if queue is None:
        queue = await visit.api.get(queue_path(key_of(visit)))
    wrong = None if error is None else (f"{error.field}: {error.message}" if error.field else error.message)
    status = 200 if error is None else error.status
    return visit.show(template, status, queue=queue, given=given, wrong=wrong, nav="queues", **values)


async def send_form(visit: Visit) -> Response:
    """A form to send a message."""
    return await queue_page(visit, "send.html", None, visit.members)


async def send(visit: Visit) -> Response:
    """Send it."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        # A browser writes the ends of lines as CR LF, whatever was typed.
        message: dict[str, Any] = {"body": given.get("body", "").replace("\r\n", "\n")}
        for name in ("group", "type", "deduplication_id"):
            if given.get(name):
                message[name] = given[name]
        if given.get("delay"):
            message["delay_us"] = span_us("delay", given["delay"])
        if given.get("attribute"):
            value = given.get("value", "")
            message["attributes"] = [{"name": given["attribute"], "type": "String", "value": value}]
        answer = await visit.api.act("POST", queue_path(key, "/messages"), {"messages": [message]}, once)
        (sent,) = answer["messages"]
        how = "It was there already (deduplication)." if sent["duplicate"] else f"Sent to {key.name}."
        return Done(how, f"/console/messages/{sent['id']}")

    return await visit.act(work, lambda given, error: queue_page(visit, "send.html", error, given))


async def purge_form(visit: Visit) -> Response:
    """What a purge would delete."""
    return await queue_page(visit, "purge.html", None, {})


async def purge(visit: Visit) -> Response:
    """Purge."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        answer = await visit.api.act("POST", queue_path(key, "/purge"), {}, once)
        return Done(f"{count(answer['count'])} messages of {key.name} were deleted.", console_path(key))

    return await visit.act(work, lambda given, error: queue_page(visit, "purge.html", error, given))


async def move_form(visit: Visit) -> Response:
    """Where a redrive would take the messages."""
    return await queue_page(visit, "move.html", None, visit.members)


async def move(visit: Visit) -> Response:
    """Begin a redrive."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        members: dict[str, Any] = {}
        if given.get("destination"):
            members["destination"] = given["destination"]
        if given.get("rate_max"):
            members["rate_max"] = number("rate", given["rate_max"])
        task = await visit.api.act("POST", queue_path(key, "/move"), members, once)
        return Done(f"The redrive of {count(task['to_move'])} messages has begun.", console_path(key))

    return await visit.act(work, lambda given, error: queue_page(visit, "move.html", error, given))


async def settings_form(visit: Visit) -> Response:
    """The settings, to be changed."""
    return await _settings_page(visit, None, {})


async def _settings_page(
    visit: Visit, error: ApiRefused | None, given: dict[str, str], changes: list[tuple[str, str, str]] | None = None
) -> Response:
    queue = await visit.api.get(queue_path(key_of(visit)))
    shown = _typed(queue["settings"]) | given
    return await queue_page(visit, "settings.html", error, shown, queue, spans=_SPANS, changes=changes)


async def change_settings(visit: Visit) -> Response:
    """Show what would change; after that is confirmed, change it."""
    given, _ = await visit.checked_form()
    key = key_of(visit)
    found = await visit.api.get(queue_path(key))
    try:
        change, changes = _change(found["settings"], given)
    except FormWrong as error:
        return await _settings_page(visit, error, given)
    if "confirmed" not in given:
        return await _settings_page(visit, None, given, changes)
    return await visit.act(
        _changing(visit, key, change, changes), lambda form, error: _settings_page(visit, error, form)
    )


def _changing(visit: Visit, key: QueueKey, change: dict[str, Any], changes: list[tuple[str, str, str]]) -> Any:
    async def work(given: dict[str, str], once: str) -> Done:
        found = await visit.api.get(queue_path(key))
        if str(found["modified"]) != given.get("modified"):
            words = "someone else changed the queue meanwhile: look at its settings of now, and try again"
            raise ApiRefused(409, {"error": "changed", "message": words})
        await visit.api.act("PATCH", queue_path(key), change, once)
        return Done("Changed: " + "; ".join(f"{name} {new}" for name, _, new in changes) + ".", console_path(key))

    return work


def _typed(settings: dict[str, Any]) -> dict[str, str]:
    """The settings as the form's fields have them."""
    redrive = settings["redrive"]
    return {name: duration_typed(settings[name]) for name, _ in _SPANS} | {
        "target": redrive["target"]["name"] if redrive else "",
        "receive_count_max": str(redrive["receive_count_max"]) if redrive else "",
    }


def _change(settings: dict[str, Any], given: dict[str, str]) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """What to ask the API for, and each change as name, old and new. Raises FormWrong."""
    change: dict[str, Any] = {}
    changes = []
    for name, label in _SPANS:
        if name in given and (new := span_us(label, given[name])) != settings[name]:
            change[name] = new
            changes.append((label, duration(settings[name]), duration(new)))
    before = _typed(settings)
    target, receives = given.get("target", "").strip(), given.get("receive_count_max", "").strip()
    if (target, receives) != (before["target"], before["receive_count_max"]) and "target" in given:
        change["redrive"] = {"target": target, "receive_count_max": number("receives", receives)} if target else None
        old = f"to {before['target']} after {before['receive_count_max']}" if before["target"] else "nowhere"
        changes.append(("dead letters", old, f"to {target} after {receives}" if target else "nowhere"))
    return change, changes


def span_us(field: str, text: str) -> int:
    """A duration as typed: 30 s, 5 min, 1.5 h; a number alone is seconds. Raises FormWrong."""
    number, unit = text.strip(), "s"
    for name in sorted(UNITS_US, key=len, reverse=True):
        if number.endswith(name):
            number, unit = number.removesuffix(name).strip(), name
            break
    try:
        span = round(float(number) * UNITS_US[unit])
    except (ValueError, OverflowError):
        raise FormWrong(field, f"expected a duration such as 30 s, 5 min, 1.5 h or 4 d, not {text!r}") from None
    return span


def number(field: str, text: str) -> int:
    """A whole number as typed. Raises FormWrong."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise FormWrong(field, f"expected a whole number, not {text!r}")
    return int(text)


QUEUE_ACTS: Final = (
    Page(PATH + "/send", send_form),
    Page(PATH + "/send", send, "POST"),
    Page(PATH + "/purge", purge_form),
    Page(PATH + "/purge", purge, "POST"),
    Page(PATH + "/move", move_form),
    Page(PATH + "/move", move, "POST"),
    Page(PATH + "/settings", settings_form),
    Page(PATH + "/settings", change_settings, "POST"),
)
