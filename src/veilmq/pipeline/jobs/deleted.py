"""Queues that are no more: what they tell of work stays true, but nobody needs a lease for them.

Strategy: a queue is what its name says, so one that was deleted and created again goes on, with all that was learnt.
"""

from collections.abc import Set
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUEUE: Final = ("account", "region", "queue")
"""What names one."""
KINDS: Final = ("queue_created", "queue_deleted")
"""The events that tell of that."""


def lives(events: "DataFrame") -> "DataFrame":
    """One row a queue that was created or deleted among the events: `QUEUE`, and whether it is `deleted` after them."""
    from pyspark.sql import functions as F

    return (
        events.where(F.col("kind").isin(*KINDS))
        .groupBy(*QUEUE)
        .agg((F.max_by("kind", "offset") == "queue_deleted").alias("deleted"))
    )


def without(rows: Any, deleted: Set[tuple[str, ...]]) -> Any:
    """The rows of a pandas frame that are of other queues."""
    if not deleted or rows.empty:
        return rows
    return rows[[key not in deleted for key in rows[list(QUEUE)].itertuples(index=False, name=None)]]
