"""Finds deleted queues: their durations remain valid, but nobody needs a lease for them.

Strategy: a queue is identified by its name, so a queue that is deleted and created again keeps all that was learnt.
"""

from collections.abc import Set
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUEUE: Final = ("account", "region", "queue")
"""Columns that identify a queue."""
KINDS: Final = ("queue_created", "queue_deleted")
"""The kinds of events that report it."""


def lives(events: "DataFrame") -> "DataFrame":
    """One row per queue that was created or deleted in the events: `QUEUE`, and whether it is `deleted` after them."""
    from pyspark.sql import functions as F

    return (
        events.where(F.col("kind").isin(*KINDS))
        .groupBy(*QUEUE)
        .agg((F.max_by("kind", "offset") == "queue_deleted").alias("deleted"))
    )


def without(rows: Any, deleted: Set[tuple[str, ...]]) -> Any:
    """The rows of a pandas frame that belong to other queues."""
    if not deleted or rows.empty:
        return rows
    return rows[[key not in deleted for key in rows[list(QUEUE)].itertuples(index=False, name=None)]]
