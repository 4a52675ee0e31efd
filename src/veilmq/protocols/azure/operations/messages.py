"""Put, Get, Peek, Clear, Delete and Update Message.

Strategy: our handle is the pop receipt. Put asks for one of attempt 0, Update rotates it, and after its lease it stays
valid until the message is granted again. If a client omits a timeout or time to live, the queue's own settings apply,
which are Azure's defaults unless its owner changed them. Source: the pages of these operations in the REST API.
"""

import re
from collections.abc import Sequence
from hashlib import md5 as md5_of
from typing import Final

from veilmq.model.commands import AfterExpiry, Delete, Extend, Peek, PurgeQueue, Receive, Send
from veilmq.model.instant import FOREVER, SECOND_US, Instant
from veilmq.model.messages import (
    REPORT_HEADER,
    Delivery,
    encode_xml_body,
    first_forbidden_character,
    id_text,
    read_header,
)
from veilmq.model.outcomes import Extended, Outcome, Received, Sent
from veilmq.model.settings.queue import XmlBody
from veilmq.protocols import Response, escape
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.addresses import required, whole_number
from veilmq.protocols.azure.call import Asked, Call, Plan, sole
from veilmq.protocols.azure.errors import NO_ID, Refusal, bad_node, dead_before_visible, missing_node, too_large
from veilmq.protocols.azure.fields import CONTENT_TYPE, DECLARATION, members_of, print_rfc1123, read_document

_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z", re.IGNORECASE)
_PLAIN: Final = re.compile(
    rb"""(?:<\?xml version=["']1\.0["'](?: encoding=["'](?:utf|UTF)-8["'])?(?: standalone=["']yes["'])? ?\?>\n?)?"""
    rb"<QueueMessage>[ \t\r\n]*<MessageText>([ -%'-;=?-~]*)</MessageText>[ \t\r\n]*</QueueMessage>[ \t\r\n]*"
)
"""The common case in SDKs: ASCII text without markup, used as it is. Expat parses everything else."""


def _visibility_seconds(asked: Asked, minimum: int) -> int | None:
    modern = asked.version >= limits.VERSION_UPDATE
    maximum = limits.VISIBILITY_SECONDS_MAX if modern else limits.VISIBILITY_SECONDS_MAX_OLD
    return whole_number(asked.parameters, "visibilitytimeout", minimum, maximum)


def _count(asked: Asked) -> int:
    count = whole_number(asked.parameters, "numofmessages", 1, limits.COUNT_MAX)
    return 1 if count is None else count


def _message_text(asked: Asked) -> tuple[str, bytes]:
    """The text of a QueueMessage document, and its UTF-8. Raises Refusal."""
    plain = _PLAIN.fullmatch(asked.request.body)
    if plain is not None:
        raw = plain[1]
        text = raw.decode()
    else:
        text = _read_text(asked.request.body)
        raw = text.encode()
    limit_bytes = limits.MESSAGE_BYTES_MAX if asked.version >= limits.VERSION_UPDATE else limits.MESSAGE_BYTES_MAX_OLD
    if len(raw) > limit_bytes:
        raise too_large(limit_bytes)
    return text, raw


def _read_text(document: bytes) -> str:
    root = read_document(document, "QueueMessage", limits.BODY_BYTES_MAX, text="MessageText")
    node = members_of(root, ("MessageText",)).get("MessageText")
    if node is None:
        raise missing_node("MessageText")
    # "Any XML markup in the message that isn't escaped or encoded is removed" (Put Message).
    if first_forbidden_character(node.raw) is not None:
        raise bad_node("MessageText", "", "The text has a character that XML 1.0 cannot carry.")
    return node.raw


def _ttl_seconds(asked: Asked) -> int | None:
    modern = asked.version >= limits.VERSION_LONG_TTL
    text = asked.parameters.get("messagettl")
    if modern and text == str(limits.TTL_NEVER):
        return limits.TTL_NEVER
    ttl_s = whole_number(
        asked.parameters, "messagettl", 1, limits.TTL_SECONDS_MAX if modern else limits.TTL_SECONDS_MAX_OLD
    )
    # .NET's TimeSpan.MaxValue is 29,000 years (Azure/azure-sdk-for-net #15158, Azure/Azurite #308).
    return limits.TTL_NEVER if ttl_s is not None and ttl_s > limits.TTL_SECONDS_COUNTED_MAX else ttl_s


def plan_put(asked: Asked) -> Plan:
    """Put Message."""
    queue = asked.queue()
    if asked.version < limits.VERSION_UPDATE and "visibilitytimeout" in asked.parameters:
        raise Refusal(errors.UNSUPPORTED_QUERY_PARAMETER, {"QueryParameterName": "visibilitytimeout"})
    delay_s, ttl_s = _visibility_seconds(asked, 0), _ttl_seconds(asked)
    if delay_s is not None and ttl_s is not None and delay_s >= ttl_s != limits.TTL_NEVER:
        raise dead_before_visible(str(delay_s))
    body, raw = _message_text(asked)
    ttl_us = None if ttl_s is None else FOREVER if ttl_s == limits.TTL_NEVER else ttl_s * SECOND_US
    command = Send(
        queue=queue,
        origin=asked.sender.origin,
        body=body,
        md5=md5_of(raw, usedforsecurity=False).digest(),
        size_bytes=len(raw),
        delay_us=None if delay_s is None else delay_s * SECOND_US,
        ttl_us=ttl_us,
        wants_handle=True,
        from_xml=True,
        must_appear=True,
    )
    return (command,), None


