"""What a policy for leases costs, if work lasts as a curve says and workers crash at a rate. Without Spark.

Strategy: a policy is a plain timeout or a schedule of extensions. Its costs are the client's (`Costs`: a second of
recovery delay, a duplicate start, an extension), so that the pipeline and AdaptiveTimeout agree. An attempt is alive at
age t if its work takes longer and its worker has not crashed. Curves have the shape of the package's.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.estimate.schedule import Costs, Schedule
from veilmq.pipeline.estimates.buckets import BOUNDS, LAST, bucket_of

_ENDS_MAX: Final = 200
"""Lease ends considered per attempt."""
_ENDS_AT_ONCE: Final = 25
"""A numpy call costs as much for one as for some hundreds."""
_LOOKS_MAX: Final = 300
"""After this many, an attempt is extended at the same pace; how often follows from the area under the curve."""
_ALIVE_MIN: Final = 1e-7
_WIDTHS: Final = np.diff(BOUNDS, prepend=0.0)
_BEFORE: Final = np.concatenate([[0.0], BOUNDS[:-1]])


def at_bounds(alive: Any, seconds: Any) -> Any:
    """The curve interpolated between bounds: shape (..., LAST + 1) and times of shape (n,) give (..., n)."""
    place = np.clip(bucket_of(seconds), 1, LAST)
    part = np.clip(
        (np.log(np.maximum(seconds, 1e-9)) - np.log(BOUNDS[place - 1])) / np.log(BOUNDS[1] / BOUNDS[0]), 0, 1
    )
    found = alive[..., place - 1] * (1 - part) + alive[..., place] * part
    return np.where(np.asarray(seconds) <= BOUNDS[0], 1 - (1 - alive[..., :1]) * np.asarray(seconds) / BOUNDS[0], found)


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
    left = areas[..., -1] - area[..., -1]
    endless = alive[..., -1] * np.exp(-rates[..., 0] * max(BOUNDS[-1], at[-1]))
    with np.errstate(over="ignore"):
        # With crashes that frequent nobody lives to extend again; avoids zero times infinity.
        again = endless / np.expm1(np.maximum(rates[..., 0], 1e-9) * step)
    # What is left after the last look at the middle of its step, as a sum of such steps has half a step less.
    extensions = there.sum(-1) + np.maximum(left / step - there[..., -1] / 2, 0.0) + again
    too_late = costs.late_share * np.exp(-schedule.margin / costs.late_mean)
    crashed = rates[..., 0] * left + endless
    return Price(recovery.sum(-1) + crashed * (lease - step / 2), extensions * too_late, extensions)


def steady(lease: float, margin: float) -> Schedule:
    """The same lease at every age."""
    return Schedule((0.0,), (lease,), margin, 0.0)
