"""Makes the HTTP request that pushes a message (docs/mns.md, "Pushes").

Strategy: pure; the clock's reading and the signature are arguments. A setting chooses the case of header names: lower
case, as the Python samples look them up, or as documented (`Content-md5`, `Content-Type`, `Date`), as the Java sample
does.
"""

import base64
from email.utils import formatdate
from hashlib import md5
from typing import Final, NamedTuple

from veilmq.model.message import Delivery
from veilmq.model.topic import ContentFormat, Notification, SubscriptionSettings, TopicKey, render

VERSION: Final = "2015-06-06"
_TYPES: Final = {
    ContentFormat.XML: "text/xml;charset=utf-8",
    ContentFormat.JSON: "application/json;charset=utf-8",
    ContentFormat.SIMPLIFIED: "text/plain;charset=utf-8",
}
_DOCUMENTED: Final = {"content-md5": "Content-md5", "content-type": "Content-Type", "date": "Date"}


class Push(NamedTuple):
    """One request without its signature and target."""

    body: bytes
    headers: dict[str, str]
    """Names in lower case."""


def push_of(
    topic: TopicKey, subscription: str, settings: SubscriptionSettings, message: Delivery, request_id: str,
    certificate_url: str, wall_us: int,
) -> Push:  # fmt: skip
    """The request that pushes a message. wall_us: wall time, for the Date header."""
    published = message.extras.published_id or message.id
    notification = Notification(
        topic, subscription, published.hex().upper(), message.body, message.md5.hex().upper(), message.extras.tag,
        message.sent,
    )  # fmt: skip
    body = render(notification, settings.content_format).encode()
    digest = md5(body, usedforsecurity=False).hexdigest()
    headers = {
        "content-md5": base64.b64encode(digest.encode()).decode(),
        "content-type": _TYPES[settings.content_format],
        "date": formatdate(wall_us / 1e6, usegmt=True),
        "x-mns-request-id": request_id,
        "x-mns-version": VERSION,
        "x-mns-signing-cert-url": base64.b64encode(certificate_url.encode()).decode(),
    }
    if settings.content_format is ContentFormat.SIMPLIFIED:
        headers["x-mns-message-id"] = notification.message_id
        if notification.tag is not None and _is_header(notification.tag):
            headers["x-mns-message-tag"] = notification.tag
    return Push(body, headers)


def _is_header(tag: str) -> bool:
    """Whether the tag fits into a header; another protocol may have accepted any text as a tag."""
    return tag == tag.strip() and not any(character < " " or character == "\x7f" for character in tag)


def cased(headers: dict[str, str], documented: bool) -> dict[str, str]:
    """The headers with names in the case that the setting asks for."""
    return {_DOCUMENTED.get(name, name): value for name, value in headers.items()} if documented else headers
