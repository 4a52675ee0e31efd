"""`split`: recommends which message types should get queues of their own, and what that saves.

Strategy: sort the types of one queue by their mean logarithm of time; a split is a set of cuts in that order, and
dynamic programming finds the best: the least squares of log times within the parts, with a price of `QUEUE_FEE` per
further queue. The gain is expressed by timeouts: each part gets the plain timeout that is best for it, instead of the
best one for all together. Source: document 003, "use separate queues for different types of messages, where messages in
each queue take a similar amount of time".
"""

from math import log
from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.estimates.buckets import by_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.estimates import Curve
    from veilmq.pipeline.estimates.prices import Price

QUEUE_FEE: Final = log(3) ** 2 / 2
"""Two types deserve two queues when one takes three times as long as the other."""
TYPES_MAX: Final = 64
"""Types of one queue considered separately; rarer ones stay together."""
SCHEMA: Final = (
    "account string, region string, queue string, part int, parts int, types array<string>, attempts double,"
    " median_s double, median_low_s double, median_high_s double,"
    " timeout_s double, timeout_low_s double, timeout_high_s double, recovery_s double,"
    " together_timeout_s double, together_recovery_s double, together_cost double, split_cost double, gain double,"
    " gain_low double, gain_high double"
)


def split(cells: "DataFrame", costs: "Costs | None" = None) -> "DataFrame":
    """From a histogram, one row per proposed queue; columns as in `SCHEMA`.

    recovery_s and together_recovery_s: from a crash to the next start, with the part's own timeout and with the common
    one; together_cost and split_cost: per attempt of the whole queue, likewise; gain: the share of the cost that the
    split saves. One part: leave the queue as it is. The part's median, its timeout and the gain of these parts and
    timeouts have a 95 % interval (the last two by a bootstrap of the messages, and the gain's with crash rates from
    `possible_rates`); a high of null is beyond what was seen, and a median of null `median_low_s` or more.
    """
    given = costs

    def cut(rows: Any) -> Any:
        import pandas as pd

        found = _split(rows, given)
        return pd.DataFrame(found, columns=[part.split()[0] for part in SCHEMA.split(", ")])

    return by_group(cells, ("account", "region", "queue"), cut, SCHEMA)


def _split(rows: Any, given: "Costs | None") -> list[dict[str, Any]]:
    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.estimates import FINISHED_MIN, RESAMPLES, Curve, sample_of
    from veilmq.pipeline.jobs.timeouts import (
        crash_rate,
        crash_share,
        longest,
        other_timeouts,
        possible_rates,
        rated,
        with_interval,
    )

    rows = rows.assign(type=rows["type"].where(rows["type"].notna(), None))
    found = [
        (None if kind is None or kind != kind else kind, part) for kind, part in rows.groupby("type", dropna=False)
    ]
    samples = [(kind, sample_of(part)) for kind, part in found]
    samples = [(kind, each) for kind, each in samples if each.finished.sum() >= FINISHED_MIN]
    if not samples:
        return []
    samples.sort(key=lambda each: -each[1].finished.sum())
    samples = samples[:TYPES_MAX]
    samples.sort(key=lambda each: _mean_log(each[1]))
    curves = [Curve(sample) for _, sample in samples]
    whole = Curve(_together([sample for _, sample in samples]))
    costs = rated(whole.sample, given)
    cuts = _best_cuts([_mean_log(each) for _, each in samples])
    parts = [Curve(_together([each.sample for each in curves[low:high]])) for low, high in cuts]
    timeout = _best(whole, costs, parts)
    together = sum(float(_price(each, timeout, costs).cost(costs)) * each.attempts for each in parts)
    believed = (given or Costs()).crashes_per_second
    rates = crash_rate(whole.chosen[1], whole.sample.exposure_s, believed)
    priced = possible_rates(whole.sample, believed, RESAMPLES)
    first = rows.iloc[0]
    result: list[dict[str, Any]] = []
    other_costs: Any = 0.0
    for part, ((low, high), curve) in enumerate(zip(cuts, parts, strict=True)):
        own = _best(curve, costs)
        crash = crash_share(curve.continued(), costs.crashes_per_second)
        price, median = _price(curve, own, costs), curve.quantile(0.5)
        shortest_s, longest_s = other_timeouts(curve.chosen[0], rates, costs, own, longest(curve))
        other_costs = other_costs + curve.attempts * _costs(curve.chosen_continued, priced, costs, own, timeout)
        result.append(
            {name: first[name] for name in ("account", "region", "queue")}
            | {
                "part": part,
                "parts": len(cuts),
                "types": [kind for kind, _ in samples[low:high]],
                "attempts": curve.attempts,
                "median_s": median.seconds,
                "median_low_s": median.low,
                "median_high_s": median.high,
                "timeout_s": own,
                "timeout_low_s": shortest_s,
                "timeout_high_s": longest_s,
                "recovery_s": float(price.recovery_s) / crash,
                "together_timeout_s": timeout,
                "together_recovery_s": float(_price(curve, timeout, costs).recovery_s) / crash,
                "together_cost": together / whole.attempts,
                "cost": float(price.cost(costs)) * curve.attempts,
            }
        )
    cost = sum(each.pop("cost") for each in result)
    saved = {"gain": 0.0, "gain_low": 0.0, "gain_high": 0.0}
    if together > 0 and len(cuts) > 1:
        gains = 1 - other_costs[:, 0] / other_costs[:, 1]
        saved = with_interval("gain", max(1 - cost / together, 0.0), gains)
    return [each | {"split_cost": cost / whole.attempts} | saved for each in result]


