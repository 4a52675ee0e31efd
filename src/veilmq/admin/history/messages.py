"""The messages of a queue, page by page, those in quarantine, and one message by its id, wherever it is.

Strategy: pages seek by index and never count. One message is found through its history (trace.py), which knows its
sequences and queues; then its row is read. Nothing is leased, and nothing changes.

A page of damaged messages is bounded by its number of messages and by the bytes of their bodies, which are read either
way: their present MD5 is shown beside the one with which they were sent. A body may be no text any more, so it is
exported in base64, and so are attributes that cannot be read.
"""

import base64
from collections.abc import Callable, Iterator
from hashlib import md5
from typing import Any, Final, NamedTuple

from veilmq.admin.api.inputs import PAGE_MAX, FindInput, PageInput, SendsInput
from veilmq.admin.api.views import shown_client, shown_extras, shown_instant, shown_key, shown_lease
from veilmq.admin.history import Scope
from veilmq.admin.history.trace import sends_with, trace
from veilmq.admin.holders import Clients, shown_head
from veilmq.model.commands import Origin, RecordPeek
from veilmq.model.errors import QueueMissing
from veilmq.model.events import Event, LeaseEnding
from veilmq.model.instant import Instant
from veilmq.model.messages import id_text
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader, View
from veilmq.store.reader import DamagedMessage, FoundMessage, ListedMessage, QueueState

LOOKED_AT_MAX: Final = 10_000
"""Messages that one page looks at to find those that match."""
SEARCHED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bodies that one page searches for a text; the last few may go beyond."""
_SEARCHED_AT_ONCE: Final = 16
"""Bodies may be long, so only a few are searched beyond what a page needs."""


def message_page(reader: Reader, key: QueueKey, wanted: PageInput, now: Instant) -> dict[str, Any]:
    """Messages that match, visible ones by sequence, hidden ones by due instant, behind the page that ended at
    `wanted.after`. {messages, after, looked_at}: `after` names the next page and is null at the end; a page with an
    `after` and fewer messages than its limit was stopped by a bound. Raises QueueMissing."""
    queue = reader.queues.get(key)
    if queue is None:
        raise QueueMissing(queue=str(key))
    found: list[ListedMessage] = []
    after, looked_at, searched_bytes = None, 0, 0
    with reader.look() as view:
        for each, matches in _walk(view, queue, wanted, now):
            looked_at += 1
            searched_bytes += 0 if wanted.text is None else each.body_bytes
            if matches:
                found.append(each)
            if len(found) == wanted.limit or looked_at == LOOKED_AT_MAX or searched_bytes >= SEARCHED_BYTES_MAX:
                after = _place(each, wanted.state)
                break
        blocked = _blocked_by(view, queue, found, now)
    shown = [_message(each, queue.settings.retention_us) | blocked.get(each.sequence, {}) for each in found]
    return {"messages": shown, "after": after, "looked_at": looked_at}


def _blocked_by(view: View, queue: QueueState, listed: list[ListedMessage], now: Instant) -> dict[int, dict[str, Any]]:
    """By sequence: what visible messages of a FIFO queue wait for, if they do, as the member `blocked_by`."""
    visible = [each for each in listed if not (each.hidden and each.due is not None and each.due > now)]
    if not queue.settings.fifo or not visible:
        return {}
    heads, clients = view.heads(queue, now, {each.group for each in visible if each.group is not None}), Clients(view)
    return {
        each.sequence: {"blocked_by": shown_head(head, clients)}
        for each in visible
        if (head := heads.get(each.group or "")) is not None and head.sequence < each.sequence
    }


def _walk(view: View, queue: QueueState, wanted: PageInput, now: Instant) -> Iterator[tuple[ListedMessage, bool]]:
    """Each message behind `wanted.after`, and whether it matches."""
    after, chunk = wanted.after, wanted.limit if wanted.filter.is_empty else PAGE_MAX
    while True:
        leading, _, trailing = after.partition("-")
        if wanted.state == "visible":
            listed = view.visible(queue, int(leading or 0), chunk)
        else:
            listed = view.hidden(queue, int(leading or -1), int(trailing or 0), chunk)
        for at in range(0, len(listed), _SEARCHED_AT_ONCE):
            yield from _judged(view, queue, listed[at : at + _SEARCHED_AT_ONCE], wanted, now)
        if len(listed) < chunk:
            return
        after = _place(listed[-1], wanted.state)


def _place(message: ListedMessage, state: str) -> str:
    return str(message.sequence) if state == "visible" else f"{message.due}-{message.sequence}"


def _judged(
    view: View, queue: QueueState, listed: list[ListedMessage], wanted: PageInput, now: Instant
) -> Iterator[tuple[ListedMessage, bool]]:
    admits = wanted.filter.admits
    matching = {each.sequence for each in listed if admits(each.type, each.group, each.sent, each.attempt or 0, now)}
    if wanted.text is not None and matching:
        matching = view.containing(queue, sorted(matching), wanted.text)
    return ((each, each.sequence in matching) for each in listed)


def _message(held: ListedMessage, retention_us: int) -> dict[str, Any]:
    return (
        {
            "id": id_text(held.id),
            "sequence": held.sequence,
            "priority": held.priority,
            "sent": held.sent,
            "expires": shown_instant(held.sent + retention_us if held.own_expiry is None else held.own_expiry),
            "sender": held.sender,
            "body_bytes": held.body_bytes,
        }
        | shown_lease(held)
        | shown_extras(held.extras)
    )


def without_error(shown: dict[str, Any]) -> dict[str, Any]:
    """The message without the text of a worker's error, which may quote the body."""
    error = shown.get("last_error")
    return shown if error is None else shown | {"last_error": {"type": error["type"]}}


