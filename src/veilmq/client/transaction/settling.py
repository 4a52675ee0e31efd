"""Commit and roll back, once or again, in either form.

Strategy: each step may be repeated by anybody at any time, and says what it found. A half message whose handle is taken
was committed before, for only a visible message can be received; one that is gone before its end was too, unless
nobody can have done that; one that is gone after its end is sent again from the log, and whoever asked to be told is
told. Source: document 002, failure analysis C: "the same handle can be committed only once".
"""

import logging
from collections.abc import Callable
from enum import StrEnum

from msgspec.structs import replace

from veilmq.client.messages import Message
from veilmq.client.queue import Queue
from veilmq.client.transaction.entry import Entry, Form, Prepared, marked
from veilmq.client.transaction.parameters import CLOCKS_APART, Times
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseError,
    LeaseTaken,
    ReceiptInvalid,
    UsageError,
    VeilError,
)

log = logging.getLogger("veilmq.transaction")


class Settled(StrEnum):
    """What a commit found."""

    COMMITTED = "committed"
    EARLIER = "committed earlier"
    RESENT = "sent again"
    """From the log: at least once."""


class Settler:
    """Settles the transactions of one queue."""

    def __init__(self, queue: Queue, times: Times, on_lost: Callable[[Prepared], object] | None) -> None:
        self.queue = queue
        self._times = times
        self._on_lost = on_lost

    def prepare(self, message: Message, transaction: str, life: float) -> str:
        """Send the half message; its handle. Raises as `Queue.send`."""
        capabilities = self.queue.capabilities
        half = replace(message, delay=self._times.half_delay, ttl=life if capabilities.ttl else None)
        entry = Entry(1, transaction, Form.HIDDEN, half, None, 0.0, None)
        handle = self.queue.send(marked(entry, capabilities)).handle
        if handle is None:
            raise CapabilityMissing(capability=f"a handle from a delayed send on {capabilities.protocol}")
        return handle

    def commit(self, entry: Entry, now: float, perhaps_earlier: bool) -> Settled:
        """Make the message visible, or see that it is. perhaps_earlier: an attempt before this one may have done it.

        Raises TransportError, ServiceError, CapacityError (try again), UsageError and CapabilityMissing (never).
        """
        if entry.handle is None:
            self.queue.send(marked(entry, self.queue.capabilities))
            return Settled.COMMITTED
        alive = entry.expires is not None and now < entry.expires - CLOCKS_APART
        if entry.expires is not None and alive and entry.expires - now < self._times.life_min:
            return self._anew(entry, entry.handle)
        try:
            self.queue.release(entry.handle)
        except LeaseTaken:
            return Settled.EARLIER
        except (LeaseError, ReceiptInvalid) as error:
            if isinstance(error, LeaseError) and alive and perhaps_earlier:
                return Settled.EARLIER
            return self._resend(entry, str(error))
        return Settled.COMMITTED

    def roll_back(self, entry: Entry) -> None:
        """Delete the half message, if there is one. Raises TransportError, ServiceError (try again)."""
        if entry.handle is None:
            return
        try:
            self.queue.delete(entry.handle)
        except LeaseTaken:
            log.error("transaction %s is rolled back, but its message was committed before and received", entry.id)
        except (LeaseError, UsageError) as error:
            log.info("transaction %s: there is no half message any more: %s", entry.id, error)

    def _anew(self, entry: Entry, handle: str) -> Settled:
        """Too little of its life is left: a whole message in its place."""
        if not self.queue.capabilities.receipts_rotate:
            try:
                # Nobody has it, and nobody gets it meanwhile.
                self.queue.extend(handle, self._times.check_lease)
            except LeaseError:
                return Settled.EARLIER
        settled = self._resend(entry, "most of its half message's life is over")
        try:
            self.queue.delete(handle)
        except VeilError as error:
            log.info("transaction %s: its half message stays until it ends: %s", entry.id, error)
        return settled

    def _resend(self, entry: Entry, why: str) -> Settled:
        log.warning("transaction %s: its message is sent again from the log: %s", entry.id, why)
        self.queue.send(marked(entry, self.queue.capabilities))
        if self._on_lost is not None:
            try:
                self._on_lost(entry.shown())
            except Exception:  # it is sent: what the application makes of that must not send it once more
                log.exception("transaction %s: on_lost failed", entry.id)
        return Settled.RESENT


def hopeless(error: VeilError) -> bool:
    """Whether a commit that failed with this can never succeed."""
    return isinstance(error, UsageError | CapabilityMissing)
