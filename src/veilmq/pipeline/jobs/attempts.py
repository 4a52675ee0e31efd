"""`attempts`: one row per lease: when it was granted, how often extended, how it ended, how long the work took.

Strategy: every event of a lease carries the same (incarnation, sequence, attempt), so a lease is one group. A group's
facts are all minima, maxima and sums (`partials`), so that two halves of a history can be reduced separately and
added (`merged`): the loop reads only new events. Their meaning is decided once, at the end (`judged`):

- deleted under its lease, or late but before the message was granted again: the work took exactly that long;
- a refused delete with the lease's number: the worker lived on and took exactly that long, and the message was granted
  to another worker meanwhile;
- released for a retry: the handler failed after exactly that long (unless the reason says that it never began);
- released: the worker stopped by itself; the work would have taken longer than that;
- deleted or given back by an operator's job, over by its retention, quarantined: that says nothing about the worker,
  which was alive at its last sign of life; after the lease's end it changes nothing;
- run out after its last extension had shortened it: the worker most likely gave the message back with a delay, and
  lived until then; that is no sign of a dead worker;
- expired, and its worker never heard of again: a crash. That is *not* "took longer than the lease": all that is known
  is that the worker was alive at its last extension, and gone when the next one was due;
- an extension that was refused: the worker was alive then, and had lost its lease;
- expired and resumed (`lease_resumed`): the worker was late and is alive, as after any other extension;
- not ended when the history ends, under a lease that runs on: the worker is still working, or crashed since its last
  sign of life. Long work is more likely to be found in this state: without such leases work would look short.

Source: docs/admin-api.md, "Kinds"; docs/patterns/adaptive-timeout.md.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS: Final = ("account", "region", "queue", "incarnation", "sequence", "attempt")
"""Identify a lease; the first three follow from the fourth."""
KINDS: Final = (
    "received",
    "extended",
    "lease_resumed",
    "released",
    "released_for_retry",
    "undelivered",
    "lease_expired",
    "expired_after_change",
    "deleted",
    "delete_refused",
    "extend_refused",
    "expired",
    "quarantined",
)
"""The kinds of events about leases."""
EXTENSIONS: Final = ("extended", "lease_resumed")
_MINIMA: Final = ("granted", "first_extension", "deleted", "delete_refused", "released", "undelivered", "dropped")
_SUMS: Final = ("extensions",)

UNWORKED: Final = ("busy", "shortage", "released")
"""Reasons of a release for a retry whose handler never ran, or was stopped."""
OUTCOMES: Final = (
    "deleted", "redone", "failed", "released", "undelivered", "lost", "crashed", "changed", "dropped", "open",
)  # fmt: skip
"""How a lease ended; the first that fits counts.

