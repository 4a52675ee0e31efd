"""Gold: how long work takes, how long leases should be, and what a queue suffers from."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from veilmq.pipeline.estimates import buckets
from veilmq.pipeline.jobs import health as health_job
from veilmq.pipeline.jobs import survival as survival_job
from veilmq.pipeline.jobs import timeouts as timeouts_job

spark = SparkSession.active()


@dp.materialized_view
def lease_histogram() -> DataFrame:
    """Leases counted by queue, type and how they ended."""
    return buckets.histogram(spark.read.table("attempts"))


@dp.materialized_view
def survival() -> DataFrame:
    """p50, p90 and p99, or "at least"."""
    return survival_job.quantiles(spark.read.table("lease_histogram"))


@dp.materialized_view
def timeouts() -> DataFrame:
    """Recommended timeouts and leases with their costs."""
    return timeouts_job.recommended(spark.read.table("lease_histogram"))


@dp.materialized_view
def health() -> DataFrame:
    """Windows of five minutes."""
    return health_job.health(spark.read.table("events"), streaming=False)
