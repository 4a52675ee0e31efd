"""One process that sends a stream of rows to a FIFO queue, and is killed amid a batch.

    python sink_side.py URL DIRECTORY STEP

The rows are DIRECTORY/in, a file a batch. Without a step it sends what is left.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

from tests.pipeline.drain_side import Killer

from veilmq.pipeline.drain.source import QueueSource
from veilmq.pipeline.options import read_send_options
from veilmq.pipeline.session import session
from veilmq.pipeline.sinks.queue import QueueStreamWriter

ROWS_SENT = 700
"""Of the second batch: more than one chunk, less than all."""


class DyingWriter(QueueStreamWriter):
    killer: Killer

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"killer": self.killer}

    def write(self, iterator: Iterator[Any]) -> Any:
        return super().write(self._counted(iterator))

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for number, row in enumerate(iterator):
            if number == ROWS_SENT and row["body"].startswith("1-"):
                self.killer.at("in-sink")
            yield row


class DyingSink(QueueSource):
    killer: Killer

    @classmethod
    def name(cls) -> str:
        return "veilmq-sink-dying"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        writer = DyingWriter(schema, read_send_options(self.options))
        writer.killer = self.killer
        return writer


def main(url: str, directory: str, step: str) -> None:
    spark = session("local[2]")
    jvm: Any = spark._jvm
    pids = {"python": os.getpid(), "jvm": int(jvm.java.lang.ProcessHandle.current().pid())}
    DyingSink.killer = Killer(step, directory, pids)
    spark.dataSource.register(DyingSink)
    frame = spark.readStream.schema("body string, `group` string").option("maxFilesPerTrigger", 1)
    writer = frame.parquet(f"{directory}/in").writeStream.format("veilmq-sink-dying").option("url", url)
    writer.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
