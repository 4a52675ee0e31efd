"""Rows into queues, and into Delta tables."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.pipeline.drain_stage import Stage, left

import veilmq
from veilmq.client.queue import Queue
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.sinks.delta import DeltaRefused, Written, add_files, is_committed
from veilmq.pipeline.sinks.options import read_delta_options, read_send_options

SCHEMA = pa.schema([("n", pa.int64())])


def received(queue: Queue) -> list[Any]:
    found: list[Any] = []
    while came := queue.receive(min(64, queue.capabilities.receive_messages_max), lease=60):
        found += came
        queue.delete_batch([each.handle for each in came])
    return found


def written(directory: Path, name: str, numbers: list[int]) -> Written:
    directory.mkdir(exist_ok=True)
    pq.write_table(pa.table({"n": numbers}, SCHEMA), directory / name)
    return Written(name, (directory / name).stat().st_size, len(numbers), "q")


class TestDeltaTransactions:
    def test_a_batch_is_committed_once(self, tmp_path: Path) -> None:
        table = tmp_path / "t"
        assert add_files(str(table), SCHEMA, [written(table, "a.parquet", [1, 2])], "app", 0)
        assert not add_files(str(table), SCHEMA, [written(table, "b.parquet", [1, 2])], "app", 0)
        assert add_files(str(table), SCHEMA, [written(table, "c.parquet", [3])], "app", 1)
        assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 2, 3]
        assert is_committed(str(table), "app", 1)
        assert not is_committed(str(table), "app", 2)

    def test_applications_do_not_hide_each_others_batches(self, tmp_path: Path) -> None:
        table = tmp_path / "t"
        add_files(str(table), SCHEMA, [written(table, "a.parquet", [1])], "one", 0)
        assert add_files(str(table), SCHEMA, [written(table, "b.parquet", [2])], "other", 0)
        assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 2]

    @pytest.mark.parametrize(
        ("options", "said"),
        [({}, "path is missing"), ({"path": "/t", "storage": "[]"}, "storage"), ({"path": "/t", "x": "1"}, "option x")],
    )
    def test_bad_options_are_named(self, options: dict[str, str], said: str) -> None:
        with pytest.raises(OptionInvalid, match=said):
            read_delta_options(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "url is missing"),
        ({"url": "veil://h/q", "patience": "-1"}, "patience"),
        ({"url": "x", "u": ""}, "option u"),
    ],
)
def test_bad_options_of_the_queue_sink_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionInvalid, match=said):
        read_send_options(options)


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestQueueSink:
    @pytest.mark.parametrize("scheme", ["veil", "sqs"])
    def test_rows_become_messages(self, spark: Any, stage: Stage, scheme: str) -> None:
        with stage.make() as queue:
            frame = spark.range(700).selectExpr(
                "concat('body ', id) body", "map('n', cast(id as string)) attributes", "'t' type"
            )
            frame.write.format("veilmq").option("url", stage.url(scheme)).mode("append").save()
            assert left(queue) == 700
        with veilmq.connect(stage.url(scheme)) as queue:
            found = received(queue)
        assert sorted(each.body for each in found) == sorted(f"body {number}" for number in range(700))
        assert all(each.type == "t" and each.attributes["n"] == each.body.split()[1] for each in found)

    def test_a_key_makes_one_message_of_the_same_rows(self, spark: Any, stage: Stage) -> None:
        stage.name += ".fifo"
        with stage.make(fifo=True) as queue:
            frame = spark.range(40).selectExpr("concat('v', id) body", "'g' `group`", "id % 10 as order")
            for _ in range(2):
                frame.write.format("veilmq").option("url", stage.url()).option("key", "order").mode("append").save()
            assert left(queue) == 10

    def test_a_batch_of_a_stream_that_is_repeated_sends_nothing_twice(self, spark: Any, stage: Stage) -> None:
        stage.name += ".fifo"
        source, checkpoint = stage.directory / "in", stage.directory / "checkpoint"
        spark.range(30).selectExpr("concat('v', id) body", "'g' `group`").coalesce(1).write.parquet(str(source))
        with stage.make(fifo=True) as queue:
            for _ in range(2):
                frame = spark.readStream.schema("body string, `group` string").parquet(str(source))
                query = frame.writeStream.format("veilmq").option("url", stage.url())
                query.option("checkpointLocation", str(checkpoint)).trigger(
                    availableNow=True
                ).start().awaitTermination()
                assert left(queue) == 30
                # As after a crash between the sink and Spark's own log.
                for file in (checkpoint / "commits").iterdir():
                    file.unlink()

    @pytest.mark.parametrize(
        ("expression", "options", "said"),
        [
            (["id"], {}, "no column id"),
            (["'b' type"], {}, "no column body"),
            (["id as body"], {}, "body cannot be bigint"),
            (["'b' body"], {"key": "k"}, "no such column"),
            (["'b' body", "'k' k"], {"key": "k"}, "does not deduplicate"),
            (["cast(null as string) body"], {}, "body is null"),
        ],
    )
    def test_rows_that_are_no_messages_are_told(
        self, spark: Any, stage: Stage, expression: list[str], options: dict[str, str], said: str
    ) -> None:
        with stage.make() as queue:
            writer = spark.range(1).selectExpr(*expression).write.format("veilmq").option("url", stage.url())
            with pytest.raises(Exception, match=said):
                writer.options(**options).mode("append").save()
            assert left(queue) == 0


ROWS = pa.table({"id": [1, 2], "days": pa.array([["x"], []], pa.list_(pa.string()))})


@pytest.mark.parametrize(
    ("there", "partitioned", "said"),
    [
        ({"id": [0], "days": [["w"]], "day": ["w"]}, ["day"], "is partitioned by day"),
        ({"id": [0]}, [], "has no column days. It has id"),
        ({"ID": [0], "days": [["w"]]}, [], "has no column id. It has ID, days"),
        ({"id": ["0"], "days": [["w"]]}, [], "column id of the table .* is no long. It is string"),
        ({"id": [0], "days": [[1]]}, [], "column days of the table .* is no"),
    ],
)
def test_a_table_that_has_no_room_for_the_rows_refuses_them(
    tmp_path: Path, there: dict[str, list[Any]], partitioned: list[str], said: str
) -> None:
    """A Delta transaction takes any file: what does not fit would be read as null."""
    write_deltalake(tmp_path, pa.table(there), partition_by=partitioned)
    with pytest.raises(DeltaRefused, match=said):
        add_files(str(tmp_path), ROWS.schema, [file_of_rows(tmp_path)], "app", 0)
    assert DeltaTable(tmp_path).version() == 0


def test_a_table_may_have_more_columns_in_another_order(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"more": ["m"], "days": [["w"]], "id": [0]}))
    assert add_files(str(tmp_path), ROWS.schema, [file_of_rows(tmp_path)], "app", 0)
    found = sorted(DeltaTable(tmp_path).to_pyarrow_table().to_pylist(), key=lambda row: row["id"])
    assert [(row["id"], row["days"], row["more"]) for row in found] == [
        (0, ["w"], "m"),
        (1, ["x"], None),
        (2, [], None),
    ]


def file_of_rows(place: Path) -> Written:
    pq.write_table(ROWS, place / "part.parquet")
    return Written("part.parquet", (place / "part.parquet").stat().st_size, ROWS.num_rows, "query")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_into_delta_repeats_no_batch(spark: Any, tmp_path: Path) -> None:
    source, table, checkpoint = tmp_path / "in", tmp_path / "table", tmp_path / "checkpoint"
    spark.range(30).write.parquet(str(source))
    for _ in range(2):
        query = spark.readStream.schema("id bigint").parquet(str(source)).writeStream.format("veilmq-delta")
        query = query.option("path", str(table)).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()
        assert sorted(DeltaTable(table).to_pyarrow_table()["id"].to_pylist()) == list(range(30))
        # As after a crash between the sink and Spark's own log.
        for file in (checkpoint / "commits").iterdir():
            file.unlink()
    app = json.loads((checkpoint / "metadata").read_text())["id"]
    assert is_committed(str(table), app, 0)
    # What the repeated batch wrote was removed again.
    assert len(list(table.glob("*.parquet"))) == len(DeltaTable(table).file_uris())
