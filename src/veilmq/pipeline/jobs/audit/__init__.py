"""`audit`: checks the conservation law and the lease invariants from a history alone.

Strategy: window functions walk the events of each message in the order of their offsets. Each row sees which kinds of
events there were before, whether a lease runs, its number and its end. A rule is a condition on such a row; a row that
breaks a rule is a finding. A kind is one bit of a number (`_BITS`), so that "was there any of these" is one operation
on one column, of which the rows that Spark sorts have one instead of a text. Every snapshot is compared with the events
before it.

Facts about a whole queue (the order of its sends, the count of a purge) and about all events (contiguous offsets) are
found by pieces of the history, in two steps: what happens within a piece, and from what its predecessors left. So one
busy queue is the work of many tasks, and no task holds a whole queue.

A history that starts at offset 0 is known from its beginning. A trimmed one is known from the end of its first complete
snapshot: messages with a sequence number above that snapshot's `last` have their own events, and the snapshot reports
all others. Between its begin and end a message of a lower number may not be reported yet. Before that, or without a
snapshot, the audit skips what cannot be known: where messages came from.

Source: docs/how-it-works.md; docs/admin-api.md, "Snapshots in the history"; decision 0008.
"""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
_MOVED: Final = ("dead_lettered", "moved")
"""A message entered a dead-letter queue, or left it again."""
_RAN_OUT: Final = ("lease_expired", "expired_after_change", "retry_due")
"""A message in flight became visible by itself."""
_MOVES: Final = ("extended", "lease_resumed", "released_for_retry")
"""The end of the lease was moved."""
_MESSAGE_KINDS: Final = (
    "received", "sent", "deleted", *_MOVES, *_RAN_OUT, "delete_refused", "released", "undelivered", "content_updated",
    *(kind for kind in _ENDINGS if kind != "deleted"),
)  # fmt: skip
"""The usual ones first: Spark compares them one by one."""
_REPORTED_HELD: Final = "told in flight"
_REPORTED_FREE: Final = "told"
_REPORTED: Final = (_REPORTED_HELD, _REPORTED_FREE)
"""Reported by a snapshot: of a leased message, of any other message."""
_MOVED_IN: Final = "moved in"
_COMES: Final = ("sent", _MOVED_IN, *_REPORTED)
_GRANTS: Final = ("received", "lease_resumed", _REPORTED_HELD)
_BITS: Final = {kind: 1 << at for at, kind in enumerate((*_MESSAGE_KINDS, _MOVED_IN, *_REPORTED))}


PIECE_ROWS: Final = 1 << 20
"""Offsets of a piece."""


class Known(NamedTuple):
    """What can be known of a history; all -1 if it begins at offset 0, all `NEVER` if it has no complete snapshot."""

    end: int
    """The offset after which everything is known."""
    begin: int
    """Where the snapshot began ..."""
    last: int
    """... and the greatest sequence number until then."""


def known(events: "DataFrame") -> Known:
    """Reads the offsets of all events and, unless they begin at 0, the snapshots among them."""
    from pyspark.sql import functions as F

    return _known(events, (events.agg(F.min("offset")).first() or (None,))[0])


def _known(events: "DataFrame", first: int | None) -> Known:
    from pyspark.sql import functions as F

    if first == 0:
        return Known(-1, -1, -1)
    mark = F.get_json_object("detail", "$.part").isin(Part.BEGIN, Part.END)
    marks = events.where((F.col("kind") == "snapshot") & mark).select("offset", "detail").collect()
    details = {offset: json.loads(detail) for offset, detail in marks}
    for end in sorted(details):
        begin = details.get(details[end].get("begin"))
        if begin is not None:
            return Known(end, details[end]["begin"], begin["last"])
    return Known(NEVER, NEVER, NEVER)


def snapshot_messages(events: "DataFrame") -> "DataFrame":
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


