"""The states of a message and every transition: the table that docs, reference model and the store's checks read.

Strategy: a state is what a receiver would see. `ready` (never leased since it became visible) and `returned` (came
back) are both visible; a store keeps them apart because only the first is append-only. What a store shows of a message
in flight or delayed, and of those that it holds back on a FIFO queue, is here too.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from veilmq.model.instant import Instant


class State(StrEnum):
    """State of one message."""

    DELAYED = "delayed"
    READY = "ready"
    IN_FLIGHT = "in flight"
    RETURNED = "returned"
    GONE = "gone"


class Step(NamedTuple):
    """One transition: what happens, from where to where, and whether it raises attempt or rotation."""

    source: State
    event: str
    target: State
    raises_attempt: bool = False
    raises_rotation: bool = False


STEPS: Final = (
    Step(State.DELAYED, "delay ends", State.RETURNED),
    Step(State.READY, "delay is raised (FIFO)", State.DELAYED),
    Step(State.RETURNED, "delay is raised (FIFO)", State.DELAYED),
    Step(State.DELAYED, "extend (attempt 0)", State.DELAYED, raises_rotation=True),
    Step(State.DELAYED, "release (attempt 0)", State.RETURNED, raises_rotation=True),
    Step(State.READY, "extend (attempt 0)", State.DELAYED, raises_rotation=True),
    Step(State.READY, "release (attempt 0)", State.RETURNED, raises_rotation=True),
    Step(State.RETURNED, "extend (attempt 0)", State.DELAYED, raises_rotation=True),
    Step(State.RETURNED, "release (attempt 0)", State.RETURNED, raises_rotation=True),
    Step(State.READY, "receive", State.IN_FLIGHT, raises_attempt=True),
    Step(State.RETURNED, "receive", State.IN_FLIGHT, raises_attempt=True),
    Step(State.RETURNED, "extend after expiry", State.IN_FLIGHT, raises_rotation=True),
    Step(State.RETURNED, "release after expiry", State.RETURNED, raises_rotation=True),
    Step(State.IN_FLIGHT, "extend", State.IN_FLIGHT, raises_rotation=True),
    Step(State.IN_FLIGHT, "release", State.RETURNED, raises_rotation=True),
    Step(State.IN_FLIGHT, "lease expires", State.RETURNED),
    Step(State.IN_FLIGHT, "undelivered", State.RETURNED),
    *(
        Step(state, event, State.GONE)
        for state in (State.DELAYED, State.READY, State.IN_FLIGHT, State.RETURNED)
        for event in ("delete", "expire", "purge")
    ),
    Step(State.READY, "dead-letter", State.GONE),
    Step(State.RETURNED, "dead-letter", State.GONE),
    Step(State.READY, "move", State.GONE),
    Step(State.RETURNED, "move", State.GONE),
    Step(State.IN_FLIGHT, "dead-letter (push)", State.GONE),
    Step(State.READY, "quarantine", State.GONE),
    Step(State.RETURNED, "quarantine", State.GONE),
)
"""All steps. `raises_rotation` holds only for a protocol whose handles rotate (Azure, MNS). Dead-lettering ends the
message here and sends it, with its id, in the dead-letter queue; a move task does the same, and gives it another id.
A push is dead-lettered by its last try, and so in flight. Quarantine is for a message whose body is damaged: nobody
receives it."""


class HeldLease(NamedTuple):
    """A delayed message (attempt 0), or one in flight and who has it."""

    due: Instant
    sequence: int
    id: bytes
    attempt: int
    rotation: int
    granted: Instant
    first: Instant | None
    group: str | None
    type: str | None
    origin: int
    ending: int
    """What it means if the lease ends: `LeaseEnding`."""


class BlockedGroup(NamedTuple):
    """A group of a FIFO queue with visible messages that wait behind a message in flight or delayed, its head."""

    group: str
    since: int
    """When it was received from last, or when the first of those that wait became visible, whichever is later."""
    messages: int
    """How many wait; at least so many, if the bound on all of them was reached."""
    head: HeldLease


class Blocked(NamedTuple):
    """The visible messages of a FIFO queue that nobody can receive yet."""

    messages: int
    groups: int
    shown: list[BlockedGroup]
    """Some of the groups, those first that have been blocked for longest."""
    is_all: bool
    """False: a bound was reached, and there may be more."""
