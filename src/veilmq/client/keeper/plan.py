"""How long leases should be, message by message: what a keeper asks of a policy.

Strategy: a keeper without a plan gives every lease its `visibility_timeout`. A plan answers in seconds, from any
thread, without I/O; a keeper clamps what it says to what the queue can do.
"""

from typing import Protocol

from veilmq.client.messages import Received


class Plan(Protocol):
    """Lease lengths, in seconds."""

    @property
    def margin(self) -> float:
        """How long before its end a lease is to be extended; takes the place of interval + minimal_life."""
        ...

    def first_lease(self, message: Received) -> float:
        """The lease that a message should have from its receive."""
        ...

    def next_lease(self, message: Received, held: float) -> float:
        """The lease that an extension should give to a message that has been held for `held` seconds."""
        ...
