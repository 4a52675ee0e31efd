"""How long a receive leases: set by the receiver, the sender's hint, the queue's plan, or the queue's setting."""

from typing import Final

from veilmq.model.commands import LeaseSource, Receive
from veilmq.model.instant import Instant
from veilmq.model.message import Extras
from veilmq.store.sqlite.batch.queues import LiveQueue

_FROM_QUEUE: Final = int(LeaseSource.QUEUE)
_FROM_RECEIVE: Final = int(LeaseSource.RECEIVE)
_FROM_PLAN: Final = int(LeaseSource.PLAN)

Lease = tuple[int, int, Instant]
"""Length in microseconds, `LeaseSource`, end."""


class Terms:
    """What all leases of one receive share, computed once."""

    __slots__ = ("_now", "_plan", "named", "usual")

    def __init__(self, now: Instant, queue: LiveQueue, command: Receive) -> None:
        self._now = now
        self._plan = queue.plan.applied
        lease_us = command.lease_us
        self.named = lease_us is not None
        """Whether the receiver set the length: then nothing else counts."""
        if lease_us is None:
            lease_us = queue.settings.visibility_timeout_us
            self.usual: Lease = (lease_us, _FROM_QUEUE, Instant(now + lease_us))
        else:
            self.usual = (lease_us, _FROM_RECEIVE, Instant(now + lease_us))

    def of(self, kind: str | None, extras: Extras) -> Lease:
        """The first lease of a message of that type: its sender or the queue's plan may set another length."""
        if self.named:
            return self.usual
        lease_us = extras.lease_hint_us
        if lease_us is None and self._plan is not None:
            lease_us = self._plan.lease_of(kind)
        return self.usual if lease_us is None else (lease_us, _FROM_PLAN, Instant(self._now + lease_us))
