"""Queue Storage's messages as the port's, and handles.

Strategy: a handle is the message's id and its pop receipt in one text, because a later call needs both. Instants are
whole seconds, as the service writes them. Source: "Get Messages", "Peek Messages".
"""

from datetime import datetime
from typing import Any, Final

from veilmq.client import checked
from veilmq.client.messages import Peeked, Received
from veilmq.model.errors import ReceiptInvalid

_SEPARATOR: Final = ":"
_NEVER_YEAR: Final = 9999


def handle_of(message_id: str, receipt: str) -> str:
    """One text of the two."""
    return f"{message_id}{_SEPARATOR}{receipt}"


def parts_of(handle: str) -> tuple[str, str]:
    """Message id and pop receipt. Raises ReceiptInvalid."""
    if checked.handle(handle).isascii() and handle.isprintable():
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


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()


def _expiry(instant: datetime | None) -> float | None:
    """None also for what never expires, which the service writes as the last day there is."""
    return None if instant is None or instant.year == _NEVER_YEAR else instant.timestamp()
