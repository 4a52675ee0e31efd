"""`audit`: checks the conservation law and the lease invariants from a history alone.

Strategy: window functions walk the events of each message in the order of their offsets. Each row sees the last grant,
the last end of a lease and whether the message had left before. A rule is a condition on such a row; a row that breaks
a rule is a finding. Facts about a whole queue (the count of a purge, contiguous offsets) are summed separately. Every
snapshot is compared with the events before it.

A history that starts at offset 0 is known from its beginning. A trimmed one is known from the end of its first complete
snapshot: messages with a sequence number above that snapshot's `last` have their own events, and the snapshot reports
all others. Between its begin and end a message of a lower number may not be reported yet. Before that, or without a
snapshot, the audit skips what cannot be known: where messages came from.

Source: docs/how-it-works.md; docs/admin-api.md, "Snapshots in the history"; decision 0008.
"""

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from veilmq.model.events import Part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


NEVER: Final = (1 << 63) - 1
_MESSAGES: Final = (
    "messages array<struct<sequence: long, state: string, receive_count: long, rotation: long, due: long>>"
)
RULES: Final = {
    "offsets": "offsets are contiguous, each once",
    "sent once": "a message is sent once, under a sequence number that grows with the offsets",
    "received was sent": "nothing is received or deleted that was not sent",
    "left once": "a message leaves once: deleted, expired, moved or quarantined",
    "no resurrection": "nothing happens to a message after it left",
    "receive count": "the receive count grows by one with each receive",
    "one lease": "one lease at a time: a receive, or a lease taken up again, follows the end of the lease before",
    "visible": "nothing is received before it is visible",
    "stale handles": "a handle that is not current changes nothing",
    "lease end": "a lease ends when its last grant or extension said",
    "refused rightly": "a handle that is current is not refused",
    "snapshot": "a snapshot tells what the events before it tell",
    "conservation": "sent and moved in = deleted, expired, moved, quarantined, purged and what is left",
}
"""Each rule and its text."""
_ENDINGS: Final = ("deleted", "expired", "dead_lettered", "moved", "quarantined")
_RAN_OUT: Final = ("lease_expired", "expired_after_change", "retry_due")
"""A message in flight became visible by itself."""
_MOVES: Final = ("extended", "lease_resumed", "released_for_retry")
"""The end of the lease was moved."""
_MESSAGE_KINDS: Final = (
    "sent", "received", *_MOVES, "released", *_RAN_OUT, "undelivered", "delete_refused", "content_updated",
    *_ENDINGS,
)  # fmt: skip
_TOLD_HELD: Final = "told in flight"
_TOLD_FREE: Final = "told"
_TOLD: Final = (_TOLD_HELD, _TOLD_FREE)
"""Reported by a snapshot: of a leased message, of any other message."""


class Known(NamedTuple):
    """What can be known of a history; all -1 if it begins at offset 0, all `NEVER` if it has no complete snapshot."""

    end: int
    """The offset after which everything is known."""
    begin: int
    """Where the snapshot began ..."""
    last: int
    """... and the greatest sequence number until then."""


def known(events: "DataFrame") -> Known:
    """Reads all events."""
    from pyspark.sql import functions as F

    mark = F.get_json_object("detail", "$.part").isin(Part.BEGIN, Part.END)
    mark = F.when((F.col("kind") == "snapshot") & mark, F.struct("offset", "detail"))
    first, marks = events.agg(F.min("offset"), F.collect_list(mark)).first() or (None, [])
    if first == 0:
        return Known(-1, -1, -1)
    details = {offset: json.loads(detail) for offset, detail in marks}
    for end in sorted(details):
        begin = details.get(details[end].get("begin"))
        if begin is not None:
            return Known(end, details[end]["begin"], begin["last"])
    return Known(NEVER, NEVER, NEVER)


def told(events: "DataFrame") -> "DataFrame":
    """One row per message that a snapshot reports: where (offset, at, queue, incarnation, sequence) and what (state,
    attempt, rotation, due).

    Quarantined messages are left out: in the books they have left. Instants in microseconds UTC.
    """
    from pyspark.sql import functions as F

    some = F.from_json("detail", _MESSAGES).getField("messages")
    one = events.where("kind = 'snapshot'").withColumn("one", F.explode(some)).where("one.state != 'quarantined'")
    return one.select(
        "offset", "at", "queue", "incarnation", "one.sequence", "one.state",
        F.col("one.receive_count").alias("attempt"), "one.rotation", "one.due",
    )  # fmt: skip


