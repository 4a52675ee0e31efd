"""How long work takes: the share that is not done after each time, from runs that ended and runs that did not.

Strategy: both estimators are Kaplan's and Meier's. `Curve` has every time of a bounded sample, and an interval for each
answer: Greenwood's variance on the scale of log(-log), inverted for quantiles (Brookmeyer and Crowley). `Survival`
follows a stream of attempts in bounded memory: times fall into buckets whose bounds grow by a constant factor, so that
short and long times need equally few buckets. Old attempts count less and less (`half_life`), so that the curve follows
a drift. A prior of a few attempts, spread evenly over the logarithm of time, applies where nothing has been seen yet.

A run that finished is an event at its time. One whose end is unknown is censored at its last sign of life: it took
longer, but nobody knows how much. A quantile is None beyond the range of the runs.

Source: docs/patterns/adaptive-timeout.md; Kaplan and Meier 1958; Greenwood 1926; Brookmeyer and Crowley 1982.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import exp, inf, log, sqrt
from typing import Final, NamedTuple

import msgspec

from veilmq.model.errors import ParameterInvalid

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
_CONFIDENT: Final = 1.96
"""Standard errors of an interval that covers the truth in 95 of 100 cases."""
_UNLIKELY: Final = 0.025
_ROUNDING: Final = 1e-12
USUAL: Final = (
    1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1_200, 1_800, 2_700, 3_600, 5_400, 7_200,
    10_800, 14_400, 21_600, 28_800, 43_200,
)  # fmt: skip


def rounded_up(seconds: float) -> float:
    """The next length that people usually set: 30, 45, 60, 90 s ... up to 12 h."""
    return float(next((each for each in USUAL if each >= seconds), USUAL[-1]))


def in_range(value: float, parameter: str, least: float, most: float) -> float:
    """A number in a range, but no bool. Raises ParameterInvalid."""
    if type(value) in (int, float) and least <= value <= most:
        return value
    raise ParameterInvalid(parameter=parameter, reason=f"must be a number from {least:g} to {most:g}")


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
            in_range(half_life, "half_life", 1, inf)
        in_range(prior_weight, "prior_weight", 0, _WEIGHT_MAX)
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

    def add(self, samples: "Iterable[Sample]") -> None:
        """Attempts that finished or did not."""
        for each in samples:
            (self.finished if each.finished else self.censored)(each.seconds)

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


class Sample(msgspec.Struct, frozen=True):
    """One run of the work."""

    seconds: float
    finished: bool


class Between(NamedTuple):
    """An estimate and its 95 % interval. None: more than anything that was seen."""

    value: float | None
    low: float | None
    high: float | None


class Curve:
    """The survival curve of a sample, exact."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        # Among equal times, the finished runs come first: a run that failed at that time was still at risk.
        runs = sorted((each.seconds, not each.finished) for each in samples)
        self.runs = len(runs)
        self.finished = sum(1 for _, is_cut in runs if not is_cut)
        self.longest = runs[-1][0] if runs else 0.0
        """Of all runs, finished or not."""
        self.times: list[float] = []
        """When some finished."""
        self.alive: list[float] = []
        """The share that takes longer than that, ..."""
        self.lows: list[float] = []
        self.highs: list[float] = []
        """... and its interval."""
        at_risk, alive, spread = self.runs, 1.0, 0.0
        low, high = _UNLIKELY ** (1 / self.runs) if runs else 0.0, 1.0
        self._first_low = low
        for (seconds, is_cut), group in groupby(runs):
            count = sum(1 for _ in group)
            if not is_cut:
                alive *= 1 - count / at_risk
                left = at_risk - count
                if left:
                    spread += count / (at_risk * left)
                    width = _CONFIDENT * sqrt(spread) / -log(alive)
                    low, high = alive ** exp(width), alive ** exp(-width)
                else:
                    alive = low = 0.0
                    high *= 1 - _UNLIKELY ** (1 / at_risk)
                self.times.append(seconds)
                self.alive.append(alive)
                self.lows.append(low)
                self.highs.append(high)
            at_risk -= count

    @property
    def rest(self) -> float:
        """The share that takes longer than everything that was seen; 0: the curve comes down to its end."""
        return self.alive[-1] if self.alive else 1.0

    def share_above(self, seconds: float) -> Between:
        """The share that takes longer. Beyond `longest` it is known only to be no greater than there."""
        place = bisect_right(self.times, seconds) - 1
        if place < 0:
            return Between(1.0, self._first_low, 1.0)
        low = 0.0 if seconds > self.longest else self.lows[place]
        return Between(self.alive[place], low, self.highs[place])

    def quantile(self, share: float) -> Between:
        """Seconds within which that share finishes."""
        wanted = 1 - share + _ROUNDING
        return Between(*(self._first_below(each, wanted) for each in (self.alive, self.lows, self.highs)))

    def _first_below(self, shares: Sequence[float], wanted: float) -> float | None:
        return next((at for at, share in zip(self.times, shares, strict=True) if share <= wanted), None)
