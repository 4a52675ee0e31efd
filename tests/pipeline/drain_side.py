"""One process that drains a queue into a Delta table, and is killed at a place that is named.

    python drain_side.py URL DIRECTORY STEP [MASTER [OPTIONS]]

Strategy: subclasses of the source and the sink that stop at one step, where a signal that nobody can catch ends what
the step says: `all` ends the driver's Python, its JVM and the process it happens in, `jvm` the JVM alone, `source` the
source's process alone, `executor` the JVM of the executor. Without a step it drains until the queue is empty. OPTIONS:
further options of the source, as JSON, and `home`: where manifests and table are, if that is not DIRECTORY.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import veilmq
from veilmq.client.clock import SYSTEM
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError
from veilmq.pipeline.drain.batches.queues import opened, total
from veilmq.pipeline.drain.driver import Driver
from veilmq.pipeline.drain.manifests import Offset
from veilmq.pipeline.drain.source import DrainReader, QueueSource
from veilmq.pipeline.options import read_delta_options
from veilmq.pipeline.sinks.delta import DeltaSink, DeltaWriter

STEPS = {
    "in-read": "all",
    "manifest-not-logged": "jvm",
    "after-sink-commit": "all",
    "before-deletes": "all",
    "amid-deletes": "all",
    "source-in-receive": "source",
    "in-executor": "executor",
}
"""Where, and whom."""
SINK_STEPS = {"in-sink": "all"}
"""Of sink_side.py."""
BATCH_ROWS = 100


class Killer:
    """Kills once, from the second batch on: what it needs to know travels in its fields."""

    def __init__(self, step: str, directory: str, pids: dict[str, int]) -> None:
        self.step, self.directory, self.pids = step, directory, pids

    def at(self, step: str) -> None:
        if step != self.step:
            return
        try:
            os.close(os.open(f"{self.directory}/killed-{step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        whom = (STEPS | SINK_STEPS)[step]
        if whom == "source":
            targets = [os.getpid()]
        elif whom == "executor":
            # The worker's parent is Spark's daemon, and that one's the executor.
            targets = [parent(os.getppid())]
        else:
            targets = [self.pids["jvm"]] + ([self.pids["python"], os.getpid()] if whom == "all" else [])
        for pid in targets:
            os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Faulty(Wrapping):
    """Dies when half of a delete is done, or when a receive was answered."""

    def __init__(self, inner: Queue, killer: Killer) -> None:
        super().__init__(inner)
        self._killer = killer

    def receive(self, *given: Any, **named: Any) -> Any:
        answer = super().receive(*given, **named)
        self._killer.at("source-in-receive")
        return answer

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        half = len(handles) // 2
        answers = super().delete_batch(handles[:half])
        self._killer.at("amid-deletes")
        return answers + super().delete_batch(handles[half:])


class DyingReader(DrainReader):
    killer: Killer

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"killer": self.killer}

    def _opened(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options, wrap=lambda queue: Faulty(queue, self.killer))
        return self._driver

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        told = Path(f"{self.killer.directory}/code")
        if told.is_dir():
            (told / f"source-{os.getpid()}").write_text(veilmq.__file__)
        if Offset.read(start).seq:
            self.killer.at("before-deletes")
        end = super().latestOffset(start, limit)
        if Offset.read(end).seq > 1:
            self.killer.at("manifest-not-logged")
        return end

    def read(self, partition: Any) -> Iterator[Any]:
        told = Path(f"{self.killer.directory}/code")
        if told.is_dir():
            (told / f"executor-{os.getpid()}").write_text(veilmq.__file__)
        for batch in super().read(partition):
            self.killer.at("in-read")
            self.killer.at("in-executor")
            yield batch


class DyingSource(QueueSource):
    killer: Killer

    @classmethod
    def name(cls) -> str:
        return "veilmq-dying"

    def streamReader(self, schema: Any) -> Any:
        reader = DyingReader(schema, read_options(self.options))
        reader.killer = self.killer
        return reader


class DyingWriter(DeltaWriter):
    killer: Killer

    def commit(self, messages: Any, batchId: int) -> None:
        super().commit(messages, batchId)
        self.killer.at("after-sink-commit")


class DyingSink(DeltaSink):
    killer: Killer

    @classmethod
    def name(cls) -> str:
        return "veilmq-delta-dying"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        writer = DyingWriter(schema, read_delta_options(self.options))
        writer.killer = self.killer
        return writer


def read_options(options: Any) -> Any:
    from veilmq.pipeline import options as module

    return module.read_options(options)


def main(url: str, directory: str, step: str, master: str = "local[2]", further: str = "{}") -> None:
    from veilmq.pipeline.session import is_submitted, session

    if is_submitted():
        Path(f"{directory}/code").mkdir()
        Path(f"{directory}/code/driver").write_text(veilmq.__file__)
    spark = session(None if is_submitted() else master)
    jvm: Any = spark._jvm
    pids = {"python": os.getpid(), "jvm": int(jvm.java.lang.ProcessHandle.current().pid())}
    DyingSource.killer = DyingSink.killer = Killer(step, directory, pids)
    spark.dataSource.register(DyingSource)
    spark.dataSource.register(DyingSink)
    given = json.loads(further)
    home = given.pop("home", directory)
    options = {"url": url, "directory": f"{home}/manifests", "lease": "2", "maxRows": str(BATCH_ROWS)} | given
    frame = spark.readStream.format("veilmq-dying").options(**options).load()
    writer = frame.writeStream.format("veilmq-delta-dying").option("path", f"{home}/table")
    writer = writer.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True)
    with closing(opened(read_options(options), SYSTEM)) as queue:
        while True:
            writer.start().awaitTermination()
            if not total(queue.stats()):
                break
            time.sleep(0.2)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
