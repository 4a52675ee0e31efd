"""Acts on one queue: send, purge, redrive.

Strategy: what cannot be taken back has a page before it that names what and how many. A redrive is a job (jobs.py).
"""

from typing import Any, Final

from starlette.responses import Response

from veilmq.console.calls import ApiRefused, queue_path
from veilmq.console.pages.queue import PATH, UNITS_US, console_path, key_of
from veilmq.console.sessions import Done
from veilmq.console.showing import count
from veilmq.console.visit import Page, Visit


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
    Page(PATH + "/purge", purge_form),
    Page(PATH + "/purge", purge, "POST"),
    Page(PATH + "/move", move_form),
)
