"""The cheapest schedule of leases for a survival curve: optimal inspection.

Strategy: a lease is a promise to look again. Looking often costs calls, and each call may be late; looking seldom costs
recovery when a worker dies. At each age of an attempt the schedule says how long the next lease should be. Found
backwards from the greatest age (dynamic programming over the survival curve's bucket bounds): at age t, the next look
at age u costs what a crash between t and u would wait for, plus, if the attempt lives to u, the call, the chance that
it comes too late, and the best that follows. The margin (how long before its end a lease is extended) is one number for
the whole schedule, the best of a few. Source: Barlow and Proschan, "Mathematical Theory of Reliability", on optimal
inspection.

Survival: times fall into buckets whose bounds grow by a constant factor, so that seconds and hours cost the same few
numbers. An attempt that finished is an event in its bucket; one whose worker vanished is censored at its last sign of
life: it took longer than that, nobody knows how much. The curve is Kaplan and Meier's. Old attempts count less and less
(`half_life`), so that the curve follows a drift; a prior of a few attempts, spread evenly over the logarithm of time,
speaks where nothing was seen yet. Source: docs/patterns/adaptive-timeout.md; Kaplan and Meier 1958.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, inf, log
from typing import Final

import msgspec

from veilmq.client import checked

SHORTEST: Final = 0.05
"""Seconds: everything shorter is one bucket."""
LONGEST: Final = 2 * 86_400.0
GROWTH: Final = 1.1
BUCKETS: Final = int(log(LONGEST / SHORTEST) / log(GROWTH)) + 1
PRIOR_WEIGHT: Final = 3.0
_PRIOR_FADES: Final = 20.0
"""Attempts seen at which the prior is worth half."""
_PRIOR_SHORTEST: Final = 1.0
_PRIOR_LONGEST: Final = 4 * 3_600.0
_SCALE_MAX: Final = 1e100
_WEIGHT_MAX: Final = 1e9


def bucket_of(seconds: float) -> int:
    """The bucket that a time falls into."""
    if seconds <= SHORTEST:
        return 0
    return min(int(log(seconds / SHORTEST) / log(GROWTH)) + 1, BUCKETS)


def bound_of(bucket: int) -> float:
    """The upper bound of a bucket, in seconds."""
    return SHORTEST * GROWTH**bucket


class Survival:
    """Processing times of one kind of message. Not thread-safe."""

    def __init__(self, half_life: float | None = 400, prior_weight: float = PRIOR_WEIGHT) -> None:
        """half_life: after so many attempts more, 1 at the least, one counts half; None: never less.

        prior_weight: how many attempts the prior is worth; 0: no prior. Raises ParameterInvalid.
        """
        if half_life is not None:
            checked.number(half_life, "half_life", 1, inf)
        checked.number(prior_weight, "prior_weight", 0, _WEIGHT_MAX)
        self._growth = 1.0 if half_life is None else 2 ** (1 / half_life)
        self._scale = 1.0
        self._finished = [0.0] * (BUCKETS + 1)
        self._censored = [0.0] * (BUCKETS + 1)
        self._prior_weight = prior_weight
        self.attempts = 0
        """Ever added."""

    def finished(self, seconds: float) -> None:
        """An attempt took exactly so long."""
        self._finished[bucket_of(seconds)] += self._weight()

    def censored(self, seconds: float) -> None:
        """An attempt was alive at `seconds`, and then nobody knows."""
        self._censored[bucket_of(seconds)] += self._weight()

    @property
    def weight(self) -> float:
        """How many attempts of today all that is remembered is worth."""
        return (sum(self._finished) + sum(self._censored)) / self._scale

    @property
    def reach(self) -> float:
        """Seconds up to which the curve rests on attempts seen; beyond, on the prior alone. 0: nothing seen."""
        seen = [at for at in range(BUCKETS + 1) if self._finished[at] + self._censored[at] > 1e-6 * self._scale]
        return bound_of(seen[-1]) if seen else 0.0

    def curve(self) -> list[float]:
        """For each bucket, the chance that an attempt takes longer than its upper bound; never quite 0."""
        seen = self.weight
        prior = _prior(self._prior_weight * self._scale * _PRIOR_FADES / (_PRIOR_FADES + seen))
        at_risk = sum(self._finished) + sum(self._censored) + sum(prior)
        alive = 1.0
        found = []
        for finished, censored, expected in zip(self._finished, self._censored, prior, strict=True):
            ended = finished + expected
            if at_risk > 0 and ended > 0:
                # Within a bucket, the censored ones left on the average in its middle.
                hazard = ended / max(at_risk - censored / 2, ended)
                alive *= 1 - hazard
            at_risk -= ended + censored
            found.append(max(alive, 1e-9))
        return found

    def quantile(self, share: float) -> float | None:
        """Seconds within which that share of attempts finishes; None if the attempts seen do not reach so far."""
        for bucket, alive in enumerate(self.curve()):
            if alive <= 1 - share:
                bound = bound_of(bucket)
                return bound if bound <= self.reach else None
        return None

    def _weight(self) -> float:
        self.attempts += 1
        self._scale *= self._growth
        if self._scale > _SCALE_MAX:
            self._finished = [each / self._scale for each in self._finished]
            self._censored = [each / self._scale for each in self._censored]
            self._scale = 1.0
        return self._scale


def _prior(weight: float) -> list[float]:
    """`weight` attempts, spread evenly over the logarithm of time from a second to some hours."""
    first, last = bucket_of(_PRIOR_SHORTEST), bucket_of(_PRIOR_LONGEST)
    share = weight / (last - first + 1)
    return [share if first <= bucket <= last else 0.0 for bucket in range(BUCKETS + 1)]


MARGINS: Final = (2.0, 3.0, 5.0, 8.0, 11.0, 15.0, 20.0, 25.0, 30.0, 40.0, 60.0)
"""Seconds: the margins that a schedule chooses from."""
DUPLICATES_MAX: Final = 0.004
"""Duplicate starts an attempt that a schedule may expect (the promise is one in a hundred messages)."""
STEP_MIN: Final = 1.0
"""Seconds between two looks, at the least."""
_ALIVE_MIN: Final = 1e-200
_COST_MAX: Final = 1e12
"""Sums of products of them have a float."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a second, a duplicate and a call are worth, and how the world behaves. All in one unit of cost.

    Raises ParameterInvalid for values that cannot be.
    """

    recovery: float = 1.0
    """A second in which a crashed worker's message waits for its lease to end."""
    duplicate: float = 120.0
    """A message started again while its first worker lives."""
    extend: float = 0.01
    """One call that extends a lease."""
    crashes_per_second: float = 1 / 7_200
    late_share: float = 0.002
    """Of the extensions, how many come late ..."""
    late_mean: float = 8.0
    """... and by how many seconds, exponentially."""

    def __post_init__(self) -> None:
        for name in ("recovery", "duplicate", "extend", "crashes_per_second"):
            checked.number(getattr(self, name), name, 0, _COST_MAX)
        checked.number(self.late_share, "late_share", 0, 1)
        checked.positive(self.late_mean, "late_mean")


