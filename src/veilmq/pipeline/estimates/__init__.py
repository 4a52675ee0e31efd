"""How long the work of one queue and type takes, and what a policy for its leases costs. Without Spark.

Strategy: the survival curve comes from a histogram of leases. A crash is censored not at the lease's end but where it
happened: between the last sign of life and the moment when the next was due. Its place in that interval follows from
the curve itself (the attempt had not finished yet), so the code alternates between curve and crashes. In the same way
it decides whether an attempt whose lease runs on at the history's end is still working or has crashed. The lognormal
fit maximises the likelihood of exact and censored times by EM; it is used beyond the curve's reach only if it agrees
with the curve within it.

A policy is a plain timeout or a schedule of extensions. Its costs are the client's (`Costs`: a second of recovery
delay, a duplicate start, an extension), so that the pipeline and AdaptiveTimeout agree. An attempt is alive at age t if
its work takes longer and its worker has not crashed. Curves are arrays of shape (..., LAST + 1): many at a time, for
confidence intervals.

Source: Kaplan and Meier 1958; Greenwood 1926; Dempster, Laird and Rubin 1977 (EM, with a censored normal as an
example).
"""

from math import erfc, sqrt
from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.estimate.schedule import Costs, Schedule
from veilmq.pipeline.estimates.buckets import BOUNDS, CRASHED, DONE, LAST, MIDDLES, STOPPED, WATCHED, bucket_of

AT_RISK_MIN: Final = 10.0
"""A point of the curve needs at least this many attempts under way."""
_AT_RISK_GOOD: Final = 200.0
"""With fewer attempts under way, a law that fits is better than the curve."""
FINISHED_MIN: Final = 30.0
"""With fewer finished attempts, nothing is recommended."""
_CUT_OFF: Final = 0.5
"""Fewer censored attempts than this count as none."""
_PLACINGS: Final = 8
_EM_STEPS_MAX: Final = 2_000
_EM_SETTLED: Final = 1e-7
_AGREES: Final = 4.0
"""Standard errors by which a fit may differ from the curve at any point."""
_COARSE: Final = 0.004
"""Additional tolerance for the error of the buckets themselves."""
_ERFC: Final = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807,
    -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip


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


def sample_of(rows: Any) -> Sample:
    """From histogram rows (a pandas frame with the columns of `buckets.SCHEMA`)."""
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


def _with_crashes(
    finished: Any, stopped: Any, alive: Any, until: Any, count: Any, watched: Any, exposure: float
) -> Sample:  # fmt: skip
    """Spread each crash over the interval in which it happened, in proportion to the attempts alive; for watched
    attempts, count the share that did not live to the end."""
    end = bucket_of(until)
    low = np.concatenate([[0.0], BOUNDS[:-1]])
    overlap = np.clip(np.minimum(until[:, None], BOUNDS) - np.maximum(alive[:, None], low), 0, None)
    inside = np.clip((np.minimum(until[:, None], BOUNDS) + np.maximum(alive[:, None], low)) / 2, 0, None)
    censored, rate = stopped, 0.0
    crashes, worked = 0.0, exposure
    for _ in range(_PLACINGS):
        there = kaplan_meier(finished, censored)
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


