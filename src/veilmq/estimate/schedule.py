"""The cheapest schedule of leases for a survival curve (optimal inspection), and what leases cost.

Strategy: a lease's end is the next inspection of an attempt. Frequent inspections cost calls, and each call may be
late; rare ones cost recovery time when a worker dies. For each age of an attempt, the schedule gives the length of the
next lease. It is computed backwards from the greatest age (dynamic programming over the survival curve's bucket
bounds). At age t, a next inspection at age u costs the expected wait after a crash between t and u; if the attempt
lives to u, it also costs the call, the risk that the call is late, and the best schedule from u on. The margin (how
long before its end a lease is extended) is one number for the whole schedule, the best of a few. Source: Barlow and
Proschan, "Mathematical Theory of Reliability", on optimal inspection.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log
from typing import Final

import msgspec

from veilmq.estimate.survival import BUCKETS, bound_of, in_range
from veilmq.model.errors import ParameterInvalid

MARGINS: Final = (2.0, 3.0, 5.0, 8.0, 11.0, 15.0, 20.0, 25.0, 30.0, 40.0, 60.0)
"""Seconds: the margins that a schedule chooses from."""
DUPLICATES_MAX: Final = 0.004
"""Duplicate starts that a schedule may expect for an attempt (the promise is one in a hundred messages)."""
STEP_MIN: Final = 1.0
"""Minimum seconds between two inspections."""
_ALIVE_MIN: Final = 1e-200
_COST_MAX: Final = 1e12
"""So that sums of products of costs stay within a float."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a second, a duplicate and a call, and the rates of crashes and late calls. All costs in one unit.

    Raises ParameterInvalid for invalid values.
    """

    recovery: float = 1.0
    """Per second that a crashed worker's message waits for its lease to end."""
    duplicate: float = 120.0
    """Per message that is started again while its first worker is alive."""
    extend: float = 0.01
    """Per call that extends a lease."""
    crashes_per_second: float = 1 / 7_200
    late_share: float = 0.002
    """Share of the extensions that are late ..."""
    late_mean: float = 8.0
    """... and their mean delay in seconds, exponentially distributed."""

    def __post_init__(self) -> None:
        for name in ("recovery", "duplicate", "extend", "crashes_per_second"):
            in_range(getattr(self, name), name, 0, _COST_MAX)
        in_range(self.late_share, "late_share", 0, 1)
        if in_range(self.late_mean, "late_mean", 0, _COST_MAX) == 0:
            raise ParameterInvalid(parameter="late_mean", reason="must be above 0")


RATE_PRIOR: Final = log(10.0)
"""The given crash rate is right within a factor of ten: the standard deviation of its logarithm."""
_RATE_STEPS: Final = 60


def crash_rate(crashes: float, exposure_s: float, believed: float) -> float:
    """The likeliest crashes per second after this many crashes in this many seconds of work.

    Its logarithm is normal around that of `believed`. A prior worth some crashes would be worth hours of unobserved
    work and dominate short work; this one gives way after two or three crashes.
    """
    centre = log(max(believed, 1e-12))
    # Find the zero of a decreasing function: crashes - rate * exposure_s - (log(rate) - centre) / RATE_PRIOR**2.
    low, high = centre - 40, max(centre, log(max(crashes, 1e-12) / max(exposure_s, 1e-9)))
    for _ in range(_RATE_STEPS):
        middle = (low + high) / 2
        if crashes - exp(middle) * exposure_s > (middle - centre) / RATE_PRIOR**2:
            low = middle
        else:
            high = middle
    return exp(low)


class Schedule(msgspec.Struct, frozen=True):
    """The lease for each age of an attempt. `ages` increase from 0, each with its lease, in seconds."""

    ages: tuple[float, ...]
    leases: tuple[float, ...]
    margin: float
    cost: float
    """Expected cost of an attempt."""
    duplicates: float = 0.0
    """Expected duplicate starts of an attempt."""

    @property
    def first(self) -> float:
        """The lease to ask for at receive."""
        return self.leases[0]

    def lease_at(self, age: float) -> float:
        """The lease to extend with when the attempt is `age` seconds old."""
        return self.leases[max(0, bisect_right(self.ages, age + 1e-9) - 1)]


