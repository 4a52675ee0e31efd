"""spark_archive.py ARCHIVE: write what Spark's Java loads in its first seconds to a file that later Javas start from.

Strategy: Java's own means, an archive of classes that were loaded and checked once ("Class Data Sharing", JEP 350). The
tests start Java some dozens of times, and each spends most of its CPU on loading Spark; from the archive it is half. A
Java or a Spark that the archive does not fit ignores it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from veilmq.pipeline.session import session

_SECONDS = 240


def main() -> None:
    archive = Path(sys.argv[1]).resolve()
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={archive} -Xlog:disable"
    with tempfile.TemporaryDirectory() as directory:
        java = _work(Path(directory), options)
        java.wait(_SECONDS)
    if not archive.exists():
        sys.exit(f"veilmq: {archive} was not written")


def _work(directory: Path, options: str) -> "subprocess.Popen[bytes]":
    """A little of what the tests do, and the process of Java, which writes the archive when it ends."""
    spark = session("local[2]", settings={"spark.driver.extraJavaOptions": options})
    java: subprocess.Popen[bytes] = spark.sparkContext._gateway.proc
    table, stream = str(directory / "table"), str(directory / "stream")
    work = spark.range(20).selectExpr("id % 3 AS kind", "CAST(id AS DOUBLE) AS seconds", "'text' AS body")
    work.createOrReplaceTempView("work")
    counted = "SELECT kind, count(*), percentile(seconds, 0.5), max(body) FROM work GROUP BY kind ORDER BY kind"
    spark.sql(counted).write.mode("overwrite").parquet(table)
    spark.read.parquet(table).toPandas()
    work.mapInPandas(lambda frames: frames, "kind long, seconds double, body string").collect()
    lines = spark.readStream.format("rate").load().writeStream.format("parquet").option("path", stream)
    lines.option("checkpointLocation", str(directory / "checkpoint")).trigger(once=True).start().awaitTermination()
    spark.stop()
    spark.sparkContext._gateway.shutdown()
    java.stdin.close()
    return java


if __name__ == "__main__":
    main()