class Curve:
    """A survival curve with its reach, its error and, if it fits, the lognormal law behind it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        finished, censored = sample.finished, sample.censored
        self.alive = kaplan_meier(finished, censored)
        at_risk = np.flip(np.cumsum(np.flip(finished + censored)))
        self.at_risk = at_risk
        exposed = np.maximum(at_risk - censored / 2, finished)
        left = np.maximum(exposed - finished, 1e-9)
        steps = np.divide(finished, exposed * left, out=np.zeros_like(exposed), where=(finished > 0) & (left > 0.5))
        self.error = self.alive * np.sqrt(np.cumsum(steps))
        rests = np.flatnonzero(at_risk >= AT_RISK_MIN)
        self.last = int(rests[-1]) if len(rests) else -1
        if float(censored[self.last + 1 :].sum()) < _CUT_OFF and self.last >= 0:
            # No attempt beyond was censored: the curve comes down to its end.
            self.last = int(np.flatnonzero(finished + censored)[-1])
        self.law = lognormal_fit(finished, censored) if self.finished >= FINISHED_MIN else None
        self.fits = self.law is not None and self._agrees(self.law)

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

    def _agrees(self, law: tuple[float, float]) -> bool:
        bound = np.flatnonzero(self.sample.finished[: self.last + 1] > 0)
        expected = normal_survival(law, BOUNDS[bound])
        # At its end the curve's error seems to be 0; the law itself gives the error of that many attempts.
        error = np.maximum(self.error[bound], np.sqrt(expected * (1 - expected) / self.attempts))
        apart = np.abs(self.alive[bound] - expected)
        return bool(len(bound)) and bool(np.all(apart <= _AGREES * error + _COARSE))

    def quantile(self, share: float) -> tuple[float | None, str]:
        """Seconds within which that share finishes, and the basis: `curve`, `lognormal`; None: `at least`."""
        wanted = 1 - share
        below = np.flatnonzero(self.alive[: self.last + 1] <= wanted)
        if len(below) and (not self.fits or self.at_risk[below[0]] >= _AT_RISK_GOOD):
            return float(np.exp(_crossing(np.log(BOUNDS), self.alive, int(below[0]), wanted))), "curve"
        if self.fits and self.law is not None:
            return float(np.exp(_normal_quantile(self.law, wanted))), "lognormal"
        return None, "at least"

    def extended(self) -> Any:
        """The survival at all bounds: the curve while it rests on many attempts, then the law's if it fits.

        Without a law, the curve within its reach and level beyond.
        """
        alive = self.alive.copy()
        if self.last < 0:
            return np.ones_like(alive)
        if self.fits and self.law is not None:
            return self.followed(alive, *self.law)
        alive[self.last :] = alive[self.last]
        return alive

    def ended(self) -> Any:
        """The same, as if all work that went on beyond the reach had ended there; with a law that fits, the law."""
        alive = self.extended()
        if not self.fits and self.last >= 0:
            alive[self.last :] = 0.0
        return alive

    def followed(self, alive: Any, mean: Any, deviation: Any) -> Any:
        """Curves of shape (..., LAST + 1) that follow lognormal laws (shape ...) from where few attempts are under
        way."""
        many = np.flatnonzero(self.at_risk >= _AT_RISK_GOOD)
        place = int(many[-1]) if len(many) else 0
        tail = _tail((np.log(BOUNDS[place:]) - np.asarray(mean)[..., None]) / np.asarray(deviation)[..., None])
        tail = alive[..., place : place + 1] * tail / np.maximum(tail[..., :1], 1e-300)
        return np.concatenate([alive[..., :place], tail], axis=-1)


def _crossing(x: Any, alive: Any, at: int, wanted: float) -> float:
    """Where the curve passes `wanted` within bucket `at`, linear in the logarithm of time."""
    before = alive[at - 1] if at else 1.0
    low = x[at - 1] if at else x[0]
    part = (before - wanted) / max(before - alive[at], 1e-12)
    return float(low + part * (x[at] - low))


def at_bounds(alive: Any, seconds: Any) -> Any:
    """The curve interpolated between bounds: shape (..., LAST + 1) and times of shape (n,) give (..., n)."""
    place = np.clip(bucket_of(seconds), 1, LAST)
    part = np.clip(
        (np.log(np.maximum(seconds, 1e-9)) - np.log(BOUNDS[place - 1])) / np.log(BOUNDS[1] / BOUNDS[0]), 0, 1
    )
    found = alive[..., place - 1] * (1 - part) + alive[..., place] * part
    return np.where(np.asarray(seconds) <= BOUNDS[0], 1 - (1 - alive[..., :1]) * np.asarray(seconds) / BOUNDS[0], found)


def lognormal_fit(finished: Any, censored: Any) -> tuple[float, float] | None:
    """Mean and standard deviation of the logarithm of time, by EM; None if nothing can be fitted."""
    done, cut = np.flatnonzero(finished), np.flatnonzero(censored)
    number = float(finished.sum())
    total = number + float(censored.sum())
    if len(done) < 2:
        return None
    x, weight = np.log(MIDDLES[done]), finished[done]
    limit, weight_cut = np.log(MIDDLES[cut]), censored[cut]
    mean = float((weight * x).sum() / number)
    deviation = max(sqrt(float((weight * (x - mean) ** 2).sum() / number)), 1e-2)
    first, second = float((weight * x).sum()), float((weight * x * x).sum())
    for _ in range(_EM_STEPS_MAX):
        z = (limit - mean) / deviation
        hazard = _hazard(z)
        expected = mean + deviation * hazard
        squares = mean**2 + deviation**2 + deviation * hazard * (limit + mean)
        new_mean = (first + float((weight_cut * expected).sum())) / total
        variance = (second + float((weight_cut * squares).sum())) / total - new_mean**2
        new_deviation = sqrt(max(variance, 1e-6))
        moved = abs(new_mean - mean) + abs(new_deviation - deviation)
        mean, deviation = new_mean, new_deviation
        if moved < _EM_SETTLED:
            break
    return mean, deviation


def normal_survival(law: tuple[float, float], seconds: Any) -> Any:
    """1 - the distribution function of a lognormal law."""
    return _tail((np.log(seconds) - law[0]) / law[1])


def _normal_quantile(law: tuple[float, float], wanted: float) -> float:
    low, high = -40.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * erfc(middle / sqrt(2)) > wanted else (low, middle)
    return law[0] + law[1] * low


def _tail(z: Any) -> Any:
    """The normal distribution's upper tail; relative error below 2e-7 (Numerical Recipes, 2nd edition, erfcc)."""
    x = np.abs(z) / sqrt(2)
    t = 1 / (1 + 0.5 * x)
    series = np.zeros_like(t)
    for factor in _ERFC:
        series = factor + t * series
    upper = 0.5 * t * np.exp(np.clip(-x * x + series, -700, 700))
    return np.where(np.asarray(z) >= 0, upper, 1 - upper)


