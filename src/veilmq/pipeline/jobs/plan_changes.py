"""`helped`: what became of a queue's costs after the plan in force changed, on matched hours.

Strategy: leases are added up by hour (`hours`); each change of the plan in force is an event (`changes`). The hours
since the last change are compared with those before it (since the change before that, four weeks at most): each with
the same hour of the week, or of the day if there was no whole week. So a quiet night is not compared with a busy noon.
The difference is an average over the matched hours, and its interval comes from drawing those hours with replacement.

A verdict of `worse` takes a plan back, and is looked for again and again. So an interval above zero is not enough: it
takes `_SURE` standard errors, `HOURS_MIN` matched hours, `MESSAGES_MIN` messages on both sides, and a difference of
`_MATTERS` of the cost.

Source: Barlow and Proschan (the mean age at which work is cut off); Efron 1979; docs/pipeline.md, "Did it help?".
"""

from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.estimates.buckets import GROUP, struct

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.estimate.schedule import Costs

QUEUE: Final = ("account", "region", "queue")
HOURS_SCHEMA: Final = (
    "account string, region string, queue string, type string, hour bigint, messages double, redone double,"
    " crashes double, crash_span_s double, extensions double, work_s double, work_squares double"
)
CHANGES_SCHEMA: Final = (
    "account string, region string, queue string, at bigint, what string, in_force boolean, made bigint, why string"
)
SCHEMA: Final = (
    "account string, region string, queue string, changed bigint, what string, in_force boolean, made bigint,"
    " why string, hours double, messages_before double, messages_after double, cost_before double, cost_after double,"
    " change double, change_low double, change_high double, duplicates_before double, duplicates_after double,"
    " recovery_before_s double, recovery_after_s double, verdict string"
)
KIND: Final = "queue_changed"
HOURS_MIN: Final = 12
MESSAGES_MIN: Final = 200
_HOUR_US: Final = 3_600_000_000
_DAY, _WEEK = 24, 168
_BEFORE_MAX: Final = 4 * _WEEK
_MATTERS: Final = 0.05
_SAMPLES: Final = 1_000
_SURE: Final = 3.5
_SUMS: Final = ("messages", "redone", "crashes", "crash_span_s", "extensions", "work_s", "work_squares")


def hours(leases: "DataFrame") -> "DataFrame":
    """Leases (of `attempts`) added up by queue, type and hour (since 1970); columns as in `HOURS_SCHEMA`.

    messages: by their first leases. redone: their workers were at it when the message was received again. crash_span_s:
    from the last sign of life to the end of the lease.
    """
    from pyspark.sql import functions as F

    crashed = F.col("outcome") == "crashed"
    work = F.when(F.col("exact"), F.col("held_us") / 1e6).otherwise(0.0)
    return (
        leases.where(F.col("outcome") != "undelivered")
        .groupBy(*GROUP, F.floor(F.col("granted") / _HOUR_US).cast("bigint").alias("hour"))
        .agg(
            F.count_if(F.col("attempt") == 1).cast("double").alias("messages"),
            F.count_if(F.col("outcome") == "redone").cast("double").alias("redone"),
            F.count_if(crashed).cast("double").alias("crashes"),
            F.sum(F.when(crashed, (F.col("lease_end_us") - F.col("held_us")) / 1e6).otherwise(0.0)).alias(
                "crash_span_s"
            ),
            F.sum("extensions").cast("double").alias("extensions"),
            F.sum(work).alias("work_s"),
            F.sum(work * work).alias("work_squares"),
        )
    )


def changes(events: "DataFrame") -> "DataFrame":
    """One row per change of the plan in force; columns as in `CHANGES_SCHEMA`.

    what: `suggested` (a plan was published), `reconsidered` (the owner's settings changed), `reverted`. in_force: a
    plan is, and was made at `made`.
    """
    from pyspark.sql import functions as F

    def detail(path: str) -> Any:
        return F.get_json_object("detail", f"$.{path}")

    made = detail("applied.made").cast("bigint")
    found = events.where((F.col("kind") == KIND) & detail("plan").isNotNull() & F.col("detail").contains('"applied":'))
    return found.select(
        *QUEUE,
        "at",
        detail("plan").alias("what"),
        made.isNotNull().alias("in_force"),
        made.alias("made"),
        F.coalesce(detail("why"), detail("applied.why")).alias("why"),
    )


def helped(by_hour: "DataFrame", changed: "DataFrame", costs: "Costs | None" = None) -> "DataFrame":
    """One row per queue whose plan changed; columns as in `SCHEMA`, see `compared`."""
    given = costs

    def compare(rows: Any, happened: Any) -> Any:
        import pandas as pd

        columns = [part.split()[0] for part in SCHEMA.split(", ")]
        plain = happened.rename(columns=lambda name: name.removeprefix("_"))
        found = [compared(rows, plain, given)] if len(plain) else []
        return pd.DataFrame(found, columns=columns)

    # Both may come from one frame of events, whose columns Spark would take for the same.
    renamed = changed.toDF(*(f"_{name}" for name in changed.columns))
    one, other = by_hour.groupBy(*QUEUE), renamed.groupBy(*(f"_{name}" for name in QUEUE))
    return one.cogroup(other).applyInPandas(compare, struct(SCHEMA))


