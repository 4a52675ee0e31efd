"""One message between its arrival and its acknowledgement, and how the application sees it.

Strategy: a handle is its place and the hand-out (`EPOCH.NUMBER.ATTEMPT`), so that a stale one is known. The queue's own
handle stays with the keeper's lease.
"""

import logging
from contextlib import suppress
from typing import Final

from veilmq.client.keeper import Lease
from veilmq.client.messages import Received
from veilmq.client.ordered.reorder import Place
from veilmq.model.errors import ReceiptInvalid, VeilError

FOREVER: Final = float("inf")

log = logging.getLogger("veilmq.ordered")


class Ordered(Received, frozen=True, kw_only=True):
    """A message in its turn. `receive_count` counts this receiver's hand-outs too."""

    epoch: int
    number: int


class Entry:
    """A message in the buffer."""

    __slots__ = ("attempt", "hands", "lease", "message", "not_before", "until", "void")

    def __init__(self, message: Received, lease: Lease, void: bool) -> None:
        self.message = message
        self.lease = lease
        self.void = void
        self.hands = 0
        self.attempt = 0
        """Of the current hand-out, counted over all."""
        self.until = FOREVER
        """End of the current hand-out, on the monotonic clock."""
        self.not_before = -FOREVER


def shown(place: Place, entry: Entry, hold_end: float) -> Ordered:
    """What the application gets. hold_end: the lease's end if the hand-out has none of its own."""
    values = {name: getattr(entry.message, name) for name in Received.__struct_fields__}
    values |= {
        "handle": f"{place.epoch}.{place.number}.{entry.attempt}",
        "lease_end": hold_end if entry.until == FOREVER else entry.until,
        "receive_count": entry.message.receive_count + entry.hands - 1,
    }
    return Ordered(**values, epoch=place.epoch, number=place.number)


def place_of(handle: str) -> tuple[Place, int]:
    """What a handle names, and which hand-out. Raises ReceiptInvalid."""
    parts = handle.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ReceiptInvalid(reason="not a handle of an ordered receiver")
    epoch, number, attempt = map(int, parts)
    return Place(epoch, number), attempt


def give_back(lease: Lease, delay: float = 0) -> None:
    """Release it; what the queue does not take is extended no more, and comes back when its lease ends."""
    try:
        lease.release(delay)
    except VeilError as error:
        log.info("message %s is not released: %s", lease.message.id, error)
        with suppress(VeilError):
            lease.forget()
