"""Acts on one queue: send, purge, redrive.

Strategy: what cannot be taken back has a page before it that names what and how many. A redrive is a job (jobs.py).
What was sent last can be filled in again: the session keeps it in memory, within a bound, so that no body is in an
address or in a browser's storage.
"""

import json
from typing import Any, Final

from starlette.responses import Response

from veilmq.admin.api.inputs import message_id
from veilmq.console.calls import ApiRefused, queue_path
from veilmq.console.pages.queue import PATH, UNITS_US, console_path, key_of
from veilmq.console.sessions import Done
from veilmq.console.showing import count
from veilmq.console.visit import Page, Visit
from veilmq.model.messages.message import id_text

_FIELDS: Final = ("body", "delay", "ttl", "priority", "type", "group", "attributes")
"""Of a message that was sent, to be filled in again: a deduplication id would make the next one the same."""


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
    return await _send_page(visit, None, {})


async def _send_page(visit: Visit, error: ApiRefused | None, given: dict[str, str]) -> Response:
    return await queue_page(visit, "send.html", error, given, sent=visit.session.sent)


async def fill(visit: Visit) -> Response:
    """The form as one of the last messages was sent, or with what a message has. To read that is to read its body."""
    given, _ = await visit.checked_form()
    if "message" in given:
        try:
            return await _send_page(visit, None, await _as_typed(visit, given["message"]))
        except FormWrong as error:
            return await _send_page(visit, error, {})
    place = given.get("again", "")
    sent = visit.session.sent
    return await _send_page(visit, None, sent[int(place)] if place in map(str, range(len(sent))) else {})


async def _as_typed(visit: Visit, message: str) -> dict[str, str]:
    """A message as the form's fields have it. Raises FormWrong, ApiRefused."""
    if not visit.shows_bodies:
        raise FormWrong("message", "this server's console shows no bodies (console_bodies)")
    found = await visit.api.get(f"/api/v1/messages/{id_text(message_id(message))}", bodies="true")
    place = next(iter(found["places"]), None)
    if place is None:
        raise FormWrong("message", "it is no longer there")
    if place.get("body") is None:
        raise FormWrong("message", "its body is no text: download it, and send it with a program")
    typed = {name: place[name] for name in ("body", "type", "group") if place.get(name)}
    return typed | {"attributes": attributes_typed(place.get("attributes") or [])}


async def send(visit: Visit) -> Response:
    """Send it."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        members = {"messages": [_message(given)]}
        answer = await visit.api.act("POST", queue_path(key, "/messages"), members, once)
        visit.session.keep_sent({name: given[name] for name in _FIELDS if given.get(name)})
        (sent,) = answer["messages"]
        how = "It was there already (deduplication)." if sent["duplicate"] else f"Sent to {key.name}."
        return Done(how, f"/console/messages/{sent['id']}")

    return await visit.act(work, lambda given, error: _send_page(visit, error, given))


def _message(given: dict[str, str]) -> dict[str, Any]:
    """What the API is to send. Raises FormWrong."""
    # A browser writes the ends of lines as CR LF, whatever was typed.
    message: dict[str, Any] = {"body": given.get("body", "").replace("\r\n", "\n")}
    message |= {name: given[name] for name in ("group", "type", "deduplication_id") if given.get(name)}
    for name, label in (("delay", "delay"), ("ttl", "time to live")):
        if given.get(name):
            message[f"{name}_us"] = span_us(label, given[name])
    if given.get("priority"):
        message["priority"] = number("priority", given["priority"])
    if given.get("attributes", "").strip():
        message["attributes"] = attributes_read(given["attributes"])
    return message


def attributes_typed(attributes: list[dict[str, str]]) -> str:
    """A line of name=value for each; a JSON list if not all are of the type String."""
    if all(each["type"] == "String" for each in attributes):
        return pairs_typed({each["name"]: each["value"] for each in attributes})
    return json.dumps(attributes, ensure_ascii=False)


def attributes_read(text: str) -> list[dict[str, str]]:
    """The same back. Raises FormWrong."""
    if not text.lstrip().startswith("["):
        pairs = pairs_read("attributes", text)
        return [{"name": name, "type": "String", "value": value} for name, value in pairs.items()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FormWrong("attributes", "expected a JSON list of {name, type, value}") from None
    assert isinstance(found, list)  # the API looks at what is in it
    return found


def pairs_typed(pairs: dict[str, str]) -> str:
    """A line of name=value for each; as JSON if lines could not say it."""
    parts = [part for pair in pairs.items() for part in pair]
    odd = any(len(part.splitlines()) > 1 or part != part.strip() for part in parts)
    if odd or "=" in "".join(pairs) or next(iter(pairs), "").startswith("{"):
        return json.dumps(pairs, ensure_ascii=False)
    return "\n".join(f"{name}={value}" for name, value in pairs.items())


def pairs_read(field: str, text: str) -> dict[str, str]:
    """The same back. Raises FormWrong."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise FormWrong(field, "expected a JSON object of texts, or a line of name=value for each")
        return found
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if not line.partition("=")[0].strip() or "=" not in line:
            raise FormWrong(field, f"expected name=value, not {line!r}")
    return {line.partition("=")[0].strip(): line.partition("=")[2].strip() for line in lines}


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
    """Where a redrive would take the messages: it begins as a job that counts them."""
    return await queue_page(visit, "move.html", None, visit.members)


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
    Page(PATH + "/send/fill", fill, "POST"),
    Page(PATH + "/purge", purge_form),
    Page(PATH + "/purge", purge, "POST"),
    Page(PATH + "/move", move_form),
)
