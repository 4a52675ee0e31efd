"""What `veilmq pipeline health --follow` does.

Strategy: check before Spark starts that the table is a stream's and not a job's: neither may overwrite the other.
"""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from veilmq.cli.pipeline_options import Asked
from veilmq.cli.pipeline_session import options_of
from veilmq.cli.pipeline_spark import hush
from veilmq.pipeline.errors import OptionInvalid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE: Final = "health"
_LOOK_SECONDS: Final = 1


def check_place(out: Path, kind: str) -> None:
    """Check that the stream may write its table there. Raises OptionInvalid, TableForeign."""
    from veilmq.pipeline.drain.checkpoint import check_table
    from veilmq.pipeline.jobs.tables import checkpoint_of

    place = out.resolve() / TABLE
    checkpoint = checkpoint_of(place)
    has_begun = (checkpoint / "offsets").is_dir()
    if not has_begun and place.is_dir() and any(place.iterdir()):
        raise OptionInvalid(f"{place} is a table of no stream.", "Name another --out, or take it away.")
    check_table(kind, str(place), checkpoint)


def follow(asked: Asked, environment: Mapping[str, str], spark: "SparkSession", window: str, failures: int) -> None:
    """The windows of `asked` as they come, until Ctrl-C."""
    from veilmq.pipeline.jobs import health as job
    from veilmq.pipeline.jobs.tables import checkpoint_of

    assert asked.out is not None
    place = asked.out / TABLE
    stream = spark.readStream.format("veilmq-events").options(**options_of(asked, environment)).load()
    kind = {"delta": "veilmq-delta"}.get(asked.format, asked.format)
    query = (
        job.health(stream, window=window, failures=failures)
        .writeStream.format(kind)
        .outputMode("append")
        .option("path", str(place))
        .option("checkpointLocation", str(checkpoint_of(place)))
        .trigger(processingTime="10 seconds")
        .start()
    )
    is_over = threading.Event()
    # Poll in short calls: interrupting a call leaves Spark's gateway in a bad state.
    handler = signal.signal(signal.SIGINT, lambda *_: is_over.set())
    try:
        while not is_over.is_set() and not query.awaitTermination(_LOOK_SECONDS):
            pass
        if is_over.is_set():
            hush(spark)
            query.stop()
    finally:
        signal.signal(signal.SIGINT, handler)
