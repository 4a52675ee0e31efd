"""Reads the snapshots in a history for the audit: which messages existed, and from where on everything is known.

Strategy: a history that starts at offset 0 is known from its beginning. Otherwise it is known from the end of its first
complete snapshot: messages with a sequence number above that snapshot's `last` have their own events, and the snapshot
reports all others. Between its begin and end a message of a lower number may not be reported yet. Source:
docs/admin-api.md, "Snapshots in the history"; decision 0008.
"""

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from veilmq.model.events import Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NEVER: Final = (1 << 63) - 1
_MESSAGES: Final = (
    "messages array<struct<sequence: long, state: string, receive_count: long, rotation: long, due: long>>"
)


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
