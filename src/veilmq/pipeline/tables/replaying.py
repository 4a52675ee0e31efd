"""`replay`: sends archived messages back to a queue.

Strategy: an archive has the columns of the queue sink, except those that the queue sets itself (sequence, times) and
those that only the drain knew. A FIFO queue gets the rows in order and drops messages whose id it knows, so a replay
that failed half way can be run again. Other queues get a repeated task's rows again: at least once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from veilmq.client.adapters.connect import connect
from veilmq.model.errors import VeilError
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.sinks.queue import check_key
from veilmq.pipeline.tables import read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SENT: Final = (
    "body", "attributes", "type", "group", "tag", "delay", "ttl", "lease_hint", "priority", "deduplication_id",
)  # fmt: skip
_ORDER: Final = ("batch", "position")
_DATA_EXCEPTION: Final = "22"
"""The SQLSTATE class for values that an expression cannot handle: a cast, a division by zero, a date."""
_VECTORS: Final = "spark.sql.parquet.enableVectorizedReader"


def replay(spark: "SparkSession", table: Path, queue: str, *, where: str | None = None, key: str | None = None) -> int:
    """Send the rows of a table (Parquet or Delta) to the queue of that URL; returns the number of rows.

    where: a condition in SQL; key: a column whose equal rows a FIFO queue takes once, by default `id`. On a FIFO queue
    rows without a group form one group. Raises PipelineError.
    """
    from pyspark.sql import functions as f

    rows = read(spark, table)
    if "body" not in rows.columns:
        raise OptionInvalid(f"{table} has no column body.", "Is it an archive?")
    if key is not None and key not in rows.columns:
        raise OptionInvalid(f"{table} has no column {key}.", f"It has {', '.join(rows.columns)}.")
    check_key(rows.schema, key)
    if where is not None:
        rows = _only(rows, where)
    if _is_fifo(queue):
        if key is None and "id" in rows.columns and "deduplication_id" not in rows.columns:
            key = "id"
        group = f.lit(table.name)
        rows = rows.withColumn("group", f.coalesce("group", group) if "group" in rows.columns else group)
        order = [name for name in _ORDER if name in rows.columns]
        # One partition, so that the order stays.
        rows = rows.coalesce(1).sortWithinPartitions(*order) if order else rows
    wanted = [name for name in rows.columns if name in _SENT or name == key]
    writer = rows.select(*wanted).write.format("veilmq").option("url", queue).mode("append")
    with row_by_row(spark):
        number = _counted(rows, where)
        (writer if key is None else writer.option("key", key)).save()
    return number


@contextmanager
def row_by_row(spark: "SparkSession") -> Iterator[None]:
    """Within this context Parquet is read row by row: Spark otherwise reads thousands of rows at once, whatever their
    size."""
    before = spark.conf.get(_VECTORS)
    spark.conf.set(_VECTORS, "false")
    try:
        yield
    finally:
        spark.conf.set(_VECTORS, str(before))


def _only(rows: "DataFrame", where: str) -> "DataFrame":
    from pyspark.errors import AnalysisException

    try:
        kept = rows.where(where)
        # Spark Connect checks a condition when its columns are requested.
        _ = kept.columns
    except AnalysisException as error:
        raise OptionInvalid(f"where={where!r} cannot be: {_sentence(error)}", "") from None
    return kept


def _counted(rows: "DataFrame", where: str | None) -> int:
    """The number of rows. A condition that fits the columns may still fail on a row; nothing was sent then."""
    from pyspark.errors import PySparkException

    try:
        return rows.count()
    except PySparkException as error:
        if where is None or not (error.getSqlState() or "").startswith(_DATA_EXCEPTION):
            raise
        raise OptionInvalid(f"where={where!r} fails on a row: {_sentence(error)}", "") from None


def _sentence(error: Exception) -> str:
    return " ".join(str(error).partition(";")[0].partition("== SQL")[0].split())


def _is_fifo(url: str) -> bool:
    try:
        with connect(url) as queue:
            return queue.capabilities.native_fifo
    except VeilError as error:
        raise SourceUnreachable(f"The queue cannot be reached: {error}.", "Is it there?") from None
