"""How long the work of one queue and type takes, and what a policy for its leases costs (prices.py). Without Spark.

Strategy: the survival curve comes from a histogram of leases. A crash is censored not at the lease's end but where it
happened: between the last sign of life and the moment when the next was due. Its place in that interval follows from
the curve itself (the attempt had not finished yet), so the code alternates between curve and crashes. In the same way
it decides whether an attempt whose lease runs on at the history's end is still working or has crashed. A law (laws.py)
is used beyond the curve's reach, and where few attempts are left, if it agrees with the curve.

Curves are arrays of shape (..., LAST + 1): many at a time, for confidence intervals.

Source: Kaplan and Meier 1958; Greenwood 1926; Brookmeyer and Crowley 1982; Mantel 1966 (log-rank test).
"""

from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.pipeline.estimates import laws
from veilmq.pipeline.estimates.buckets import (
    AGAIN,
    AGAIN_CRASHED,
    AGAIN_DONE,
    BOUNDS,
    CRASHED,
    DONE,
    LAST,
    LATER,
    MIDDLES,
    STOPPED,
    WATCHED,
    bucket_of,
    on_scale,
)
from veilmq.pipeline.estimates.tails import Tail, tail_of

AT_RISK_MIN: Final = 10.0
"""A point of the curve needs at least this many attempts under way."""
_FEW: Final = 0.1
"""And no fewer than this share of those under way when the last one finished."""
_AT_RISK_GOOD: Final = 200.0
"""With fewer attempts under way, a law that fits is better than the curve."""
FINISHED_MIN: Final = 30.0
"""With fewer finished attempts, nothing is recommended."""
_CUT_OFF: Final = 0.5
"""Fewer censored attempts than this count as none."""
_PLACINGS: Final = 8
_AGREES: Final = 3.5
"""Standard errors by which a fit may differ from the curve at any point."""
_COARSE: Final = 0.01
"""Share by which it may differ, too, for the error of the buckets themselves."""
RESAMPLES: Final = 120
_AGAIN_MIN: Final = 10
_LIKELY: Final = 2.58
"""Standard errors that chance exceeds once in a hundred times."""
_CONFIDENT: Final = 1.96
_UNLIKELY: Final = 0.025
_ROUNDING: Final = 1e-12
_SILENT_MIN: Final = 0.05
_SILENT_AGAIN: Final = 0.9
_REACHES: Final = 1 / 6
"""What `silent_were` asks for."""
_BUCKET: Final = float(np.sqrt(BOUNDS[1] / BOUNDS[0]))
"""From the middle of a bucket to its end."""


class Sample(NamedTuple):
    """Leases of one queue and type by bucket, as numpy arrays of `LAST + 1`."""

    finished: Any
    censored: Any
    """Alive then, and not heard of again for a reason that says nothing about the work; includes crashes once
    placed."""
    crashes: float
    """Includes, by their probability, attempts under way at the history's end."""
    exposure_s: float
    """Seconds that workers worked, in total."""

    @property
    def crashes_per_second(self) -> float:
        """0 if none was seen."""
        return self.crashes / self.exposure_s if self.exposure_s > 0 else 0.0


def silent_were(rows: Any) -> str | None:
    """What leases count as that ran out without a sign of their worker, and were never extended, from histogram rows:
    `crashes`, or `slow` work that nobody reported; None: there are none.

    `slow` only if no crashes, at whatever steady rate, look like that: no worker was heard of after its lease; of the
    messages that came back nearly all ran out so again; and a good part of the work ends in the second half of a
    lease. Workers that crash so often would seldom get that far.
    """
    plain = rows[(rows.ended == CRASHED) & (rows.bucket == 0)]
    if plain.empty:
        return "crashes" if (rows.ended == CRASHED).any() else None
    later, done = rows[rows.ended.isin(LATER)], rows[rows.ended == DONE]
    silent, again = float(plain.leases.sum()), float(later.leases.sum())
    firsts = float(rows.leases.sum()) - again
    is_over = rows.ended.isin((DONE, STOPPED, AGAIN, AGAIN_DONE)) & (rows.renewals < rows.leases)
    if (
        silent < _SILENT_MIN * firsts
        or not again
        or (rows.redone > 0).any()
        or (is_over & (rows.bucket > rows.lease)).any()
    ):
        return "crashes"
    half_s = float((BOUNDS[plain.until.to_numpy()] * plain.leases).sum()) / silent / 2
    near = float(done.leases[done.held_s > half_s * done.leases].sum())
    share = _at_least(float(later.leases[later.ended == AGAIN_CRASHED].sum()), again)
    return "slow" if share >= _SILENT_AGAIN and near >= _REACHES * silent else "crashes"


