"""Whatever happens to a commit to a Delta table: no file that a version names is gone, and no row is missing or twice.

Steps: before the commit, amid it, after it; the checkpoint after it fails; its answer is lost. Spark then calls `abort`
and the query ends; run again, it repeats the batch with files of its own.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import StreamingQueryException
from tests.pipeline import delta_side
from tests.pipeline.drain_stage import Stage, left, send
from tests.pipeline.stores import SCHEMA, Store
from tests.support.postgres import until

from veilmq.pipeline.errors import DeltaRefused, SourceUnreachable
from veilmq.pipeline.options import read_delta_options
from veilmq.pipeline.sinks import delta
from veilmq.pipeline.sinks.checking import check
from veilmq.pipeline.sinks.delta import DeltaSink, DeltaWriter, Written, add_files

NOW = 2e9
ROOT = Path(__file__).parents[2]
FIRST = "00000000000000000001.json"
"""The log's entry for the first commit after the table was made."""


@pytest.mark.parametrize(
    ("fault", "options", "raises", "has_landed"),
    [
        ({"do": "request"}, {"max_retries": "0"}, True, False),
        ({"do": "answer"}, {}, False, True),
        ({"do": "answer", "away": "1"}, {"max_retries": "0"}, True, True),
    ],
    ids=["request lost", "answer lost", "answer lost and nobody there"],
)
def test_a_commit_that_is_not_answered_loses_no_row(
    store: Store, fault: dict[str, str], options: dict[str, str], raises: bool, has_landed: bool
) -> None:
    table = store.make(f"{'-'.join(fault.values())}")
    writer = delta_side.writer(table, json.dumps(store.storage(**options)))
    messages = [store.put(table, "first.parquet", [1, 2])]
    store.fault(at=FIRST, **fault)
    if raises:
        with pytest.raises(SourceUnreachable, match="may have batch 0 or not"):
            writer.commit(messages, 0)
        store.fault()
        writer.abort(messages, 0)
    else:
        writer.commit(messages, 0)
    assert store.rows(table) == ([1, 2] if has_landed else [])
    writer.commit([store.put(table, "again.parquet", [1, 2])], 0)
    assert store.rows(table) == [1, 2]
    assert not check(table, store.storage(), now=NOW).missing


