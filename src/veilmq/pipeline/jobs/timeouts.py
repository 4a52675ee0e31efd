"""`timeouts`: recommends lease lengths per queue and message type, and computes the cost of today's.

Strategy: compute the curve and crash rate from a group's histogram and run the client's own planner
(veilmq.estimate.schedule) on them, so that the recommendation is what AdaptiveTimeout would arrive at. There are two
answers: a plain timeout for workers that never extend, and a first lease with a renewal interval for those that do.
Each cost comes with its 95 % interval from resampled histograms. Where the best timeout depends on durations that were
never observed, the answer is "at least": the best timeout if all work ended at the curve's reach. A cost goes beyond
the reach as the last messages do (`Curve.continued`); the choice of a lease does not. No plain timeout is recommended
under which more than `TWICE_MAX` of the messages are started again, however cheap it is: their first worker's delete is
refused, and those that always take so long are never done. Where none is long enough, there is a note instead. Deleted
queues get no recommendation (`queue_lives`, `without_deleted`): the durations of their work remain valid, but nobody
needs a lease for them. A queue is identified by its name, so one that is deleted and created again keeps all that was
learnt.

Source: docs/patterns/adaptive-timeout.md; document 003 of docs/from-the-documents.md.
"""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, Final

from veilmq.estimate import TWICE_MAX
from veilmq.pipeline.estimates.buckets import GROUP, by_group, histogram

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.estimate.schedule import Costs, Schedule
    from veilmq.pipeline.estimates import Curve, Sample


SCHEMA: Final = (
    "account string, region string, queue string, type string, attempts double, finished double,"
    " crashes_per_second double, reach_s double, basis string, today_lease_s double, today_renewed boolean,"
    " today_cost double, today_redelivered double, today_recovery_s double, timeout_s double, timeout_low_s double,"
    " timeout_high_s double, timeout_at_least_s double, timeout_cost double, timeout_cost_low double,"
    " timeout_cost_high double, timeout_redelivered double, timeout_recovery_s double,"
    " first_lease_s double, first_lease_low_s double, first_lease_high_s double, renew_after_s double,"
    " renew_after_low_s double, renew_after_high_s double, margin_s double, cost double, cost_low double,"
    " cost_high double, redelivered double, recovery_s double, extensions double, silent_were string, note string"
)
CURVE_SCHEMA: Final = (
    "account string, region string, queue string, type string, timeout_s double, redelivered double, low double,"
    " high double, recovery_s double, cost double, within_reach boolean"
)
TIMEOUT_SHORTEST_S: Final = 1.0
LEASE_LONGEST_S: Final = 43_200.0
_PLANNED: Final = 12
"""So many other samples get a schedule of their own: that takes some milliseconds each."""
_STUDENT: Final = 2.2
"""Standard deviations of an interval that covers the truth in 95 of 100 cases, if estimated from so many samples."""
_RATES: Final = 500
"""Rates of crashes looked at on each side of the likeliest."""
_AWAY: Final = 4.0
"""No other sample's best timeout is looked for further away than by this factor."""
_NEAR: Final = 1.05
"""Costs within this factor count as equal; the shortest such timeout is chosen."""
QUEUE: Final = ("account", "region", "queue")
"""Columns that identify a queue."""
LIFE_KINDS: Final = ("queue_created", "queue_deleted")
"""The kinds of events that report it."""


def timeouts(leases: "DataFrame", costs: "Costs | None" = None) -> "DataFrame":
    """One row per queue and type; see `recommended`."""
    return recommended(histogram(leases), costs)


def recommended(cells: "DataFrame", costs: "Costs | None" = None) -> "DataFrame":
    """From a histogram, one row per queue and type; columns as in `SCHEMA`, costs and shares per attempt.

    attempts: messages, by their first lease. timeout_s: the best lease for workers that never extend; null with
    timeout_at_least_s where it is longer than what was seen, and timeout_low_s is then the low end of that; all null
    where none is long enough.
    first_lease_s, renew_after_s, margin_s: for those that do. Both leases and the renewal have a 95 % interval, by a
    bootstrap of the messages; a high of null is beyond what was seen. today_*: as leases were granted, extended or not.
    redelivered: started again under a living worker. recovery_s: from a crash to the next start, on the average.
    silent_were: as in `survival.quantiles`.
    basis: `curve`, a law's name (the tail is the fitted law's), `level` (beyond the reach nothing is known: the keeper
    goes on as if work there never ended), `too few`.
    """
    given = costs

    def plan(rows: Any) -> Any:
        import pandas as pd

        return pd.DataFrame([recommend(rows, given)])

    return by_group(cells, GROUP, plan, SCHEMA)


