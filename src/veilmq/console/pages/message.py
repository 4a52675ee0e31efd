"""The page of one message: what happened in one sentence and as a picture, every event, and the body behind a button.

Strategy: the sentence and the events come from the trace, the state from the message's row. A session that may
see only one of the two sees that one. Reading a body is an act: a POST, which the history records.
"""

import base64
from typing import Any, Final

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from veilmq.admin.api import Refused
from veilmq.admin.api.inputs import message_id
from veilmq.admin.story.life import life_of
from veilmq.console.pictures import timeline
from veilmq.console.showing import shown_body
from veilmq.console.visit import Page, Visit
from veilmq.model.events import EventRecord
from veilmq.model.instant import Instant
from veilmq.model.messages import id_text

PATH: Final = "/console/messages/{message}"
EVENTS_SHOWN_MAX: Final = 500
DEDUPLICATION_ID_MAX: Final = 128
SCAN_MAX: Final = 100_000
"""So many events that no index covers are looked at for a deduplication id: a name of a queue may be meant."""


async def message(visit: Visit) -> Response:
    """The page."""
    return await _message_page(visit, bodies=False)


async def body(visit: Visit) -> Response:
    """The page with the bodies."""
    await visit.checked_form()
    _check_bodies(visit)
    return await _message_page(visit, bodies=True)


async def download(visit: Visit) -> Response:
    """One body as a file."""
    given, _ = await visit.checked_form()
    _check_bodies(visit)
    found = await visit.api.get(f"/api/v1/messages/{_id(visit)}", bodies="true")
    places = [each for each in found["places"] if str(each["sequence"]) == given.get("sequence")]
    if not places:
        raise Refused(404, "not_found", "The message is no longer there.")
    text = places[0].get("body")
    raw = base64.b64decode(places[0]["body_base64"]) if text is None else text.encode()
    # An id has no character that needs escaping in a file's name (RFC 6266).
    named = {"content-disposition": f'attachment; filename="message-{_id(visit)}.bin"'}
    return Response(raw, media_type="application/octet-stream", headers=named)


def _id(visit: Visit) -> str:
    """The id in the path, as a UUID. Raises ParameterInvalid."""
    return id_text(message_id(visit.request.path_params["message"]))


def _check_bodies(visit: Visit) -> None:
    if not visit.shows_bodies:
        raise Refused(403, "not_granted", "This server's console shows no bodies (console_bodies, admin_bodies).")


async def _message_page(visit: Visit, *, bodies: bool) -> Response:
    message = _id(visit)
    may_peek, may_trace = visit.may("peek"), visit.may("events")
    if not (may_peek or may_trace):
        raise Refused(403, "not_granted", "The key was granted neither peek nor events.")
    members = {"bodies": "true"} if bodies else {}
    found = await visit.api.get(f"/api/v1/messages/{message}", **members) if may_peek else {"places": []}
    trace = await visit.api.get(f"/api/v1/trace/{message}") if may_trace else {"events": [], "story": None}
    if not found["places"] and not trace["events"]:
        sends = await sends_with(visit, visit.request.path_params["message"]) if may_peek else None
        if sends and sends["messages"]:
            return visit.show("sends.html", sends=sends, may_be_name=False, nav="message")
        return visit.show("missing.html", 404, message=message, scanned=trace.get("scanned", 0), nav="message")
    return visit.show(
        "message.html",
        message=message,
        story=trace["story"],
        drawing=_drawing(trace, visit.now),
        events=trace["events"][-EVENTS_SHOWN_MAX:],
        left_out=max(0, len(trace["events"]) - EVENTS_SHOWN_MAX),
        places=[each | {"shown": await run_in_threadpool(_shown, each)} for each in found["places"]],
        may_peek=may_peek,
        nav="message",
    )


async def sends_with(visit: Visit, identity: str) -> dict[str, Any]:
    """The messages that were sent with a deduplication id, as the API lists them."""
    if len(identity) > DEDUPLICATION_ID_MAX:
        return {"messages": []}
    found: dict[str, Any] = await visit.api.get("/api/v1/messages", deduplication_id=identity, scan=SCAN_MAX)
    return found


def _shown(place: dict[str, Any]) -> Any:
    if "body" not in place and "body_base64" not in place:
        return None
    return shown_body(place.get("body"), place.get("body_base64"))


def _drawing(trace: dict[str, Any], now: int) -> Any:
    if not trace["events"]:
        return None
    events = msgspec.convert(trace["events"], list[EventRecord])
    return timeline(life_of(events, Instant(now), is_complete=trace["complete"]))


MESSAGE_PAGES: Final = (
    Page(PATH, message),
    Page(PATH, body, "POST"),
    Page(PATH + "/download", download, "POST"),
)