@pytest.mark.parametrize(("step", "has_landed"), [("kill-before", False), ("kill-after", True)])
def test_a_process_killed_amid_a_commit_loses_no_row(store: Store, step: str, has_landed: bool) -> None:
    table = store.make(step)
    file = store.put(table, "first.parquet", [1, 2])
    storage = json.dumps(store.storage())
    process = side(table, storage, file)
    store.fault(at=FIRST, do=step, pid=str(process.pid))
    process.communicate(b"\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert store.rows(table) == ([1, 2] if has_landed else [])
    # Spark's JVM lives, and lets another process of Python's abort.
    writer = delta_side.writer(table, storage)
    writer.abort([file], 0)
    assert store.rows(table) == ([1, 2] if has_landed else [])
    writer.commit([store.put(table, "again.parquet", [1, 2])], 0)
    assert store.rows(table) == [1, 2]
    assert not check(table, store.storage(), now=NOW).missing


def side(table: str, storage: str, file: Written) -> subprocess.Popen[bytes]:
    """A process that commits batch 0, once it reads a line."""
    command = [sys.executable, delta_side.__file__, table, storage, file.name, str(file.size_bytes), str(file.rows)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("step", ["kill-before", "kill-after"])
def test_a_process_killed_while_it_makes_the_table_loses_no_row(store: Store, step: str) -> None:
    table = f"{store.url}/new-{step}"
    storage = json.dumps(store.storage())
    process = side(table, storage, store.put(table, "first.parquet", [1, 2]))
    store.fault(at="00000000000000000000.json", do=step, pid=str(process.pid))
    process.communicate(b"\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    writer = delta_side.writer(table, storage)
    writer.commit([store.put(table, "again.parquet", [1, 2])], 0)
    assert store.rows(table) == [1, 2]
    assert not check(table, store.storage(), now=NOW).missing


def test_of_two_that_commit_one_batch_at_once_one_does(store: Store) -> None:
    """The first has asked the table and written its files; its entry of the log is on its way."""
    table = store.make("two")
    storage = json.dumps(store.storage())
    process = side(table, storage, store.put(table, "first.parquet", [1, 2]))
    store.fault(at=FIRST, do="hold")
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    until(lambda: not store.is_armed())
    delta_side.writer(table, storage).commit([store.put(table, "second.parquet", [1, 2])], 0)
    store.fault()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert store.rows(table) == [1, 2]
    assert not check(table, store.storage(), now=NOW).missing


def test_who_asked_the_table_too_early_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept while another process committed the batch: delta-rs sees no conflict with a version that it has read."""
    write_deltalake(tmp_path, SCHEMA.empty_table())
    pq.write_table(pa.table({"n": [1, 2]}, SCHEMA), tmp_path / "0.parquet")
    written = Written("0.parquet", (tmp_path / "0.parquet").stat().st_size, 2, delta_side.QUERY)
    monkeypatch.setattr(delta, "_table", lambda *asked: None)
    assert add_files(str(tmp_path), SCHEMA, [written], "app", 6)
    assert not add_files(str(tmp_path), SCHEMA, [written], "app", 6)
    assert not add_files(str(tmp_path), SCHEMA, [written], "app", 9, after=5)
    assert DeltaTable(tmp_path).to_pyarrow_table()["n"].to_pylist() == [1, 2]
    other = Written("0.parquet", written.size_bytes, 2, "another query")
    with pytest.raises(DeltaRefused, match="of another query"):
        add_files(str(tmp_path), SCHEMA, [other], "app", 6)


@pytest.mark.slow
def test_of_many_that_commit_one_batch_at_once_one_does(tmp_path: Path) -> None:
    """In a local table, whose log has no requests that could be held."""
    write_deltalake(tmp_path, SCHEMA.empty_table())
    processes = []
    for number in range(4):
        pq.write_table(pa.table({"n": [1, 2]}, SCHEMA), tmp_path / f"{number}.parquet")
        size = (tmp_path / f"{number}.parquet").stat().st_size
        processes.append(side(str(tmp_path), "{}", Written(f"{number}.parquet", size, 2, delta_side.QUERY)))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert DeltaTable(tmp_path).to_pyarrow_table()["n"].to_pylist() == [1, 2]


def test_queries_that_make_a_table_at_once_all_commit(tmp_path: Path) -> None:
    """Each finds no table, so several of them write its columns: to the others that is a change amid their commit."""

    def commits(table: Path, number: int) -> None:
        name = f"{number}.parquet"
        pq.write_table(pa.table({"n": [number]}, SCHEMA), table / name)
        together.wait()
        written = Written(name, (table / name).stat().st_size, 1, f"query {number}")
        assert add_files(table, SCHEMA, [written], written.query, 0)

    together = Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        for round_ in range(10):
            table = tmp_path / str(round_)
            table.mkdir()
            list(pool.map(commits, [table] * 4, range(4)))
            assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("place", ["_last_checkpoint", "00000000000000000001.checkpoint.parquet"])
def test_a_checkpoint_that_is_lost_undoes_no_commit(store: Store, place: str) -> None:
    table = f"{store.url}/checkpoint-{place[:5]}"
    every = {"delta.checkpointInterval": "1"}
    write_deltalake(table, SCHEMA.empty_table(), configuration=every, storage_options=store.storage())
    writer = delta_side.writer(table, json.dumps(store.storage(max_retries="0")))
    file = store.put(table, "first.parquet", [1, 2])
    store.fault(at=place, do="request")
    writer.commit([file], 0)
    assert not store.is_armed()
    writer.abort([file], 0)
    writer.commit([store.put(table, "again.parquet", [1, 2])], 0)
    assert store.rows(table) == [1, 2]
    assert not check(table, store.storage(), now=NOW).missing


def checkpoint_fails(table: Path, schema: Any = SCHEMA) -> None:
    """Each commit to the table makes a checkpoint, which cannot take its place."""
    write_deltalake(table, schema.empty_table(), configuration={"delta.checkpointInterval": "1"})
    (table / "_delta_log" / "_last_checkpoint").mkdir()


@pytest.mark.parametrize("place", ["_last_checkpoint", "00000000000000000001.checkpoint.parquet"])
def test_a_checkpoint_that_fails_undoes_no_commit(tmp_path: Path, place: str) -> None:
    """deltalake raises an OSError of the one, a DeltaError of the other; the commit has landed."""
    write_deltalake(tmp_path, SCHEMA.empty_table(), configuration={"delta.checkpointInterval": "1"})
    (tmp_path / "_delta_log" / place).mkdir()
    pq.write_table(pa.table({"n": [1, 2]}, SCHEMA), tmp_path / "a.parquet")
    file = Written("a.parquet", (tmp_path / "a.parquet").stat().st_size, 2, delta_side.QUERY)
    writer = delta_side.writer(str(tmp_path))
    writer.commit([file], 0)
    writer.abort([file], 0)
    assert DeltaTable(tmp_path).to_pyarrow_table()["n"].to_pylist() == [1, 2]
    assert not add_files(str(tmp_path), SCHEMA, [file], delta_side.QUERY, 0)
    assert not check(str(tmp_path), now=NOW).missing


class FaultyWriter(DeltaWriter):
    step = directory = ""

    def commit(self, messages: Any, batchId: int) -> None:
        self.die("before")
        super().commit(messages, batchId)
        self.die("after")

    def die(self, step: str) -> None:
        """Once: this process of Python's alone, so that Spark's JVM lives and aborts."""
        mark = Path(self.directory, step)
        if step == self.step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FaultySink(DeltaSink):
    @classmethod
    def name(cls) -> str:
        return "veilmq-delta-faulty"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        options = dict(self.options)
        step, directory = options.pop("step"), options.pop("marks")
        writer = FaultyWriter(schema, read_delta_options(options))
        writer.step, writer.directory = step, directory
        return writer


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", ["before", "after", "checkpoint"])
def test_messages_are_in_the_table_or_in_the_queue(spark: Any, stage: Stage, step: str) -> None:
    table, sent = stage.directory / "table", [f"body {number}" for number in range(20)]
    spark.dataSource.register(FaultySink)
    source = spark.readStream.format("veilmq").option("url", stage.url())
    frame = source.option("directory", str(stage.directory / "manifests")).option("lease", "2").load()
    query = frame.writeStream.format("veilmq-delta-faulty").option("path", str(table))
    query = query.option("step", step).option("marks", str(stage.directory))
    query = query.option("checkpointLocation", str(stage.directory / "checkpoint")).trigger(availableNow=True)
    if step == "checkpoint":
        checkpoint_fails(table, arrow_schema(frame))
    with stage.make(timeout=2) as queue:
        send(queue, sent)
        if step != "checkpoint":
            with pytest.raises(StreamingQueryException):
                query.start().awaitTermination()
            assert (stage.directory / step).exists()
            assert left(queue) == len(sent)
        query.start().awaitTermination()
        assert sorted(DeltaTable(table).to_pyarrow_table(columns=["body"])["body"].to_pylist()) == sorted(sent)
        assert left(queue) == 0
    assert not check(str(table), now=NOW).missing


def arrow_schema(frame: Any) -> Any:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(frame.schema, timezone="UTC")
