"""Which timeout a queue needs: how long its messages take, from leases that ended, and what each timeout would do.

Strategy: each message counts once, with its first lease under which anybody worked. A message whose lease ran out is
received again; if its length is its own, it takes long again, and counting every lease would count long messages most.
First leases are a fair sample both if the length is the message's and if it is the attempt's. `law` says which of the
two the redelivered messages show.

A lease that ended without a sign of its worker is either a crash or work that was too slow. Where some workers were
late and said so (a late delete, a refused one), silent ones crashed. So they did if hardly any work ended in the
second half of a lease. They were slow if the same messages ended so again. Otherwise nobody knows: then they count as
slow, and the lower ends of all intervals hold if they crashed. A crash happened at some time under the lease while the
work was not done: they are spread over it in proportion to the curve, at a steady rate.

A timeout costs what the client's planner says (`Costs`): a second of recovery delay, a message started twice. The
recommended one is the cheapest of those that people usually set, with a quarter on top of what was seen
(docs/which-timeout.md), under which few messages are started twice (`TWICE_MAX`).

Source: docs/decisions/0026-estimate.md; docs/patterns/adaptive-timeout.md.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from math import expm1, log
from typing import Final, NamedTuple

import msgspec

from veilmq.estimate.schedule import Costs, Schedule, crash_rate, plan_of
from veilmq.estimate.survival import USUAL, Between, Curve, Sample, Survival

FINISHED_MIN: Final = 30
"""With fewer messages that finished, nothing is recommended."""
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LEASE_MIN_S: Final = 5.0
"""Shorter leases are not recommended: a slow network alone would end them."""
MARGIN: Final = 1.25
"""A timeout is judged as if it were shorter by this factor: nobody has seen the longest work yet."""
NEAR: Final = 1.25
"""A timeout that costs at most this factor more than the best one is good."""
TWICE_MAX: Final = 0.05
"""Share of messages: no timeout is recommended under which more are started again, however cheap it is. Their first
worker's delete is refused, and those that always take so long are never done."""
REST_MAX: Final = 0.004
"""With a greater share of messages that take longer than anything seen, no plain timeout is known to suffice."""
_CRASHES_AT_ONCE: Final = 0.05
"""Share of messages: so many silent leases may be crashes just because hardly any work was so long."""
_RARE: Final = 4
_PLACINGS: Final = 3
_GOLDEN: Final = 0.6180339887498949
_AGAIN_MIN: Final = 10
_LIKELY: Final = 6.63
"""Of chi-squared with one degree of freedom, exceeded by chance once in a hundred times."""


class Ended(IntEnum):
    """How a lease ended."""

    DONE = 0
    """The work took exactly `alive_s`, whatever its result."""
    STOPPED = 1
    """The worker stopped, or the message left: the work would have taken longer than `alive_s`."""
    UNWORKED = 2
    """Nobody worked: the answer was lost, the message was given back at once, or somebody looked (a lease of 0 s)."""
    SILENT = 3
    """It ran out at `until_s`, and its worker, alive at `alive_s`, was never heard of again."""
    OPEN = 4
    """It runs on, and has for `alive_s`."""


class Lease(NamedTuple):
    """One lease of a message. Seconds count from its grant."""

    message: int
    attempt: int
    """The receive count."""
    ended: Ended
    alive_s: float
    until_s: float
    age_s: float
    """From the grant until now."""
    late: bool
    """Whether its worker was heard of after the lease's end."""
    extended: bool
    type: str | None = None


class Law(msgspec.Struct, frozen=True):
    """Whether messages that were received again after their lease's end take longer than others."""

    again: int
    """How many were."""
    longer: bool | None
    """True: the length of work belongs to the message. False: no sign of it. None: too few."""
    by_attempt: Between
    """The median if each lease counted."""


class Effect(msgspec.Struct, frozen=True):
    """What a timeout does, if no lease is extended."""

    timeout_s: float
    duplicates: Between
    """Share of messages that are started again while their worker still works."""
    recovery_s: float
    """Mean time from a worker's crash until its message is visible again."""
    seen: bool
    """Whether leases were long enough to show it; if not, `duplicates` is an upper bound."""


