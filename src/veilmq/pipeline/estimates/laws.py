"""Which law the length of work follows: lognormal, Weibull or gamma, by the likelihood of times in buckets.

Strategy: each law has a median and a spread (about the standard deviation of the logarithm of time), so that one
lattice of both serves all three, and a law is as many numbers on the buckets' bounds. A fit climbs on ever finer
lattices. Counts enter a likelihood linearly, so the fits to other samples of the same messages (a bootstrap) cost one
product of matrices.

Each law is fitted to all times and judged by its tail: by the likelihood of what happened after the `_BODY` share was
done, given how many are left then. A law that fits the body alone is wrong where it matters: exponential work of 20 s
has a p99 of 92 s, and of 199 s by the lognormal law that fits 400 such messages best. If a law fitted to the tail alone
is much likelier there, that contradicts a law. Of those that are left the likeliest counts, and what the others say of
other samples belongs to the interval, too.

Source: Cohen 1991, Truncated and censored samples (grouped data); Klein and Moeschberger 2003, section 3.5.
"""

from math import lgamma
from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.pipeline.estimates.buckets import BOUNDS, MIDDLES

NAMES: Final = ("lognormal", "weibull", "gamma")
_BODY: Final = 0.5
_EVENTS_MIN: Final = 50
"""So many messages that finished are at least in the tail."""
_CONTRADICTS: Final = 3.0
"""Logarithm of a likelihood ratio that chance exceeds once in twenty times (chi-squared, two degrees of freedom)."""
_SIZES: Final = (15, 7, 7, 7, 7)
"""Of the lattices: each is a cell of the one before."""
_SPREADS: Final = (0.02, 4.0)
_LOG: Final = np.log(BOUNDS)
_GAMMA_GRID: Final = np.arange(-60.0, 6.0, 0.02)
_ERRORS: Final = np.linspace(-3.2, 3.2, 13)
"""Standard errors by which other samples' laws may differ from this one's."""
_ERFC: Final = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807,
    -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip


class Law(NamedTuple):
    """One law."""

    name: str
    median_s: float
    spread: float

    def alive(self) -> Any:
        """The share that takes longer than each of `BOUNDS`."""
        return survival(self.name, np.array([np.log(self.median_s)]), np.array([self.spread]), _LOG)[0]


def survival(name: str, median: Any, spread: Any, log_time: Any) -> Any:
    """The share that takes longer; shapes (n,), (n,) and (m,) give (n, m). median: its logarithm."""
    away = log_time[None, :] - median[:, None]
    if name == "lognormal":
        return tail(away / spread[:, None])
    if name == "weibull":
        power = np.pi / np.sqrt(6) / spread[:, None]
        return np.exp(-np.log(2) * np.exp(np.clip(power * away, -700, 6.5)))
    known, place = np.unique(spread, return_inverse=True)
    curves = [_gamma((1 + (1 + 2 * each**2) ** 0.5) / (2 * each**2)) for each in map(float, known)]
    return np.stack([np.exp(np.interp(row, *curves[at])) for at, row in zip(place, away, strict=True)])


def _gamma(shape: float) -> tuple[Any, Any]:
    """The gamma law of that shape and median 1: logarithms of times and of the share that takes longer, from the area
    under its density on the logarithm of time."""
    # Relative to the density's top, in about its standard deviations.
    grid = np.log(shape) + _GAMMA_GRID * max(1 / shape**0.5, 0.02)
    density = np.exp(np.clip(shape * grid - np.exp(np.minimum(grid, 700)) - lgamma(shape), -745, 700))
    part = (density[1:] + density[:-1]) / 2 * np.diff(grid)
    above = np.concatenate([np.cumsum(part[::-1])[::-1], [0.0]])
    above = np.minimum(above + max(1 - above[0] - density[0] / shape, 0.0), 1.0)
    median = float(np.interp(-0.5, -above, grid))
    return grid - median, np.log(np.maximum(above, 1e-300))