def _hazard(z: Any) -> Any:
    """Density over upper tail of the normal distribution."""
    density = np.exp(-np.clip(z * z / 2, 0, 700)) / sqrt(2 * np.pi)
    return np.where(z > 30, z, density / np.maximum(_tail(np.minimum(z, 30)), 1e-300))


_ENDS_MAX: Final = 200
"""Lease ends considered per attempt."""
_ENDS_AT_ONCE: Final = 25
"""A numpy call costs as much for one as for some hundreds."""
_LOOKS_MAX: Final = 300
"""After this many, an attempt is assumed to go on at the same pace until it crashes."""
_ALIVE_MIN: Final = 1e-7
_WIDTHS: Final = np.diff(BOUNDS, prepend=0.0)
_BEFORE: Final = np.concatenate([[0.0], BOUNDS[:-1]])


class Price(NamedTuple):
    """Averages per attempt. Arrays of one shape."""

    recovery_s: Any
    """Seconds that the message waits for a crashed worker's lease to end."""
    duplicates: Any
    """How often it is started again while its first worker lives."""
    extensions: Any

    def cost(self, costs: Costs) -> Any:
        """In the unit of `costs`."""
        return costs.recovery * self.recovery_s + costs.duplicate * self.duplicates + costs.extend * self.extensions