def _at_least(found: float, of: float) -> float:
    """The lower end of a share's 95 % interval (Wilson)."""
    z2 = _CONFIDENT**2
    share = found / of
    spread = (z2 * (share * (1 - share) / of + z2 / (4 * of * of))) ** 0.5
    return float((share + z2 / (2 * of) - spread) / (1 + z2 / of))


def sample_of(rows: Any, silent: str | None = None) -> Sample:
    """From histogram rows (a pandas frame with the columns of `buckets.SCHEMA`).

    silent: what leases without a sign count as, if not what `silent_were` finds.
    """
    if (silent or silent_were(rows)) == "slow":
        is_slow = (rows.ended == CRASHED) & (rows.bucket == 0)
        rows = rows.assign(
            ended=rows.ended.where(~is_slow, STOPPED),
            bucket=rows.bucket.where(~is_slow, rows.until),
            held_s=rows.held_s.where(~is_slow, rows.leases * BOUNDS[rows.until.to_numpy()]),
        )
    finished, stopped = np.zeros(LAST + 1), np.zeros(LAST + 1)
    for ended, into in ((DONE, finished), (STOPPED, stopped)):
        part = rows[rows.ended == ended]
        np.add.at(into, part.bucket.to_numpy(), part.leases.to_numpy())
    unknown = rows[rows.ended.isin((CRASHED, WATCHED))]
    exposure = float(rows[rows.ended.isin((DONE, STOPPED))].held_s.sum())
    if unknown.empty:
        return Sample(finished, stopped, 0.0, exposure)
    renewals = float(rows.renewals.sum())
    share = min(float(rows.renewed_share.sum()) / renewals, 1.0) if renewals else 1.0
    count = unknown.leases.to_numpy()
    alive = unknown.held_s.to_numpy() / count
    place = unknown.until.to_numpy()
    watched = (unknown.ended == WATCHED).to_numpy()
    until = np.where(watched, MIDDLES[place], alive + share * (BOUNDS[place] - alive))
    until = np.maximum(until, alive * 1.0001 + 1e-3)
    return _with_crashes(finished, stopped, alive, until, count, watched, exposure)


def doubted(rows: Any) -> "Curve | None":
    """The curve if all attempts whose lease runs on had crashed; None unless crashes and long work look alike.

    They look alike where leases outlast the history and none has expired in it. Work takes at least as long as this
    curve.
    """
    watched = rows.ended == WATCHED
    if not watched.any() or (rows.ended == CRASHED).any():
        return None
    return Curve(sample_of(rows.assign(ended=rows.ended.where(~watched, CRASHED))))


def length_of(rows: Any) -> tuple[str | None, float | None]:
    """Whose the length of work is, from histogram rows: `message` if messages that were received again take longer than
    others, else `attempt`; None: too few were. And the median if each lease counted (None: nobody knows)."""
    done, cut, done_again, cut_again = (np.zeros(LAST + 1) for _ in range(4))
    for ended, into in ((DONE, done), (AGAIN_DONE, done_again), (AGAIN, cut_again), (AGAIN_CRASHED, cut_again)):
        part = rows[rows.ended == ended]
        np.add.at(into, part.bucket.to_numpy(), part.leases.to_numpy())
    others = rows[~rows.ended.isin((DONE, *LATER))]
    np.add.at(cut, others.bucket.to_numpy(), others.leases.to_numpy())
    median = _within(kaplan_meier(done + done_again, cut + cut_again)[:LAST], 0.5)
    if done_again.sum() < _AGAIN_MIN:
        return None, median
    at_risk, again = (np.cumsum(each[::-1])[::-1] for each in (done + cut, done_again + cut_again))
    every, over = at_risk + again, done + done_again
    several = every > 1
    share = again[several] / every[several]
    expected = over[several] * share
    left = (every[several] - over[several]) / (every[several] - 1)
    spread = float((expected * (1 - share) * left).sum())
    fewer = float((expected - done_again[several]).sum())
    return "message" if spread > 0 and fewer / spread**0.5 > _LIKELY else "attempt", median


