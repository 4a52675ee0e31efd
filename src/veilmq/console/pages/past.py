"""A queue at an instant of the past, and what changed until a second one.

Strategy: plain fields of a GET form. An instant may be typed as so long ago; then the page redirects to the address
with the instant itself, so that a link shows a colleague the same. A form that cannot be understood, and an instant
that the history does not cover, are said above the form.
"""

from contextlib import suppress
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from veilmq.admin.past.replay import STATES
from veilmq.console.calls import ApiRefused, queue_path
from veilmq.console.pages.queue import MESSAGES_A_PAGE, PATH, key_of
from veilmq.console.showing import FormWrong, clock_time, iso, span_us
from veilmq.console.visit import Page, Visit
from veilmq.model.instant import from_text


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


async def export(visit: Visit) -> Response:
    """The messages that the page shows, as JSON or CSV."""
    asked, _ = _asked(visit)
    found = await _found(visit, asked)
    return visit.download(f"{key_of(visit).name}-past", found["messages"])


PAST_PAGES: Final = (Page(PATH + "/past", past), Page(PATH + "/past/messages", export))
