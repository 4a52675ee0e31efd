"""The cheapest schedule of leases for a survival curve (optimal inspection), and what a load test says about timeouts.

Strategy: a lease's end is the next inspection of an attempt. Frequent inspections cost calls, and each call may be
late; rare ones cost recovery time when a worker dies. For each age of an attempt, the schedule gives the length of the
next lease. It is computed backwards from the greatest age (dynamic programming over the survival curve's bucket
bounds). At age t, a next inspection at age u costs the expected wait after a crash between t and u; if the attempt
lives to u, it also costs the call, the risk that the call is late, and the best schedule from u on. The margin (how
long before its end a lease is extended) is one number for the whole schedule, the best of a few. Source: Barlow and
Proschan, "Mathematical Theory of Reliability", on optimal inspection.

Survival: times fall into buckets whose bounds grow by a constant factor, so that short and long times need equally few
buckets. An attempt that finished is an event in its bucket. One whose worker vanished is censored at its last sign of
life: it took longer, but nobody knows how much. The estimator is Kaplan-Meier's. Old attempts count less and less
(`half_life`), so that the curve follows a drift. A prior of a few attempts, spread evenly over the logarithm of time,
applies where nothing has been seen yet. Source: docs/patterns/adaptive-timeout.md; Kaplan and Meier 1958.

Calibration: the same over the samples of a load test. A handler that finished is an exact sample; one that failed is
censored. Percentiles are None beyond the range of the samples. There are two recommendations: leases for a keeper that
extends them, and one timeout for a consumer that never extends. Source: document 004 ("perform a series of load tests
on the consumer"); document 003, 1.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import exp, inf, log
from typing import Final

import msgspec

from veilmq.client.shared import checks

SHORTEST: Final = 0.05
"""Seconds: all shorter times share one bucket."""
LONGEST: Final = 2 * 86_400.0
GROWTH: Final = 1.1
BUCKETS: Final = int(log(LONGEST / SHORTEST) / log(GROWTH)) + 1
PRIOR_WEIGHT: Final = 3.0
_PRIOR_FADES: Final = 20.0
"""Number of attempts at which the prior's weight is halved."""
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
        """half_life: after this many more attempts, at least 1, an attempt counts half; None: attempts never fade.

        prior_weight: the weight of the prior in attempts; 0: no prior. Raises ParameterInvalid.
        """
        if half_life is not None:
            checks.number(half_life, "half_life", 1, inf)
        checks.number(prior_weight, "prior_weight", 0, _WEIGHT_MAX)
        self._growth = 1.0 if half_life is None else 2 ** (1 / half_life)
        self._scale = 1.0
        self._finished = [0.0] * (BUCKETS + 1)
        self._censored = [0.0] * (BUCKETS + 1)
        self._prior_weight = prior_weight
        self.attempts = 0
        """All attempts ever added."""

    def finished(self, seconds: float) -> None:
        """An attempt took exactly this long."""
        self._finished[bucket_of(seconds)] += self._weight()

    def censored(self, seconds: float) -> None:
        """An attempt was alive at `seconds`; its end is unknown."""
        self._censored[bucket_of(seconds)] += self._weight()

    @property
    def weight(self) -> float:
        """The total weight of all attempts remembered; a new attempt has weight 1."""
        return (sum(self._finished) + sum(self._censored)) / self._scale

    @property
    def reach(self) -> float:
        """Seconds up to which the curve is based on attempts seen; beyond, on the prior alone. 0: nothing seen."""
        seen = [at for at in range(BUCKETS + 1) if self._finished[at] + self._censored[at] > 1e-6 * self._scale]
        return bound_of(seen[-1]) if seen else 0.0

    def curve(self) -> list[float]:
        """For each bucket, the probability that an attempt takes longer than its upper bound; never exactly 0."""
        seen = self.weight
        prior = _prior(self._prior_weight * self._scale * _PRIOR_FADES / (_PRIOR_FADES + seen))
        at_risk = sum(self._finished) + sum(self._censored) + sum(prior)
        alive = 1.0
        found = []
        for finished, censored, expected in zip(self._finished, self._censored, prior, strict=True):
            ended = finished + expected
            if at_risk > 0 and ended > 0:
                # Censored attempts left, on average, in the middle of the bucket.
                hazard = ended / max(at_risk - censored / 2, ended)
                alive *= 1 - hazard
            at_risk -= ended + censored
            found.append(max(alive, 1e-9))
        return found

    def quantile(self, share: float) -> float | None:
        """Seconds within which that share of attempts finishes; None beyond the range of the attempts seen."""
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
            checks.number(getattr(self, name), name, 0, _COST_MAX)
        checks.number(self.late_share, "late_share", 0, 1)
        checks.positive(self.late_mean, "late_mean")


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