def compared(rows: Any, happened: Any, given: "Costs | None" = None) -> dict[str, Any]:
    """The comparison of one queue, from pandas frames of its hours and changes (one at least).

    change: of the cost per message, in the unit of `Costs`; low and high: its 95 % interval. duplicates: per message;
    recovery_s: from a crash, placed at the work's mean age, to the end of the lease. verdict: `better`, `worse`,
    `no difference` (none that is sure), `too few` (hours or messages that match).
    """
    import numpy as np

    from veilmq.estimate.schedule import Costs

    costs = given or Costs()
    happened = happened.sort_values("at")
    last = happened.iloc[-1]
    names = {name: last[name] for name in QUEUE}
    row: dict[str, Any] = dict.fromkeys(part.split()[0] for part in SCHEMA.split(", "))
    made = last["made"]
    row |= names | {
        "changed": int(last["at"]), "what": last["what"], "in_force": bool(last["in_force"]),
        "made": None if made is None or made != made else int(made), "why": last["why"], "verdict": "too few",
    }  # fmt: skip
    one, other = _matched(_costs(rows, costs), happened)
    row |= {
        "hours": float(len(one)),
        "messages_before": float(one.messages.sum()),
        "messages_after": float(other.messages.sum()),
    }
    if one.empty:
        return row
    weight = np.minimum(one.messages, other.messages).to_numpy()
    apart = (other.cost / other.messages - one.cost / one.messages).to_numpy()
    drawn = np.random.default_rng(10).integers(0, len(one), (_SAMPLES, len(one)))
    several = (weight * apart)[drawn].sum(axis=1) / weight[drawn].sum(axis=1)
    change = float((weight * apart).sum() / weight.sum())
    low, high = (float(each) for each in np.quantile(several, [0.025, 0.975]))
    is_worse = change > _SURE * float(several.std()) and low > 0
    cost_before = float((weight * one.cost / one.messages).sum() / weight.sum())
    row |= {"cost_before": cost_before, "cost_after": cost_before + change, "change": change}
    row |= {"change_low": low, "change_high": high}
    for name, each in (("before", one), ("after", other)):
        row[f"duplicates_{name}"] = float(each.redone.sum() / each.messages.sum())
        row[f"recovery_{name}_s"] = float(each.waited.sum() / each.crashes.sum()) if each.crashes.sum() else None
    if len(one) >= HOURS_MIN and min(row["messages_before"], row["messages_after"]) >= MESSAGES_MIN:
        matters = abs(change) > _MATTERS * cost_before
        row["verdict"] = "worse" if is_worse and matters else "better" if high < 0 and matters else "no difference"
    return row


def _matched(rows: Any, happened: Any) -> tuple[Any, Any]:
    """The sums of the hours before the last change and of those after it: of hours of the day (of the week, if there is
    a week before it) in which both have messages."""
    at = int(happened["at"].iloc[-1]) // _HOUR_US
    since = int(happened["at"].iloc[-2]) // _HOUR_US + 1 if len(happened) > 1 else 0
    before = rows[(rows.hour < at) & (rows.hour >= max(since, at - _BEFORE_MAX))]
    after = rows[rows.hour > at]
    period = _WEEK if not before.empty and at - int(before.hour.min()) >= _WEEK else _DAY
    sums = ["messages", "redone", "crashes", "waited", "cost"]
    one, other = (each.groupby(each.hour % period)[sums].sum() for each in (before, after))
    one, other = one[one.messages > 0], other[other.messages > 0]
    both = one.index.intersection(other.index)
    return one.loc[both], other.loc[both]


def _costs(rows: Any, costs: "Costs") -> Any:
    """With `waited`, seconds of crashed workers' messages, and `cost`."""
    import numpy as np

    kind = rows["type"].fillna("")
    whole = rows.groupby(kind)[list(_SUMS)].sum()
    # The mean age of work at a moment of the worker's life that nothing chose.
    age = (whole.work_squares / (2 * whole.work_s).where(whole.work_s > 0)).fillna(0.0)
    lived = np.minimum(rows.crashes * kind.map(age), rows.crash_span_s / 2)
    waited = rows.crash_span_s - lived
    cost = costs.recovery * waited + costs.duplicate * rows.redone + costs.extend * rows.extensions
    return rows.assign(waited=waited, cost=cost)


def is_worse(row: Any) -> bool:
    """Whether to take the plan back. One that came with a revert is not: it was in force before."""
    return bool(row["verdict"] == "worse" and row["made"] is not None and row["what"] != "reverted")


def reason(row: Any) -> str:
    """Why a plan is taken back, in one sentence."""
    return (
        f"it got worse: a message cost {row['cost_before']:.3g} before and {row['cost_after']:.3g} since"
        f" ({row['change_low']:+.3g} to {row['change_high']:+.3g}), in {row['hours']:.0f} matched hours with"
        f" {row['messages_after']:.0f} messages"
    )