def audit(events: "DataFrame", *, piece_rows: int = PIECE_ROWS) -> "DataFrame":
    """One row per finding: rule (of `RULES`), offset, queue, incarnation, sequence, attempt, said. Empty: no violation.

    When called, reads the events once to find out what can be known of them. In no order: sorting would do the work
    twice.
    """
    from pyspark.sql import functions as F

    kinds = {row.kind: row.first for row in events.groupBy("kind").agg(F.min("offset").alias("first")).collect()}
    reach = _known(events, min(kinds.values(), default=None))
    # What does not occur is not looked for: each scan of the events costs.
    entered = [_arrivals(events)] if kinds.keys() & set(_MOVED) else []
    reported = snapshot_messages(events) if "snapshot" in kinds else None
    changes = _changes(events, reach, entered, reported)
    found = _of_messages(_lines(events, entered, reported), reach)
    for part in (_of_offsets(events), _of_queues(changes.withColumn("piece", F.floor(F.col("offset") / piece_rows)))):
        found = found.unionByName(part)
    return found


def _of_messages(lines: "DataFrame", reach: Known) -> "DataFrame":
    from pyspark.sql import functions as F

    rules = _rules_of_life(reach) | _rules_of_snapshots(reach) | _rules_of_leases() | _rules_of_handles()
    # A filter first: Spark compiles it, but interprets functions of arrays.
    is_broken = reduce(or_, (F.coalesce(rule, F.lit(False)) for rule in rules.values()))
    broken = F.array_compact(F.array(*(F.when(rule, F.lit(name)) for name, rule in rules.items())))
    what = F.concat_ws(
        " ", _kind_of(F.col("bit")), F.lit("of attempt"), F.col("attempt").cast("string"),
        F.lit("after a receive of attempt"), F.coalesce(F.col("count").cast("string"), F.lit("none")),
    )  # fmt: skip
    return _finding(lines.where(is_broken).withColumn("rules", broken), F.explode("rules"), what)


def _lines(events: "DataFrame", entered: "Sequence[DataFrame]", reported: "DataFrame | None") -> "DataFrame":
    """The events of messages, each with what went before it in its message's line; instants in microseconds UTC.

    bit: the kind. ends: when the lease that the event gives ends. early: a receive before the message was visible.
    stale: a delete that was refused for its handle. before: the bits of all kinds before. held: whether a lease runs;
    null: there was none. count, turned: the attempt and the rotation of the last grant. due: when the last grant or
    extension ends.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    kind = F.col("kind")
    # Spark's sort compares the first column alone where it differs: the one that differs most comes first.
    line = Window.partitionBy("sequence", "incarnation").orderBy("offset")
    before = line.rowsBetween(Window.unboundedPreceding, -1)

    def last(value: "Column", *kinds: str) -> "Column":
        return F.last(F.when(_is(*kinds), value), ignorenulls=True).over(before)

    ends = F.col("ends")
    refused, early = kind == "delete_refused", F.col("at") < F.col("visible_since")
    lines = events.where(kind.isin(*_MESSAGE_KINDS) & F.col("sequence").isNotNull()).select(
        "offset", _bit_of(kind).alias("bit"), "at", "queue", "incarnation", "sequence", "attempt", "rotation",
        (F.col("at") + F.col("lease_us")).alias("ends"),
        F.coalesce((kind == "received") & early, F.lit(False)).alias("early"),
        F.coalesce(refused & F.col("detail").contains('"stale"'), F.lit(False)).alias("stale"),
    )  # fmt: skip
    for each in (*entered, *([] if reported is None else [_reports(reported)])):
        part = each.withColumn("bit", _bit_of(kind)).drop("kind")
        lines = lines.unionByName(part, allowMissingColumns=True)
    # A message released for a retry with a delay is in flight until the delay is over.
    over = _is("released", *_RAN_OUT, "undelivered", _REPORTED_FREE) | (
        _is("released_for_retry") & (ends == F.col("at"))
    )
    held = F.when(_is(*_GRANTS), F.lit(True)).when(over, F.lit(False))
    # In one `select`: with columns added one by one, Spark walks the lines once for each.
    return lines.select(
        "*",
        F.coalesce(F.bit_or("bit").over(before), F.lit(0)).alias("before"),
        F.last(held, ignorenulls=True).over(before).alias("held"),
        last(F.coalesce("attempt", F.lit(0)), "received", *_COMES).alias("count"),
        last(ends, "received", *_MOVES, _REPORTED_HELD).alias("due"),
        last(F.col("rotation"), "received", *_MOVES, "released", *_REPORTED).alias("turned"),
    )


def _is(*kinds: str, of: str = "bit") -> "Column":
    """Whether the event is of one of the kinds, or (`of` = `before`) such an event was before it."""
    from pyspark.sql import functions as F

    return F.col(of).bitwiseAND(F.lit(sum({_BITS[kind] for kind in kinds}))) != 0


def _bit_of(kind: "Column") -> "Column":
    """The bit of a kind in words; null if it is none of a message's."""
    return _looked_up(kind, _BITS)