def _with_crashes(
    finished: Any, stopped: Any, alive: Any, until: Any, count: Any, watched: Any, exposure: float
) -> Sample:  # fmt: skip
    """Spread each crash over the interval in which it happened, in proportion to the attempts alive; for watched
    attempts, count the share that did not live to the end."""
    end = bucket_of(until)
    low, upper = np.concatenate([[0.0], BOUNDS[:-1]]), np.append(BOUNDS[:-1], np.inf)
    overlap = np.clip(np.minimum(until[:, None], upper) - np.maximum(alive[:, None], low), 0, None)
    inside = np.clip((np.minimum(until[:, None], upper) + np.maximum(alive[:, None], low)) / 2, 0, None)
    censored, rate = stopped, 0.0
    crashes, worked = 0.0, exposure
    for _ in range(_PLACINGS):
        there = kaplan_meier(*on_scale(finished, censored))
        before = np.concatenate([[1.0], there[:-1]])
        density = overlap * ((there + before) / 2 + 1e-12) * np.exp(-rate * MIDDLES)
        lives = np.where(watched, (there[end] + 1e-12) * np.exp(-rate * until), 0.0)
        density *= np.where(watched, rate, 1.0)[:, None]
        scale = count / (density.sum(axis=1) + lives)
        density, lives = density * scale[:, None], lives * scale
        censored = stopped + density.sum(axis=0)
        np.add.at(censored, end, lives)
        crashes = float(density.sum())
        worked = exposure + float((density * inside).sum() + (lives * until).sum())
        rate = crashes / worked
    return Sample(finished, censored, crashes, worked)


def kaplan_meier(finished: Any, censored: Any) -> Any:
    """The probability to take longer than each bucket's upper bound. Arrays of shape (..., LAST + 1)."""
    left = finished + censored
    at_risk = np.flip(np.cumsum(np.flip(left, -1), -1), -1)
    exposed = np.maximum(at_risk - censored / 2, finished)
    hazard = np.divide(finished, exposed, out=np.zeros_like(exposed), where=exposed > 0)
    return np.cumprod(1 - hazard, axis=-1)


class Quantile(NamedTuple):
    """Seconds within which a share of the messages finishes, and the 95 % interval."""

    seconds: float | None
    """None: nobody knows; `low` or more."""
    low: float
    high: float | None
    """None: longer than anything that was seen."""
    basis: str
    """`curve`, the name of a law, or `at least`."""