SHARES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
SAFETY: Final = 1.5
"""A timeout that is never extended is the longest time seen, multiplied by this."""
SAMPLES_FEW: Final = 100
LEASE_MIN: Final = 5.0
_STEPS: Final = (1.0, 2.0, 5.0)
_ROUND: Final = (
    1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1_200, 1_800, 2_700, 3_600, 5_400, 7_200,
    10_800, 14_400, 21_600, 28_800, 43_200,
)  # fmt: skip


class Sample(msgspec.Struct, frozen=True):
    """One run of the handler."""

    seconds: float
    finished: bool


class Bucket(msgspec.Struct, frozen=True):
    """Runs of more than `over` and up to `upto` seconds."""

    over: float
    upto: float
    finished: int
    failed: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The results. Seconds."""

    finished: int
    failed: int
    percentiles: dict[str, float | None]
    """`p50`, `p90`, `p95`, `p99`, `p99.9`; None beyond the range of the samples."""
    longest: float
    """Longest run, finished or not."""
    mean: float | None
    """Of the runs that finished."""
    histogram: tuple[Bucket, ...]
    """Bounds 1, 2, 5, 10, ..., without empty ends."""
    first_lease: float
    """With a keeper: the lease to ask for at receive."""
    renewal_margin: float
    """With a keeper: how long before its end to extend a lease."""
    timeout: float | None
    """Without a keeper; None: the longest runs failed, so nobody knows how long they take."""
    notes: tuple[str, ...]
    """Caveats to read before relying on the numbers."""


def calibrate(samples: Sequence[Sample], costs: Costs | None = None) -> Calibration:
    """Evaluate the samples. Raises ValueError if there are none, or if one is below 0."""
    if not samples:
        raise ValueError("there are no samples")
    if min(each.seconds for each in samples) < 0:
        raise ValueError("a processing time cannot be below 0")
    learnt = Survival(half_life=None)
    for each in samples:
        (learnt.finished if each.finished else learnt.censored)(each.seconds)
    finished = sorted(each.seconds for each in samples if each.finished)
    failed = [each.seconds for each in samples if not each.finished]
    plan = plan_of(learnt.curve(), costs, shortest=LEASE_MIN)
    known = bool(finished) and (not failed or max(failed) <= finished[-1])
    timeout = rounded_up(max(finished[-1] * SAFETY, 1.0)) if known else None
    return Calibration(
        finished=len(finished),
        failed=len(failed),
        percentiles={f"p{share * 100:g}": quantile(samples, share) for share in SHARES},
        longest=max(each.seconds for each in samples),
        mean=sum(finished) / len(finished) if finished else None,
        histogram=histogram(samples),
        first_lease=rounded_up(plan.first),
        renewal_margin=plan.margin,
        timeout=timeout,
        notes=_notes(len(finished), len(failed), known),
    )


def quantile(samples: Sequence[Sample], share: float) -> float | None:
    """Seconds within which that share of runs finishes, by Kaplan-Meier; None beyond the range of the samples."""
    alive, at_risk = 1.0, len(samples)
    # Among equal times, the finished runs come first: a run that failed at that time was still at risk.
    for each in sorted(samples, key=lambda sample: (sample.seconds, not sample.finished)):
        if each.finished:
            alive *= 1 - 1 / at_risk
            if alive <= 1 - share + 1e-12:
                return each.seconds
        at_risk -= 1
    return None


def histogram(samples: Sequence[Sample]) -> tuple[Bucket, ...]:
    """Counts in buckets bounded by 1, 2 and 5 times powers of ten, from 1 ms on."""
    bounds = [0.0, 0.001]
    longest = max(each.seconds for each in samples)
    while bounds[-1] < longest:
        step, power = divmod(len(bounds) - 1, 3)[::-1]
        bounds.append(_STEPS[step] * 10.0 ** (power - 3))
    found = [
        Bucket(
            over,
            upto,
            sum(1 for each in samples if each.finished and _within(each.seconds, over, upto)),
            sum(1 for each in samples if not each.finished and _within(each.seconds, over, upto)),
        )
        for over, upto in pairwise(bounds)
    ]
    filled = [place for place, bucket in enumerate(found) if bucket.finished + bucket.failed]
    return tuple(found[filled[0] : filled[-1] + 1])


def rounded_up(seconds: float) -> float:
    """The next length that people usually set: 30, 45, 60, 90 s ... up to 12 h."""
    return float(next((each for each in _ROUND if each >= seconds), _ROUND[-1]))


def _within(seconds: float, over: float, upto: float) -> bool:
    return over < seconds <= upto or (over == 0 and seconds == 0)


def _notes(finished: int, failed: int, known: bool) -> tuple[str, ...]:
    notes = []
    if finished < SAMPLES_FEW:
        notes.append(f"{finished} finished runs say little about the longest ones: measure {SAMPLES_FEW} or more")
    if failed:
        notes.append(f"{failed} failed runs count as longer than they took")
    if not known:
        notes.append("the longest runs failed: no timeout without extensions can be recommended")
    return tuple(notes)