def redelivery_curve(cells: "DataFrame", costs: "Costs | None" = None) -> "DataFrame":
    """From a histogram: the effect of each plain timeout; columns as in `CURVE_SCHEMA`, only within the reach."""
    given = costs

    def curve(rows: Any) -> Any:
        return _curve(rows, given)

    return by_group(cells, GROUP, curve, CURVE_SCHEMA)


def rated(sample: "Sample", costs: "Costs | None") -> "Costs":
    """The costs with the observed crash rate, using the given one as a prior."""
    import msgspec

    from veilmq.estimate.schedule import Costs

    given = costs or Costs()
    rate = float(crash_rate(sample.crashes, sample.exposure_s, given.crashes_per_second))
    return msgspec.structs.replace(given, crashes_per_second=rate)


def crash_rate(crashes: Any, exposure_s: float, believed: float) -> Any:
    """The likeliest crashes per second for each number of crashes; shapes as `crashes`."""
    import numpy as np

    from veilmq.estimate.schedule import crash_rate

    return np.vectorize(lambda each: crash_rate(float(each), exposure_s, believed))(crashes)


def possible_rates(sample: "Sample", believed: float, number: int) -> Any:
    """So many crash rates (per second) that the seen crashes leave possible: draws from the posterior whose mode is
    `crash_rate`. The same sample gives the same draws.

    An interval of modes that other histories would have had is too narrow after few crashes: no history has fewer than
    none. Source: Gelman and others, Bayesian Data Analysis (2013), 2.6 (the Poisson model) and 10.3 (drawing from a
    grid).
    """
    import numpy as np

    from veilmq.estimate.schedule import RATE_PRIOR

    mode = float(crash_rate(sample.crashes, sample.exposure_s, believed))
    away = np.geomspace(1e-4, 10 * RATE_PRIOR, _RATES)  # in logarithms: fine where many crashes make it narrow
    logs = np.concatenate([-away[::-1], [0.0], away])
    expected = mode * sample.exposure_s
    prior = (np.log(mode) - np.log(max(believed, 1e-12)) + logs) ** 2 / (2 * RATE_PRIOR**2)
    likely = sample.crashes * logs - expected * np.exp(logs) - prior
    weights = np.exp(likely - likely.max()) * np.gradient(logs)
    shares = (np.cumsum(weights) - weights / 2) / weights.sum()
    # Spread evenly, in random order: few random ones miss the ends of an interval.
    spread = np.random.default_rng(5).permutation(number) / max(number - 1, 1)
    return mode * np.exp(np.interp(np.clip(spread, 0.5 / number, 1 - 0.5 / number), shares, logs))


def best_timeout(
    alive: Any, costs: "Costs", longest_s: float, *, near: float = 1.0, parts: Sequence[Any] = ()
) -> tuple[float, bool]:
    """The cheapest timeout up to `longest_s` that is long enough, and whether the true best may lie beyond.

    near: take the shortest timeout that costs at most this factor more. parts: curves for which it must be long enough,
    too.
    """
    import numpy as np

    from veilmq.pipeline.estimates.buckets import BOUNDS, bucket_of

    longest_s = max(longest_s, 2 * TIMEOUT_SHORTEST_S)
    usable = BOUNDS[bucket_of(TIMEOUT_SHORTEST_S) : bucket_of(longest_s) + 1]
    cost = _costs(alive, costs.crashes_per_second, costs, usable, parts)
    best = int(np.flatnonzero(cost <= near * cost.min())[0])
    return min(float(usable[best]), LEASE_LONGEST_S), best >= len(usable) - 2


def _costs(alive: Any, rates: Any, costs: "Costs", at: Any, parts: Sequence[Any] = ()) -> Any:
    """What each timeout costs, of shape (..., n). Infinite where it is too short for too many messages, but for the
    last one."""
    import numpy as np

    from veilmq.pipeline.estimates.prices import timeout_price

    left_out = is_too_short(alive, at)
    for each in parts:
        left_out = left_out | is_too_short(each, at)
    left_out[..., -1] = False
    return np.where(left_out, np.inf, timeout_price(alive, rates, at).cost(costs))


def is_too_short(alive: Any, timeouts: Any) -> Any:
    """Whether more than `TWICE_MAX` of the messages take longer; of shape (..., n), or one for one timeout."""
    import numpy as np

    from veilmq.pipeline.estimates.prices import at_bounds

    found = at_bounds(alive, np.atleast_1d(np.asarray(timeouts, float))) > TWICE_MAX
    return found if np.ndim(timeouts) else bool(found[..., 0])


