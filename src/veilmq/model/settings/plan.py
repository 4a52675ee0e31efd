"""Plans of recommended first leases, and the rules by which the server applies them.

Strategy: a plan is data with two uses. Clients read it and name their leases themselves. For clients that name none,
the server may use it for the first lease, by `effective`: a pure function of the suggestion, the owner's limits, and
the plan in force. The visibility timeout that the protocols show never changes. See docs/pipeline.md, "Closed loop",
and docs/admin-api.md, "Queues".
"""

from enum import StrEnum
from typing import Final

import msgspec

from veilmq.model.instant import DAY_US, SECOND_US, Instant

LEASE_US_MAX: Final = 7 * DAY_US
LEASE_US_MIN: Final = SECOND_US
HYSTERESIS: Final = 0.2
"""A lease in force changes only if the new one differs by more than this fraction."""
TYPES_MAX: Final = 1_000


class Adaptive(StrEnum):
    """What the server does with suggestions for a queue."""

    OFF = "off"
    """Keeps none."""
    SUGGEST = "suggest"
    """Shows them."""
    APPLY = "apply"
    """Uses them for receives that name no lease."""


class LeasePlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """First leases of a queue, in microseconds."""

    lease_us: int | None = None
    """For messages of no type named below; None: the queue's visibility timeout."""
    by_type: dict[str, int] = {}
    floor_us: int = 0
    """Lower bound of all leases: twice the longest interval at which a client was seen to extend."""
    why: str = ""
    """For people: the number of attempts behind it, and what it would cost."""
    made: Instant = Instant(0)

    def lease_of(self, kind: str | None) -> int | None:
        """The lease of a message of that type."""
        return self.lease_us if kind is None else self.by_type.get(kind, self.lease_us)


class PlanState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All plans of a queue."""

    suggested: LeasePlan | None = None
    """The plan published last."""
    applied: LeasePlan | None = None
    """The plan in force; None: the visibility timeout alone."""
    previous: LeasePlan | None = None
    """The plan that was in force before."""


NO_PLAN: Final = PlanState()


def effective(
    suggested: LeasePlan, applied: LeasePlan | None, visibility_timeout_us: int, minimum_us: int | None
) -> LeasePlan:
    """The plan that may be applied: only leases longer than the visibility timeout, unless the owner set a minimum."""

    def judged(lease_us: int, in_force_us: int | None) -> int:
        least_us = visibility_timeout_us if minimum_us is None else max(minimum_us, suggested.floor_us)
        lease_us = min(max(lease_us, least_us, LEASE_US_MIN), LEASE_US_MAX)
        near = in_force_us is not None and abs(lease_us - in_force_us) <= HYSTERESIS * in_force_us
        if near and in_force_us is not None and in_force_us >= least_us:
            return in_force_us
        return lease_us

    lease_us = suggested.lease_us
    by_type = {
        kind: judged(wanted_us, None if applied is None else applied.by_type.get(kind))
        for kind, wanted_us in suggested.by_type.items()
    }
    return LeasePlan(
        lease_us=None if lease_us is None else judged(lease_us, None if applied is None else applied.lease_us),
        by_type=by_type,
        floor_us=suggested.floor_us,
        why=suggested.why,
        made=suggested.made,
    )


def same_leases(one: LeasePlan | None, other: LeasePlan | None) -> bool:
    """Whether two plans give the same leases."""
    if one is None or other is None:
        return one is other
    return one.lease_us == other.lease_us and one.by_type == other.by_type
