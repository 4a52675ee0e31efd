"""Silver: one row a lease."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from veilmq.pipeline.jobs import attempts as job

spark = SparkSession.active()


@dp.materialized_view
def attempts() -> DataFrame:
    """When a lease was granted, how it ended, how long the work took."""
    return job.attempts(spark.read.table("events"))