def plan(alive: Any, costs: "Costs", margins: Sequence[float] | None = None) -> "Schedule":
    """The client's planner on one of our curves; margins: those to choose from, if not all."""
    import numpy as np

    from veilmq.estimate.schedule import MARGINS, plan_of
    from veilmq.pipeline.estimates.buckets import FINE

    shares = [float(each) for each in np.maximum(alive[::FINE], 1e-9)]
    return plan_of(shares, costs, longest=LEASE_LONGEST_S, margins=margins or MARGINS)


def recommend(rows: Any, given: "Costs | None") -> dict[str, Any]:
    import numpy as np

    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.estimates import FINISHED_MIN, RESAMPLES, Curve, doubted, sample_of, silent_were
    from veilmq.pipeline.estimates.buckets import names_of

    curve = Curve(sample_of(rows))
    costs = rated(curve.sample, given)
    row: dict[str, Any] = dict.fromkeys(part.split()[0] for part in SCHEMA.split(", "))
    row |= names_of(rows) | {
        "attempts": curve.attempts,
        "finished": curve.finished,
        "crashes_per_second": curve.sample.crashes_per_second,
        "reach_s": curve.reach_s,
        "basis": "too few",
        "silent_were": silent_were(rows),
    }
    if curve.finished < FINISHED_MIN:
        return row | {"note": f"{curve.finished:.0f} finished attempts: {FINISHED_MIN:.0f} are needed"}
    alive = curve.extended()
    row["basis"] = curve.law.name if curve.law else "level" if alive[-1] > 1e-3 else "curve"
    believed = (given or Costs()).crashes_per_second
    curves, crashes = curve.resampled
    resampled = curves, crash_rate(crashes, curve.sample.exposure_s, believed)
    curves = curve.resampled_continued
    rates = possible_rates(curve.sample, believed, RESAMPLES)
    priced = curves, np.tile(rates, len(curves) // RESAMPLES)
    plain = _plain(curve, resampled, priced, costs)
    if not plain:
        row["note"] = f"over {100 * TWICE_MAX:.0f} % take longer than any timeout: let workers extend"
    doubt = doubted(rows)
    if doubt is not None and "timeout_at_least_s" in plain:
        plain["timeout_at_least_s"] = min(plain["timeout_at_least_s"], _at_least(doubt, rated(doubt.sample, given)))
        plain["timeout_low_s"] = min(plain["timeout_low_s"], plain["timeout_at_least_s"])
    return row | _today(rows, curve, costs) | plain | _kept(curve, resampled, priced, costs)


def _today(rows: Any, curve: "Curve", costs: "Costs") -> dict[str, Any]:
    """Today's leases and their cost."""
    import numpy as np

    from veilmq.pipeline.estimates.prices import schedule_price, steady, timeout_price

    number = rows.groupby("lease").leases.sum()
    usual = rows[rows.lease == number.idxmax()]
    lease = float(usual.lease_s.sum() / usual.leases.sum())
    renewals = float(usual.renewals.sum())
    rate, alive = costs.crashes_per_second, curve.continued()
    if renewals:
        share = min(float(usual.renewed_share.sum()) / renewals, 0.99)
        price = schedule_price(alive, rate, steady(lease, lease * (1 - share)), costs)
        cost, twice, waits = float(price.cost(costs)), float(price.duplicates), float(price.recovery_s)
    else:
        price = timeout_price(alive, rate, np.array([lease]))
        cost, twice, waits = float(price.cost(costs)[0]), float(price.duplicates[0]), float(price.recovery_s[0])
    return {
        "today_lease_s": lease,
        "today_renewed": renewals > 0,
        "today_cost": cost,
        "today_redelivered": twice,
        "today_recovery_s": waits / crash_share(alive, rate),
    }


def _plain(curve: "Curve", resampled: tuple[Any, Any], priced: tuple[Any, Any], costs: "Costs") -> dict[str, Any]:
    """Empty if no timeout is long enough. resampled, priced: other samples' curves and rates of crashes, to plan with
    and for the costs."""
    import numpy as np

    from veilmq.pipeline.estimates import AT_RISK_MIN
    from veilmq.pipeline.estimates.buckets import bucket_of
    from veilmq.pipeline.estimates.prices import timeout_price

    alive = curve.extended()
    timeout, beyond = best_timeout(alive, costs, longest(curve))
    # A curve that came down to zero within its reach has nothing beyond.
    if beyond and curve.law is None and alive[-1] > 0:
        least_s = _at_least(curve, costs)
        if is_too_short(curve.ended(), least_s):
            return {}
        return {"timeout_at_least_s": least_s, "timeout_low_s": _lowest(curve, resampled, costs, least_s)}
    at = np.array([timeout])
    if is_too_short(alive, timeout):
        return {}
    alive = curve.continued()
    price = timeout_price(alive, costs.crashes_per_second, at)
    crash = crash_share(alive, costs.crashes_per_second)
    curves, rates = resampled
    shortest_s, longest_s = other_timeouts(curves, rates, costs, timeout, longest(curve))
    if curve.law is not None:  # it may be wrong: what the curve alone says is within the interval
        shortest_s = min(shortest_s, best_timeout(curve.alive, costs, curve.reach_s)[0])
    elif curve.at_risk[bucket_of(timeout)] < AT_RISK_MIN:
        longest_s = None  # no sample of these messages has longer work than they have
    return {
        "timeout_s": timeout,
        "timeout_low_s": shortest_s,
        "timeout_high_s": longest_s,
        **with_interval("timeout_cost", float(price.cost(costs)[0]), timeout_price(*priced, at).cost(costs)[..., 0]),
        "timeout_redelivered": float(price.duplicates[0]),
        "timeout_recovery_s": float(price.recovery_s[0]) / crash,
    }


def other_timeouts(
    curves: Any, rates: Any, costs: "Costs", timeout_s: float, longest_s: float
) -> tuple[float, float | None]:
    """The interval of the best timeout: between which 95 of 100 other samples have theirs."""
    import numpy as np

    at = _around(timeout_s, longest_s)
    best = np.argmin(_costs(curves, rates, costs, at), axis=-1)
    shortest, longest = np.quantile(best, [0.025, 0.975])
    is_known = longest < len(at) - 1 or bool(np.all(curves[..., -1] == 0))
    # No finer than the timeouts that are looked at.
    low, high = at[max(int(shortest) - 1, 0)], at[min(int(np.ceil(longest)) + 1, len(at) - 1)]
    return float(low), float(high) if is_known else None


def _around(timeout_s: float, longest_s: float) -> Any:
    """Timeouts near this one, and it."""
    import numpy as np

    from veilmq.pipeline.estimates.buckets import BOUNDS, FINE

    place = np.arange(np.argmin(np.abs(BOUNDS - timeout_s)) % FINE, len(BOUNDS), FINE)
    first, last = max(timeout_s / _AWAY, TIMEOUT_SHORTEST_S), min(timeout_s * _AWAY, longest_s)
    return BOUNDS[place][(BOUNDS[place] >= first) & (BOUNDS[place] <= max(last, timeout_s * 1.01))]


def _at_least(curve: "Curve", costs: "Costs") -> float:
    """The best timeout if no work took longer than observed."""
    return best_timeout(curve.ended(), costs, longest(curve), near=_NEAR)[0]


def _lowest(curve: "Curve", resampled: tuple[Any, Any], costs: "Costs", least_s: float) -> float:
    """Above it are those of 97.5 of 100 other samples."""
    import numpy as np

    curves, rates = resampled
    ended = curves.copy()
    ended[..., curve.last :] = 0.0
    at = _around(least_s, longest(curve))
    cost = _costs(ended, rates, costs, at)
    best = np.argmax(cost <= _NEAR * cost.min(axis=-1, keepdims=True), axis=-1)
    # No finer than the timeouts that are looked at.
    return min(float(at[max(int(np.quantile(best, 0.025)) - 1, 0)]), least_s)


def longest(curve: "Curve") -> float:
    """No timeout beyond it is looked at."""
    return LEASE_LONGEST_S if curve.law else min(curve.reach_s, LEASE_LONGEST_S)


def _kept(curve: "Curve", resampled: tuple[Any, Any], priced: tuple[Any, Any], costs: "Costs") -> dict[str, Any]:
    from veilmq.estimate.schedule import STEP_MIN
    from veilmq.pipeline.estimates.prices import schedule_price

    rate, alive = costs.crashes_per_second, curve.continued()
    schedule = plan(curve.extended(), costs)
    price = schedule_price(alive, rate, schedule, costs)
    others = schedule_price(*priced, schedule, costs).cost(costs)
    shortest, longest = _other_firsts(*resampled, costs, schedule)
    return {
        "first_lease_s": schedule.first,
        "first_lease_low_s": shortest,
        "first_lease_high_s": longest,
        "renew_after_s": schedule.first - schedule.margin,
        "renew_after_low_s": max(shortest - schedule.margin, STEP_MIN),
        "renew_after_high_s": longest - schedule.margin,
        "margin_s": schedule.margin,
        **with_interval("cost", float(price.cost(costs)), others),
        "redelivered": float(price.duplicates),
        "recovery_s": float(price.recovery_s) / crash_share(alive, rate),
        "extensions": float(price.extensions),
    }


def crash_share(alive: Any, rate: float) -> float:
    """The share of attempts that end in a crash (who is at work at the curve's end does, too)."""
    import numpy as np

    from veilmq.pipeline.estimates.buckets import BOUNDS
    from veilmq.pipeline.estimates.prices import areas_of

    areas, _ = areas_of(alive, rate)
    return max(rate * float(areas[-1]) + float(alive[-1] * np.exp(-rate * BOUNDS[-1])), 1e-12)


def _other_firsts(curves: Any, rates: Any, costs: "Costs", schedule: "Schedule") -> tuple[float, float]:
    """The interval of the first lease, by what a few other samples would have planned with that margin."""
    from math import log

    import msgspec
    import numpy as np

    from veilmq.estimate.survival import GROWTH

    places = np.linspace(0, len(curves) - 1, _PLANNED).astype(int)
    others = (msgspec.structs.replace(costs, crashes_per_second=float(rates[at])) for at in places)
    found = [plan(curves[at], each, [schedule.margin]).first for at, each in zip(places, others, strict=True)]
    # No finer than the planner's buckets.
    width = log(GROWTH) / 2 + _STUDENT * float(np.sqrt(np.mean(np.log(np.array(found) / schedule.first) ** 2)))
    return schedule.first * float(np.exp(-width)), min(schedule.first * float(np.exp(width)), LEASE_LONGEST_S)


def with_interval(name: str, value: float, others: Any) -> dict[str, float]:
    """A number, and between which 95 of 100 other samples have theirs: it is always within."""
    import numpy as np

    low, high = np.quantile(others, [0.025, 0.975])
    return {name: value, f"{name}_low": min(float(low), value), f"{name}_high": max(float(high), value)}


def _curve(rows: Any, given: "Costs | None") -> Any:
    import numpy as np
    import pandas as pd

    from veilmq.pipeline.estimates import FINISHED_MIN, Curve, sample_of
    from veilmq.pipeline.estimates.buckets import BOUNDS, FINE, names_of
    from veilmq.pipeline.estimates.prices import timeout_price

    curve = Curve(sample_of(rows))
    if curve.finished < FINISHED_MIN:
        return pd.DataFrame([], columns=[part.split()[0] for part in CURVE_SCHEMA.split(", ")])
    costs = rated(curve.sample, given)
    alive = curve.extended()
    last = min(4 * curve.reach_s if curve.law else curve.reach_s, LEASE_LONGEST_S)
    place = np.arange(0, len(BOUNDS), FINE // 2)
    place = place[(BOUNDS[place] >= TIMEOUT_SHORTEST_S) & (BOUNDS[place] <= max(last, 2 * TIMEOUT_SHORTEST_S))]
    at = BOUNDS[place]
    continued = curve.continued()
    price = timeout_price(continued, costs.crashes_per_second, at)
    low, high = (each[place] for each in curve.between)
    return pd.DataFrame(
        names_of(rows)
        | {
            "timeout_s": at,
            "redelivered": alive[place],
            "low": np.where(at <= curve.reach_s, np.minimum(low, alive[place]), 0.0),
            "high": np.maximum(high, alive[place]),
            "recovery_s": price.recovery_s / crash_share(continued, costs.crashes_per_second),
            "cost": price.cost(costs),
            "within_reach": at <= curve.reach_s,
        }
    )


def queue_lives(events: "DataFrame") -> "DataFrame":
    """One row per queue that was created or deleted in the events: `QUEUE`, and whether it is `deleted` after them."""
    from pyspark.sql import functions as F

    return (
        events.where(F.col("kind").isin(*LIFE_KINDS))
        .groupBy(*QUEUE)
        .agg((F.max_by("kind", "offset") == "queue_deleted").alias("deleted"))
    )


def without_deleted(rows: Any, deleted: Set[tuple[str, ...]]) -> Any:
    """The rows of a pandas frame that belong to other queues."""
    if not deleted or rows.empty:
        return rows
    return rows[[key not in deleted for key in rows[list(QUEUE)].itertuples(index=False, name=None)]]