def audit(events: "DataFrame") -> "DataFrame":
    """One row per finding: rule (of `RULES`), offset, queue, incarnation, sequence, attempt, said. Empty: no violation.

    When called, reads the events once to find out what can be known of them.
    """
    reach = known(events)
    found = _of_messages(events, reach)
    for part in (_of_offsets(events), _of_sends(events), _of_purges(events, reach)):
        found = found.unionByName(part)
    return found.orderBy("offset", "rule")


def _of_messages(events: "DataFrame", reach: Known) -> "DataFrame":
    from pyspark.sql import functions as F

    rules = _rules_of_life(reach) | _rules_of_snapshots(reach) | _rules_of_leases() | _rules_of_handles()
    broken = F.array_compact(F.array(*(F.when(rule, F.lit(name)) for name, rule in rules.items())))
    said = F.concat_ws(
        " ", "kind", F.lit("of attempt"), F.col("attempt").cast("string"), F.lit("after a receive of attempt"),
        F.coalesce(F.col("count").cast("string"), F.lit("none")),
    )  # fmt: skip
    return _finding(_lines(events).withColumn("rules", broken).where(F.size("rules") > 0), F.explode("rules"), said)


def _lines(events: "DataFrame") -> "DataFrame":
    """The events of messages, each with what went before it in its message's line; instants in microseconds UTC.

    come, grant, over, left: offsets of the last send or move in, start of a lease, end of a lease, end of the message;
    a snapshot's report counts as such. count, turned: the attempt and the rotation of the last grant. due: when the
    last grant or extension ends.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    kind = F.col("kind")
    before = Window.partitionBy("incarnation", "sequence").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)

    def last(value: "Column", *kinds: str) -> "Column":
        return F.last(F.when(kind.isin(*kinds), value), ignorenulls=True).over(before)

    offset, ends = F.col("offset"), F.col("at") + F.col("lease_us")
    # A message released for a retry with a delay is in flight until the delay is over.
    over = F.when((kind != "released_for_retry") | (F.col("lease_us") == 0), offset)
    return (
        events.where(kind.isin(*_MESSAGE_KINDS) & F.col("sequence").isNotNull())
        .select(
            "offset", "kind", "at", "queue", "incarnation", "sequence", "attempt", "rotation", "lease_us",
            "visible_since", "detail",
        )
        .unionByName(_arrivals(events))
        .unionByName(_tellings(events))
        .withColumn("come", last(offset, "sent", "moved in", *_TOLD))
        .withColumn("grant", last(offset, "received", "lease_resumed", _TOLD_HELD))
        .withColumn("count", last(F.coalesce("attempt", F.lit(0)), "sent", "moved in", "received", *_TOLD))
        .withColumn("over", last(over, "released", "released_for_retry", *_RAN_OUT, "undelivered", _TOLD_FREE))
        .withColumn("left", last(offset, *_ENDINGS))
        .withColumn("due", last(ends, "received", *_MOVES, _TOLD_HELD))
        .withColumn("turned", last(F.col("rotation"), "received", *_MOVES, "released", *_TOLD))
    )  # fmt: skip


def _rules_of_life(reach: Known) -> "dict[str, Column]":
    """Rules on how a message enters and leaves."""
    from pyspark.sql import functions as F

    kind = F.col("kind")
    comes, left = F.col("come").isNotNull(), F.col("left").isNotNull()
    needs_a_send = kind.isin("received", "deleted", "expired", "dead_lettered")
    new = (F.col("offset") > reach.begin) & (F.col("sequence") > reach.last)
    return {
        "sent once": (kind == "sent") & comes,
        "received was sent": (new | (F.col("offset") > reach.end)) & needs_a_send & ~comes,
        "left once": kind.isin(*_ENDINGS) & left,
        "no resurrection": ~kind.isin(*_ENDINGS, "delete_refused", *_TOLD) & left,
    }


def _rules_of_snapshots(reach: Known) -> "dict[str, Column]":
    """Rules on what a snapshot reports of a message."""
    from pyspark.sql import functions as F

    came, left = F.col("come").isNotNull(), F.col("left").isNotNull()
    granted, is_held = F.col("grant").isNotNull(), F.col("kind") == _TOLD_HELD
    held = granted & (F.col("over").isNull() | (F.col("over") < F.col("grant")))
    otherwise = (
        ((F.col("offset") > reach.end) & ~came)
        | (F.col("attempt") != F.col("count"))
        | ((granted | F.col("over").isNotNull()) & (is_held != held))
        | (is_held & held & (F.col("at") + F.col("lease_us") != F.col("due")))
    )
    return {"snapshot": F.col("kind").isin(*_TOLD) & (left | F.coalesce(otherwise, F.lit(False)))}


def _rules_of_leases() -> "dict[str, Column]":
    """Rules on when a lease begins and ends."""
    from pyspark.sql import functions as F

    received, granted = F.col("kind") == "received", F.col("grant").isNotNull()
    held = granted & (F.col("over").isNull() | (F.col("over") < F.col("grant")))
    return {
        "receive count": received & (F.col("attempt") != F.col("count") + 1),
        "one lease": (received | (F.col("kind") == "lease_resumed")) & held,
        "visible": received & (F.col("at") < F.col("visible_since")),
        "lease end": F.col("kind").isin(*_RAN_OUT) & held & (F.col("at") != F.col("due")),
    }


def _rules_of_handles() -> "dict[str, Column]":
    """Rules on what a handle may do."""
    from pyspark.sql import functions as F

    kind, granted = F.col("kind"), F.col("grant").isNotNull()
    current = F.col("attempt") == F.col("count")
    uses = kind.isin(*_MOVES, "released", "deleted", *_RAN_OUT, "undelivered") & (F.col("attempt") > 0)
    refused = (kind == "delete_refused") & F.coalesce("detail", F.lit("")).contains('"stale"')
    unmoved = (F.col("rotation") == F.col("turned")) & F.col("left").isNull()
    return {
        "stale handles": uses & granted & ~current,
        "refused rightly": refused & granted & current & unmoved,
    }


def _arrivals(events: "DataFrame") -> "DataFrame":
    """Messages that entered a dead-letter queue, with their numbers there."""
    from pyspark.sql import functions as F

    into = F.from_json("detail", "target long, target_sequence long")
    none = F.lit(None)
    return (
        events.where(F.col("kind").isin("dead_lettered", "moved"))
        .withColumn("into", into)
        .select(
            "offset", F.lit("moved in").alias("kind"), "at", none.cast("string").alias("queue"),
            F.col("into.target").alias("incarnation"), F.col("into.target_sequence").alias("sequence"),
            F.lit(0).cast("long").alias("attempt"), F.lit(0).cast("long").alias("rotation"),
            none.cast("long").alias("lease_us"), none.cast("long").alias("visible_since"),
            none.cast("string").alias("detail"),
        )
        .where(F.col("sequence").isNotNull())
    )  # fmt: skip


def _tellings(events: "DataFrame") -> "DataFrame":
    """What snapshots report of messages, as events in their lines; `at` and `lease_us` add up to the lease's end."""
    from pyspark.sql import functions as F

    held = F.col("state") == "in flight"
    none = F.lit(None)
    return told(events).select(
        "offset", F.when(held, _TOLD_HELD).otherwise(_TOLD_FREE).alias("kind"), "at", "queue", "incarnation",
        "sequence", "attempt", "rotation", F.when(held, F.col("due") - F.col("at")).alias("lease_us"),
        none.cast("long").alias("visible_since"), none.cast("string").alias("detail"),
    )  # fmt: skip


