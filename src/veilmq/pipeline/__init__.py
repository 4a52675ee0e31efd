"""The data pipeline on Spark: reads the queue's history as tables, recommends timeouts, drains queues exactly once.

Strategy: two data sources (`veilmq-events`, `veilmq`) connect Spark to the server. Jobs are functions from DataFrame to
DataFrame and run the same on `local[*]`, a cluster or Spark Connect; `loop` keeps their recommendations up to date.
Only modules that need PySpark import it, so that the command line and other tools' drivers start quickly. Source:
docs/pipeline.md.
"""

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_REGISTERED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_LOCK: Final = threading.Lock()


def register(spark: "SparkSession") -> None:
    """Register the data sources with a session, once: `spark.read.format("veilmq-events")` and the others.

    Any thread. Spark's own registry takes no two threads: a query that starts while another thread registers a source
    may not find it.
    """
    from veilmq.pipeline.drain.source import QueueSource
    from veilmq.pipeline.events.source import EventsSource
    from veilmq.pipeline.sinks.delta import DeltaSink

    with _LOCK:
        if spark not in _REGISTERED:
            for source in (EventsSource, QueueSource, DeltaSink):
                spark.dataSource.register(source)
            _REGISTERED.add(spark)