def tail(z: Any) -> Any:
    """The normal distribution's upper tail; relative error below 2e-7 (Numerical Recipes, 2nd edition, erfcc)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.5 * x)
    series = np.zeros_like(t)
    for factor in _ERFC:
        series = factor + t * series
    upper = 0.5 * t * np.exp(np.clip(-x * x + series, -700, 700))
    return np.where(np.asarray(z) >= 0, upper, 1 - upper)


class Counts:
    """Messages that finished and that were cut off, by bucket, and what is needed of a law for their likelihood."""

    def __init__(self, finished: Any, censored: Any, alive: Any, error: Any) -> None:
        """alive, error: the curve of the counts, and its standard error."""
        done = np.flatnonzero(finished)
        self.finished, self.censored = done, np.flatnonzero(censored)
        self.last = int(done[-1])
        after = np.cumsum(finished[::-1])[::-1]
        below = np.flatnonzero((alive <= 1 - _BODY) | (after <= _EVENTS_MIN))
        self.body = int(below[0]) if len(below) and below[0] < self.last else int(done[0])
        """The bucket after which the tail begins."""
        self._weights = finished[self.finished], censored[self.censored]
        share, width = float(alive[self.body]), max(float(error[self.body]), 1e-6)
        self._pin = share, max(share * (1 - share) / width**2, 1.0)
        lower = np.concatenate([[1e-12], BOUNDS[:-1]])
        self._times = np.concatenate(
            [np.log(lower[done]), _LOG[done], np.log(MIDDLES[self.censored]), [_LOG[self.body]]]
        )

    def terms(self, name: str, median: Any, spread: Any) -> tuple[Any, ...]:
        """Logarithms for each law: of the chance of each bucket, to be cut off there, and to outlive the body."""
        alive = survival(name, median, spread, self._times)
        number = len(self.finished)
        chance = np.log(np.maximum(alive[:, :number] - alive[:, number : 2 * number], 1e-300))
        there = np.log(np.maximum(alive[:, 2 * number :], 1e-300))
        return chance, there[:, :-1], there[:, -1]

    def whole(self, terms: tuple[Any, ...], finished: Any = None, censored: Any = None) -> Any:
        """The logarithm of the likelihood of all times: shape (laws,), or (laws, samples) for counts of (samples,
        buckets)."""
        if finished is None:
            return terms[0] @ self._weights[0] + terms[1] @ self._weights[1]
        return terms[0] @ finished[:, self.finished].T + terms[1] @ censored[:, self.censored].T

    def of_tail(self, terms: tuple[Any, ...]) -> Any:
        """The same of the tail, given how many outlive the body."""
        inside, cut = self.finished > self.body, self.censored > self.body
        one, two = self._weights[0][inside], self._weights[1][cut]
        body = np.clip(terms[2], -700, -1e-12)
        found = terms[0][:, inside] @ one + terms[1][:, cut] @ two - body * (one.sum() + two.sum())
        share, number = self._pin
        return found + number * (share * body + (1 - share) * np.log(-np.expm1(body)))


def fitted(counts: Counts) -> list[Law]:
    """The laws that the tail does not contradict, the likeliest first. There must be two buckets in which messages
    finished."""
    found = sorted((_climb(counts, name) for name in NAMES), key=lambda each: -each.whole)
    alone = max(_climb(counts, name, of_tail=True).tail for name in NAMES)
    return [each.law for each in found if alone - each.tail <= _CONTRADICTS]


class _Climbed(NamedTuple):
    """A law, and the logarithms of its likelihoods."""

    law: Law
    whole: float
    tail: float


def _climb(counts: Counts, name: str, *, of_tail: bool = False) -> _Climbed:
    """The likeliest law of that name; of_tail: for the tail alone."""
    low, high = float(_LOG[counts.finished[0]]) - 1.0, float(_LOG[counts.last]) + 4.0
    spreads = [float(each) for each in np.log(_SPREADS)]
    medians, widths, best = (low, high), (spreads[0], spreads[1]), (low, spreads[0])
    for size in _SIZES:
        median, spread = _lattice(np.linspace(*medians, size), np.linspace(*widths, size))
        terms = counts.terms(name, median, np.exp(spread))
        at = int(np.argmax(counts.of_tail(terms) if of_tail else counts.whole(terms)))
        best = float(median[at]), float(spread[at])
        steps = [(edge[1] - edge[0]) / (size - 1) for edge in (medians, widths)]
        medians, widths = ((place - step, place + step) for place, step in zip(best, steps, strict=True))
    law = Law(name, float(np.exp(best[0])), float(np.exp(best[1])))
    terms = counts.terms(name, np.array([best[0]]), np.array([law.spread]))
    return _Climbed(law, float(counts.whole(terms)[0]), float(counts.of_tail(terms)[0]))


def _lattice(one: Any, other: Any) -> tuple[Any, Any]:
    first, second = np.meshgrid(one, other)
    return first.ravel(), second.ravel()


def resampled(counts: Counts, law: Law, finished: Any, censored: Any) -> tuple[Any, Any]:
    """The law as other samples would have fitted it (counts of shape (samples, buckets)), as curves on `BOUNDS`, shape
    (samples, buckets); and the logarithm of each sample's likelihood."""
    median, spread = _around(counts, law)
    score = counts.whole(counts.terms(law.name, median, spread), finished, censored)
    known, place = np.unique(np.argmax(score, axis=0), return_inverse=True)
    return survival(law.name, median[known], spread[known], _LOG)[place], score.max(axis=0)


def _around(counts: Counts, law: Law) -> tuple[Any, Any]:
    """Medians (their logarithms) and spreads near the law's, as far as chance may move them."""
    at = np.log([law.median_s, law.spread])
    step = np.array([0.1 * law.spread, 0.1])
    moves = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)], float)
    points = at + moves * step
    terms = counts.terms(law.name, points[:, 0], np.exp(points[:, 1]))
    score = counts.whole(terms)
    one = score[1] - 2 * score[0] + score[2]
    other = score[3] - 2 * score[0] + score[4]
    both = (score[5] - score[1] - score[3] + 2 * score[0] - score[2] - score[4] + score[6]) / 2
    bend = -np.array([[one, both], [both, other]])
    values, axes = np.linalg.eigh(bend)
    reach = axes / np.sqrt(np.maximum(values, 1e-3))
    first, second = _lattice(_ERRORS, _ERRORS)
    found = at + (np.stack([first, second], axis=1) @ reach.T) * step
    return found[:, 0], np.exp(np.clip(found[:, 1], *np.log(_SPREADS)))
