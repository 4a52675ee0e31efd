"""Where a held message can be, and every step between.

Strategy: a table, as in model/states.py; `step` is the only way to another state. A call under way is a state of its
own (EXTENDING, ENDING), so that extend and delete cannot overlap, and nothing follows DONE.
"""

from enum import StrEnum
from typing import Final

from veilmq.client.errors import ServiceError
from veilmq.model.errors import LeaseError, LeaseExpired, MessageGone, QueueMissing, ReceiptInvalid, VeilError


class State(StrEnum):
    """State of one held message."""

    HELD = "held"
    EXTENDING = "extending"
    """An extension is under way, the keeper's or the user's."""
    ENDING = "ending"
    """The user's delete or release is under way: no extension may start."""
    DONE = "done"
    """Deleted, released, or forgotten."""
    LOST = "lost"
    """Nobody extends it any more, and the handler was told."""


class Reason(StrEnum):
    """Why a lease was lost."""

    EXPIRED = "the lease ended before it could be extended"
    TAKEN = "another receiver has the message, or its handle was replaced"
    GONE = "the message was deleted, expired, purged or moved"
    INVALID = "the queue is gone, or does not know the handle"
    MAX_HOLD = "held for max_hold"
    TOTAL_CAP = "the protocol's cap on the whole lease is reached"
    CLOSED = "the keeper was closed"


STEPS: Final = {
    (State.HELD, "extend"): State.EXTENDING,
    (State.EXTENDING, "kept"): State.HELD,
    (State.EXTENDING, "failed"): State.HELD,
    (State.EXTENDING, "lost"): State.LOST,
    (State.HELD, "end"): State.ENDING,
    (State.ENDING, "ended"): State.DONE,
    (State.ENDING, "failed"): State.HELD,
    (State.ENDING, "lost"): State.LOST,
    (State.HELD, "lost"): State.LOST,
    (State.EXTENDING, "ended"): State.DONE,
}
"""All steps. The last one: a delete whose answer was lost had happened, as the next extension learns."""


class Look(StrEnum):
    """What one look at a held message decides (the documents' ChangeVisibilityTask)."""

    LEAVE = "leave it alone"
    LET_GO = "tell the handler; extend no more"
    OVER = "lost, unless a late extend is granted"
    EXTEND = "extend to visibility_timeout"
    WAIT = "look again when one of these is due"


LOOKS: Final = (
    ("Is its delete or release under way?", Look.LEAVE),
    ("Was it held for max_hold, or the protocol's own limit?", Look.LET_GO),
    ("Is its lease over?", Look.OVER),
    ("Is an extension under way, or is the last one made?", Look.WAIT),
    ("Is interval + minimal_life or less of its lease left?", Look.EXTEND),
)
"""The questions of one look, in their order: the first yes decides; without any it is WAIT. Printed as
docs/images/keeper-flow.svg."""

REFUSALS: Final = (LeaseError, ReceiptInvalid, QueueMissing)
"""What says that the lease is no more; every other error is of the way to the queue and is tried again."""


def reason_of(error: VeilError) -> Reason:
    """Why a refusal ends the lease."""
    if isinstance(error, LeaseExpired):
        return Reason.EXPIRED
    if isinstance(error, MessageGone):
        return Reason.GONE
    return Reason.TAKEN if isinstance(error, LeaseError) else Reason.INVALID


def may_have_happened(error: VeilError) -> bool:
    """Whether a call that ended with this error may have done its work."""
    if isinstance(error, ServiceError):
        return error.status >= 500
    return bool(getattr(error, "may_have_happened", False))
