"""The process of Spark: it runs one stream after the other in one session, and strikes where it is told to.

    python side.py SETTING

SETTING is a JSON file: streams by name (`stream_of`). A line `{"stream": NAME}` on its standard input runs that stream
until its queue is empty (trigger AvailableNow) or it fails, and a line of JSON says which.

A fault is a file `fault.json` beside the stream: the step, whether its process or everything (`group`) is killed or the
call raises, and how many times the step is passed first. Whoever comes to the step takes the file away, so that it
strikes once.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from veilmq.client.errors import TransportError
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError
from veilmq.pipeline.drain.driver import Driver
from veilmq.pipeline.drain.manifests import SPARK_SCHEMA, Offset
from veilmq.pipeline.drain.source import DrainReader, QueueSource
from veilmq.pipeline.options import read_delta_options, read_options, read_send_options
from veilmq.pipeline.session import session
from veilmq.pipeline.sinks.delta import DeltaSink, DeltaWriter
from veilmq.pipeline.sinks.queue import QueueStreamWriter

FAULT = "fault.json"
STRUCK = "struck"


class Struck(Exception):
    """The fault."""


def taken(marks: str, step: str) -> dict[str, Any] | None:
    """The fault, if it is this step's turn; it is taken away."""
    path = Path(marks, FAULT)
    try:
        fault = json.loads(path.read_text())
        if fault["step"] != step:
            return None
        if fault["skip"]:
            path.write_text(json.dumps(fault | {"skip": fault["skip"] - 1}))
            return None
        path.rename(path.with_name(STRUCK))
    except (OSError, ValueError):
        return None
    return dict(fault)


def at(marks: str, step: str) -> None:
    fault = taken(marks, step)
    how = fault["how"] if fault is not None else ""
    if fault is not None and how == "kill all":
        os.killpg(fault["group"], signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)  # PySpark's daemon and its workers are a group of their own
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise Struck(step)


class FaultyQueue(Wrapping):
    """Answers are lost, of receives and of deletes half done."""

    def __init__(self, inner: Queue, marks: str) -> None:
        super().__init__(inner)
        self._marks = marks

    def _at(self, step: str) -> None:
        try:
            at(self._marks, step)
        except Struck:
            raise TransportError(reason="the answer was lost", may_have_happened=True) from None

    def receive(self, *given: Any, **named: Any) -> Any:
        answer = super().receive(*given, **named)
        self._at("received")
        return answer

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        half = len(handles) // 2
        answers = super().delete_batch(handles[:half])
        self._at("amid deletes")
        return answers + super().delete_batch(handles[half:])


class FaultyReader(DrainReader):
    marks = ""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"marks": self.marks}

    def _opened(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options, wrap=lambda queue: FaultyQueue(queue, self.marks))
        return self._driver

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        if Offset.read(start).seq:
            at(self.marks, "before deletes")
        end = super().latestOffset(start, limit)
        if end != start:
            at(self.marks, "manifest not logged")
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Any:
        at(self.marks, "before claim")
        pieces = super().partitions(start, end)
        at(self.marks, "after claim")
        return pieces

    def read(self, partition: Any) -> Iterator[Any]:
        for batch in super().read(partition):
            at(self.marks, "amid read")
            yield batch


class FaultySource(QueueSource):
    @classmethod
    def name(cls) -> str:
        return "veilmq-faulty"

    def schema(self) -> str:
        return SPARK_SCHEMA

    def streamReader(self, schema: Any) -> Any:
        options = dict(self.options)
        marks = options.pop("marks")
        reader = FaultyReader(schema, read_options(options))
        reader.marks = marks
        return reader

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        options = dict(self.options)
        marks = options.pop("marks")
        writer = FaultySender(schema, read_send_options(options))
        writer.marks = marks
        return writer


class FaultySender(QueueStreamWriter):
    marks = ""

    def write(self, iterator: Iterator[Any]) -> Any:
        done = super().write(self._counted(iterator))
        at(self.marks, "rows written")
        return done

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for number, row in enumerate(iterator):
            if number == 600:  # a chunk of 512 was sent
                at(self.marks, "amid write")
            yield row

    def commit(self, messages: Any, batchId: int) -> None:
        at(self.marks, "before commit")
        super().commit(messages, batchId)
        at(self.marks, "after commit")


class FaultyTable(DeltaWriter):
    marks = ""

    def write(self, iterator: Iterator[Any]) -> Any:
        done = super().write(self._counted(iterator))
        at(self.marks, "rows written")
        return done

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            yield batch
            at(self.marks, "amid write")

    def commit(self, messages: Any, batchId: int) -> None:
        at(self.marks, "before commit")
        if taken(self.marks, "two commit") is None:
            super().commit(messages, batchId)
        else:
            self._twice(messages, batchId)
        at(self.marks, "after commit")

    def _twice(self, messages: Any, batch: int) -> None:
        """Two drivers at once, as one that slept and the next."""
        errors: list[Exception] = []

        def once() -> None:
            try:
                DeltaWriter.commit(self, messages, batch)
            except Exception as error:  # noqa: BLE001 - as Spark would see it
                errors.append(error)

        threads = [threading.Thread(target=once) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class FaultyDelta(DeltaSink):
    @classmethod
    def name(cls) -> str:
        return "veilmq-delta-faulty"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        options = dict(self.options)
        marks = options.pop("marks")
        writer = FaultyTable(schema, read_delta_options(options))
        writer.marks = marks
        return writer


def stream_of(spark: Any, given: dict[str, str]) -> Any:
    """url, directory (of manifests), marks, sink (delta, parquet, queue), table (or the target's URL), storage."""
    marks = given["marks"]
    source = spark.readStream.format("veilmq-faulty").option("marks", marks).option("maxRows", given["rows"])
    if given["sink"] == "parquet":
        source = source.option("table", given["table"])
    frame = source.option("url", given["url"]).option("directory", given["directory"]).option("lease", "2").load()
    if given["sink"] == "queue":
        from pyspark.sql import functions as f

        writer = frame.select("body", f.lit("g").alias("group")).coalesce(1).writeStream.format("veilmq-faulty")
        writer = writer.option("url", given["table"]).option("marks", marks)
    elif given["sink"] == "delta":
        rows = frame.select("id", "body", "type")
        writer = rows.writeStream.format("veilmq-delta-faulty").option("path", given["table"]).option("marks", marks)
        writer = writer.option("storage", given["storage"]).option("partitionBy", given["partition"])
    else:
        writer = frame.select("id", "body").writeStream.format("parquet").option("path", given["table"])
    return writer.option("checkpointLocation", f"{marks}/checkpoint").trigger(availableNow=True)


def main(setting: str) -> None:
    streams = json.loads(Path(setting).read_text())
    settings = {"spark.sql.shuffle.partitions": "2", "spark.log.level": "OFF"}
    spark = session("local[2]", settings=settings, is_short=True)
    spark.dataSource.register(FaultySource)
    spark.dataSource.register(FaultyDelta)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        try:
            stream_of(spark, streams[json.loads(line)["stream"]]).start().awaitTermination()
            print(json.dumps({"error": None}), flush=True)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next run of the stream must mend it
            print(json.dumps({"error": str(error)[-600:]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