class Schedule(msgspec.Struct, frozen=True):
    """Which lease at which age of an attempt. `ages` grow from 0, each with its lease, in seconds."""

    ages: tuple[float, ...]
    leases: tuple[float, ...]
    margin: float
    cost: float
    """What an attempt is expected to cost."""
    duplicates: float = 0.0
    """How many duplicate starts an attempt is expected to have."""

    @property
    def first(self) -> float:
        """The lease to receive with."""
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
    """The cheapest schedule for a curve (`Survival.curve`) whose leases are from `shortest` to `longest` seconds.

    Schedules with more than `duplicates_max` duplicate starts an attempt are passed over, while there are others.
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
    # Areas under the curve up to each age, and of age times it: a crash at age s waits from s to the lease's end.
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
        # First choice: look at a steady pace until the next age, several times if the ages lie far apart.
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
        # Of a trapezoid, exactly.
        centre = ages[i - 1] * part + width * width * (low + 2 * high) / 6
        moment.append(moment[-1] + centre)
    return area, moment


def _steady_step(costs: Costs, late: float) -> float:
    """The step of a steady heartbeat, for an attempt of which nothing is known but that it goes on.

    A second costs rate * step / 2 for crashes and late / step for calls: the best step is their balance.
    """
    rate = max(costs.crashes_per_second * costs.recovery, 1e-12)
    return float((2 * late / rate) ** 0.5)


def _for_ever(costs: Costs, late: float, margin: float, step: float) -> float:
    """What such an attempt costs until it crashes, or for two hours where nothing ever does."""
    rate = costs.crashes_per_second
    return (costs.recovery * rate * (step / 2 + margin) + late / step) / max(rate, 1 / 7_200)
