"""Pages of the damaged messages that the store set apart, for the admin port and for the command line.

Strategy: a page is bounded by its number of messages and by the bytes of their bodies, which are read either way: their
present MD5 is shown beside the one with which they were sent. A body may be no text any more, so it is exported in
base64, and so are attributes that cannot be read.
"""

import base64
from collections.abc import Callable
from hashlib import md5
from typing import Any, Final

from veilmq.admin.api.views import shown_extras, shown_key
from veilmq.model.messages.message import id_text
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Reader
from veilmq.store.reader import DamagedMessage

PAGE_BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""A page ends with the message that reaches this."""


def quarantine_page(
    reader: Reader, wanted: Callable[[QueueKey], bool], after: str, limit: int, *, bodies: bool
) -> dict[str, Any]:
    """The messages in quarantine of the wanted queues, by sequence, after the page that gave `after`. Blocks."""
    with reader.look() as view:
        found, more = view.quarantined(wanted, int(after or 0), limit, PAGE_BODY_BYTES_MAX)
    shown = [_shown(message) | (_whole(message) if bodies else {}) for message in found]
    return {"messages": shown, "more": more, "after": str(found[-1].sequence) if more else None}


def _shown(message: DamagedMessage) -> dict[str, Any]:
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


def _whole(message: DamagedMessage) -> dict[str, Any]:
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