def _kind_of(bit: "Column") -> "Column":
    return _looked_up(bit, {bit: kind for kind, bit in _BITS.items()})


def _looked_up(key: "Column", values: Mapping[Any, Any]) -> "Column":
    from pyspark.sql import functions as F

    (first, value), *others = values.items()
    found = F.when(key == first, value)
    for other, value in others:
        found = found.when(key == other, value)
    return found


def _rules_of_life(reach: Known) -> "dict[str, Column]":
    """Rules on how a message enters and leaves."""
    from pyspark.sql import functions as F

    comes, left = _is(*_COMES, of="before"), _is(*_ENDINGS, of="before")
    needs_a_send = _is("received", "deleted", "expired", "dead_lettered")
    new = (F.col("offset") > reach.begin) & (F.col("sequence") > reach.last)
    return {
        "sent once": _is("sent") & comes,
        "received was sent": (new | (F.col("offset") > reach.end)) & needs_a_send & ~comes,
        "left once": _is(*_ENDINGS) & left,
        "no resurrection": ~_is(*_ENDINGS, "delete_refused", *_REPORTED) & left,
    }


def _rules_of_snapshots(reach: Known) -> "dict[str, Column]":
    """Rules on what a snapshot reports of a message."""
    from pyspark.sql import functions as F

    came, left = _is(*_COMES, of="before"), _is(*_ENDINGS, of="before")
    held, is_held = F.col("held"), _is(_REPORTED_HELD)
    otherwise = (
        ((F.col("offset") > reach.end) & ~came)
        | (F.col("attempt") != F.col("count"))
        | (is_held != held)
        | (is_held & held & (F.col("ends") != F.col("due")))
    )
    return {"snapshot": _is(*_REPORTED) & (left | F.coalesce(otherwise, F.lit(False)))}


def _rules_of_leases() -> "dict[str, Column]":
    """Rules on when a lease begins and ends."""
    from pyspark.sql import functions as F

    received, held = _is("received"), F.col("held")
    return {
        "receive count": received & (F.col("attempt") != F.col("count") + 1),
        "one lease": (received | _is("lease_resumed")) & held,
        "visible": F.col("early"),
        "lease end": _is(*_RAN_OUT) & held & (F.col("at") != F.col("due")),
    }


def _rules_of_handles() -> "dict[str, Column]":
    """Rules on what a handle may do."""
    from pyspark.sql import functions as F

    granted = _is(*_GRANTS, of="before")
    current = F.col("attempt") == F.col("count")
    uses = _is(*_MOVES, "released", "deleted", *_RAN_OUT, "undelivered") & (F.col("attempt") > 0)
    unmoved = (F.col("rotation") == F.col("turned")) & ~_is(*_ENDINGS, of="before")
    return {
        "stale handles": uses & granted & ~current,
        "refused rightly": F.col("stale") & granted & current & unmoved,
    }