class Estimate:
    """What the leases of one queue, or of one type, say."""

    def __init__(self, leases: Sequence[Lease], costs: Costs | None = None) -> None:
        firsts, again = by_message(leases)
        self.messages = len(firsts)
        self.silent = sum(each.ended is Ended.SILENT for each in firsts)
        self.reading = _reading(firsts, again, leases)
        self.extended = sum(each.extended for each in firsts)
        slow = [_sample(each) for each in firsts]
        crashed = self.silent and self.reading in ("crashes", "unknown")
        other, crashes = _with_crashes(firsts, slow) if crashed else (slow, 0)
        judged = other if self.reading == "crashes" else slow
        self.curve = Curve(judged)
        self._lowest = Curve(other) if self.reading == "unknown" else self.curve
        """If all silent leases were crashes."""
        self.finished = self.curve.finished
        believed = costs or Costs()
        worked_s = sum(each.seconds for each in other)
        rate = crash_rate(crashes, worked_s, believed.crashes_per_second)
        self.costs = msgspec.structs.replace(believed, crashes_per_second=rate)
        self.law = _law(firsts, again, leases)
        self._survival = Survival(half_life=None)
        self._survival.add(judged)
        self._areas, self._moments = _integrals(self.curve)

    @property
    def enough(self) -> bool:
        """Whether anything can be recommended."""
        return self.finished >= FINISHED_MIN

    @property
    def quantiles(self) -> dict[str, Between]:
        """p50, p95 and p99 in seconds. A `value` or `high` of None: `low` or more."""
        return {name: self._quantile(share) for name, share in SHARES.items()}

    def _quantile(self, share: float) -> Between:
        found, lowest = self.curve.quantile(share), self._lowest.quantile(share)
        low = lowest.low if lowest.low is not None else self._lowest.longest
        return Between(found.value, low, found.high)

    def effect(self, timeout_s: float) -> Effect:
        """What that timeout would do."""
        share = self.curve.share_above(timeout_s)
        low = min(share.low or 0.0, self._lowest.share_above(timeout_s).low or 0.0)
        seen = timeout_s <= self.curve.longest or self.curve.rest == 0
        duplicates = Between(share.value, low, share.high)
        return Effect(timeout_s, duplicates, self._recovery_s(timeout_s), seen)

    def recommended_s(self) -> float | None:
        """The best timeout without extensions; None if leases never were long enough to show it, or none is long
        enough."""
        if not self.enough or self.curve.rest > REST_MAX:
            return None
        long_enough = [each for each in USUAL if each >= LEASE_MIN_S and self._twice(each) <= TWICE_MAX]
        return float(min(long_enough, key=self._cost)) if long_enough else None

    def is_good(self, timeout_s: float) -> bool:
        """Whether that timeout is about as good as the recommended one. There must be one."""
        best = self.recommended_s()
        assert best is not None
        return self._twice(timeout_s) <= TWICE_MAX and self._cost(timeout_s) <= NEAR * self._cost(best)

    def schedule(self) -> Schedule:
        """The best leases for workers that extend them."""
        return plan_of(self._survival.curve(), self.costs, shortest=LEASE_MIN_S)

    def _cost(self, timeout_s: float) -> float:
        rate = self.costs.crashes_per_second
        area, moment = self._until(timeout_s)
        twice = self.costs.duplicate * self._twice(timeout_s)
        return self.costs.recovery * rate * (timeout_s * area - moment) + twice

    def _twice(self, timeout_s: float) -> float:
        """The share of messages that are started again, if work takes `MARGIN` times as long as was seen."""
        return self.curve.share_above(timeout_s / MARGIN).value or 0.0

    def _recovery_s(self, timeout_s: float) -> float:
        """A crash at age s, equally likely at each moment of work, waits from s to the timeout."""
        area, moment = self._until(timeout_s)
        return timeout_s - moment / area if area > 0 else timeout_s

    def _until(self, seconds: float) -> tuple[float, float]:
        """Integrals from 0 of the curve, and of age times the curve."""
        place = bisect_right(self.curve.times, seconds)
        before = self.curve.times[place - 1] if place else 0.0
        alive = self.curve.alive[place - 1] if place else 1.0
        area = (self._areas[place - 1] if place else 0.0) + alive * (seconds - before)
        moment = (self._moments[place - 1] if place else 0.0) + alive * (seconds**2 - before**2) / 2
        return area, moment


def by_message(leases: Iterable[Lease]) -> tuple[list[Lease], list[Lease]]:
    """The first lease of each message under which anybody worked, if all before it are known; and those leases that
    came after one that had run out."""
    attempts: defaultdict[int, list[Lease]] = defaultdict(list)
    for each in leases:
        attempts[each.message].append(each)
    firsts, again = [], []
    for ones in attempts.values():
        ones.sort(key=lambda each: each.attempt)
        expected = 1
        for place, each in enumerate(ones):
            if each.attempt != expected:
                break
            if each.ended is not Ended.UNWORKED:
                firsts.append(each)
                again += _redelivered(ones[place:])
                break
            expected += 1
    return firsts, again


def _redelivered(ones: Sequence[Lease]) -> list[Lease]:
    return [
        later
        for before, later in pairwise(ones)
        if (before.late or before.ended is Ended.SILENT) and later.ended is not Ended.UNWORKED
    ]


def _sample(lease: Lease) -> Sample:
    """A silent worker as one that was slow, unless it extended: it would have done so again."""
    if lease.ended is Ended.SILENT:
        return Sample(lease.alive_s if lease.extended else lease.until_s, False)
    return Sample(lease.alive_s, lease.ended is Ended.DONE)


