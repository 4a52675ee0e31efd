"""The page of one queue: how much there is, its settings, its messages by state; and the same queue at an instant of
the past, with what changed until a second one.

Strategy: the filters are members of the address, so that a link shows a colleague the same. Messages come by key, never
by offset; a page that a bound stopped says so. Bodies are not shown here.

The past is asked for with plain fields of a GET form. An instant may be typed as so long ago; then the page redirects
to the address with the instant itself. A form that cannot be understood, and an instant that the history does not
cover, are said above the form.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from veilmq.admin.api.inputs import STATES, queue_key
from veilmq.console import ApiRefused, queue_path
from veilmq.console.pages.queue.settings import settings_shown
from veilmq.console.pictures import SPANS, charts, effects
from veilmq.console.showing import FormWrong, blocked, clock_time, count, duration, duration_typed, iso, number, span_us
from veilmq.console.visit import Page, Visit
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, from_text
from veilmq.model.settings.queue import QueueKey

PATH: Final = "/console/queues/{account}/{region}/{name}"
MESSAGES_A_PAGE: Final = 50
JOBS_SHOWN_MAX: Final = 5
_JOBS_OF_PREFIX_MAX: Final = 100
"""Jobs that are asked for: the API finds them by the beginning of a queue's name."""
HOLDERS_SHOWN_MAX: Final = 10
BLOCKED_SHOWN_MAX: Final = 10
"""Groups."""
FAILURES_MINUTES: Final = 1_440
CAUSES_SHOWN_MAX: Final = 10
AGES: Final = (("", 0), ("1 min", MINUTE_US), ("1 h", HOUR_US), ("1 d", DAY_US))
ADVICE: Final = {
    "keep": "Keep it.",
    "raise": "Raise it.",
    "lower": "Lower it.",
    "extend": "Extend leases.",
    "too_few": "Too early to say.",
}
FILTERS: Final = {"type": "type", "group": "group", "age_us_min": "age over", "receives_min": "receives at least",
                  "text": "text"}  # fmt: skip


def key_of(visit: Visit) -> QueueKey:
    """The queue, or the topic, that the path names. Raises ParameterInvalid."""
    parts = visit.request.path_params
    return queue_key(parts["account"], parts["region"], parts["name"])


def console_path(key: QueueKey, suffix: str = "") -> str:
    """The console's path of a queue."""
    return f"/console/queues/{key.account}/{key.region}/{key.name}{suffix}"


async def queue(visit: Visit) -> Response:
    """The page."""
    key = key_of(visit)
    found = await visit.api.get(queue_path(key))
    messages, wrong = _none_asked(visit), None
    try:
        messages = await _messages(visit, key)
    except ApiRefused as error:
        if error.field not in FILTERS:
            raise
        wrong = f"{FILTERS[error.field]}: {error.message}"
    span, rollups, step_us = await _rollups(visit, key)
    members = {"account": key.account, "region": key.region, "prefix": key.name, "limit": _JOBS_OF_PREFIX_MAX}
    jobs = (await visit.api.get("/api/v1/jobs", **members))["jobs"]
    holders = await _of_messages(visit, key, "/holders", HOLDERS_SHOWN_MAX)
    is_blocked = found["blocked"] is not None and found["blocked"]["messages"] > 0
    failures = await visit.api.get(queue_path(key, "/failures"), minutes=FAILURES_MINUTES, limit=CAUSES_SHOWN_MAX)
    timeout = await visit.api.get(queue_path(key, "/timeout"))
    return visit.show(
        "queue.html",
        200 if wrong is None else 400,
        queue=found,
        wrong=wrong,
        timeout=timeout,
        advice=ADVICE[timeout["advice"]],
        effects=effects(timeout, visit.members.get("step", ""), duration_typed),
        settings=settings_shown(found["settings"]),
        jobs=[job for job in jobs if job["queue"]["name"] == key.name][:JOBS_SHOWN_MAX],
        holders=holders,
        blocked=await _of_messages(visit, key, "/blocked", BLOCKED_SHOWN_MAX) if is_blocked else None,
        failures=failures["causes"],
        may={
            name: visit.may(name, key.account, key.name)
            for name in ("send", "purge", "move", "change-queue", "peek", "events")
        },
        ages=AGES,
        charts=charts(rollups, step_us, visit.now),
        span=span,
        spans=[(name, each[0]) for name, each in SPANS.items()],
        nav="queues",
        **messages,
    )


async def news(visit: Visit) -> Response:
    """The cells of the page that may have changed."""
    found = await visit.api.get(queue_path(key_of(visit)))
    cells = {state: count(found["counts"][state]) for state in ("visible", "in_flight", "delayed", "total")}
    if found["blocked"] is not None:
        cells["blocked"] = blocked(found["blocked"])
    return visit.news(cells)


async def _of_messages(visit: Visit, key: QueueKey, what: str, shown_max: int) -> dict[str, Any] | None:
    """What the API shows of the queue's messages, if the session may see them."""
    if not visit.may("peek", key.account, key.name):
        return None
    found: dict[str, Any] = await visit.api.get(queue_path(key, what), limit=shown_max)
    return found


async def _rollups(visit: Visit, key: QueueKey) -> tuple[str, list[dict[str, Any]], int]:
    """The stretch that the address asks for, what happened in it, and the length of a step."""
    span = visit.members.get("span", "")
    span = span if span in SPANS else "hour"
    _, step, length_us, step_us = SPANS[span]
    # As many whole steps as the API shows at once, with the present one.
    start = visit.now - visit.now % step_us - length_us + step_us
    found = await visit.api.get(queue_path(key, "/rollups"), step=step, **{"from": start})
    return span, found["rollups"], step_us


