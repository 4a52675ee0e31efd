"""The messages of a queue, page by page, and one message by its id, wherever it is.

Strategy: pages seek by index and never count. One message is found through its history (trace.py), which knows its
sequences and queues; then its row is read. Nothing is leased, and nothing changes.
"""

import base64
from typing import Any

from veilmq.admin.api.inputs import message_id
from veilmq.admin.api.views import shown_extras, shown_instant, shown_key, shown_lease
from veilmq.admin.history.reading import Scope
from veilmq.admin.history.trace import trace
from veilmq.model.commands import Origin, RecordPeek
from veilmq.model.errors import QueueMissing
from veilmq.model.messages.message import id_text
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader, View
from veilmq.store.reader import FoundMessage, ListedMessage


def message_page(reader: Reader, key: QueueKey, state: str, after: str, limit: int) -> dict[str, Any]:
    """Up to `limit` messages, visible ones by sequence, hidden ones by due instant, behind the page that ended at
    `after`. {messages, after}: `after` names the next page and is null at the end. Raises QueueMissing."""
    queue = reader.queues.get(key)
    if queue is None:
        raise QueueMissing(queue=str(key))
    leading, _, trailing = after.partition("-")
    with reader.look() as view:
        if state == "visible":
            found = view.visible(queue, int(leading or 0), limit)
        else:
            found = view.hidden(queue, int(leading or -1), int(trailing or 0), limit)
    following = None
    if len(found) >= limit:
        last = found[-1]
        following = str(last.sequence) if state == "visible" else f"{last.due}-{last.sequence}"
    retention_us = queue.settings.retention_us
    return {"messages": [_message(each, retention_us) for each in found], "after": following}


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


def find_message(view: View, message: bytes, scan_max: int, scope: Scope, *, bodies: bool) -> dict[str, Any]:
    """{message, complete, scanned, places, last}: every queue that holds the message, with all that is there of it (a
    published message may be in several), and the last event, which says how a message went that is nowhere."""
    found = trace(view, message, scan_max, scope)
    messages = [view.message(queue, sequence) for sequence, queue in sorted(found.places.items())]
    return {
        "message": id_text(message),
        "complete": found.complete,
        "scanned": found.scanned,
        "places": [_whole(view, each, bodies) for each in messages if each is not None],
        "last": found.events[-1] if found.events else None,
    }


def peeks(shown: dict[str, Any], origin: Origin) -> list[RecordPeek]:
    """The commands that record whose bodies the answer of `find_message` shows."""
    return [
        RecordPeek(
            queue=QueueKey(place["account"], place["region"], place["name"]),
            origin=origin,
            message=message_id(place["id"]),
            sequence=place["sequence"],
        )
        for place in shown["places"]
    ]


def _whole(view: View, found: FoundMessage, bodies: bool) -> dict[str, Any]:
    shown = shown_key(found.queue) | _message(found.listed, found.retention_us) | {"md5": found.md5.hex()}
    if found.listed.quarantined is not None:
        shown |= {"state": "quarantined", "quarantined": found.listed.quarantined}
    if found.holder is not None and shown["receive_count"]:
        names = view.origin_names(found.holder) or ("", "", "")
        shown["holder"] = dict(zip(("protocol", "principal", "client"), names, strict=True))
    if bodies:
        shown |= _body(found.body)
    return shown


def _body(body: bytes) -> dict[str, str]:
    """A damaged body may be no text any more."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
