"""`health`: the problems of each queue, window by window; the same code in batch and as a stream.

Strategy: counts and maxima by event time over tumbling windows, so a stream needs no other state. Document 003's rule
is a column: if many deletes in a window were refused because the message had come back, raise the timeout. Refusals for
a message that is gone are counted separately: most are a client's own retries, which one window cannot detect. Source:
document 003 ("count how many deletes fail"); `ThresholdTimeout` has the same rule.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

WINDOW_DEFAULT: Final = "5 minutes"
LATE_DEFAULT: Final = "10 minutes"
"""How long a stream waits for late events: expiries carry the instant at which they were due."""
FAILURES_DEFAULT: Final = 5
FACTOR_DEFAULT: Final = 2.0
_COUNTS: Final = (
    "sent", "received", "redeliveries", "deleted", "expired_leases", "stale_deletes", "gone_deletes",
    "refused_extensions", "dead_letters", "expired_messages", "retries", "changed_leases",
)  # fmt: skip
KINDS: Final = (
    "sent", "received", "extended", "released", "lease_expired", "deleted", "delete_refused", "extend_refused",
    "dead_lettered", "expired", "released_for_retry", "expired_after_change",
)  # fmt: skip
"""The kinds of events that are read."""


def together(windows: "DataFrame") -> "DataFrame":
    """All queues' rows of `health` as one row per window: from, to, the counts' sums, the greatest oldest_s."""
    from pyspark.sql import functions as F

    sums = (F.sum(name).alias(name) for name in _COUNTS)
    return windows.groupBy("from", "to").agg(*sums, F.max("oldest_s").alias("oldest_s"))


def health(
    events: "DataFrame",
    *,
    window: str = WINDOW_DEFAULT,
    late: str = LATE_DEFAULT,
    failures: int = FAILURES_DEFAULT,
    factor: float = FACTOR_DEFAULT,
    streaming: bool | None = None,
) -> "DataFrame":
    """One row per window and queue: from, to, counts of events, redeliveries, oldest_s, lease_s, raise_to_s.

    expired_leases: those whose worker died or was late; a message that was given back counts among retries, or among
    changed_leases if its client only shortened the lease. oldest_s: the age of the oldest message that was received or
    left. lease_s: the longest lease granted. raise_to_s: `factor` times that if `failures` deletes or more were refused
    because the message had come back, else null.
    streaming: whether events come as a stream; None: look at `events`, which a declarative pipeline does not allow.
    """
    from pyspark.sql import functions as F

    kind, detail = F.col("kind"), F.coalesce("detail", F.lit(""))
    taken = kind == "received"
    back = (kind == "delete_refused") & ~detail.contains('"gone"')
    gone = (kind == "delete_refused") & detail.contains('"gone"')

    def count(what: "Column", name: str) -> "Column":
        return F.sum(what.cast("long")).alias(name)

    stamped = events.where(kind.isin(*KINDS)).withColumn("time", F.timestamp_micros("at"))
    if events.isStreaming if streaming is None else streaming:
        stamped = stamped.withWatermark("time", late)
    age_s = (F.col("at") - F.col("sent")) / 1e6
    left = kind.isin("received", "deleted", "expired", "dead_lettered")
    return (
        stamped.groupBy(F.window("time", window).alias("window"), "account", "region", "queue")
        .agg(
            count(kind == "sent", "sent"),
            count(taken, "received"),
            count(taken & (F.col("attempt") > 1), "redeliveries"),
            count(kind == "deleted", "deleted"),
            count(kind == "lease_expired", "expired_leases"),
            count(back, "stale_deletes"),
            count(gone, "gone_deletes"),
            count(kind == "extend_refused", "refused_extensions"),
            count(kind == "dead_lettered", "dead_letters"),
            count(kind == "expired", "expired_messages"),
            count(kind == "released_for_retry", "retries"),
            count(kind == "expired_after_change", "changed_leases"),
            F.max(F.when(left, age_s)).alias("oldest_s"),
            F.max(F.when(taken, F.col("lease_us") / 1e6)).alias("lease_s"),
        )
        .select(
            F.col("window.start").alias("from"),
            F.col("window.end").alias("to"),
            *("account", "region", "queue", *_COUNTS, "oldest_s", "lease_s"),
            F.when(F.col("stale_deletes") >= failures, F.col("lease_s") * factor).alias("raise_to_s"),
        )
    )