def _of_offsets(events: "DataFrame") -> "DataFrame":
    """Gaps and repetitions: every offset in [first, last] must occur once."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    # Windows of a fixed number of offsets, each with its neighbour's first: no single partition sees everything.
    piece = F.floor(F.col("offset") / 10_000)
    sums = events.groupBy(piece.alias("piece")).agg(
        F.count("*").alias("number"), F.countDistinct("offset").alias("distinct"),
        F.min("offset").alias("low"), F.max("offset").alias("high"),
    )  # fmt: skip
    # Partitioned by a constant because Spark Connect warns of a window without; it holds one row per 10,000 events.
    whole = Window.partitionBy(F.lit(0)).orderBy("piece")
    beside = sums.withColumn("follows", F.lead("low").over(whole))
    wrong = (
        (F.col("number") != F.col("distinct"))
        | (F.col("distinct") != F.col("high") - F.col("low") + 1)
        | (F.col("follows").isNotNull() & (F.col("follows") != F.col("high") + 1))
    )
    said = F.format_string("%d events with %d offsets from %d to %d, then %s", "number", "distinct", "low", "high",
                           F.coalesce(F.col("follows").cast("string"), F.lit("the end")))  # fmt: skip
    rows = beside.where(wrong).select(
        F.col("low").alias("offset"), *(_missing(name) for name in ("queue", "incarnation", "sequence", "attempt")),
        said.alias("what"),
    )  # fmt: skip
    return _finding(rows, F.lit("offsets"), F.col("what"))


def _of_sends(events: "DataFrame") -> "DataFrame":
    """Sequence numbers grow with the offsets in each queue."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    line = Window.partitionBy("incarnation").orderBy("offset")
    rows = (
        events.where(F.col("kind") == "sent")
        .withColumn("before", F.lag("sequence").over(line))
        .where(F.col("sequence") <= F.col("before"))
    )
    said = F.format_string("sequence %d after %d", "sequence", "before")
    return _finding(rows, F.lit("sent once"), said)