async def export(visit: Visit) -> Response:
    """What the charts show, as JSON or CSV."""
    key = key_of(visit)
    span, rollups, _ = await _rollups(visit, key)
    return visit.download(f"{key.name}-{span}", rollups)


async def export_timeout(visit: Visit) -> Response:
    """What the curves of the timeout show, as JSON or CSV."""
    key = key_of(visit)
    found = await visit.api.get(queue_path(key, "/timeout"))
    return visit.download(f"{key.name}-timeout", found["curve"])


def _none_asked(visit: Visit) -> dict[str, Any]:
    """What the address asks for, and no message yet."""
    members = visit.members
    filters = {name: members.get(name, "") for name in FILTERS}
    if not visit.shows_bodies:
        filters["text"] = ""
    state = "hidden" if members.get("state") == "hidden" else "visible"
    return {"state": state, "filters": filters, "messages": None, "after": None, "stopped": None}


def filter_read(given: Mapping[str, str]) -> dict[str, Any]:
    """The filter as the API takes it. Raises FormWrong."""
    chosen: dict[str, Any] = {name: given[name] for name in FILTERS if given.get(name)}
    for name in ("age_us_min", "receives_min"):
        if name in chosen:
            chosen[name] = number(name, chosen[name])
    return chosen


def filter_in_words(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a filter asks for: name and value."""
    chosen = {name: str(given[name]) for name in FILTERS if given.get(name)}
    with suppress(KeyError, FormWrong):
        chosen["age_us_min"] = duration(number("age_us_min", chosen["age_us_min"]))
    return [(FILTERS[name], value) for name, value in chosen.items()]


async def _messages(visit: Visit, key: QueueKey) -> dict[str, Any]:
    """A page of messages: those that the address asks for."""
    shown = _none_asked(visit)
    if not visit.may("peek", key.account, key.name):
        return shown
    asked = {"state": shown["state"], "after": visit.members.get("after"), "limit": MESSAGES_A_PAGE}
    found = await visit.api.get(queue_path(key, "/messages"), **asked, **filter_read(shown["filters"]))
    is_stopped = found["after"] is not None and len(found["messages"]) < MESSAGES_A_PAGE
    return shown | {
        "messages": found["messages"],
        "after": found["after"],
        "stopped": found["looked_at"] if is_stopped else None,
    }


async def export_messages(visit: Visit) -> Response:
    """The messages that the page shows, as JSON or CSV."""
    key = key_of(visit)
    found = await _messages(visit, key)
    return visit.download(f"{key.name}-messages", found["messages"] or ())


QUEUE_PAGES: Final = (
    Page(PATH, queue),
    Page(PATH + "/news", news, is_polled=True),
    Page(PATH + "/rollups", export),
    Page(PATH + "/timeout", export_timeout),
    Page(PATH + "/messages", export_messages),
)


def instant_typed(field: str, text: str, now: int) -> tuple[int, bool]:
    """An instant, and whether it was typed as one: 2026-11-26 10:02:31.5 (UTC); `now`; 10 min: so long ago. Raises
    FormWrong."""
    if text == "now":
        return now, False
    with suppress(ValueError):
        return max(1, from_text(text)), True
    try:
        return now - span_us(field, text.removesuffix("ago")), False
    except FormWrong:
        words = f"expected an instant such as {iso(now)}, or how long ago, such as 10 min, not {text!r}"
        raise FormWrong(field, words) from None


def _asked(visit: Visit) -> tuple[dict[str, int], bool]:
    """`at` and perhaps `until`, and whether the address names both as instants. Raises FormWrong."""
    found, are_instants = {}, True
    for name in ("at", "until"):
        text = visit.members.get(name, "").strip()
        if text:
            found[name], is_instant = instant_typed(name, text, visit.now)
            are_instants = are_instants and is_instant
    return found, are_instants


async def _found(visit: Visit, asked: dict[str, int]) -> dict[str, Any]:
    """What the API says of that page. Raises ApiRefused."""
    path, members = queue_path(key_of(visit), "/past"), visit.members
    more = {"state": members.get("state"), "after": members.get("after"), "limit": MESSAGES_A_PAGE}
    found: dict[str, Any] = await visit.api.get(path, **asked, **more)
    return found


async def past(visit: Visit) -> Response:
    """The page: the form, and what it asks for."""
    key, found, error = key_of(visit), None, None
    try:
        asked, are_instants = _asked(visit)
        if not are_instants:
            return RedirectResponse(visit.here(**{name: iso(at) for name, at in asked.items()}), 303)
        if "at" in asked:
            found = await _found(visit, asked)
    except ApiRefused as refused:
        since = refused.data.get("since")
        begins = "" if since is None else f" (it begins at {clock_time(since)} UTC)"
        error = f"{refused.field}: {refused.message}" if refused.field else refused.message + begins
        if refused.error == "QueueMissing":
            error = "There was no queue of that name then."
        if refused.status == 403:
            raise
    given = {name: visit.members.get(name, "") for name in ("at", "until", "state")}
    status = 200 if error is None else 400
    return visit.show("past.html", status, key=key, given=given, found=found, wrong=error, states=STATES, nav="queues")


async def export_past(visit: Visit) -> Response:
    """The messages that the page shows, as JSON or CSV."""
    asked, _ = _asked(visit)
    found = await _found(visit, asked)
    return visit.download(f"{key_of(visit).name}-past", found["messages"])


PAST_PAGES: Final = (Page(PATH + "/past", past), Page(PATH + "/past/messages", export_past))