def _reading(firsts: Sequence[Lease], again: Sequence[Lease], leases: Sequence[Lease]) -> str:
    """What silent leases were: `none` there are, `crashes`, `slow` or `unknown`."""
    every = [each for each in firsts if each.ended is Ended.SILENT]
    silent = [each for each in every if not each.extended]
    if not silent:
        return "crashes" if every else "none"
    if any(each.late for each in leases):
        return "crashes"
    over = [each.ended is Ended.SILENT for each in again if each.ended is not Ended.OPEN]
    if over and 2 * sum(over) >= len(over):
        return "slow"
    # Of work that goes on so long about as much ends in the second half of a lease as after its end, or more.
    half_s = min(each.until_s for each in silent) / 2
    slow = sum(each.ended is Ended.DONE and each.alive_s > half_s for each in firsts)
    are_few = len(silent) <= _CRASHES_AT_ONCE * len(firsts)
    return "crashes" if are_few and _RARE * slow <= len(silent) else "unknown"


def _with_crashes(firsts: Sequence[Lease], slow: list[Sample]) -> tuple[list[Sample], int]:
    """The samples with crashes where they most likely happened, and their number."""
    longest_s = max((each.alive_s for each in firsts if each.ended is Ended.DONE), default=0.0)
    # A worker that may still be at work is heard of later.
    places = [at for at, each in enumerate(firsts) if each.ended is Ended.SILENT and each.age_s >= longest_s]
    if not places:
        return slow, 0
    samples = [each for each, lease in zip(slow, firsts, strict=True) if lease.ended is not Ended.SILENT]
    for _ in range(_PLACINGS):
        crashing = _Crashing(Curve(samples), len(places) / max(sum(each.seconds for each in samples), 1e-9))
        samples = list(slow)
        for number, at in enumerate(places):
            part = ((number + 1) * _GOLDEN) % 1  # spread evenly, and the same for the same leases
            samples[at] = Sample(crashing.time_at(firsts[at].alive_s, firsts[at].until_s, part), False)
    return samples, len(places)


class _Crashing:
    """When crashes at a steady rate hit work that is neither done nor crashed: the density is the rate times the curve
    times exp(-rate * age). In `_aged` time, which runs slower with age, it is the curve alone."""

    def __init__(self, curve: Curve, rate: float) -> None:
        self._rate = rate
        self._ages = [0.0, *(self._aged(each) for each in curve.times)]
        self._alive = [1.0, *curve.alive]
        steps = zip(self._ages, self._ages[1:], self._alive, strict=False)
        self._areas = [0.0, *accumulate(share * (stop - start) for start, stop, share in steps)]

    def time_at(self, start_s: float, stop_s: float, part: float) -> float:
        """The time within a stretch before which that part of its crashes happens."""
        low, high = self._area_to(start_s), self._area_to(stop_s)
        if high <= low:
            return start_s
        wanted = low + part * (high - low)
        place = bisect_right(self._areas, wanted) - 1
        alive = self._alive[place]
        aged = self._ages[place] + ((wanted - self._areas[place]) / alive if alive else 0.0)
        left = 1 - self._rate * aged
        return min(max(-log(left) / self._rate if left > 0 else stop_s, start_s), stop_s)

    def _aged(self, seconds: float) -> float:
        return -expm1(-self._rate * seconds) / self._rate

    def _area_to(self, seconds: float) -> float:
        aged = self._aged(seconds)
        place = bisect_right(self._ages, aged) - 1
        return self._areas[place] + self._alive[place] * (aged - self._ages[place])


def _integrals(curve: Curve) -> tuple[list[float], list[float]]:
    """Of the curve, and of age times the curve, up to each of its times."""
    before = [0.0, *curve.times]
    alive = [1.0, *curve.alive]
    steps = list(zip(before, curve.times, alive, strict=False))
    areas = accumulate(share * (stop - start) for start, stop, share in steps)
    moments = accumulate(share * (stop**2 - start**2) / 2 for start, stop, share in steps)
    return list(areas), list(moments)


def _law(firsts: Sequence[Lease], again: Sequence[Lease], leases: Sequence[Lease]) -> Law:
    every = [_sample(each) for each in leases if each.ended is not Ended.UNWORKED]
    median = Curve(every).quantile(0.5)
    if len(again) < _AGAIN_MIN:
        return Law(len(again), None, median)
    difference = log_rank([_sample(each) for each in firsts], [_sample(each) for each in again])
    return Law(len(again), difference > _LIKELY**0.5, median)


def log_rank(one: Sequence[Sample], other: Sequence[Sample]) -> float:
    """By how many standard deviations the others take longer (Mantel's test)."""
    runs = sorted(
        [(each.seconds, not each.finished, 0) for each in one]
        + [(each.seconds, not each.finished, 1) for each in other]
    )
    at_risk, at_risk_other = len(runs), len(other)
    excess = variance = 0.0
    for _, is_cut, is_other in runs:
        if not is_cut and at_risk > 1:
            share = at_risk_other / at_risk
            excess += share - is_other
            variance += share * (1 - share)
        at_risk -= 1
        at_risk_other -= is_other
    return excess / variance**0.5 if variance > 0 else 0.0
