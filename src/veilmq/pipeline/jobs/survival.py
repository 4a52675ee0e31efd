"""`survival`: how long work takes, per queue and message type, including censored attempts.

Strategy: leases become a histogram (estimates/buckets.py), small however long the history is. Crashes are placed in it
(estimates/), and window functions over the buckets of each group compute the Kaplan-Meier curve. `quantiles` summarises
it in a row per group: a number with its 95 % interval where the curve reaches or a law agrees with it, "at least"
beyond. Whether messages that were received again take longer than others says whose the length of work is.
"""

from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.estimates.buckets import GROUP, by_group, histogram, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


PLACED_SCHEMA: Final = (
    "account string, region string, queue string, type string, bucket int, seconds double, finished double,"
    " censored double, low double, high double, law double, reach_s double"
)
CURVE_SCHEMA: Final = (
    "account string, region string, queue string, type string, bucket int, seconds double, finished double,"
    " censored double, at_risk double, alive double, low double, high double, law double, within_reach boolean"
)
QUANTILES: Final = (0.5, 0.9, 0.99)
QUANTILES_SCHEMA: Final = (
    "account string, region string, queue string, type string, attempts double, finished double,"
    " censored_share double, crashes double, crashes_per_second double, reach_s double,"
    " p50_s double, p50_low_s double, p50_high_s double, p50_basis string,"
    " p90_s double, p90_low_s double, p90_high_s double, p90_basis string,"
    " p99_s double, p99_low_s double, p99_high_s double, p99_basis string,"
    " at_least_s double, law string, law_median_s double, law_spread double,"
    " length_of string, by_attempt_p50_s double, redelivered_share double, redone_share double,"
    " silent_were string"
)


def survival(leases: "DataFrame") -> "DataFrame":
    """One row per bucket, queue and type: seconds (upper bound), finished, censored, at_risk, alive (the share
    that takes longer), low and high (95 % sure: `Curve.between`), law (the fitted law's share), within_reach."""
    return curve(histogram(leases))


def curve(cells: "DataFrame") -> "DataFrame":
    """The same, from a histogram."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    placed = by_group(cells, GROUP, _placed, PLACED_SCHEMA)
    onwards = Window.partitionBy(*GROUP).orderBy("bucket").rowsBetween(0, Window.unboundedFollowing)
    so_far = Window.partitionBy(*GROUP).orderBy("bucket").rowsBetween(Window.unboundedPreceding, 0)
    at_risk = F.sum(F.col("finished") + F.col("censored")).over(onwards)
    exposed = F.greatest(F.col("at_risk") - F.col("censored") / 2, F.col("finished"))
    hazard = F.when(F.col("exposed") > 0, F.col("finished") / F.col("exposed")).otherwise(0.0)
    found = (
        placed.withColumn("at_risk", at_risk)
        .withColumn("exposed", exposed)
        .withColumn("alive", F.exp(F.sum(F.log(F.greatest(1 - hazard, F.lit(1e-300)))).over(so_far)))
    )
    return found.select(
        *GROUP,
        *("bucket", "seconds", "finished", "censored", "at_risk", "alive", "low", "high", "law"),
        (F.col("seconds") <= F.col("reach_s")).alias("within_reach"),
    )


def quantiles(cells: "DataFrame") -> "DataFrame":
    """From a histogram, one row per queue and type; see `QUANTILES_SCHEMA`.

    attempts: first leases, so each message counts once. A quantile's basis is `curve`, the name of a law, or
    `at least`: then it is null, and the work takes `at_least_s` or more. Its 95 % interval is `low` to `high`; a high
    of null is longer than anything seen. length_of: `message` if messages that were received again take longer than
    others, else `attempt`; null if too few were. by_attempt_p50_s: the median if each lease counted, for comparison.
    silent_were: what leases count as that ran out without a sign of their worker: `crashes`, `slow`; null: none did.
    """
    return by_group(cells, GROUP, _quantiles, QUANTILES_SCHEMA)


def _placed(rows: Any) -> Any:
    import numpy as np
    import pandas as pd

    from veilmq.pipeline.estimates import Curve, sample_of
    from veilmq.pipeline.estimates.buckets import BOUNDS

    found = Curve(sample_of(rows))
    seen = np.flatnonzero(found.done + found.cut > 0)
    bucket = np.arange(seen[0], seen[-1] + 1) if len(seen) else np.arange(0)
    low, high = (each[bucket] for each in found.between)
    law = np.full(len(bucket), np.nan) if found.law is None else found.law.alive()[bucket]
    return pd.DataFrame(
        names_of(rows)
        | {
            "bucket": bucket,
            "seconds": BOUNDS[bucket],
            "finished": found.done[bucket],
            "censored": found.cut[bucket],
            "low": low,
            "high": high,
            "law": law,
            "reach_s": found.reach_s,
        }
    )


def _quantiles(rows: Any) -> Any:
    import pandas as pd

    from veilmq.pipeline.estimates import Curve, doubted, length_of, sample_of, silent_were

    found = Curve(sample_of(rows))
    doubt = doubted(rows)
    whose, by_attempt = length_of(rows)
    row: dict[str, Any] = names_of(rows) | {
        "attempts": found.attempts,
        "finished": found.finished,
        "censored_share": 1 - found.finished / max(found.attempts, 1e-9),
        "crashes": found.sample.crashes,
        "crashes_per_second": found.sample.crashes_per_second,
        "reach_s": found.reach_s,
        "at_least_s": None,
        "law": found.law and found.law.name,
        "law_median_s": found.law and found.law.median_s,
        "law_spread": found.law and found.law.spread,
        "length_of": whose,
        "by_attempt_p50_s": by_attempt,
        "redelivered_share": float(rows.redeliveries.sum() / max(rows.leases.sum(), 1.0)),
        "redone_share": float(rows.redone.sum() / max(rows.leases.sum(), 1.0)),
        "silent_were": silent_were(rows),
    }
    for share in QUANTILES:
        name = f"p{round(share * 100)}"
        one = found.quantile(share)
        row |= {f"{name}_s": one.seconds, f"{name}_low_s": one.low, f"{name}_high_s": one.high}
        row[f"{name}_basis"] = one.basis
        if doubt is not None:
            row[f"{name}_low_s"] = min(one.low, doubt.quantile(share).low)
        if one.seconds is None and row["at_least_s"] is None:
            low = found.reach_s if doubt is None else doubt.quantile(share).seconds or doubt.reach_s
            row["at_least_s"] = min(found.reach_s, low)
    return pd.DataFrame([row])
