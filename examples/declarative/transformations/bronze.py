"""Bronze: the history as it was exported, each file taken in once."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from veilmq.pipeline.events import COLUMNS, SPARK_SCHEMA

spark = SparkSession.active()


@dp.table
def events() -> DataFrame:
    """One row an event."""
    files = spark.readStream.schema(SPARK_SCHEMA).option("recursiveFileLookup", "true")
    return files.parquet(spark.conf.get("veilmq.events")).select(*COLUMNS)