class Curve:
    """A survival curve with its reach, its error and, if one fits, the law behind it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.done, self.cut = finished, censored = on_scale(sample.finished, sample.censored)
        self.alive = kaplan_meier(finished, censored)
        self.at_risk = at_risk = np.flip(np.cumsum(np.flip(finished + censored)))
        exposed = np.maximum(at_risk - censored / 2, finished)
        left = np.maximum(exposed - finished, 1e-9)
        steps = np.divide(finished, exposed * left, out=np.zeros_like(exposed), where=(finished > 0) & (left > 0.5))
        self._ends = np.flatnonzero((finished > 0) & (left <= 0.5))
        self._spread = np.sqrt(np.cumsum(steps))
        self.error = self.alive * self._spread
        rests = np.flatnonzero(at_risk[:LAST] >= AT_RISK_MIN)
        self.last = int(rests[-1]) if len(rests) else -1
        self.comes_down = self.last >= 0 and float(sample.censored[self.last + 1 :].sum()) < _CUT_OFF
        """No attempt beyond was censored: the curve comes down to its end, or to the end of the scale."""
        if self.comes_down:
            self.last = min(int(np.flatnonzero(finished + censored)[-1]), LAST - 1)
        several = len(np.flatnonzero(finished)) > 1 and self.finished >= FINISHED_MIN
        self._counts = laws.Counts(finished, censored, self.alive, self.error) if several else None
        found = [] if self._counts is None else laws.fitted(self._counts)
        self.laws = [each for each in found if self._agrees(each)]
        """Those that agree with the curve, the likeliest tail first."""

    @property
    def law(self) -> "laws.Law | None":
        """The likeliest law, if one agrees."""
        return self.laws[0] if self.laws else None

    @property
    def finished(self) -> float:
        """Attempts with an exactly known time."""
        return float(self.sample.finished.sum())

    @property
    def attempts(self) -> float:
        """All attempts."""
        return float(self.sample.finished.sum() + self.sample.censored.sum())

    @property
    def reach_s(self) -> float:
        """Seconds up to which the curve rests on observed attempts; 0: none observed."""
        return float(BOUNDS[self.last]) if self.last >= 0 else 0.0

    def _agrees(self, law: laws.Law) -> bool:
        bound = np.flatnonzero(self.done[: self.last + 1] > 0)
        expected = law.alive()[bound]
        # At its end the curve's error seems to be 0; the law itself gives the error of that many attempts.
        error = np.maximum(self.error[bound], np.sqrt(expected * (1 - expected) / self.attempts))
        apart = np.abs(self.alive[bound] - expected)
        return bool(len(bound)) and bool(np.all(apart <= _AGREES * error + _COARSE * expected))

    def quantile(self, share: float) -> Quantile:
        """By the curve where it rests on many attempts or no law fits. The interval is the curve's (Greenwood's on the
        scale of log(-log), inverted as Brookmeyer and Crowley do) unless its upper end is unknown: then it ends where
        the laws that fit other samples do."""
        wanted = 1 - share
        value = _within(self.alive[: self.last + 1], wanted)
        low, high = (_within(each[: self.last + 1], wanted) for each in self.between)
        low = self.reach_s if low is None else low
        if value is not None:
            # No finer than a bucket: a law may end within one.
            low, high = min(low, value / _BUCKET), high and max(high, value * _BUCKET)
        by_law = None if self.law is None else _within(self.extended(), wanted)
        if self.law is None or by_law is None or (value and self.at_risk[bucket_of(value)] >= _AT_RISK_GOOD):
            return Quantile(value, low, high, "at least" if value is None else "curve")
        if high is None:
            several = [_within(each, wanted) or float(BOUNDS[-1]) for each in self.resampled[0]]
            ends = np.quantile(np.reshape(several, (len(self.laws), RESAMPLES)), [_UNLIKELY, 1 - _UNLIKELY], axis=1)
            low, high = min(low, float(ends[0].min())), float(ends[1].max())
            high = None if high >= BOUNDS[-1] else high  # a law does not come down on the scale
        return Quantile(by_law, min(low, by_law), high and max(high, by_law), self.law.name)

    @cached_property
    def between(self) -> tuple[Any, Any]:
        """The lower and the upper end of the curve's 95 % interval."""
        with np.errstate(divide="ignore", invalid="ignore"):
            width = np.exp(_CONFIDENT * self._spread / -np.log(np.clip(self.alive, 1e-300, 1 - 1e-12)))
        # Before the first message finished and after the last, the binomial law alone says what may be.
        first = _UNLIKELY ** (1 / max(self.attempts, 1.0))
        low = np.where(self.alive >= 1, first, self.alive**width)
        high = np.where(self.alive >= 1, 1.0, self.alive ** (1 / width))
        if len(self._ends):
            end = int(self._ends[0])
            before = high[end - 1] if end else 1.0
            low[end:], high[end:] = 0.0, before * (1 - _UNLIKELY ** (1 / max(float(self.at_risk[end]), 1.0)))
        return low, np.minimum.accumulate(high)

    @property
    def resampled(self) -> tuple[Any, Any]:
        """Curves and numbers of crashes, as other messages might have shown them; of shape (n, LAST + 1) and (n,) for n
        of `RESAMPLES` times the number of laws, or once if there is none.

        A bootstrap by message (each counts a number of times, by Poisson's law). The same history gives the same
        samples.
        """
        return self._resampled[:2]

    @cached_property
    def chosen(self) -> tuple[Any, Any]:
        """The same, `RESAMPLES` in any case: each sample's curve follows the law that is its likeliest.

        Source: Buckland, Burnham and Augustin 1997 (a law counts as often as other samples would choose it).
        """
        curves, crashes, scores = self._resampled
        at = np.arange(RESAMPLES)
        return curves[np.argmax(scores, axis=0) * RESAMPLES + at], crashes[at]

    @cached_property
    def _resampled(self) -> tuple[Any, Any, Any]:
        finished, censored, crashes = self._drawn
        alive = kaplan_meier(finished, censored)
        if self._counts is None or not self.laws:
            alive[:, max(self.last, 0) :] = alive[:, self.last : self.last + 1] if self.last >= 0 else 1.0
            return alive, crashes, np.zeros((1, RESAMPLES))
        curves, scores = zip(*(laws.resampled(self._counts, law, finished, censored) for law in self.laws), strict=True)
        every = np.concatenate([self._followed(alive, law) for law in curves])
        return every, np.tile(crashes, len(curves)), np.array(scores)

    @cached_property
    def _drawn(self) -> tuple[Any, Any, Any]:
        """Messages that finished and that were cut off, by bucket, and crashes, in each other sample."""
        random = np.random.default_rng(4)
        finished, censored = (
            random.poisson(each, (RESAMPLES, LAST + 1)).astype(float) for each in (self.done, self.cut)
        )
        return finished, censored, random.poisson(self.sample.crashes, RESAMPLES)

    def extended(self) -> Any:
        """The survival at all bounds: the curve while it rests on many attempts, then the law's if it fits.

        Without a law, the curve within its reach and level beyond.
        """
        alive = self.alive.copy()
        if self.last < 0:
            return np.ones_like(alive)
        if self.law is not None:
            return self._followed(alive, self.law.alive())
        alive[self.last :] = alive[self.last]
        return alive

    def ended(self) -> Any:
        """The same, as if all work that went on beyond the reach had ended there; with a law that fits, the law."""
        alive = self.extended()
        if self.law is None and self.last >= 0:
            alive[self.last :] = 0.0
        return alive

    def continued(self) -> Any:
        """`extended`, but where no law fits the curve falls on beyond its reach as it did among its last messages
        (tails.py): for prices, not for planning."""
        return self._falling(self.alive, self.done, self.cut, self.extended())

    @cached_property
    def resampled_continued(self) -> Any:
        """The curves of `resampled`, continued so. Where nobody knows how they do, half of them end at the reach."""
        finished, censored, _ = self._drawn
        curves = self._falling(kaplan_meier(finished, censored), finished, censored, self.resampled[0])
        if self._tail is None or self._tail.agrees:
            return curves
        ended = self.resampled[0].copy()
        ended[:, self.last :] = 0.0
        return np.concatenate([curves, ended])

    @property
    def chosen_continued(self) -> Any:
        """The curves of `chosen`, continued so."""
        return self.chosen[0] if self._tail is None else self.resampled_continued[:RESAMPLES]

    @cached_property
    def _tail(self) -> Tail | None:
        """None: a law goes on instead, there are too few messages, or the curve comes down to its end and a Pareto law
        contradicts that."""
        if self.law is not None or self.finished < FINISHED_MIN or self.last < 0:
            return None
        tail = tail_of(self.done, self.cut)
        is_down = self.comes_down and float(self.alive[self.last]) * self.attempts <= 1
        return tail if tail.agrees or not is_down else None

    def _falling(self, alive: Any, finished: Any, censored: Any, otherwise: Any) -> Any:
        """Curves that follow the tail from where few attempts are under way; `otherwise` where there is none. Few are
        also crashes that may have happened after an age at which all other work was cut off."""
        if self._tail is None:
            return otherwise
        under_way = float(self.at_risk[np.flatnonzero(self.done)[-1]])
        rests = np.flatnonzero(self.at_risk[:LAST] >= max(AT_RISK_MIN, _FEW * under_way))
        if not len(rests):
            return otherwise
        place = int(rests[-1])
        fall = np.exp(-self._tail.fall(finished, censored)[..., None] * np.arange(LAST + 1 - place))
        return np.concatenate([alive[..., :place], alive[..., place : place + 1] * fall], axis=-1)

    def _followed(self, alive: Any, law: Any) -> Any:
        """Curves that follow laws from where few attempts are under way; both of shape (..., LAST + 1)."""
        many = np.flatnonzero(self.at_risk >= _AT_RISK_GOOD)
        place = int(many[-1]) if len(many) else 0
        after = alive[..., place : place + 1] * law[..., place:] / np.maximum(law[..., place : place + 1], 1e-300)
        return np.concatenate([alive[..., :place], after], axis=-1)


def _within(alive: Any, wanted: float) -> float | None:
    """Seconds until the curve is down at `wanted`, linear in the logarithm of time; None if it never is."""
    below = np.flatnonzero(alive <= wanted + _ROUNDING)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0:
        return float(BOUNDS[0])
    part = (alive[at - 1] - wanted) / max(alive[at - 1] - alive[at], 1e-300)
    return float(BOUNDS[at - 1] * (BOUNDS[at] / BOUNDS[at - 1]) ** part)
