"""Drains through Spark: tables, JSON, wrapped bodies, bad records, bad input."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import types
from tests.pipeline.drain_stage import Stage, left, send
from tests.support.postgres import until

from veilmq.client.encrypted import EncryptedQueue, KeyFile, add_key, new_key
from veilmq.client.large import LargeMessageQueue
from veilmq.client.messages import Message
from veilmq.client.unreadable import keep
from veilmq.pipeline.drain import Drained, DrainUnfinished, clear_checkpoint, drain, read_bad_records
from veilmq.pipeline.drain.manifests import Directory
from veilmq.pipeline.drain.source import check_schema
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.options import DrainOptions
from veilmq.testing.for_each import for_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def bodies(count: int) -> list[str]:
    return [f"body {number}" for number in range(count)]


def table(spark: Any, sink: str) -> list[dict[str, Any]]:
    kind, _, path = sink.partition(":")
    found = DeltaTable(path).to_pyarrow_table() if kind == "delta" else spark.read.parquet(path).toArrow()
    return found.to_pylist()


@pytest.mark.parametrize(("kind", "scheme"), [("delta", "veil"), ("parquet", "sqs")])
def test_a_queue_becomes_a_table(spark: Any, stage: Stage, kind: str, scheme: str) -> None:
    sink = f"{kind}:{stage.directory}/table"
    with stage.make() as queue:
        send(queue, bodies(500))
        done = drain(spark, stage.url(scheme), sink, stage.directory / "d", max_rows=200)
        assert (done.messages, done.batches, done.bad_records) == (500, 3, 0)
        assert sorted(row["body"] for row in table(spark, sink)) == sorted(bodies(500))
        assert left(queue) == 0
        send(queue, ["more"])
        drain(spark, stage.url(scheme), sink, stage.directory / "d", max_rows=200)
        assert len(table(spark, sink)) == 501


def test_an_interrupted_drain_stops_its_query(spark: Any, stage: Stage) -> None:
    """Ctrl-C in a notebook, whose Spark lives on: the query would write on without the drain's locks."""
    home, go_on = stage.directory / "d", str(stage.directory / "go-on")

    def wait(batches: Any) -> Any:
        while not os.path.exists(go_on):
            time.sleep(0.01)
        yield from batches

    def interrupt() -> None:
        until(lambda: any((home / "checkpoint" / "offsets").glob("0")))
        os.kill(os.getpid(), signal.SIGINT)

    with stage.make() as queue, ThreadPoolExecutor(1) as beside:
        send(queue, bodies(10))
        beside.submit(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                drain(
                    spark, stage.url(), f"parquet:{stage.directory}/table", home,
                    transform=lambda rows: rows.mapInArrow(wait, rows.schema),
                )  # fmt: skip
            assert spark.streams.active == []
        finally:
            Path(go_on).touch()
        done = drain(spark, stage.url(), f"parquet:{stage.directory}/table", home)
        assert (done.messages, left(queue)) == (10, 0)


def test_a_kill_amid_the_first_entry_of_spark_s_log_is_no_end(spark: Any, stage: Stage) -> None:
    """What such a kill leaves there: Spark names it `.0.<UUID>.tmp`, and its checksum `..0.<UUID>.tmp.crc`."""
    offsets = stage.directory / "d" / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    for name in (".0.a6d49589-7020-428b-a278-7dd71dcebd41.tmp", "..0.a6d49589-7020-428b-a278-7dd71dcebd41.tmp.crc"):
        (offsets / name).write_text("v1")
    with stage.make() as queue:
        send(queue, bodies(10))
        done = drain(spark, stage.url(), f"delta:{stage.directory}/table", stage.directory / "d")
        assert (done.messages, left(queue)) == (10, 0)


def test_unfinished_entries_of_a_query_at_work_or_with_batches_stay(stage: Stage) -> None:
    offsets = stage.directory / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    entry = offsets / ".0.x.tmp"
    entry.touch()
    held = Directory(stage.directory / "manifests", "q")
    try:
        clear_checkpoint(stage.directory / "checkpoint", stage.directory / "manifests")
        assert entry.exists()
    finally:
        held.close()
    (offsets / "0").touch()
    clear_checkpoint(stage.directory / "checkpoint", stage.directory / "manifests")
    assert entry.exists()
    (offsets / "0").unlink()
    clear_checkpoint(stage.directory / "checkpoint", stage.directory / "manifests")
    assert not entry.exists()


def test_columns(spark: Any, stage: Stage) -> None:
    sink = f"delta:{stage.directory}/table"
    stage.name += ".fifo"
    with stage.make(fifo=True) as queue:
        queue.send(Message("b", attributes={"a": "x", "n": 3}, type="t", group="g", deduplication_id="1"))
        drain(spark, stage.url(), sink, stage.directory / "d")
    (row,) = table(spark, sink)
    assert dict(row["attributes"]) == {"a": "x", "n": "3"}
    assert [row[name] for name in ("body", "type", "group", "receive_count", "batch", "position")] == [
        "b", "t", "g", 1, 1, 0,
    ]  # fmt: skip
    assert row["sequence"] > 0


def test_json_with_a_column_for_corrupt_records(spark: Any, stage: Stage) -> None:
    sink = f"parquet:{stage.directory}/table"
    schema = "_id string, order int, lines array<struct<sku string, n int>>, at timestamp, _corrupt_record string"
    good = {"order": 7, "lines": [{"sku": "a", "n": 2}], "at": "2026-01-31T12:00:00Z", "unknown": 1}
    with stage.make() as queue:
        send(queue, [json.dumps(good), '{"order": "seven"}', "no json", '{"order": 2147483648}', "{}"])
        done = drain(spark, stage.url(), sink, stage.directory / "d", schema=schema, format="json")
    rows = table(spark, sink)
    assert done.bad_records == 0
    assert len(rows) == 5
    assert all(row["_id"] for row in rows)
    assert sorted(row["_corrupt_record"] for row in rows if row["_corrupt_record"]) == [
        "no json", '{"order": "seven"}', '{"order": 2147483648}',
    ]  # fmt: skip
    (row,) = [row for row in rows if row["order"] == 7]
    assert row["lines"] == [{"sku": "a", "n": 2}]
    assert row["at"].isoformat() == "2026-01-31T12:00:00+00:00"


def test_numbers_and_instants_out_of_range_are_corrupt_and_stop_nothing(spark: Any, stage: Stage) -> None:
    sink = f"parquet:{stage.directory}/table"
    bad = [
        '{"price": 1e100}', '{"price": 1e999999999}', '{"price": 123456789.00}', '{"price": "NaN"}', '{"part": 1e300}',
        '{"at": "0001-01-01T00:00:00+14:00"}', '{"at": "9999-12-31T23:59:59-14:00"}', '{"few": [1e39]}',
    ]  # fmt: skip
    good = '{"price": -12345678.904, "part": 3.4028234e38, "at": "0001-01-01T14:00:00+14:00", "few": [1, null]}'
    schema = "price decimal(10, 2), part float, at timestamp, few array<float>, _corrupt_record string"
    with stage.make() as queue:
        send(queue, [*bad, good])
        done = drain(spark, stage.url(), sink, stage.directory / "d", schema=schema, format="json")
    rows = table(spark, sink)
    assert (done.messages, done.bad_records) == (9, 0)
    assert sorted(row["_corrupt_record"] for row in rows if row["_corrupt_record"]) == sorted(bad)
    (row,) = [row for row in rows if row["_corrupt_record"] is None]
    assert (str(row["price"]), row["few"]) == ("-12345678.90", [1.0, None])


@for_each(("name", "kind"), [("_batch", "string"), ("_sent", "string"), ("_id", "int")])
def test_the_message_s_own_columns_have_their_types(name: str, kind: str) -> None:
    kinds: dict[str, types.DataType] = {"string": types.StringType(), "int": types.IntegerType()}
    schema = types.StructType().add("a", types.IntegerType()).add(name, kinds[kind])
    options = DrainOptions(url="veil://127.0.0.1:1/q", directory="/d", format="json")
    with pytest.raises(OptionInvalid, match=f"veilmq has no column {name} of the type"):
        check_schema(schema, options)


def test_sessions_may_read_timestamp_as_one_without_a_zone(spark: Any, stage: Stage) -> None:
    sink = f"delta:{stage.directory}/table"
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        with stage.make() as queue:
            send(queue, ["1", "2"])
            assert drain(spark, stage.url(), sink, stage.directory / "d").messages == 2
    finally:
        spark.conf.unset("spark.sql.timestampType")
    assert all(row["sent"].tzinfo is not None for row in table(spark, sink))


def test_json_without_that_column_is_a_bad_record(spark: Any, stage: Stage) -> None:
    sink = f"parquet:{stage.directory}/table"
    with stage.make("dead-" + stage.name) as dead, stage.make() as queue:
        send(queue, ['{"order": 1}', "no json"])
        done = drain(
            spark, stage.url(), sink, stage.directory / "d",
            schema="order int", format="json", dead_letters=stage.url(name=dead.name),
        )  # fmt: skip
        assert done.bad_records == 1
        assert [row["order"] for row in table(spark, sink)] == [1]
        (kept,) = read_bad_records(stage.directory / "d" / "manifests")
        assert kept.body == "no json"
        assert "JSON" in kept.reason
        assert left(queue) == 0
        (letter,) = dead.receive(10, wait=1)
        assert letter.body == "no json"
        assert letter.attributes["veilmq.source"] == queue.name


def test_wrapped_bodies_are_unwrapped_and_bad_ones_kept(spark: Any, stage: Stage) -> None:
    sink = f"parquet:{stage.directory}/table"
    store = f"file://{stage.directory}/objects"
    keys = stage.directory / "keys"
    add_key(keys, new_key())
    with stage.make() as queue:
        large = LargeMessageQueue(queue, store, unreadable=keep, threshold_bytes=1_000)
        secret = EncryptedQueue(large, KeyFile(keys), unreadable=keep)
        sent = ["small", "long " * 1_000, "x" * 100_000]
        for body in sent:
            secret.send(body)
        lost = "lost " * 1_000
        before = set(objects(stage.directory))
        secret.send(lost)
        (gone,) = set(objects(stage.directory)) - before
        gone.unlink()
        queue.send("never encrypted")
        done = drain(
            spark, stage.url(), sink, stage.directory / "d", unwrap=["large", "encrypted"], keys=str(keys), store=store
        )
        assert sorted(row["body"] for row in table(spark, sink)) == sorted(sent)
        assert done.bad_records == 2
        reasons = " / ".join(each.reason for each in read_bad_records(stage.directory / "d" / "manifests"))
        assert "it is not encrypted" in reasons
        assert "is missing" in reasons
        assert left(queue) == 0
    assert objects(stage.directory) == []


def objects(directory: Path) -> list[Path]:
    return [each for each in (directory / "objects").rglob("*") if each.is_file()]


def test_a_failing_sink_loses_nothing_and_repeats_the_batch(spark: Any, stage: Stage) -> None:
    seen: list[tuple[int, list[str]]] = []

    def sink(frame: Any, batch: int) -> None:
        seen.append((batch, sorted(row["body"] for row in frame.select("body").collect())))
        if len(seen) == 1:
            raise ValueError("the sink fails")

    with stage.make() as queue:
        send(queue, bodies(20))
        with pytest.raises(Exception, match="the sink fails"):
            drain(spark, stage.url(), sink, stage.directory / "d")
        assert left(queue) == 20
        drain(spark, stage.url(), sink, stage.directory / "d")
        assert seen == [(0, sorted(bodies(20)))] * 2
        assert left(queue) == 0


def test_a_queue_that_does_not_empty_is_told(spark: Any, stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, ["held by somebody else"])
        queue.receive(1, lease=600)
        with pytest.raises(DrainUnfinished, match="somebody else"):
            drain(spark, stage.url(), f"parquet:{stage.directory}/table", stage.directory / "d", until=0)


def test_two_queries_on_one_directory_are_told(spark: Any, stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(3))
        given = {"url": stage.url(), "directory": str(stage.directory / "m")}
        frame = spark.readStream.format("veilmq").options(**given).load()
        first = frame.writeStream.format("noop").option("checkpointLocation", f"{stage.directory}/c1").start()
        try:
            first.processAllAvailable()
            second = frame.writeStream.format("noop").option("checkpointLocation", f"{stage.directory}/c2").start()
            with pytest.raises(Exception, match="used by another query"):
                second.awaitTermination(60)
        finally:
            first.stop()


def test_reading_a_queue_as_a_table_is_refused(spark: Any, stage: Stage) -> None:
    given = {"url": stage.url(), "directory": str(stage.directory / "m")}
    with pytest.raises(Exception, match="A queue is no table"):
        spark.read.format("veilmq").options(**given).load().collect()


def test_a_sink_that_is_none_is_told(spark: Any, stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, ["b"])
        with pytest.raises(OptionInvalid, match="delta:/path, parquet:/path"):
            drain(spark, stage.url(), "csv:/x", stage.directory / "d")
        assert left(queue) == 1


def test_every_batch_is_counted_however_few_reports_are_kept(spark: Any, stage: Stage) -> None:
    """Spark keeps those of a hundred batches; here of three, as the user set it."""
    kept = "spark.sql.streaming.numRecentProgressUpdates"
    before = spark.conf.get(kept)
    spark.conf.set(kept, "3")
    try:
        with stage.make() as queue:
            send(queue, bodies(8))
            done = drain(spark, stage.url(), lambda frame, number: frame.count(), stage.directory / "d", max_rows=1)
        assert (done.messages, done.batches) == (8, 8)
        assert spark.conf.get(kept) == "3"
    finally:
        spark.conf.set(kept, before)


def test_nothing_to_drain(spark: Any, stage: Stage) -> None:
    with stage.make():
        done = drain(spark, stage.url(), f"parquet:{stage.directory}/table", stage.directory / "d")
    assert isinstance(done, Drained)
    assert (done.messages, done.runs) == (0, 1)
