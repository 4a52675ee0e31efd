"""Queue Storage's messages as the port's, and handles.

Strategy: a handle is the message's id and its pop receipt in one text, because a later call needs both. Instants are
whole seconds, as the service writes them. Source: "Get Messages", "Peek Messages".
"""

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from veilmq.client.messages import Peeked, Received
from veilmq.model.errors import ReceiptInvalid

_SEPARATOR: Final = ":"
_NEVER_YEAR: Final = 9999
_LEASE_DEFAULT: Final = 30.0
"""Seconds of a Get Messages that names none."""


def handle_of(message_id: str, receipt: str) -> str:
    """One text of the two."""
    return f"{message_id}{_SEPARATOR}{receipt}"


def parts_of(handle: str) -> tuple[str, str]:
    """Message id and pop receipt. Raises ReceiptInvalid."""
    if handle.isascii() and handle.isprintable():
        message_id, _, receipt = handle.partition(_SEPARATOR)
        if message_id and receipt and message_id.replace("-", "").isalnum():
            return message_id, receipt
    raise ReceiptInvalid(reason="it is not a message's id, a colon and a pop receipt")


def received_of(message: Any, lease_end: float) -> Received:
    """An SDK's QueueMessage from a receive."""
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
    """An SDK's QueueMessage from a peek."""
    return Peeked(
        id=message.id,
        body=message.content or "",
        receive_count=message.dequeue_count,
        sent=_seconds(message.inserted_on),
        expires=_expiry(message.expires_on),
    )


def told_lease(message: Any, date: str | None) -> float:
    """Seconds from the answer's Date to the end of the lease, of a receive that named none."""
    if date is None or message.next_visible_on is None:
        return _LEASE_DEFAULT
    try:
        answered = parsedate_to_datetime(date)
    except ValueError:
        return _LEASE_DEFAULT
    next_visible: datetime = message.next_visible_on
    return max(0.0, (next_visible - answered).total_seconds())


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()


def _expiry(instant: datetime | None) -> float | None:
    """None also for what never expires, which the service writes as the last day there is."""
    return None if instant is None or instant.year == _NEVER_YEAR else instant.timestamp()
