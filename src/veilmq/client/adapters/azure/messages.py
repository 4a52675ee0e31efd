"""The port's messages as arguments of Put Message, and the service's answers as messages.

Strategy: what Queue Storage cannot carry, and what exceeds its limits, is refused here before any I/O. The SDK writes a
carriage return into its XML unescaped, and every XML reader turns it into a line feed; our request hook writes the
character reference instead. Source: "Put Message"; XML 1.0, section 2.11.

Reading: a handle joins the message's id and its pop receipt, because later calls need both. Instants are whole seconds,
as the service writes them. Source: "Get Messages", "Peek Messages".
"""

import math
from datetime import datetime
from typing import Any, Final

import msgspec

from veilmq.client import checks
from veilmq.client.adapters.azure.calls import MESSAGE_BYTES_MAX
from veilmq.client.adapters.azure.settings import DELAY_MAX, LEASE_MAX, NEVER, TTL_MAX, Settings
from veilmq.client.adapters.cloud import encode_base64
from veilmq.client.checks import as_message, check_abilities, text_bytes
from veilmq.client.messages import Message, Peeked, Received
from veilmq.client.queue import Capabilities
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, ReceiptInvalid


class Entry(msgspec.Struct, gc=False):
    """A message ready to be sent."""

    given: dict[str, Any]
    """Arguments of `QueueClient.send_message`."""
    size_bytes: int


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message = as_message(given)
    check_abilities(message, capabilities)
    arguments: dict[str, Any] = {}
    delay, ttl = message.delay, message.ttl
    if delay is not None:
        arguments["visibility_timeout"] = checks.whole_seconds(delay, "delay", 0, DELAY_MAX)
    if ttl is not None:
        arguments["time_to_live"] = NEVER if ttl == math.inf else checks.whole_seconds(ttl, "ttl", 1, TTL_MAX)
    content, size_bytes = content_of(message.body, capabilities.base64_body)
    return Entry({"content": content, "raw_request_hook": keep_line_ends, **arguments}, size_bytes)


def settle(entry: Entry, settings: Settings) -> Entry:
    """The entry with the queue's own delay, time to live and size. Raises ParameterInvalid, MessageTooLarge."""
    limit_bytes = settings.message_bytes_max
    if limit_bytes is not None and entry.size_bytes > limit_bytes:
        raise MessageTooLarge(size_bytes=entry.size_bytes, limit_bytes=limit_bytes)
    given = dict(entry.given)
    if settings.delay is not None:
        given.setdefault("visibility_timeout", settings.delay)
    if settings.retention is not None:
        given.setdefault("time_to_live", settings.retention)
    delay, ttl = given.get("visibility_timeout", 0), given.get("time_to_live", NEVER)
    if delay >= ttl != NEVER:
        reason = f"must be below the time to live, {ttl} s: the message would be dead before it is visible"
        raise ParameterInvalid(parameter="delay", reason=reason)
    return Entry(given, entry.size_bytes)


def content_of(body: str, base64: bool) -> tuple[str, int]:
    """The body on the wire, and its bytes. Raises ParameterInvalid, MessageTooLarge."""
    raw = text_bytes(body)
    if not body:
        raise ParameterInvalid(parameter="body", reason="must not be empty")
    content = encode_base64(raw) if base64 else body
    size_bytes = len(content) if base64 else len(raw)
    if size_bytes > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=MESSAGE_BYTES_MAX)
    return content, size_bytes


def lease_of(parameter: str, seconds: float, least: int) -> int:
    """A lease in whole seconds. Raises ParameterInvalid."""
    return checks.whole_seconds(seconds, parameter, least, LEASE_MAX)


def keep_line_ends(request: Any) -> None:
    """Hook on the SDK's request, before it is signed."""
    body = request.http_request.content
    if isinstance(body, bytes) and b"\r" in body:
        body = body.replace(b"\r", b"&#13;")
    elif isinstance(body, str) and "\r" in body:
        body = body.replace("\r", "&#13;").encode()
    else:
        return
    request.http_request.set_bytes_body(body)


_SEPARATOR: Final = ":"
_NEVER_YEAR: Final = 9999


def handle_of(message_id: str, receipt: str) -> str:
    """The handle for both."""
    return f"{message_id}{_SEPARATOR}{receipt}"


def parts_of(handle: str) -> tuple[str, str]:
    """Message id and pop receipt. Raises ReceiptInvalid."""
    if checks.handle(handle).isascii() and handle.isprintable():
        message_id, _, receipt = handle.partition(_SEPARATOR)
        if message_id and receipt and message_id.replace("-", "").isalnum():
            return message_id, receipt
    raise ReceiptInvalid(reason="it is not a message's id, a colon and a pop receipt")


def received_of(message: Any, lease_end: float) -> Received:
    """The message in an SDK's QueueMessage from a receive."""
    return Received(
        id=message.id,
        body=message.content or "",
        receive_count=message.dequeue_count,
        sent=_seconds(message.inserted_on),
        expires=_expiry(message.expires_on),
        handle=handle_of(message.id, message.pop_receipt),
        lease_end=lease_end,
    )


def peeked_of(message: Any) -> Peeked:
    """The message in an SDK's QueueMessage from a peek."""
    return Peeked(
        id=message.id,
        body=message.content or "",
        receive_count=message.dequeue_count,
        sent=_seconds(message.inserted_on),
        expires=_expiry(message.expires_on),
    )


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()


def _expiry(instant: datetime | None) -> float | None:
    """None also for a message that never expires: the service gives it the last representable day."""
    return None if instant is None or instant.year == _NEVER_YEAR else instant.timestamp()