def _of_purges(events: "DataFrame", reach: Known) -> "DataFrame":
    """A purge or the deletion of a queue reports how many messages it removed: those that came less those that left."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    kind, names = F.col("kind"), ("offset", "queue", "incarnation", "sequence")
    new = F.col("sequence") > reach.last
    come = events.where((kind == "sent") & new).select(*names, F.lit(1).alias("change"))
    moved = _arrivals(events).where(new).select(*names, F.lit(1).alias("change"))
    there = told(events).where(F.col("offset").between(reach.begin, reach.end)).select(*names, F.lit(1).alias("change"))
    left = events.where(kind.isin(*_ENDINGS)).select(*names, F.lit(-1).alias("change"))
    taken = (
        events.where(kind.isin("purged", "queue_deleted"))
        .withColumn("counted", F.get_json_object("detail", "$.count").cast("long"))
        .select(*names, (-F.col("counted")).cast("int").alias("change"), "counted")
    )
    if reach.end >= 0:
        # Messages that left or were purged before the snapshot reached them were never reported.
        early = (F.col("offset") < reach.end) & ~new
        met = there.select("incarnation", "sequence", F.col("offset").alias("met"))
        left = left.join(met, ["incarnation", "sequence"], "left").where(~early | (F.col("met") < F.col("offset")))
        amid = taken.where(F.col("offset").between(reach.begin, reach.end)).select("incarnation").distinct()
        come, moved, there, left, taken = (
            each.join(amid, "incarnation", "left_anti") for each in (come, moved, there, left.drop("met"), taken)
        )
    line = Window.partitionBy("incarnation").orderBy("offset").rowsBetween(Window.unboundedPreceding, 0)
    rows = (
        come.unionByName(moved)
        .unionByName(there)
        .unionByName(left)
        .unionByName(taken, allowMissingColumns=True)
        .where(F.col("offset") > reach.begin)
        .withColumn("live", F.sum("change").over(line))
        .where((F.col("live") < 0) | (F.col("counted").isNotNull() & (F.col("live") != 0)))
        .select("offset", "queue", "incarnation", _missing("sequence"), _missing("attempt"), "live")
    )
    said = F.format_string("after it %d messages are left by the books", "live")
    return _finding(rows, F.lit("conservation"), said)


def _missing(name: str) -> "Column":
    from pyspark.sql import functions as F

    return F.lit(None).cast("string" if name == "queue" else "long").alias(name)


def _finding(rows: "DataFrame", rule: "Column", said: "Column") -> "DataFrame":
    return rows.select(rule.alias("rule"), "offset", "queue", "incarnation", "sequence", "attempt", said.alias("said"))
