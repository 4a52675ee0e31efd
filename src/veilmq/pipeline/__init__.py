"""The data pipeline on Spark: the queue's history as tables, better timeouts from it, and queues drained exactly once.

Strategy: data sources (`veilmq-events`, `veilmq`) bring the queue to Spark; jobs are functions from DataFrame to
DataFrame, the same on `local[*]`, a cluster or Spark Connect. PySpark is imported by what needs it, so that the
command line and the drivers of other tools stay quick. Source: docs/pipeline.md.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Make the data sources known to a session: `spark.read.format("veilmq-events")` and the others."""
    from veilmq.pipeline.registry import SOURCES

    for source in SOURCES:
        spark.dataSource.register(source)