def _arrivals(events: "DataFrame") -> "DataFrame":
    """Messages that entered a dead-letter queue, with their numbers there."""
    from pyspark.sql import functions as F

    into = F.from_json("detail", "target long, target_sequence long")
    zero = F.lit(0).cast("long")
    return (
        events.where(F.col("kind").isin(*_MOVED))
        .withColumn("into", into)
        .select(
            "offset", F.lit(_MOVED_IN).alias("kind"), "at", F.col("into.target").alias("incarnation"),
            F.col("into.target_sequence").alias("sequence"), zero.alias("attempt"), zero.alias("rotation"),
            F.lit(False).alias("early"), F.lit(False).alias("stale"),
        )
        .where(F.col("sequence").isNotNull())
    )  # fmt: skip


def _reports(reported: "DataFrame") -> "DataFrame":
    """What snapshots report of messages, as events in their lines."""
    from pyspark.sql import functions as F

    held = F.col("state") == "in flight"
    return reported.select(
        "offset", F.when(held, _REPORTED_HELD).otherwise(_REPORTED_FREE).alias("kind"), "at", "queue", "incarnation",
        "sequence", "attempt", "rotation", F.when(held, F.col("due")).alias("ends"), F.lit(False).alias("early"),
        F.lit(False).alias("stale"),
    )  # fmt: skip


def _of_offsets(events: "DataFrame") -> "DataFrame":
    """Gaps and repetitions: every offset in [first, last] must occur once."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    # Which of 64 offsets there are is a word of bits, so a task sends on one row for 64 events.
    offset, word = F.col("offset"), F.shiftright("offset", 6).alias("word")
    bit = F.call_function("shiftleft", F.lit(1).cast("long"), offset.bitwiseAND(63).cast("int"))
    words = events.groupBy(word).agg(
        F.count("*").alias("number"), F.bit_or(bit).alias("bits"), F.min("offset").alias("low"),
        F.max("offset").alias("high"),
    )  # fmt: skip
    sums = words.groupBy(F.shiftright("word", 10).alias("bucket")).agg(
        F.sum("number").alias("number"), F.sum(F.bit_count("bits")).alias("distinct"), F.min("low").alias("low"),
        F.max("high").alias("high"),
    )  # fmt: skip
    # Partitioned by a constant because Spark Connect warns of a window without; it holds a row per 65,536 events.
    whole = Window.partitionBy(F.lit(0)).orderBy("bucket")
    beside = sums.withColumn("follows", F.lead("low").over(whole))
    wrong = (
        (F.col("number") != F.col("distinct"))
        | (F.col("distinct") != F.col("high") - F.col("low") + 1)
        | (F.col("follows").isNotNull() & (F.col("follows") != F.col("high") + 1))
    )
    what = F.format_string("%d events with %d offsets from %d to %d, then %s", "number", "distinct", "low", "high",
                           F.coalesce(F.col("follows").cast("string"), F.lit("the end")))  # fmt: skip
    rows = beside.where(wrong).select(
        F.col("low").alias("offset"), *(_missing(name) for name in ("queue", "incarnation", "sequence", "attempt")),
        what.alias("what"),
    )  # fmt: skip
    return _finding(rows, F.lit("offsets"), F.col("what"))


def _of_queues(changes: "DataFrame") -> "DataFrame":
    """Sequence numbers grow with the offsets in each queue. A purge or the deletion of a queue reports how many
    messages it removed: those that came less those that left."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    line = Window.partitionBy("incarnation", "piece").orderBy("offset")
    earlier = Window.partitionBy("incarnation").orderBy("piece").rowsBetween(Window.unboundedPreceding, -1)
    pieces = (
        changes.groupBy("incarnation", "piece")
        .agg(F.sum("change").alias("change"), F.max_by("new", "offset").alias("new"))
        .select(
            "incarnation", "piece", F.coalesce(F.sum("change").over(earlier), F.lit(0)).alias("begin"),
            F.last("new", ignorenulls=True).over(earlier).alias("previous"),
        )
    )  # fmt: skip
    so_far, above = (line.rowsBetween(Window.unboundedPreceding, last) for last in (0, -1))
    rows = (
        changes.select(
            "*",
            F.sum("change").over(so_far).alias("within"),
            F.last("new", ignorenulls=True).over(above).alias("above"),
        )
        .join(pieces, ["incarnation", "piece"])
        .withColumn("live", F.col("begin") + F.col("within"))
        .withColumn("before", F.coalesce("above", "previous"))
    )
    falls = F.coalesce(F.col("new") <= F.col("before"), F.lit(False))
    lost = F.col("weighs") & ((F.col("live") < 0) | (F.col("counted").isNotNull() & (F.col("live") != 0)))
    of_send = F.struct(
        F.lit("sent once").alias("rule"), "sequence", "attempt",
        F.format_string("sequence %d after %d", "new", "before").alias("said"),
    )  # fmt: skip
    of_count = F.struct(
        F.lit("conservation").alias("rule"), _missing("sequence"), _missing("attempt"),
        F.format_string("after it %d messages are left by the books", "live").alias("said"),
    )  # fmt: skip
    found = F.array_compact(F.array(F.when(falls, of_send), F.when(lost, of_count)))
    rows = rows.where(falls | lost).select("offset", "queue", "incarnation", F.explode(found).alias("found"))
    return rows.select("found.rule", "offset", "queue", "incarnation", "found.sequence", "found.attempt", "found.said")