def _mean_log(sample: Any) -> float:
    """The mean logarithm of the times of finished work."""
    import numpy as np

    from veilmq.pipeline.estimates.buckets import MIDDLES

    return float((sample.finished * np.log(MIDDLES)).sum() / sample.finished.sum())


def _costs(curves: Any, rates: Any, costs: "Costs", own: float, together: float) -> Any:
    """Costs per attempt of other samples, with the timeout of the part and with the common one; of shape (n, 2)."""
    import numpy as np

    from veilmq.pipeline.estimates.prices import timeout_price

    return timeout_price(curves, rates, np.array([own, together])).cost(costs)


def _best_cuts(logs: list[float]) -> list[tuple[int, int]]:
    """The parts of an ascending list with the least squares within, at a price of `QUEUE_FEE` for each part but the
    first."""
    best: list[tuple[float, list[tuple[int, int]]]] = [(-QUEUE_FEE, [])]
    for high in range(1, len(logs) + 1):
        ways = []
        for low in range(high):
            part = logs[low:high]
            mean = sum(part) / len(part)
            squares = sum((each - mean) ** 2 for each in part)
            ways.append((best[low][0] + squares + QUEUE_FEE, [*best[low][1], (low, high)]))
        best.append(min(ways))
    return best[-1][1]


def _together(samples: list[Any]) -> Any:
    from veilmq.pipeline.estimates import Sample

    return Sample(
        sum(each.finished for each in samples),
        sum(each.censored for each in samples),
        sum(each.crashes for each in samples),
        sum(each.exposure_s for each in samples),
    )


def _best(curve: "Curve", costs: "Costs", parts: "Sequence[Curve]" = ()) -> float:
    """parts: of the curve; the timeout must be long enough for each of them, too."""
    from veilmq.pipeline.jobs.timeouts import LEASE_LONGEST_S, best_timeout

    longest = LEASE_LONGEST_S if curve.law else min(curve.reach_s, LEASE_LONGEST_S)
    return best_timeout(curve.extended(), costs, longest, parts=[each.extended() for each in parts])[0]


def _price(curve: "Curve", timeout: float, costs: "Costs") -> "Price":
    import numpy as np

    from veilmq.pipeline.estimates.prices import Price, timeout_price

    found = timeout_price(curve.continued(), costs.crashes_per_second, np.array([timeout]))
    return Price(*(each[0] for each in found))