class Caller(NamedTuple):
    """Who looks for a message, and when."""

    origin: Origin
    now: Instant


class Located(NamedTuple):
    """Where a message is."""

    shown: dict[str, Any]
    """{message, complete, scanned, places, last}: every queue that holds the message, with all that is there of it,
    and the last event, which says how a message went that is nowhere."""
    peeks: list[RecordPeek]
    """Commands to run before the bodies in `shown` go out: they record who reads them."""


def find_message(reader: Reader, message: bytes, wanted: FindInput, scope: Scope, caller: Caller) -> Located:
    """Find a message in whatever state. Blocks."""
    with reader.look() as view:
        found = trace(view, message, wanted.scan, scope)
        looked_up = [view.message(queue, sequence) for sequence, queue in sorted(found.places.items())]
        messages = [each for each in looked_up if each is not None]
        wholes = [_whole(view, each, wanted.bodies) | _blocked(reader, view, each, caller.now) for each in messages]
    shown = {
        "message": id_text(message),
        "complete": found.complete,
        "scanned": found.scanned,
        "places": [shown if scope.bodies else without_error(shown) for shown in wholes],
        "last": found.events[-1] if found.events else None,
    }
    peeked = messages if wanted.bodies else []
    return Located(
        shown,
        [
            RecordPeek(queue=each.queue, origin=caller.origin, message=each.listed.id, sequence=each.listed.sequence)
            for each in peeked
        ],
    )


def _blocked(reader: Reader, view: View, found: FoundMessage, now: Instant) -> dict[str, Any]:
    queue, listed = reader.queues.get(found.queue), found.listed
    if queue is None or listed.quarantined is not None:
        return {}
    return _blocked_by(view, queue, [listed], now).get(listed.sequence, {})


def find_sends(reader: Reader, wanted: SendsInput, scope: Scope) -> dict[str, Any]:
    """The messages that were sent with a deduplication id, newest first, and where they are: {deduplication_id,
    messages, complete, scanned}. Blocks."""
    with reader.look() as view:
        permitted = scope.incarnations(view)
        named = None if wanted.queue is None else set(view.incarnations_named(*wanted.queue.split("/")))
        sends, scanned, complete = sends_with(view, wanted.deduplication_id, wanted.scan)
        mine = [each for each in sends if permitted is None or each.queue in permitted]
        found = [_sent(view, each, wanted.deduplication_id) for each in mine if named is None or each.queue in named]
    shown = [each for each in found if each is not None]
    return {"deduplication_id": wanted.deduplication_id, "messages": shown, "complete": complete, "scanned": scanned}


def _sent(view: View, event: Event, identity: str) -> dict[str, Any] | None:
    """The message of that send, with its state in the queue that it was sent to, null if it is not there any more; None
    if it has another deduplication id with the same mark."""
    assert event.queue is not None
    assert event.sequence is not None
    assert event.message is not None
    key, there = view.queue_names(event.queue) or ("", "", ""), view.message(event.queue, event.sequence)
    shown = {"message": id_text(event.message)} | shown_key(QueueKey(*key)) | {"sent": event.sent, "state": None}
    if there is None:
        return shown
    if there.listed.quarantined is not None:
        return shown | {"state": "quarantined"}
    if there.listed.extras.deduplication_id != identity:
        return None
    return shown | {"state": shown_lease(there.listed)["state"]}


def _whole(view: View, found: FoundMessage, bodies: bool) -> dict[str, Any]:
    shown = shown_key(found.queue) | _message(found.listed, found.retention_us) | {"md5": found.md5.hex()}
    if found.listed.quarantined is not None:
        shown |= {"state": "quarantined", "quarantined": found.listed.quarantined}
    if found.holder is not None and shown["receive_count"]:
        shown["holder"] = shown_client(*(view.origin_names(found.holder) or ("", "", "")))
        shown["retries"] = shown["state"] == "in flight" and found.ending == LeaseEnding.RETRY
    if bodies:
        shown |= _body(found.body)
    return shown


def _body(body: bytes) -> dict[str, str]:
    """A damaged body may be no text any more."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


PAGE_BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""A page ends with the message that reaches this."""


def quarantine_page(
    reader: Reader, wanted: Callable[[QueueKey], bool], after: str, limit: int, *, bodies: bool
) -> dict[str, Any]:
    """The messages in quarantine of the wanted queues, by sequence, after the page that gave `after`. Blocks."""
    with reader.look() as view:
        found, more = view.quarantined(wanted, int(after or 0), limit, PAGE_BODY_BYTES_MAX)
    shown = [_shown_damaged(message) | (_whole_damaged(message) if bodies else {}) for message in found]
    return {"messages": shown, "more": more, "after": str(found[-1].sequence) if more else None}


def _shown_damaged(message: DamagedMessage) -> dict[str, Any]:
    """The message without its content."""
    return shown_key(message.queue) | {
        "id": id_text(message.id),
        "sequence": message.sequence,
        "sent": message.sent,
        "quarantined": message.quarantined,
        "body_bytes": len(message.body),
        "md5": message.md5.hex(),
        "md5_now": md5(message.body, usedforsecurity=False).hexdigest(),
        "attributes_readable": message.extras is not None,
    }


def _whole_damaged(message: DamagedMessage) -> dict[str, Any]:
    """Everything else that the store has of it."""
    shown: dict[str, Any] = {
        "sender": message.sender,
        "priority": message.priority,
        "expires": message.own_expiry,
        "group": message.group,
        "type": message.type,
    }
    if message.extras is not None:
        shown |= shown_extras(message.extras)
    elif message.packed is not None:
        shown["attributes_base64"] = base64.b64encode(message.packed).decode()
    return shown | {"body_base64": base64.b64encode(message.body).decode()}
