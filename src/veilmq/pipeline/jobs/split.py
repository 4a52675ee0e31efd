"""`split`: which message types belong in queues of their own, and what that gains.

Strategy: types of one queue in the order of their mean logarithm of time; a split is cuts in that order, so the best
split into each number of queues follows by dynamic programming. A part's price is what its cheapest plain timeout costs
for all its attempts together: types that take alike can share a timeout, others pay for the longest. A further queue
must pay for itself (`QUEUE_SHARE_MIN` of the cost today). Source: seed 003, "use separate queues for different types
of messages, where messages in each queue take a similar amount of time".
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.client.timeouts.schedule import Costs

QUEUE_SHARE_MIN: Final = 0.05
TYPES_MAX: Final = 64
"""Types of one queue that are told apart; the rarest beyond stay together."""
SCHEMA: Final = (
    "account string, region string, queue string, part int, parts int, types array<string>, attempts double,"
    " median_s double, timeout_s double, cost double, together_timeout_s double, together_cost double,"
    " split_cost double, gain double"
)


def split(cells: "DataFrame", costs: "Costs | None" = None) -> "DataFrame":
    """From a histogram, one row for each proposed queue; columns as in `SCHEMA`.

    cost: of an attempt, in that part; together_cost and split_cost: of an attempt of the whole queue, with one timeout
    and with one for each part; gain: the share of the cost that the split saves. One part: leave the queue as it is.
    """
    given = costs

    def cut(rows: Any) -> Any:
        import pandas as pd

        found = _split(rows, given)
        return pd.DataFrame(found, columns=[part.split()[0] for part in SCHEMA.split(", ")])

    return cells.groupBy("account", "region", "queue").applyInPandas(cut, SCHEMA)


def _split(rows: Any, given: "Costs | None") -> list[dict[str, Any]]:
    import numpy as np

    from veilmq.pipeline.jobs.buckets import MIDDLES
    from veilmq.pipeline.jobs.curves import FINISHED_MIN, sample_of
    from veilmq.pipeline.jobs.timeouts import rated

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
    samples.sort(key=lambda each: float((each[1].finished * np.log(MIDDLES)).sum() / each[1].finished.sum()))
    whole = _together([sample for _, sample in samples])
    costs = rated(whole, given)
    prices: dict[tuple[int, int], tuple[float, float, Any]] = {}

    def price(low: int, high: int) -> tuple[float, float, Any]:
        """Cost of all attempts of the types from `low` to before `high`, their timeout, their curve."""
        if (low, high) not in prices:
            prices[low, high] = _price(_together([sample for _, sample in samples[low:high]]), costs)
        return prices[low, high]

    cuts = _best_cuts(len(samples), price)
    total = float(whole.finished.sum() + whole.censored.sum())
    together, together_timeout, _ = price(0, len(samples))
    cost = sum(price(low, high)[0] for low, high in cuts)
    first = rows.iloc[0]
    result = []
    for part, (low, high) in enumerate(cuts):
        part_cost, timeout, curve = price(low, high)
        attempts = float(sum(sample.finished.sum() + sample.censored.sum() for _, sample in samples[low:high]))
        result.append(
            {name: first[name] for name in ("account", "region", "queue")}
            | {
                "part": part,
                "parts": len(cuts),
                "types": [kind for kind, _ in samples[low:high]],
                "attempts": attempts,
                "median_s": curve.quantile(0.5)[0],
                "timeout_s": timeout,
                "cost": part_cost / attempts,
                "together_timeout_s": together_timeout,
                "together_cost": together / total,
                "split_cost": cost / total,
                "gain": 1 - cost / together if together > 0 else 0.0,
            }
        )
    return result


def _best_cuts(count: int, price: Any) -> list[tuple[int, int]]:
    """The cheapest parts, where each but the first adds `QUEUE_SHARE_MIN` of the cost of no split."""
    fee = QUEUE_SHARE_MIN * price(0, count)[0]
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for high in range(1, count + 1):
        best.append(
            min(
                (
                    (best[low][0] + price(low, high)[0] + (fee if low else 0.0), [*best[low][1], (low, high)])
                    for low in range(high)
                ),
                key=lambda each: each[0],
            )
        )
    return best[count][1]


def _together(samples: list[Any]) -> Any:
    from veilmq.pipeline.jobs.curves import Sample

    return Sample(
        sum(each.finished for each in samples),
        sum(each.censored for each in samples),
        sum(each.crashes for each in samples),
        sum(each.exposure_s for each in samples),
    )


def _price(sample: Any, costs: "Costs") -> tuple[float, float, Any]:
    import numpy as np

    from veilmq.pipeline.jobs.curves import Curve
    from veilmq.pipeline.jobs.pricing import timeout_price
    from veilmq.pipeline.jobs.timeouts import LEASE_LONGEST_S, best_timeout

    curve = Curve(sample)
    alive = curve.extended()
    longest = LEASE_LONGEST_S if curve.fits else min(curve.reach_s, LEASE_LONGEST_S)
    timeout, _ = best_timeout(alive, costs, longest)
    price = timeout_price(alive, costs.crashes_per_second, np.array([timeout]))
    return float(price.cost(costs)[0]) * curve.attempts, timeout, curve
