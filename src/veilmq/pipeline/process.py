"""`process`: Spark's executors as workers on a queue.

Strategy: each task is a worker of the client library with its own lease keeper, and receives until the queue is empty.
A message is deleted when its handler returns, released with a backoff when the handler raises, and comes back by itself
when its executor dies: at least once, never exactly once. A handler that must not run twice uses a guard.
"""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from veilmq.client.worker import Job, Worker
from veilmq.pipeline.errors import OptionInvalid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Processed(msgspec.Struct, frozen=True):
    """What all workers did together. Every delivery of a message counts; the counts of a killed task are lost."""

    received: int
    outcomes: dict[str, int]
    """As in `veilmq.client.worker.Counts.outcomes`: `done`, `failed`, `dead_lettered`, `lost` ..."""


def process(
    spark: "SparkSession", url: str, handler: Callable[[Job], Any], *, workers: int = 2, **options: Any
) -> Processed:
    """Run `handler` on the messages of the queue `url`, in `workers` tasks, until each finds the queue empty.

    handler: takes a `Job`, runs on executors, and so must be picklable. It returns (the message is deleted), raises
    `Retry` or anything else (the message comes again), or raises `Reject` (the message goes to the dead-letter queue).
    options: those of a `Worker` (`lease`, `concurrency`, `poison_after`, `dead_letter_queue`, `retry`, `wait` ...).
    `wait` is how long a task waits on an empty queue before it ends; 1 s by default.

    Raises OptionInvalid, and Spark's exception if a queue cannot be reached.
    """
    if workers < 1:
        raise OptionInvalid(f"workers={workers} is below 1.", "")
    given = {"wait": 1.0, **options}

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        counts = Worker(url, handler, **given).run(until_empty=True)
        counted = json.dumps([counts.received, counts.outcomes])
        yield pa.RecordBatch.from_pydict({"counts": [counted]})

    # One partition per worker: Spark does not run a task without rows.
    frame = spark.range(0, workers, 1, workers).mapInArrow(work, "counts string")
    received = 0
    outcomes: dict[str, int] = {}
    for row in frame.collect():
        count, found = json.loads(row["counts"])
        received += count
        for outcome, number in found.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + number
    return Processed(received, outcomes)
