"""Acts on one queue: send, purge, redrive, change its settings; and jobs, which act on all messages that a filter
matches and are carried out by the server: their list, their progress, their end.

Strategy: what cannot be taken back has a page before it that names what and how many. The form of the settings shows
what would change before it does, and carries the version that was shown: if someone else changed the queue meanwhile,
the store refuses and the page says so. A setting whose inputs a form lacks stays as it is. What was sent last can be
filled in again: the session keeps it in memory, within a bound, so that no body is in an address or in a browser's
storage.

A redrive is a job. A job is always counted first (a dry run), so that the button that starts it names what it does and
to how many. The filter is the one of the queue's page, from its address.
"""

from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from veilmq.admin.api.inputs import message_id
from veilmq.console import ApiRefused, queue_path
from veilmq.console.pages.queue import FILTERS, PATH, console_path, filter_in_words, filter_read, key_of
from veilmq.console.pages.queue.settings import SETTINGS, Given, settings_of
from veilmq.console.sessions import Done
from veilmq.console.showing import (
    FormWrong,
    attributes_read,
    attributes_typed,
    count,
    duration_typed,
    many,
    named,
    number,
    span_us,
)
from veilmq.console.visit import Page, Visit, Work
from veilmq.model.messages import id_text
from veilmq.model.moves import JOB_RATE_DEFAULT
from veilmq.model.settings.queue import QueueKey

_FIELDS: Final = ("body", "delay", "ttl", "priority", "type", "group", "attributes")
"""Of a message that was sent, to be filled in again: a deduplication id would make the next one the same."""
_LABELS: Final = (
    {field.name: field.label for each in SETTINGS for field in each.inputs}
    | {each.name: each.label for each in SETTINGS}
    | FILTERS
    | {name: name for name in _FIELDS}
    | {"ttl_us": "time to live", "deduplication_id": "deduplication id", "destination": "to"}
)
"""Members that the API may refuse, as the forms call them."""
_NO_TEMPLATE: Final = FormWrong("template", "the queue has none of that name")


async def queue_page(
    visit: Visit, template: str, error: ApiRefused | None, given: dict[str, str], queue: Any = None, **values: Any
) -> Response:
    """The page of the form, with what was typed and what is wrong. queue: if it was asked for already."""
    if queue is None:
        queue = await visit.api.get(queue_path(key_of(visit)))
    wrong = None if error is None else named(error, _LABELS)
    status = 200 if error is None else error.status
    return visit.show(template, status, queue=queue, given=given, wrong=wrong, nav="queues", **values)


async def send_form(visit: Visit) -> Response:
    """A form to send a message; with that of the template that the address names."""
    name, templates = visit.members.get("template"), await _templates(visit)
    kept = next((each for each in templates if each["name"] == name), None)
    if kept is None:
        return await _send_page(visit, _NO_TEMPLATE if name else None, {}, templates)
    return await _send_page(visit, None, _typed_of(kept["message"]) | {"template": kept["name"]}, templates)


async def _send_page(
    visit: Visit,
    error: ApiRefused | None,
    given: dict[str, str],
    templates: list[dict[str, Any]] | None = None,
    *,
    keeps: bool = False,
    drops: str = "",
) -> Response:
    """templates: if they were asked for already. keeps: ask for a name to keep it under. drops: ask whether to."""
    if templates is None:
        templates = await _templates(visit)
    shown = {"templates": templates, "keeps": keeps, "drops": drops, "fields": (*_FIELDS, "deduplication_id")}
    return await queue_page(visit, "send.html", error, given, sent=visit.session.sent, **shown)


async def _templates(visit: Visit) -> list[dict[str, Any]]:
    """Messages that are kept to be sent again, if their bodies may be shown."""
    key = key_of(visit)
    if not visit.shows_bodies or not visit.may("send", key.account, key.name):
        return []
    return list((await visit.api.get(queue_path(key, "/templates")))["templates"])


def _typed_of(message: dict[str, Any]) -> dict[str, str]:
    """A kept message as the form's fields have it."""
    typed = {name: message[name] for name in ("body", "type", "group") if message[name]}
    for name in ("delay", "ttl"):
        if message[f"{name}_us"] is not None:
            typed[name] = duration_typed(message[f"{name}_us"])
    if message["priority"] is not None:
        typed["priority"] = str(message["priority"])
    return typed | {"attributes": attributes_typed(message["attributes"])}


async def keep(visit: Visit) -> Response:
    """Keep what the form has under a name, once that was asked for."""
    key = key_of(visit)
    typed, _ = await visit.checked_form()
    if "template" not in typed:
        return await _send_page(visit, None, typed | {"template": typed.get("was", "")}, keeps=True)

    async def work(given: dict[str, str], once: str) -> Done:
        message = _message(given | {"deduplication_id": ""})
        members = {"name": given["template"], "message": message}
        await visit.api.act("PUT", queue_path(key, "/templates"), members, once)
        query = urlencode({"template": given["template"]})
        return Done(f"Kept as {given['template']}.", console_path(key, f"/send?{query}"))

    return await visit.act(work, lambda given, error: _send_page(visit, error, given, keeps=True))


