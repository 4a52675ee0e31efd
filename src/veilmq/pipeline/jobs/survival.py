"""`survival`: how long work takes, per queue and message type, including censored attempts.

Strategy: leases become a histogram (estimates/buckets.py), small however long the history is. Crashes are placed in it
(estimates/), and window functions over the buckets of each group compute the Kaplan-Meier curve. `quantiles` summarises
it in a row per group: a number where the curve reaches or a lognormal law agrees with it, "at least" beyond.
"""

from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.estimates.buckets import GROUP, by_group, histogram, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


PLACED_SCHEMA: Final = (
    "account string, region string, queue string, type string, bucket int, seconds double, finished double,"
    " censored double, crashes_per_second double, law double, reach_s double"
)
CURVE_SCHEMA: Final = (
    "account string, region string, queue string, type string, bucket int, seconds double, finished double,"
    " censored double, at_risk double, alive double, low double, high double, law double, within_reach boolean"
)
QUANTILES: Final = (0.5, 0.9, 0.99)
QUANTILES_SCHEMA: Final = (
    "account string, region string, queue string, type string, attempts double, finished double,"
    " censored_share double, crashes double, crashes_per_second double, reach_s double,"
    " p50_s double, p50_basis string, p90_s double, p90_basis string, p99_s double, p99_basis string,"
    " at_least_s double, log_mean double, log_deviation double, redelivered_share double, redone_share double"
)


def survival(leases: "DataFrame") -> "DataFrame":
    """One row per bucket, queue and type: seconds (upper bound), finished, censored, at_risk, alive (the share
    that takes longer), low and high (its 95 % interval, Greenwood), law (the lognormal fit's share), within_reach."""
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
    left = F.greatest(F.col("exposed") - F.col("finished"), F.lit(1e-9))
    hazard = F.when(F.col("exposed") > 0, F.col("finished") / F.col("exposed")).otherwise(0.0)
    greenwood = F.when((F.col("finished") > 0) & (left > 0.5), F.col("finished") / (F.col("exposed") * left)).otherwise(
        0.0
    )
    found = (
        placed.withColumn("at_risk", at_risk)
        .withColumn("exposed", exposed)
        .withColumn("alive", F.exp(F.sum(F.log(F.greatest(1 - hazard, F.lit(1e-300)))).over(so_far)))
        .withColumn("error", F.sqrt(F.sum(greenwood).over(so_far)) * F.col("alive"))
    )
    return found.select(
        *GROUP,
        *("bucket", "seconds", "finished", "censored", "at_risk", "alive"),
        F.greatest(F.lit(0.0), F.col("alive") - 1.96 * F.col("error")).alias("low"),
        F.least(F.lit(1.0), F.col("alive") + 1.96 * F.col("error")).alias("high"),
        "law",
        (F.col("seconds") <= F.col("reach_s")).alias("within_reach"),
    )


def quantiles(cells: "DataFrame") -> "DataFrame":
    """From a histogram, one row per queue and type; see `QUANTILES_SCHEMA`.

    attempts: first leases, so each message counts once. A quantile's basis is `curve`, `lognormal` or `at least`: then
    it is null, and the work takes `at_least_s` or more.
    """
    return by_group(cells, GROUP, _quantiles, QUANTILES_SCHEMA)


def _placed(rows: Any) -> Any:
    import numpy as np
    import pandas as pd

    from veilmq.pipeline.estimates import Curve, normal_survival, sample_of
    from veilmq.pipeline.estimates.buckets import BOUNDS

    found = Curve(sample_of(rows))
    sample = found.sample
    seen = np.flatnonzero(sample.finished + sample.censored > 0)
    bucket = np.arange(seen[0], seen[-1] + 1) if len(seen) else np.arange(0)
    law = normal_survival(found.law, BOUNDS[bucket]) if found.fits and found.law else np.full(len(bucket), np.nan)
    return pd.DataFrame(
        names_of(rows)
        | {
            "bucket": bucket,
            "seconds": BOUNDS[bucket],
            "finished": sample.finished[bucket],
            "censored": sample.censored[bucket],
            "crashes_per_second": sample.crashes_per_second,
            "law": law,
            "reach_s": found.reach_s,
        }
    )


def _quantiles(rows: Any) -> Any:
    import pandas as pd

    from veilmq.pipeline.estimates import Curve, doubted, sample_of

    found = Curve(sample_of(rows))
    doubt = doubted(rows)
    row: dict[str, Any] = names_of(rows) | {
        "attempts": found.attempts,
        "finished": found.finished,
        "censored_share": 1 - found.finished / max(found.attempts, 1e-9),
        "crashes": found.sample.crashes,
        "crashes_per_second": found.sample.crashes_per_second,
        "reach_s": found.reach_s,
        "at_least_s": None,
        "log_mean": found.law[0] if found.fits and found.law else None,
        "log_deviation": found.law[1] if found.fits and found.law else None,
        "redelivered_share": float(rows.redeliveries.sum() / max(rows.leases.sum(), 1.0)),
        "redone_share": float(rows.redone.sum() / max(rows.leases.sum(), 1.0)),
    }
    for share in QUANTILES:
        name = f"p{round(share * 100)}"
        row[f"{name}_s"], row[f"{name}_basis"] = found.quantile(share)
        if row[f"{name}_s"] is None and row["at_least_s"] is None:
            low = found.reach_s if doubt is None else doubt.quantile(share)[0] or doubt.reach_s
            row["at_least_s"] = min(found.reach_s, low)
    return pd.DataFrame([row])