def areas_of(alive: Any, rate: Any) -> tuple[Any, Any]:
    """Areas up to each bound: under the curve of attempts alive and not crashed, and of age times that curve."""
    rate = np.asarray(rate, float)[..., None]
    there = alive * np.exp(-rate * BOUNDS)
    before = np.concatenate([np.ones_like(there[..., :1]), there[..., :-1]], -1)
    part = _WIDTHS * (there + before) / 2
    moment = _BEFORE * part + _WIDTHS**2 * (before + 2 * there) / 6
    return np.cumsum(part, -1), np.cumsum(moment, -1)


def _integral(sums: Any, seconds: Any) -> Any:
    """Integrals from 0 to each time, linear between the bounds."""
    place = np.clip(np.searchsorted(BOUNDS, seconds), 0, len(BOUNDS) - 1)
    before = np.where(place > 0, sums[..., np.maximum(place - 1, 0)], 0.0)
    part = np.clip((seconds - _BEFORE[place]) / _WIDTHS[place], 0, 1)
    return before + part * (sums[..., place] - before)


def timeout_price(alive: Any, rate: Any, timeouts: Any) -> Price:
    """Leases of `timeouts` seconds (shape (n,)) that are never extended; results of shape (..., n)."""
    timeouts = np.asarray(timeouts, float)
    areas, moments = areas_of(alive, rate)
    rates = np.asarray(rate, float)[..., None]
    recovery = rates * (timeouts * _integral(areas, timeouts) - _integral(moments, timeouts))
    duplicates = np.zeros_like(recovery)
    for first in range(1, _ENDS_MAX + 1, _ENDS_AT_ONCE):
        ends = np.outer(np.arange(first, first + _ENDS_AT_ONCE), timeouts).ravel()
        part = at_bounds(alive, ends) * np.exp(-rates * ends)
        part = part.reshape(*part.shape[:-1], _ENDS_AT_ONCE, len(timeouts))
        duplicates = duplicates + part.sum(axis=-2)
        if np.all(part[..., -1, :] < _ALIVE_MIN):
            break
    return Price(recovery, duplicates, np.zeros_like(recovery))


def schedule_price(alive: Any, rate: Any, schedule: Schedule, costs: Costs) -> Price:
    """Leases as in the schedule, extended its margin before their ends; results of shape (...)."""
    looks: list[float] = [0.0]
    leases: list[float] = []
    while len(leases) < _LOOKS_MAX and looks[-1] < BOUNDS[-1]:
        lease = schedule.lease_at(looks[-1])
        leases.append(lease)
        looks.append(looks[-1] + max(lease - schedule.margin, 0.5))
    worst = at_bounds(alive.reshape(-1, alive.shape[-1]).max(axis=0), np.array(looks[1:]))
    needed = 1 + int(np.argmax(worst < _ALIVE_MIN)) if worst.min() < _ALIVE_MIN else len(leases)
    looks, leases = looks[: needed + 1], leases[:needed]
    at = np.array(looks)
    ends = at[:-1] + np.array(leases)
    areas, moments = areas_of(alive, rate)
    rates = np.asarray(rate, float)[..., None]
    area, moment = _integral(areas, at), _integral(moments, at)
    recovery = rates * (ends * np.diff(area, axis=-1) - np.diff(moment, axis=-1))
    there = at_bounds(alive, at[1:]) * np.exp(-rates * at[1:])
    step, lease = at[-1] - at[-2], leases[-1]
    rate = np.maximum(np.asarray(rate, float), 1e-9)
    with np.errstate(over="ignore"):
        # With crashes that frequent nobody lives to extend again; avoids zero times infinity.
        extensions = there.sum(-1) + there[..., -1] / np.expm1(rate * step)
    too_late = costs.late_share * np.exp(-schedule.margin / costs.late_mean)
    return Price(recovery.sum(-1) + there[..., -1] * (lease - step / 2), extensions * too_late, extensions)


def steady(lease: float, margin: float) -> Schedule:
    """The same lease at every age."""
    return Schedule((0.0,), (lease,), margin, 0.0)