async def drop(visit: Visit) -> Response:
    """Delete a template, once that was confirmed."""
    key = key_of(visit)
    asked, _ = await visit.checked_form()
    if "confirmed" not in asked:
        kept = (await visit.api.get(queue_path(key, "/templates")))["templates"]
        is_there = asked.get("name") in [each["name"] for each in kept]
        return await _send_page(visit, None if is_there else _NO_TEMPLATE, {}, drops=asked["name"] if is_there else "")

    async def work(given: dict[str, str], once: str) -> Done:
        name = given.get("name", "")
        await visit.api.act("POST", queue_path(key, "/templates/drop"), {"name": name}, once)
        return Done(f"The template {name} was deleted.", console_path(key, "/send"))

    return await visit.act(work, lambda given, error: _send_page(visit, error, {}))


async def fill(visit: Visit) -> Response:
    """The form as it was before a name was asked for, as one of the last messages was sent, or with what a message has:
    to read that is to read its body."""
    given, _ = await visit.checked_form()
    if "back" in given:
        return await _send_page(visit, None, given)
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
        raise FormWrong("message", "this server's console shows no bodies (console_bodies, admin_bodies)")
    found = await visit.api.get(f"/api/v1/messages/{id_text(message_id(message))}", bodies="true")
    place = next(iter(found["places"]), None)
    if place is None:
        raise FormWrong("message", "it is no longer there")
    if place.get("body") is None:
        raise FormWrong("message", "its body is no text: download it, and send it with a program")
    typed = {name: place[name] for name in ("body", "type", "group") if place.get(name)}
    typed["priority"] = str(place["priority"])
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
        shows = visit.may("peek", key.account, key.name) or visit.may("events", key.account, key.name)
        return Done(how, f"/console/messages/{sent['id']}" if shows else console_path(key))

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


async def purge_form(visit: Visit) -> Response:
    """What a purge would delete."""
    return await queue_page(visit, "purge.html", None, {})


