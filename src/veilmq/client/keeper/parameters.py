"""The keeper's parameters, and the checks that they can work.

Strategy: one frozen value, checked once against the queue's capabilities before any thread starts or request is sent.
The names in brackets are those of the documents (000 and 002, "processing time, self-adapting").
"""

from typing import Final

import msgspec

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.keeper.states import Plan
from veilmq.model.errors import ParameterInvalid

VISIBILITY_TIMEOUT: Final = 30.0
INTERVAL: Final = 10.0
MINIMAL_LIFE: Final = 5.0
MAX_HOLD: Final = 18_000.0
"""The documents' five hours."""
SENDERS_ALONE: Final = 32
"""Senders if each extension is a request of its own: 32 round trips of 50 ms are 640 extensions a second."""
SENDERS_BATCH: Final = 4
SENDERS_MAX: Final = 1_000
BATCH_MAX: Final = 1_000
"""The most extensions in one `extend_batch`: a delete waits while its message's extension is in progress."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """All in seconds, except `senders`."""

    minimal_life: float = MINIMAL_LIFE
    """(MessageMinimalLife) An extension is on time if at least this much of the lease is left."""
    interval: float = INTERVAL
    """(TimerInterval) An extension is due `interval` + `minimal_life` before the lease ends."""
    visibility_timeout: float = VISIBILITY_TIMEOUT
    """(QueueMessageVisibilityTimeout) The length of each extension."""
    max_hold: float = MAX_HOLD
    """(MessageTimeout) A message held for longer is not extended any more."""
    senders: int | None = None
    """The most extensions in progress at once; None: 4 if the protocol extends in batches, else 32."""

    def check(self, capabilities: Capabilities, plan: Plan | None) -> None:
        """Raises ParameterInvalid for values that would lose leases."""
        for name in ("minimal_life", "interval", "visibility_timeout", "max_hold"):
            checked.positive(getattr(self, name), name)
        if self.senders is not None:
            checked.whole(self.senders, "senders", 1, SENDERS_MAX)
        check_lease("visibility_timeout", self.visibility_timeout, capabilities)
        if plan is not None:
            checked.not_negative(plan.margin, "plan.margin")
        elif self.visibility_timeout <= self.interval + self.minimal_life:
            needed = self.interval + self.minimal_life
            raise ParameterInvalid(
                parameter="visibility_timeout",
                reason=f"{self.visibility_timeout:g} s must exceed interval + minimal_life = {needed:g} s, "
                "or leases end before their extension is due",
            )
        total = capabilities.lease_total_max
        if total is not None and total <= self.minimal_life:
            raise ParameterInvalid(
                parameter="minimal_life",
                reason=f"{self.minimal_life:g} s is not below the {total:g} s that {capabilities.protocol} allows",
            )

    def senders_max(self, capabilities: Capabilities) -> int:
        """The most extensions in progress at once."""
        if self.senders is not None:
            return self.senders
        return SENDERS_BATCH if capabilities.batch_extend else SENDERS_ALONE


def check_lease(name: str, seconds: float, capabilities: Capabilities) -> None:
    """Raises ParameterInvalid for a lease that the queue cannot give."""
    checked.positive(seconds, name)
    if not capabilities.lease_min <= seconds <= capabilities.lease_max:
        raise ParameterInvalid(
            parameter=name,
            reason=f"{seconds:g} s is not between the {capabilities.lease_min:g} and {capabilities.lease_max:g} s "
            f"of {capabilities.protocol}",
        )


def batch_size(capabilities: Capabilities) -> int:
    """How many extensions one request carries."""
    return min(capabilities.batch_messages_max, BATCH_MAX) if capabilities.batch_extend else 1
