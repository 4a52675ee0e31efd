"""`replay`: what was archived, back to a queue.

Strategy: an archive's columns are those that the queue sink takes, but for what the queue gives itself (id, sequence,
times) and what only the drain knew. At least once: a task that is repeated sends its rows again, unless the queue drops
what it knows by a key.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.jobs.tables import read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SENT: Final = (
    "body", "attributes", "type", "group", "tag", "delay", "ttl", "lease_hint", "priority", "deduplication_id",
)  # fmt: skip
_ORDER: Final = ("batch", "position")


def replay(spark: "SparkSession", table: Path, queue: str, *, where: str | None = None, key: str | None = None) -> int:
    """Send the rows of a table (Parquet or Delta) to the queue of that URL; returns how many there were.

    where: a condition in SQL; key: a column whose equal rows a FIFO queue takes once. Raises PipelineError.
    """
    rows = read(spark, table)
    if "body" not in rows.columns:
        raise OptionInvalid(f"{table} has no column body.", "Is it an archive?")
    if key is not None and key not in rows.columns:
        raise OptionInvalid(f"{table} has no column {key}.", f"It has {', '.join(rows.columns)}.")
    if where is not None:
        rows = rows.where(where)
    order = [name for name in _ORDER if name in rows.columns]
    if order:
        # One line, so that what was in order stays in order.
        rows = rows.coalesce(1).sortWithinPartitions(*order) if "group" in rows.columns else rows
    wanted = [name for name in rows.columns if name in _SENT or name == key]
    number = rows.count()
    writer = rows.select(*wanted).write.format("veilmq").option("url", queue).mode("append")
    (writer if key is None else writer.option("key", key)).save()
    return number
