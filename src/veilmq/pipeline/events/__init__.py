"""The history as a Spark data source, from a server or from exported Parquet.

Strategy: `reading` fetches events as Arrow record batches by offset; `source` splits them for Spark; `export` writes
them to files. The columns are those of `/api/v1/events`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def load(spark: "SparkSession", options: Mapping[str, str], kinds: Sequence[str] | None = None) -> "DataFrame":
    """The events for these options of `veilmq-events`. With `kinds`, other kinds are dropped where they are read."""
    given = dict(options) if kinds is None else {**options, "kinds": ",".join(kinds)}
    return spark.read.format("veilmq-events").options(**given).load()
