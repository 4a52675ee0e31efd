"""How a survival curve goes on where no law (laws.py) agrees with it: by what its last messages show. Without Spark.

Strategy: a Pareto law loses the same share from each bucket to the next, so its one number is that share among the last
messages, and nothing has to be fitted. It counts as agreeing if the first half of those messages falls as fast as the
second. Where a hundred messages contradict it, fewer may not: work with two humps has a steep end. Where even twenty
do, nobody knows how the curve goes on. Nor does anybody where most was cut off at one age, unless the messages before
it are spread out: within a few buckets any work looks like a Pareto law's. So more messages are taken there.

Before changing it: planners do not use this. A lease for an age that nobody reached must not rest on a guess that work
ends there, but a price that counts such work as endless is too high by a third where work has a heavy tail.

Source: Hill 1975 (the exponent of a tail from the last messages alone), here with messages that were cut off.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.pipeline.estimates.buckets import STEP

_SIZES: Final = (100, 50, 20)
"""So many of the last messages that finished are tried."""
_CONTRADICTS: Final = 1.96
"""Standard errors by which the two halves may differ."""
_SPAN: Final = round(np.log(1.5) / STEP)
"""Buckets that the last messages span at least where more was cut off than they are: a factor of 1.5 in time."""
_NONE: Final = 1e-9


class Tail(NamedTuple):
    """The last messages of a sample."""

    start: int
    """The bucket in which they begin."""
    agrees: bool
    """Whether a Pareto law does."""

    def fall(self, finished: Any, censored: Any) -> Any:
        """The logarithm of what is left from bucket to bucket, negated; counts of shape (..., buckets) give (...)."""
        return finished[..., self.start :].sum(-1) / np.maximum(_passed(finished + censored, self.start), _NONE)


def tail_of(finished: Any, censored: Any) -> Tail:
    """The most messages that a Pareto law agrees with, else the fewest; counts by bucket."""
    after, every = np.flip(np.cumsum(np.flip(finished))), finished + censored
    tail = Tail(0, agrees=False)
    for size in _SIZES:
        if size > after[0]:
            continue
        number, start = size, int(np.flatnonzero(after >= size)[-1])
        tail = Tail(start, agrees=False)
        if censored[start:].sum() > after[start]:
            start = min(start, max(int(np.flatnonzero(finished)[-1]) - _SPAN, 0))
            number = after[start]
        middle = int(np.flatnonzero(after >= number / 2)[-1])
        later = _passed(every, middle)
        first = (after[start] - after[middle] + _NONE) / (_passed(every, start) - later + _NONE)
        second = (after[middle] + _NONE) / (later + _NONE)
        if abs(np.log(first / second)) < _CONTRADICTS * (4 / number) ** 0.5:
            return Tail(start, agrees=True)
    return tail


def _passed(counts: Any, start: int) -> Any:
    """How many buckets the messages went through, from this one on, added up."""
    away = np.maximum(np.arange(counts.shape[-1]) - start + 0.5, 0)
    return (counts * away).sum(-1)