def _changes(
    events: "DataFrame", reach: Known, entered: "Sequence[DataFrame]", reported: "DataFrame | None"
) -> "DataFrame":
    """What changed how many messages a queue has: change, the number of messages more; counted: of a purge or deletion,
    what it reports; new: of a send, its sequence number. weighs: whether it counts in the books that are known: for the
    others, change is 0."""
    from pyspark.sql import functions as F

    kind, names = F.col("kind"), ("offset", "queue", "incarnation", "sequence", "attempt")
    is_new, sends, takes = F.col("sequence") > reach.last, kind == "sent", kind.isin("purged", "queue_deleted")
    counted = F.when(takes, F.get_json_object("detail", "$.count").cast("long"))
    known = F.col("offset") > reach.begin
    own = events.where(sends | kind.isin(*_ENDINGS) | takes).select(
        *names, F.when(sends, 1).when(takes, -counted).otherwise(-1).alias("change"), counted.alias("counted"),
        F.when(sends, F.col("sequence")).alias("new"), (known & (~sends | is_new)).alias("weighs"),
    )  # fmt: skip
    come = [each.where(is_new).withColumn("queue", _missing("queue")) for each in entered]
    there = None if reported is None else reported.where(F.col("offset").between(reach.begin, reach.end))
    come = [
        each.where(known).select(*names, F.lit(1).cast("long").alias("change"), F.lit(True).alias("weighs"))
        for each in (*come, *([] if there is None else [there]))
    ]
    if there is not None and 0 <= reach.end < NEVER:
        # Messages that left or were purged before the snapshot reached them were never reported.
        left = F.col("new").isNull() & F.col("counted").isNull()
        early = left & (F.col("offset") < reach.end) & ~is_new
        met = there.select("incarnation", "sequence", F.col("offset").alias("met"))
        amid = own.where(F.col("counted").isNotNull() & F.col("offset").between(reach.begin, reach.end))
        gone = amid.select("incarnation", F.lit(True).alias("gone")).distinct()
        own = own.join(met, ["incarnation", "sequence"], "left").join(gone, "incarnation", "left")
        seen = F.coalesce(~early | (F.col("met") < F.col("offset")), F.lit(False)) & F.col("gone").isNull()
        own = own.withColumn("weighs", F.col("weighs") & seen).drop("met", "gone")
        come = [each.join(gone, "incarnation", "left_anti") for each in come]
    every = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), come, own)
    return every.withColumn("change", F.when(F.col("weighs"), F.col("change")).otherwise(0))


def _missing(name: str) -> "Column":
    from pyspark.sql import functions as F

    return F.lit(None).cast("string" if name == "queue" else "long").alias(name)


def _finding(rows: "DataFrame", rule: "Column", what: "Column") -> "DataFrame":
    return rows.select(rule.alias("rule"), "offset", "queue", "incarnation", "sequence", "attempt", what.alias("said"))
