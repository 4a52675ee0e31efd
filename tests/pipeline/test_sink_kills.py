"""A query that sends rows to a FIFO queue is killed amid a batch: each row is there once, in its order."""

import os
import sys
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.pipeline import sink_side
from tests.pipeline.cluster_stage import ROOT, Process
from tests.pipeline.drain_stage import Stage, left

ROWS = 1_000
FILES = 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("spark-processes")
def test_rows_are_sent_once_though_the_query_was_killed(stage: Stage) -> None:
    stage.name += ".fifo"
    (stage.directory / "in").mkdir()
    now = time.time()
    for file in range(FILES):
        sent = [f"{file}-{number}" for number in range(ROWS)]
        rows = pa.table({"body": sent, "group": [f"g{number % 7}" for number in range(ROWS)]})
        path = stage.directory / "in" / f"{file}.parquet"
        pq.write_table(rows, path)
        # Spark takes the oldest first.
        os.utime(path, (now - 60 + file, now - 60 + file))
    with stage.make(fifo=True) as queue:
        for step, wanted in (("in-sink", False), ("", True)):
            command = [sys.executable, sink_side.__file__, stage.url(), stage.directory, step]
            process = Process(stage.directory, step or "last", *command, PYTHONPATH=str(ROOT))
            try:
                assert (process.ended() == 0) is wanted, process.tail()
            finally:
                process.kill()
            if step:
                # A chunk of the second batch was sent, and the rest was not.
                assert (stage.directory / "killed-in-sink").exists(), process.tail()
                assert ROWS < left(queue) <= ROWS + sink_side.ROWS_SENT
        assert left(queue) == ROWS * FILES
        found: dict[str, list[Any]] = {}
        while came := queue.receive(64):
            for each in came:
                found.setdefault(str(each.group), []).append(each.body)
            queue.delete_batch([each.handle for each in came])
    wanted_order = [f"{file}-{number}" for file in range(FILES) for number in range(ROWS)]
    for group, received in found.items():
        number = int(group.removeprefix("g"))
        assert received == [body for body in wanted_order if int(body.partition("-")[2]) % 7 == number]
    assert sum(map(len, found.values())) == ROWS * FILES
