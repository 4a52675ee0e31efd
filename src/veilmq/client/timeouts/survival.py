"""What is known of processing times: a survival curve from finished and from censored attempts.

Strategy: times fall into buckets whose bounds grow by a constant factor, so that seconds and hours cost the same few
numbers. An attempt that finished is an event in its bucket; one whose worker vanished is censored at its last sign of
life: it took longer than that, nobody knows how much. The curve is Kaplan and Meier's. Old attempts count less and less
(`half_life`), so that the curve follows a drift; a prior of a few attempts, spread evenly over the logarithm of time,
speaks where nothing was seen yet. Source: docs/patterns/adaptive-timeout.md; Kaplan and Meier 1958.
"""

from math import inf, log
from typing import Final

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