async def purge(visit: Visit) -> Response:
    """Purge."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        answer = await visit.api.act("POST", queue_path(key, "/purge"), {}, once)
        return Done(f"Deleted {many(answer['count'], 'message')} of {key.name}.", console_path(key))

    return await visit.act(work, lambda given, error: queue_page(visit, "purge.html", error, given))


async def move_form(visit: Visit) -> Response:
    """Where a redrive would take the messages: it begins as a job that counts them."""
    return await queue_page(visit, "move.html", None, visit.members)


async def settings_form(visit: Visit) -> Response:
    """The settings, to be changed."""
    return await _settings_page(visit, None, {})


async def _settings_page(
    visit: Visit, error: ApiRefused | None, given: Given, changes: list[tuple[str, str, str]] | None = None
) -> Response:
    queue = await visit.api.get(queue_path(key_of(visit)))
    shown: Given = {}
    for each in settings_of(queue["settings"]):
        shown |= each.typed(each.of(queue["settings"][each.name]))
    inputs = [field for each in settings_of(queue["settings"]) for field in each.inputs]
    return await queue_page(visit, "settings.html", error, shown | given, queue, inputs=inputs, changes=changes)


async def change_settings(visit: Visit) -> Response:
    """Show what would change; after that is confirmed, change it."""
    given, _ = await visit.checked_form()
    key = key_of(visit)
    found = await visit.api.get(queue_path(key))
    try:
        change, changes = _change(found["settings"], given)
    except FormWrong as error:
        return await _settings_page(visit, error, given)
    if "back" in given:
        return await _settings_page(visit, None, given)
    if "confirmed" not in given:
        return await _settings_page(visit, None, given, changes)

    async def refused(given: Given, error: ApiRefused) -> Response:
        # What was typed is about settings that are no more: the form shows those of now.
        return await _settings_page(visit, error, {} if error.error == "queue_changed" else given)

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
    for each in settings_of(settings):
        if each.inputs[0].name not in given:
            continue
        old, new = each.of(settings[each.name]), each.read(given)
        if new != old:
            change[each.name] = new
            changes.append((each.label, each.said(old), each.said(new)))
    return change, changes


QUEUE_ACTS: Final = (
    Page(PATH + "/send", send_form),
    Page(PATH + "/send", send, "POST"),
    Page(PATH + "/send/fill", fill, "POST"),
    Page(PATH + "/send/keep", keep, "POST"),
    Page(PATH + "/send/drop", drop, "POST"),
    Page(PATH + "/settings", settings_form),
    Page(PATH + "/settings", change_settings, "POST"),
    Page(PATH + "/purge", purge_form),
    Page(PATH + "/purge", purge, "POST"),
    Page(PATH + "/move", move_form),
)


ACTS: Final = {
    "delete": ("Delete", "deletes them for good"),
    "move": ("Move", "moves them to another queue"),
    "redrive": ("Redrive", "moves dead letters back to where they came from, or to another queue"),
    "release": ("Release", "ends the leases of those in flight, so that others can receive them at once"),
}
JOBS_A_PAGE: Final = 50
_ONE: Final = "/console/jobs/{job}"
_WAITING: Final = frozenset({"running", "cancelling"})


async def jobs(visit: Visit) -> Response:
    """A page of jobs, newest first."""
    members = {"account": visit.account, "after": visit.members.get("after"), "limit": JOBS_A_PAGE}
    found = await visit.api.get("/api/v1/jobs", **members)
    after = found["after"] if found["more"] else None
    return visit.show("jobs.html", jobs=found["jobs"], after=after, nav="jobs")


async def job(visit: Visit) -> Response:
    """One job."""
    return await _job_page(visit, None)


async def _job_page(visit: Visit, error: ApiRefused | None) -> Response:
    found = await _found(visit)
    return visit.show(
        "job.html",
        200 if error is None else error.status,
        job=found,
        chosen=filter_in_words(found["filter"] or {}),
        is_waiting=found["status"] in _WAITING,
        rate_default=JOB_RATE_DEFAULT,
        does=ACTS.get(found["act"], (found["act"].capitalize(), ""))[0],
        wrong=None if error is None else error.message,
        nav="jobs",
    )


async def _found(visit: Visit) -> Any:
    return await visit.api.get(f"/api/v1/jobs/{visit.request.path_params['job']}")


async def news(visit: Visit) -> Response:
    """The progress of one."""
    found = await _found(visit)
    cells = {name: count(found[name]) for name in ("seen", "matched", "done", "failed", "total")}
    return visit.news(cells | {"status": found["status"]}, is_over=found["status"] not in _WAITING)


async def begin_form(visit: Visit) -> Response:
    """What to do with the messages that match."""
    return await _begin_page(visit, None, visit.members)


async def _begin_page(visit: Visit, error: ApiRefused | None, given: Given) -> Response:
    """Of the messages in flight only a release is offered, and of the visible ones all else: a job finds no others. A
    redrive is offered on a dead-letter queue."""
    queue = await visit.api.get(queue_path(key_of(visit)))
    is_hidden = given.get("state") == "hidden"
    acts = {name: words for name, words in ACTS.items() if (name == "release") == is_hidden}
    if not queue.get("is_dead_letter_queue", True):  # a server of an earlier release does not say
        acts = {name: words for name, words in acts.items() if name != "redrive"}
    given = dict.fromkeys(FILTERS, "") | given | {"state": "hidden" if is_hidden else "visible"}
    shown = {"acts": acts, "filters": FILTERS, "chosen": filter_in_words(given)}
    return await queue_page(visit, "begin.html", error, given, queue, **shown)


async def begin(visit: Visit) -> Response:
    """Begin a job: first one that counts alone, and from its page the real one."""
    key = key_of(visit)

    async def work(given: dict[str, str], once: str) -> Done:
        chosen = filter_read(given)
        if "text" in chosen and not visit.shows_bodies:
            raise FormWrong("text", "this server's console does not look into bodies (console_bodies, admin_bodies)")
        wanted: dict[str, Any] = {
            "act": given.get("act", ""),
            "queue": {"account": key.account, "region": key.region, "name": key.name},
            "filter": chosen,
            "dry_run": "confirmed" not in given,
        }
        if given.get("destination"):
            wanted["destination"] = {"account": key.account, "region": key.region, "name": given["destination"]}
        if given.get("rate"):
            wanted["rate"] = number("rate", given["rate"])
        made = await visit.api.act("POST", "/api/v1/jobs", wanted, once)
        return Done("" if made["dry_run"] else "The job has begun.", f"/console/jobs/{made['id']}")

    return await visit.act(work, lambda given, error: _begin_page(visit, error, given))


async def cancel(visit: Visit) -> Response:
    """End a job; what it did stays done."""

    async def work(given: dict[str, str], once: str) -> Done:
        ended = await visit.api.act("POST", f"/api/v1/jobs/{visit.request.path_params['job']}/cancel", {}, once)
        return Done(f"The job ends; done to {many(ended['done'], 'message')}.", f"/console/jobs/{ended['id']}")

    return await visit.act(work, lambda given, error: _job_page(visit, error))


JOB_PAGES: Final = (
    Page("/console/jobs", jobs),
    Page(_ONE, job),
    Page(_ONE + "/news", news, is_polled=True),
    Page(_ONE + "/cancel", cancel, "POST"),
    Page(PATH + "/job", begin_form),
    Page(PATH + "/job", begin, "POST"),
)