def answer_put(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201 with ids and times; before 2016-05-31 without."""
    sent: Sent = sole(call, outcomes)
    if call.asked.version < limits.VERSION_PUT_RESULT:
        return Response(201, None, b"")
    text = (
        f"{DECLARATION}<QueueMessagesList><QueueMessage><MessageId>{id_text(sent.id)}</MessageId>"
        f"<InsertionTime>{print_rfc1123(sent.sent)}</InsertionTime>"
        f"<ExpirationTime>{print_rfc1123(sent.expires)}</ExpirationTime><PopReceipt>{sent.handle}</PopReceipt>"
        f"<TimeNextVisible>{print_rfc1123(sent.visible)}</TimeNextVisible></QueueMessage></QueueMessagesList>"
    )
    return Response(201, CONTENT_TYPE, text.encode())


def plan_get(asked: Asked) -> Plan:
    """Get Messages: never waits."""
    lease_s = _visibility_seconds(asked, 1)
    command = Receive(
        queue=asked.queue(),
        origin=asked.sender.origin,
        count_max=_count(asked),
        lease_us=None if lease_s is None else lease_s * SECOND_US,
        wait_us=0,
    )
    return (command,), None


def plan_peek(asked: Asked) -> Plan:
    """Peek Messages."""
    return (Peek(queue=asked.queue(), origin=asked.sender.origin, count_max=_count(asked)),), None


def answer_messages(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with a list, which may be empty. Peeked messages have no receipt and no lease."""
    received: Received = sole(call, outcomes)
    encoded = received.xml_body is XmlBody.BASE64
    messages = "".join([_message(message, encoded) for message in received.messages])
    text = f"{DECLARATION}<QueueMessagesList>{messages}</QueueMessagesList>"
    return Response(200, CONTENT_TYPE, text.encode())


def _message(message: Delivery, encoded: bool) -> str:
    lease = ""
    if message.due is not None:
        lease = (
            f"<PopReceipt>{message.handle}</PopReceipt><TimeNextVisible>{print_rfc1123(message.due)}</TimeNextVisible>"
        )
    body = encode_xml_body(message.body) if encoded else escape(message.body)
    return (
        f"<QueueMessage><MessageId>{id_text(message.id)}</MessageId>"
        f"<InsertionTime>{print_rfc1123(message.sent)}</InsertionTime>"
        f"<ExpirationTime>{print_rfc1123(message.expires)}</ExpirationTime>{lease}"
        f"<DequeueCount>{message.receive_count}</DequeueCount><MessageText>{body}</MessageText></QueueMessage>"
    )


def plan_clear(asked: Asked) -> Plan:
    """Clear Messages."""
    return (PurgeQueue(queue=asked.queue(), origin=asked.sender.origin),), None


def _message_id(asked: Asked) -> bytes:
    """The id in the path. An invalid id names no message; a missing queue is reported first."""
    text = asked.place.message
    return bytes.fromhex(text.replace("-", "")) if _ID.match(text) else NO_ID


def plan_delete(asked: Asked) -> Plan:
    """Delete Message."""
    queue = asked.queue()
    command = Delete(
        queue=queue,
        origin=asked.sender.origin,
        handle=required(asked.parameters, "popreceipt"),
        arrived=asked.arrived,
        after_expiry=AfterExpiry.ALLOW,
        message_id=_message_id(asked),
    )
    return (command,), None


def plan_update(asked: Asked) -> Plan:
    """Update Message: sets a new lease end, which may be after the message's expiry, and optionally a new text."""
    queue = asked.queue()
    handle = required(asked.parameters, "popreceipt")
    required(asked.parameters, "visibilitytimeout")
    lease_s = _visibility_seconds(asked, 0)
    assert lease_s is not None
    body: str | None = None
    raw = b""
    if asked.request.body:
        body, raw = _message_text(asked)
    command = Extend(
        queue=queue,
        origin=asked.sender.origin,
        handle=handle,
        lease_us=lease_s * SECOND_US,
        arrived=asked.arrived,
        after_expiry=AfterExpiry.ALLOW,
        rotate=True,
        message_id=_message_id(asked),
        body=body,
        md5=b"" if body is None else md5_of(raw, usedforsecurity=False).digest(),
        size_bytes=len(raw),
        from_xml=True,
        report=read_header(asked.request.headers.get(REPORT_HEADER)),
    )
    return (command,), None


def answer_update(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """204 with the next receipt."""
    extended: Extended = sole(call, outcomes)
    headers = (
        (b"x-ms-popreceipt", extended.handle.encode()),
        (b"x-ms-time-next-visible", print_rfc1123(Instant(extended.due)).encode()),
    )
    return Response(204, None, b"", headers)
