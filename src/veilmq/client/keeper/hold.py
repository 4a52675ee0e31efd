"""What a keeper knows about one held message.

Strategy: one narrow record a message, because there may be 100,000 of them; the table (table.py) alone writes it, under
the keeper's lock.
"""

from veilmq.client.keeper.states import Reason, State
from veilmq.client.messages import Received
from veilmq.model.errors import VeilError


class Hold:
    """All instants are seconds on the clock of `Received.lease_end`."""

    __slots__ = (
        "__weakref__",
        "busy",
        "deadline",
        "error",
        "fixed",
        "hold_end",
        "late_until",
        "lead",
        "maybe_deleted",
        "message",
        "newest",
        "queued",
        "reason",
        "registered",
        "renew_at",
        "slot",
        "status",
        "tries",
        "wanted",
    )

    def __init__(self, message: Received, *, lead: float, fixed: float | None, hold_end: float, now: float) -> None:
        self.message = message
        self.newest = message.handle
        self.deadline = message.lease_end
        self.status = State.HELD
        self.busy = False
        """A call with this lease's handle is under way: the next one waits."""
        self.queued = False
        """Due, and handed to the senders."""
        self.lead = lead
        """Seconds before `deadline` at which the next extension is due."""
        self.fixed = fixed
        """Length of every extension, where the caller named one."""
        self.wanted: float | None = None
        """Length of the first lease, if the one from the receive is to be replaced."""
        self.registered = now
        self.hold_end = hold_end
        """From here on it is not extended: max_hold or the total cap."""
        self.renew_at = self.deadline - lead
        self.late_until: float | None = None
        """The lease has ended by this clock, and an extension is under way that may take it up again: until when its
        answer is awaited before the handler is told."""
        self.slot: float | None = None
        self.tries = 0
        """Failed extensions since the last one that was kept."""
        self.error: VeilError | None = None
        """What the last failed call said."""
        self.reason: Reason | None = None
        self.maybe_deleted = False
        """A delete went out and its answer never came."""