deleted: the work was done · redone: it was done, but the delete was refused because the message had been granted again
· failed: the work failed, and the message was given back for a retry · released: given back · undelivered: the answer
reached nobody, or somebody only looked: a lease of 0 s, and its handle was never used · lost: expired, and an extension
was refused · crashed: expired, and its worker was never heard of again · changed: expired after its last extension had
shortened it · dropped: the message left under the lease, or an operator's job gave it back · open: not ended yet.
"""
EXACT: Final = ("deleted", "redone", "failed")


def attempts(events: "DataFrame", until: int | None = None) -> "DataFrame":
    """One row per lease, from the columns of `veilmq-events`.

    until: when the events end (microseconds UTC, `reading.last_instant`); None: they are read once more for that.

    Gives `KEYS`, message, type, protocol, principal, client, source (who decided the lease's length), body_bytes;
    granted, sent, visible_since (microseconds UTC), lease_us (as granted), extensions; outcome (`OUTCOMES`), exact;
    held_us: from the grant to the end of the attempt if exact, to the last sign of life if not; watched_us: of an open
    lease that runs on when the events end, from the grant to that; lease_end_us: from the grant to the end of the last
    lease; renewed_share: the part of the first lease that had passed at its first extension. Leases whose grant is not
    among the events are left out.
    """
    from pyspark.sql import functions as F

    leases = partials(events)
    if until is not None:
        return judged(leases, F.lit(until))
    end = F.broadcast(events.agg(F.max("at").alias("watched_until")))
    return judged(leases.crossJoin(end), F.col("watched_until"))


def partials(events: "DataFrame") -> "DataFrame":
    """What these events say about each lease, in columns that `merged` adds up. Instants in microseconds UTC."""
    from pyspark.sql import functions as F

    kind = F.col("kind")

    def at(*kinds: str) -> "Column":
        return F.when(kind.isin(*kinds), F.col("at"))

    by_job = F.get_json_object("detail", "$.job").isNotNull()
    unworked = F.coalesce(F.get_json_object("detail", "$.reason").isin(*UNWORKED), F.lit(False))

    def granted(column: str) -> "Column":
        return F.max(F.when(kind == "received", F.col(column)))

    return (
        events.where(kind.isin(*KINDS) & (F.col("attempt") > 0))
        .groupBy(*KEYS)
        .agg(
            F.max("type").alias("type"),
            *(granted(name).alias(name) for name in ("message", "protocol", "principal", "client", "source")),
            *(granted(name).alias(name) for name in ("lease_us", "visible_since", "sent", "body_bytes")),
            F.min(at("received")).alias("granted"),
            F.sum(F.when(kind.isin(*EXTENSIONS), 1).otherwise(0)).alias("extensions"),
            F.min(at(*EXTENSIONS)).alias("first_extension"),
            F.max(at(*EXTENSIONS)).alias("last_extension"),
            F.max(F.when(kind.isin("received", *EXTENSIONS), F.col("at") + F.col("lease_us"))).alias("lease_end"),
            F.max(at("lease_expired")).alias("expired"),
            F.max(at("expired_after_change")).alias("changed"),
            F.max(F.when(~unworked, at("released_for_retry"))).alias("failed"),
            F.max(F.when(unworked, at("released_for_retry"))).alias("returned"),
            F.max(at("extend_refused")).alias("extend_refused"),
            F.min(F.when(~by_job, at("deleted"))).alias("deleted"),
            F.min(at("delete_refused")).alias("delete_refused"),
            F.min(F.when(~by_job, at("released"))).alias("released"),
            F.min(at("undelivered")).alias("undelivered"),
            F.min(F.coalesce(at("expired", "quarantined"), F.when(by_job, at("deleted", "released")))).alias("dropped"),
        )
    )


def merged(halves: "DataFrame") -> "DataFrame":
    """Combine the partials of several stretches of one history (their union) into one row per lease."""
    from pyspark.sql import functions as F

    def added(name: str) -> "Column":
        if name in _MINIMA:
            return F.min(name)
        return F.sum(name) if name in _SUMS else F.max(name)

    return halves.groupBy(*KEYS).agg(*(added(name).alias(name) for name in halves.columns if name not in KEYS))


def judged(leases: "DataFrame", watched: "Column | None" = None) -> "DataFrame":
    """Interpret `partials`; see `attempts`. watched: when the events end; without it no open lease is known to run on.

    Before changing it: do not read the columns of `leases`; a declarative pipeline does not allow that.
    """
    from pyspark.sql import functions as F

    def known(name: str) -> "Column":
        return F.col(name).isNotNull()

    granted = F.col("granted")

    def stands(name: str) -> "Column":
        """Whether that was the end: the lease was not resumed afterwards."""
        return known(name) & F.coalesce(F.col(name) >= F.col("last_extension"), F.lit(True))

    looked = (F.col("lease_us") == 0) & (F.col("extensions") == 0) & ~known("extend_refused")
    outcome = (
        F.when(known("deleted"), "deleted")
        .when(known("delete_refused"), "redone")
        .when(stands("failed"), "failed")
        .when(known("released") | stands("returned"), "released")
        .when(known("undelivered") | looked, "undelivered")
        .when(stands("expired") & known("extend_refused"), "lost")
        .when(stands("expired"), "crashed")
        .when(stands("changed"), "changed")
        .when(known("dropped"), "dropped")
        .otherwise("open")
    )
    lived = F.greatest(F.lit(0), F.col("last_extension") - granted, F.col("extend_refused") - granted)
    ended = F.coalesce(
        "deleted",
        "delete_refused",
        F.when(stands("failed"), F.col("failed")),
        "released",
        F.when(stands("returned"), F.col("returned")),
    )
    watched = F.lit(None).cast("long") if watched is None else watched
    runs_on = (F.col("outcome") == "open") & (F.col("lease_end") > watched)
    return (
        leases.where(known("granted"))
        .withColumn("outcome", outcome)
        .withColumn("exact", F.col("outcome").isin(*EXACT))
        .withColumn(
            "held_us", F.when(known("undelivered") & ~F.col("exact"), 0).otherwise(F.coalesce(ended - granted, lived))
        )
        .withColumn("watched_us", F.when(runs_on, F.greatest(watched - granted, lived)))
        .withColumn("lease_end_us", F.col("lease_end") - granted)
        # A receive may ask for a lease of 0 s, and its handle can still extend.
        .withColumn("renewed_share", (F.col("first_extension") - granted) / F.nullif("lease_us", F.lit(0)))
        .select(
            *KEYS,
            *("message", "type", "protocol", "principal", "client", "source", "body_bytes"),
            *("granted", "sent", "visible_since", "lease_us", "extensions"),
            *("outcome", "exact", "held_us", "watched_us", "lease_end_us", "renewed_share"),
        )
    )