def plan_of(
    curve: Sequence[float],
    costs: Costs | None = None,
    *,
    shortest: float = 5.0,
    longest: float = 43_200.0,
    margins: Sequence[float] = MARGINS,
    duplicates_max: float = DUPLICATES_MAX,
) -> Schedule:
    """The cheapest schedule for a curve (`Survival.curve`) with leases from `shortest` to `longest` seconds.

    Schedules with more than `duplicates_max` duplicate starts an attempt are chosen only if there are no others.
    """
    costs = costs or Costs()
    usable = [margin for margin in margins if margin + STEP_MIN <= longest] or [min(margins)]
    found = [_with_margin(curve, costs, margin, shortest, longest) for margin in usable]
    safe = [schedule for schedule in found if schedule.duplicates <= duplicates_max]
    return min(safe, key=lambda each: each.cost) if safe else min(found, key=lambda each: each.duplicates)


def _with_margin(curve: Sequence[float], costs: Costs, margin: float, shortest: float, longest: float) -> Schedule:
    ages = [0.0, *(bound_of(bucket) for bucket in range(BUCKETS + 1) if bound_of(bucket) >= STEP_MIN)]
    alive = [1.0, *(curve[bucket] for bucket in range(BUCKETS + 1) if bound_of(bucket) >= STEP_MIN)]
    rate = costs.crashes_per_second
    alive = [max(share * exp(-rate * age), _ALIVE_MIN) for age, share in zip(ages, alive, strict=True)]
    # Integrals of the curve up to each age, and of age times the curve: after a crash at age s, the message waits from
    # s to the lease's end.
    area, moment = _integrals(ages, alive)
    too_late = costs.late_share * exp(-margin / costs.late_mean)
    late = costs.extend + costs.duplicate * too_late
    step_min, step_max = max(shortest - margin, STEP_MIN), max(longest - margin, STEP_MIN)
    count = len(ages)
    best = [0.0] * count
    leap = [0.0] * count
    twice = [0.0] * count
    steady = min(max(_steady_step(costs, late), step_min), step_max)
    best[-1] = _for_ever(costs, late, margin, steady)
    leap[-1] = steady
    for i in range(count - 2, -1, -1):
        at, living = ages[i], alive[i]
        # First option: inspect at a steady pace until the next age, several times if the ages are far apart.
        looks = max(1, round((ages[i + 1] - at) / steady))
        chosen, to = (ages[i + 1] - at) / looks, i + 1
        at_risk = area[i + 1] - area[i]
        seen = alive[i + 1] + (looks - 1) * (living + alive[i + 1]) / 2
        cheapest = costs.recovery * rate * at_risk * (margin + chosen / 2) + seen * late + alive[i + 1] * best[i + 1]
        if chosen < step_min and i < count - 2:
            cheapest = float("inf")
        for j in range(i + 1, count):
            step = ages[j] - at
            if step > step_max and cheapest < float("inf"):
                break
            if step < step_min and j < count - 1:
                continue
            at_risk = area[j] - area[i]
            waited = (ages[j] + margin) * at_risk - (moment[j] - moment[i])
            total = costs.recovery * rate * waited + alive[j] * (late + best[j])
            if total < cheapest:
                cheapest, chosen, to = total, step, j
            elif total > 4 * cheapest:
                break
        best[i], leap[i] = cheapest / living, min(max(chosen, step_min), step_max)
        seen = alive[to] if to > i + 1 else seen
        twice[i] = (seen * too_late + alive[to] * twice[to]) / living
    return Schedule(tuple(ages), tuple(step + margin for step in leap), margin, best[0], twice[0])


def _integrals(ages: Sequence[float], alive: Sequence[float]) -> tuple[list[float], list[float]]:
    area, moment = [0.0], [0.0]
    for i in range(1, len(ages)):
        width = ages[i] - ages[i - 1]
        low, high = alive[i - 1], alive[i]
        part = width * (low + high) / 2
        area.append(area[-1] + part)
        # Exact for a trapezoid.
        centre = ages[i - 1] * part + width * width * (low + 2 * high) / 6
        moment.append(moment[-1] + centre)
    return area, moment


def _steady_step(costs: Costs, late: float) -> float:
    """The step of a steady heartbeat, for an attempt that is only known to go on.

    A second costs rate * step / 2 for crashes and late / step for calls: the best step balances both.
    """
    rate = max(costs.crashes_per_second * costs.recovery, 1e-12)
    return float((2 * late / rate) ** 0.5)


def _for_ever(costs: Costs, late: float, margin: float, step: float) -> float:
    """The cost of such an attempt until it crashes, or for two hours if there are no crashes."""
    rate = costs.crashes_per_second
    return (costs.recovery * rate * (step / 2 + margin) + late / step) / max(rate, 1 / 7_200)
