"""How long leases should be, message by message: what a keeper asks of a policy.

Strategy: a keeper without a plan gives every lease its `visibility_timeout`. A plan answers in seconds, from any
thread, without I/O; a keeper clamps what it says to what the queue can do.
"""

from typing import Protocol, runtime_checkable

from veilmq.client.messages import Received


class Plan(Protocol):
    """Lease lengths, in seconds."""

    @property
    def margin(self) -> float:
        """How long before its end a lease is to be extended; takes the place of interval + minimal_life. 0: never."""
        ...

    def first_lease(self, message: Received) -> float:
        """The lease that a message should have from its receive."""
        ...

    def next_lease(self, message: Received, held: float) -> float:
        """The lease that an extension should give to a message that has been held for `held` seconds."""
        ...


@runtime_checkable
class Learner(Protocol):
    """What a plan may have besides, to learn from what becomes of messages (AdaptiveTimeout). No I/O; any thread."""

    def finished(self, message: Received, held: float) -> None:
        """Deleted after `held` seconds."""
        ...

    def lost(self, message: Received, held: float) -> None:
        """The lease ended under a living handler, or somebody else has the message."""
        ...

    def late(self, seconds: float) -> None:
        """An extension took effect, so many seconds after it was due; 0 for one in time."""
        ...


@runtime_checkable
class CrashLearner(Protocol):
    """What a plan may have to learn how often workers die. Nobody sees another's crash, but its message comes back."""

    def redelivered(self, message: Received) -> None:
        """A message was registered that somebody had received before."""
        ...

    def given_back(self, message: Received) -> None:
        """A message was released by its handler or the keeper: somebody will receive it again, without a crash."""
        ...
