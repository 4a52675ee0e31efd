"""The plans that are sent to a server: the result of `timeouts`, in the admin port's format.

Strategy: one plan per queue, with the lease for each message type. A queue whose clients extend leases gets the first
lease of a plan with renewals. A queue whose clients never extend gets the plain timeout, because nothing else holds
their messages. The floor keeps other clients' heartbeats alive: twice the longest interval between two extends that any
client of the queue was seen to make.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.jobs.attempts import KEYS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEASE_US_MAX: Final = 7 * 86_400_000_000
SIGNS: Final = ("received", "extended", "lease_resumed")
"""Events that show that a lease's holder is alive."""
_SECOND_US: Final = 1_000_000
_TYPES_MAX: Final = 1_000

Queue = tuple[str, str, str]
"""Account, region, name."""


def floors(events: "DataFrame", earlier: "DataFrame | None" = None) -> "DataFrame":
    """By account, region, queue: floor_us, twice the longest interval between two signs of life of a lease's holder.

    earlier: of `attempts.partials`, the leases that ran on when these events began; None: these are all events."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    signs = events.where(f.col("kind").isin(*SIGNS)).select(*KEYS, "offset", "kind", "at")
    if earlier is not None:
        at, before = f.greatest("granted", "last_extension"), f.lit(-1).cast("long")
        last = earlier.select(*KEYS, before.alias("offset"), f.lit(SIGNS[0]).alias("kind"), at.alias("at"))
        signs = last.unionByName(signs)
    lease = Window.partitionBy(*KEYS).orderBy("offset")
    gaps = signs.withColumn("gap_us", f.col("at") - f.lag("at").over(lease)).where(f.col("kind") == "extended")
    return gaps.groupBy("account", "region", "queue").agg((f.max("gap_us") * 2).cast("bigint").alias("floor_us"))


def plans_of(rows: Iterable[Mapping[str, Any]], floors_us: Mapping[Queue, int]) -> dict[Queue, dict[str, Any]]:
    """The plans in the admin port's format, from rows of `timeouts` as dictionaries, of Spark or of pandas.

    floors_us: the minimum of any lease, by queue. A queue with too few observations gets no plan.
    """
    plans: dict[Queue, dict[str, Any]] = {}
    for given in rows:
        row = {name: _known(value) for name, value in given.items()}
        name = "first_lease" if row["today_renewed"] else "timeout"
        seconds = row[f"{name}_s"]
        if not seconds and row["timeout_at_least_s"]:
            # "At least" is no reason to shorten today's lease.
            seconds = max(row["timeout_at_least_s"], row["today_lease_s"])
        if not seconds:
            continue
        queue = (row["account"], row["region"], row["queue"])
        floor_us = min(floors_us.get(queue, 0), LEASE_US_MAX)
        plan = plans.setdefault(queue, {"lease_us": None, "by_type": {}, "floor_us": floor_us, "why": ""})
        lease_us = min(max(int(seconds * _SECOND_US), _SECOND_US), LEASE_US_MAX)
        if row["type"] is None:
            plan["lease_us"] = lease_us
        elif len(plan["by_type"]) < _TYPES_MAX:
            plan["by_type"][row["type"]] = lease_us
        known = f"{row['type'] or 'all messages'}: {row['attempts']:.0f} attempts"
        low_s, high_s = (row.get(f"{name}_{end}_s") for end in ("low", "high"))
        if low_s is not None:
            known += f", 95 % sure: {_seconds(low_s)} {'or more' if high_s is None else f'to {_seconds(high_s)}'}"
        plan["why"] = f"{plan['why']}; {known}".strip("; ")[:1_000]
    return plans


def _seconds(value: float) -> str:
    return f"{float(f'{value:.3g}'):g} s"


def _known(value: Any) -> Any:
    """The value; pandas' NaN becomes None."""
    return None if value is None or value != value else value
