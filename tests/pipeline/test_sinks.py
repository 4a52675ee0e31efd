"""Rows into queues, and into Delta tables."""

import json
import math
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Field, Schema, TableFeatures, Transaction, write_deltalake
from deltalake.transaction import AddAction
from pyspark.sql import Row
from pyspark.sql.types import DataType, LongType, MapType, StringType, StructField, StructType
from tests.pipeline.drain_stage import Stage, left
from tests.pipeline.stores import commit_parted

import veilmq
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import ServiceError
from veilmq.client.messages import Message, Sent, Template
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError
from veilmq.pipeline.drain import drain
from veilmq.pipeline.drain.source import QueueSource
from veilmq.pipeline.errors import DeltaRefused, OptionInvalid, PipelineError
from veilmq.pipeline.options import read_delta_options, read_send_options
from veilmq.pipeline.places.delta import load, write_parted
from veilmq.pipeline.sinks.checking import check
from veilmq.pipeline.sinks.claims import mark_of
from veilmq.pipeline.sinks.columns import nulls_of
from veilmq.pipeline.sinks.delta import Written, add_files, check_place
from veilmq.pipeline.sinks.queue import _send, check_columns, group_of, send_rows
from veilmq.testing.for_each import for_each

SCHEMA = pa.schema([("n", pa.int64())])


def received(queue: Queue) -> list[Any]:
    found: list[Any] = []
    while came := queue.receive(min(64, queue.capabilities.receive_messages_max), lease=60):
        found += came
        queue.delete_batch([each.handle for each in came])
    return found


def written(directory: Path, name: str, numbers: list[int], query: str = "q") -> Written:
    directory.mkdir(exist_ok=True)
    pq.write_table(pa.table({"n": numbers}, SCHEMA), directory / name)
    return Written(name, (directory / name).stat().st_size, len(numbers), query)


class TestDeltaTransactions:
    def test_a_batch_is_committed_once(self, tmp_path: Path) -> None:
        table = tmp_path / "t"
        assert add_files(str(table), SCHEMA, [written(table, "a.parquet", [1, 2])], "app", 0)
        assert not add_files(str(table), SCHEMA, [written(table, "b.parquet", [1, 2])], "app", 0)
        assert add_files(str(table), SCHEMA, [written(table, "c.parquet", [3])], "app", 1)
        # Spark repeats no earlier batch: this is a new one, of a query whose checkpoint went back.
        said = r"has batch 1 of this query, and the checkpoint ends with batch 0.*with new ones and a new table\.$"
        with pytest.raises(DeltaRefused, match=said):
            add_files(str(table), SCHEMA, [written(table, "d.parquet", [4])], "app", 0)
        assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 2, 3]
        assert DeltaTable(table).transaction_version("app") == 1

    def test_applications_do_not_hide_each_others_batches(self, tmp_path: Path) -> None:
        table = tmp_path / "t"
        add_files(str(table), SCHEMA, [written(table, "a.parquet", [1])], "one", 0)
        assert add_files(str(table), SCHEMA, [written(table, "b.parquet", [2])], "other", 0)
        assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 2]

    def test_another_query_of_the_same_name_is_not_taken_for_it(self, tmp_path: Path) -> None:
        """Its batch 0 is not the table's: to say so would have the source delete messages that are in no table."""
        table = tmp_path / "t"
        assert add_files(str(table), SCHEMA, [written(table, "a.parquet", [1], "one")], "app", 0)
        assert add_files(str(table), SCHEMA, [written(table, "b.parquet", [2], "one")], "app", 1)
        for batch in (0, 1):
            with pytest.raises(DeltaRefused, match=r"of another query under the name app=app\. Bring that query's"):
                add_files(str(table), SCHEMA, [written(table, "c.parquet", [3], "other")], "app", batch)
        assert not add_files(str(table), SCHEMA, [written(table, "b.parquet", [2], "one")], "app", 1)
        assert add_files(str(table), SCHEMA, [written(table, "d.parquet", [3], "one")], "app", 2)
        assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 2, 3]

    def test_a_query_goes_on_with_a_table_that_knows_no_queries(self, tmp_path: Path) -> None:
        """As releases before left it: the name alone, so that only a batch that it has not can be told from others."""
        file = written(tmp_path, "a.parquet", [1])
        write_deltalake(tmp_path, SCHEMA.empty_table())
        before = CommitProperties(app_transactions=[Transaction("app", 3)])
        add = AddAction(file.name, file.size_bytes, {}, 0, True, "{}")
        DeltaTable(tmp_path).create_write_transaction([add], "append", SCHEMA, [], commit_properties=before)
        with pytest.raises(DeltaRefused, match="batch 3 of another query"):
            add_files(str(tmp_path), SCHEMA, [written(tmp_path, "b.parquet", [2])], "app", 3)
        assert add_files(str(tmp_path), SCHEMA, [written(tmp_path, "b.parquet", [2])], "app", 4)
        assert not add_files(str(tmp_path), SCHEMA, [written(tmp_path, "c.parquet", [2])], "app", 4)
        assert sorted(DeltaTable(tmp_path).to_pyarrow_table()["n"].to_pylist()) == [1, 2]

    def test_another_batch_of_the_same_number_is_refused(self, tmp_path: Path) -> None:
        """Spark's log says which one it is, and says so again when the batch is repeated."""
        table, one, copy = tmp_path / "t", tmp_path / "one", tmp_path / "copy"
        for each in (one, copy):
            (each / "offsets").mkdir(parents=True)
            (each / "offsets" / "0").write_text(f"v1\n{each}")
        mark = mark_of(one.as_uri(), 0)
        assert add_files(table, SCHEMA, [written(table, "a.parquet", [1])], "q", 0, mark=mark)
        assert not add_files(table, SCHEMA, [written(table, "b.parquet", [1])], "q", 0, mark=mark)
        said = r"another batch 0 of this query: its checkpoint was copied.*Go on with the copy that wrote"
        with pytest.raises(DeltaRefused, match=said):
            add_files(table, SCHEMA, [written(table, "c.parquet", [2])], "q", 0, mark=mark_of(copy, 0))
        # Nobody can read the checkpoint: the number decides.
        assert mark_of("s3://bucket/one", 0) is mark_of(one, 1) is mark_of("", 0) is None
        assert mark_of(copy / "offsets" / "0", 0) is None
        (copy / "offsets" / "1").mkdir()
        with pytest.raises(OptionInvalid, match=r"copy/offsets/1 of the query's checkpoint cannot be read: Is a dir"):
            mark_of(copy, 1)
        assert not add_files(table, SCHEMA, [written(table, "d.parquet", [1])], "q", 0)
        # An earlier release commits batch 1, and this one repeats it.
        assert add_files(table, SCHEMA, [written(table, "e.parquet", [3])], "q", 1)
        (one / "offsets" / "1").touch()
        assert not add_files(table, SCHEMA, [written(table, "f.parquet", [3])], "q", 1, mark=mark_of(one, 1))
        assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 3]

    @for_each(
        ("options", "said"),
        [({}, "path is missing"), ({"path": "/t", "storage": "[]"}, "storage"), ({"path": "/t", "x": "1"}, "option x")],
    )
    def test_bad_options_are_named(self, options: dict[str, str], said: str) -> None:
        with pytest.raises(OptionInvalid, match=said):
            read_delta_options(options)


@for_each(
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
        ("expression", "said"), [(["id"], "no column id"), (["cast(null as string) body"], "body is null")]
    )
    def test_spark_tells_of_rows_that_are_no_messages(
        self, spark: Any, stage: Stage, expression: list[str], said: str
    ) -> None:
        """Before the first task, and from a task."""
        with stage.make() as queue:
            writer = spark.range(1).selectExpr(*expression).write.format("veilmq").option("url", stage.url())
            with pytest.raises(Exception, match=said):
                writer.mode("append").save()
            assert left(queue) == 0


TEXT, NUMBER = StringType(), LongType()


@for_each(
    ("columns", "options", "said"),
    [
        ({"type": TEXT}, {}, "no column body"),
        ({"body": NUMBER}, {}, "body cannot be bigint"),
        ({"body": TEXT}, {"key": "k"}, "no such column"),
        ({"body": TEXT, "attributes": MapType(NUMBER, TEXT)}, {}, "attributes cannot be map<bigint,string>"),
        ({"body": TEXT, "m": MapType(TEXT, NUMBER)}, {"key": "m"}, "is map<string,bigint>, which is no key"),
    ],
)
def test_columns_that_make_no_messages_are_told(
    columns: dict[str, DataType], options: dict[str, str], said: str
) -> None:
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])
    with pytest.raises(OptionInvalid, match=said):
        check_columns(schema, read_send_options({"url": "veil://127.0.0.1:1/q", **options}))


@for_each(
    ("row", "options", "said"),
    [
        ({"k": "k"}, {"key": "k"}, "does not deduplicate"),
        ({"delay": math.nan}, {}, "A row's delay is nan"),
        ({"ttl": math.inf}, {}, "A row's ttl is inf"),
        ({"priority": Decimal("5.7")}, {}, "A row's priority is 5.7"),
        ({"priority": math.nan}, {}, "A row's priority is nan"),
    ],
)
@pytest.mark.slow
def test_rows_that_are_no_messages_are_told(
    stage: Stage, row: dict[str, Any], options: dict[str, str], said: str
) -> None:
    with stage.make() as queue:
        with pytest.raises(PipelineError, match=said):
            send_rows(iter([Row(body="b", **row)]), read_send_options({"url": stage.url(), **options}), "prefix")
        assert left(queue) == 0


class Throttled(Wrapping):
    """It refuses some messages once, as a cloud may refuse a request."""

    def __init__(self, inner: Queue, refused: set[str]) -> None:
        super().__init__(inner)
        self.refused = refused

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        answers: list[Sent | VeilError] = []
        for message in messages:
            assert isinstance(message, Message)
            if message.body in self.refused:
                self.refused.remove(message.body)
                answers.append(ServiceError(code="RequestThrottled", status=503, request_id="", message=""))
            else:
                answers.append(self.inner.send(message))
        return answers


def test_rows_of_a_group_do_not_overtake_a_request_that_is_refused(tmp_path: Path) -> None:
    account = EmbeddedAccount(tmp_path)
    account.create("rows.fifo", Template(fifo=True))
    queue = account.queue("rows.fifo")
    able = queue.capabilities.batch_messages_max
    bodies = [f"{number:04}" for number in range(3 * able)]
    rows = [Message(body, group="g", deduplication_id=body) for body in bodies]
    _send(Throttled(queue, set(bodies[:able])), rows, 30)
    came: list[str] = []
    while messages := queue.receive(10):
        came += [message.body for message in messages]
        queue.delete_batch([message.handle for message in messages])
    account.close()
    assert came == bodies


@pytest.mark.parametrize("name", ["orders 2024", "Aufträge", "x" * 129, "\udcff"])
def test_rows_of_a_table_of_any_name_have_a_group(tmp_path: Path, name: str) -> None:
    """A replay sends rows without a group as one."""
    assert group_of("orders") == "orders"
    with EmbeddedAccount(tmp_path, create=True) as account:
        account.create("q.fifo", Template(fifo=True))
        account.queue("q.fifo").send(Message("b", group=group_of(name), deduplication_id="1"))
        assert group_of(name) != group_of(f"{name} ")


def test_a_stream_that_tells_all_rows_again_is_refused() -> None:
    """Output mode complete: each batch would be sent again with all rows of before."""
    sink = QueueSource({"url": "veil://127.0.0.1:1/q"})
    with pytest.raises(OptionInvalid, match="A queue cannot be overwritten"):
        sink.streamWriter(StructType().add("body", "string"), overwrite=True)
    assert sink.streamWriter(StructType().add("body", "string"), overwrite=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_checkpoint_under_an_old_name_loses_no_messages(spark: Any, stage: Stage) -> None:
    """It counts from 0 again, and the table has a batch 0 of that name."""
    table = stage.directory / "table"

    def run(checkpoint: str, app: str) -> int:
        source = spark.readStream.format("veilmq").option("url", stage.url())
        frame = source.option("directory", str(stage.directory / checkpoint)).option("lease", "1").load()
        query = frame.writeStream.format("veilmq-delta").option("path", str(table)).option("app", app)
        query = query.option("checkpointLocation", str(stage.directory / f"{checkpoint}-log"))
        query.trigger(availableNow=True).start().awaitTermination()
        return int(DeltaTable(table).to_pyarrow_table().num_rows)

    with stage.make() as queue:
        queue.send("1")
        assert run("one", "nightly") == 1
        queue.send("2")
        assert run("one", "nightly") == 2
        queue.send("3")
        with pytest.raises(Exception, match="has batch 0 of another query under the name app=nightly"):
            run("two", "nightly")
        assert left(queue) == 1
        # The batch is repeated: it was logged, and not committed.
        assert run("two", "weekly") == 3
        assert left(queue) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_null_in_a_column_that_takes_none_is_told(spark: Any, tmp_path: Path) -> None:
    """Of the values that were written: what may be null by its type mostly is not."""
    table = tmp_path / "table"
    write_deltalake(table, pa.schema([pa.field("id", pa.int64(), False)]).empty_table())
    for number, expression in enumerate(["id", "nullif(id, 2) id"]):
        source = tmp_path / f"in-{number}"
        spark.range(3).selectExpr(expression).write.parquet(str(source))
        query = spark.readStream.schema("id bigint").parquet(str(source)).writeStream.format("veilmq-delta")
        query = query.option("path", str(table)).option("checkpointLocation", str(tmp_path / f"log-{number}"))
        query = query.trigger(availableNow=True).start()
        if expression == "id":
            query.awaitTermination()
        else:
            with pytest.raises(Exception, match=r"The column id of the table .* takes no null, and a row has one"):
                query.awaitTermination()
    assert sorted(DeltaTable(table).to_pyarrow_table()["id"].to_pylist()) == [0, 1, 2]
    assert not check(str(table), now=0).missing


ROWS = pa.table({"id": [1, 2], "days": pa.array([["x"], []], pa.list_(pa.string()))})


@pytest.mark.parametrize(
    ("there", "partitioned", "said"),
    [
        ({"id": [0], "days": [["w"]], "day": ["w"]}, ["day"], "is partitioned by day"),
        ({"id": [0]}, [], "has no column days: it has id"),
        ({"ID": [0], "days": [["w"]]}, [], "has no column id: it has ID, days"),
        ({"id": ["0"], "days": [["w"]]}, [], "column id of the table .* is string, and that of these rows long"),
        ({"id": [0], "days": [[1]]}, [], "column days of the table .* is .*, and that of these rows"),
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


def with_a_constraint(place: Path) -> None:
    write_deltalake(place, SCHEMA.empty_table())
    DeltaTable(place).alter.add_constraint({"positive": "n > 0"})


def with_a_feature(place: Path) -> None:
    write_deltalake(place, SCHEMA.empty_table())
    DeltaTable(place).alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)


def with_mapped_columns(place: Path) -> None:
    mapping = {"delta.columnMapping.mode": "name", "delta.minReaderVersion": "2", "delta.minWriterVersion": "5"}
    write_deltalake(place, SCHEMA.empty_table(), configuration=mapping)


def with_a_column_of(metadata: dict[str, Any]) -> Callable[[Path], object]:
    return lambda place: DeltaTable.create(str(place), Schema([Field("n", "long", metadata=metadata)]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (with_mapped_columns, "maps its columns by name"),
        (with_a_constraint, "has a constraint positive"),
        (with_a_feature, "has rowTracking, which veilmq-delta does not know"),
        (with_a_column_of({"delta.invariants": '{"expression": {"expression": "n > 0"}}'}), "n .* has an invariant"),
        (with_a_column_of({"delta.generationExpression": "1"}), "n .* has an expression"),
        (with_a_column_of({"delta.identity.start": 1, "delta.identity.step": 1}), "n .* has values that count up"),
    ],
)
def test_a_table_that_wants_what_the_writer_does_not_see_to_is_refused(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    """Before anything is received, and at a commit, should the table be altered meanwhile."""
    place = tmp_path / "t"
    make(place)
    version = DeltaTable(place).version()
    with pytest.raises(DeltaRefused, match=said):
        check_place(str(place), SCHEMA)
    with pytest.raises(DeltaRefused, match=said):
        add_files(str(place), SCHEMA, [written(place, "a.parquet", [1])], "app", 0)
    assert DeltaTable(place).version() == version


@pytest.mark.parametrize("nulls", ["n", "r.a", "l.element", "m.value", "l.element.b"])
def test_a_column_that_takes_no_null_gets_none(tmp_path: Path, nulls: str) -> None:
    filled = pa.list_(pa.field("element", pa.struct([pa.field("b", pa.int64(), False)]), False))
    schema = pa.schema(
        [
            pa.field("n", pa.int64(), False),
            pa.field("r", pa.struct([pa.field("a", pa.int64(), False)])),
            pa.field("l", filled),
            pa.field("m", pa.map_(pa.string(), pa.field("value", pa.int64(), False))),
        ]
    )
    write_deltalake(tmp_path, schema.empty_table())
    check_place(str(tmp_path), schema)
    with pytest.raises(DeltaRefused, match=f"The column {nulls} of the table .* takes no null, and a row has one"):
        add_files(str(tmp_path), schema, [Written("a.parquet", 1, 1, "q", frozenset({nulls}))], "app", 0)
    assert DeltaTable(tmp_path).version() == 0
    # What may be null is told, too: a record whose fields may not be.
    assert add_files(str(tmp_path), schema, [Written("a.parquet", 1, 1, "q", frozenset({"r", "l", "m"}))], "app", 0)


@for_each(
    ("kind", "values", "names"),
    [
        (pa.int64(), [1, None], {"c"}),
        (pa.struct([("a", pa.int64())]), [None, {"a": 1}], {"c"}),
        (pa.struct([("a", pa.int64())]), [{"a": None}, {"a": 1}], {"c.a"}),
        (pa.list_(pa.struct([("b", pa.int64())])), [[], None, [None]], {"c", "c.element"}),
        (pa.list_(pa.struct([("b", pa.int64())])), [[{"b": 1}], [{"b": None}]], {"c.element.b"}),
        (pa.map_(pa.string(), pa.int64()), [[("k", None)], [("k", 1)]], {"c.value"}),
        (pa.map_(pa.string(), pa.int64()), [[("k", 0)], []], set()),
    ],
)
def test_nulls_are_found_wherever_they_are(kind: Any, values: list[Any], names: set[str]) -> None:
    twice = pa.record_batch({"c": pa.array([*values, *values], kind)})
    assert set(nulls_of(twice.slice(len(values)))) == names


@pytest.mark.parametrize(
    ("path", "said"), [("tables/t", "an absolute path"), ("memory://t/t", "an absolute path"), ("FILE", "it is a file")]
)
def test_a_path_that_cannot_be_is_told_before_there_are_rows(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionInvalid, match=said):
        check_place(path.replace("FILE", str(tmp_path / "file")), SCHEMA)
    check_place(str(tmp_path / "new"), SCHEMA)
    check_place("s3://bucket/t", SCHEMA)
    assert not (tmp_path / "new").exists()


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
    assert DeltaTable(table).transaction_version(app) == 0
    # What the repeated batch wrote is left to a vacuum, and is in no version.
    named = {Path(each).name for each in DeltaTable(table).file_uris()}
    assert named < {each.name for each in table.glob("*.parquet")}


PARTED = pa.table(
    {
        "kind": ["a/b c", "ä=%2F", None, "", "a/b c"],
        "day": pa.array([date(2026, 1, 31), date(2026, 2, 1), None, date(2026, 1, 31), date(2026, 1, 31)]),
        "is_new": [True, False, None, True, True],
        "n": [1, 2, 3, 4, 5],
    }
)
COLUMNS = ("kind", "day", "is_new")


def test_a_table_in_partitions_has_each_row_under_its_values(tmp_path: Path) -> None:
    """Whatever letters they have; of a text, Delta knows no difference between none and an empty one."""
    place = str(tmp_path / "t")
    for batch in (0, 1, 1):
        commit_parted(place, PARTED, batch, COLUMNS)
    table = DeltaTable(place)
    assert table.metadata().partition_columns == list(COLUMNS)
    wanted = [row | {"kind": row["kind"] or None} for row in PARTED.to_pylist()] * 2
    found = table.to_pyarrow_table().select(PARTED.schema.names).to_pylist()
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    files = pa.table(table.get_add_actions()).num_rows
    assert files == 2 * 4, "one for each combination of values and batch"
    assert not check(place, now=0).missing
    assert table.to_pyarrow_table(filters=[("kind", "=", "a/b c")]).num_rows == 4


FILLED = pa.schema([pa.field("kind", pa.string(), False), pa.field("n", pa.int64(), False)])
"""As of a frame whose columns have no nulls."""


def test_an_empty_text_that_divides_a_table_is_a_null_there(tmp_path: Path) -> None:
    """So it is in the log, and nobody opens a table with a null in a column that allows none."""
    rows = pa.table({"kind": ["a", ""], "n": [1, 2]}, FILLED)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    commit_parted(ours, rows, 0, ["kind"])
    found = DeltaTable(ours)
    assert [(each.name, each.nullable) for each in found.schema().fields] == [("kind", True), ("n", False)]
    assert sorted(found.to_pyarrow_table().select(["n", "kind"]).to_pylist(), key=str) == [
        {"n": 1, "kind": "a"}, {"n": 2, "kind": None},
    ]  # fmt: skip
    write_deltalake(theirs, FILLED.empty_table(), partition_by=["kind"])
    with pytest.raises(DeltaRefused, match=r"The column kind of the table .* takes no null, and a row has one"):
        commit_parted(theirs, rows, 0, ["kind"])
    commit_parted(theirs, rows[:1], 0, ["kind"])
    assert DeltaTable(theirs).to_pyarrow_table()["n"].to_pylist() == [1]


def test_a_table_whose_log_cannot_be_read_is_told(tmp_path: Path) -> None:
    """It has a null where it allows none."""
    write_deltalake(tmp_path, FILLED.empty_table(), partition_by=["kind"])
    added = AddAction("a.parquet", 1, {"kind": None}, 0, True, '{"numRecords": 1}')
    with pytest.raises(ValueError, match="Found unmasked nulls"):  # after it has landed
        DeltaTable(tmp_path).create_write_transaction([added], "append", FILLED, ["kind"])
    with pytest.raises(DeltaRefused, match=r"log of the table .* cannot be read"):
        commit_parted(str(tmp_path), pa.table({"kind": ["a"], "n": [1]}, FILLED), 0, ["kind"])
    with pytest.raises(DeltaRefused, match=r"log of the table .* cannot be read"):
        check_place(tmp_path, FILLED, ["kind"])
    with pytest.raises(OptionInvalid, match="holds no table that can be read"):
        load(str(tmp_path))


def test_any_value_can_divide_a_table(tmp_path: Path) -> None:
    """A message has a type of up to 256 characters; what its sender chose must not stop a drain."""
    values = ["語" * 28, "ж" * 256, "x" * 256, "%", "..", ".", "a=b/c=d", "__HIVE_DEFAULT_PARTITION__", None, "\n\x00"]
    place = str(tmp_path / "t")
    rows = pa.table({"type": values, "of": ["o" * 150] * len(values), "n": range(len(values))})
    commit_parted(place, rows, 0, ["type", "of"])
    table = DeltaTable(place)
    found: Any = table.to_pyarrow_dataset()
    assert sorted(found.to_table().select(rows.schema.names).to_pylist(), key=str) == sorted(rows.to_pylist(), key=str)
    with duckdb.connect() as quack:
        quack.register("found", found)
        assert quack.sql("SELECT n FROM found WHERE type = repeat('ж', 256)").fetchall() == [(1,)]
        assert quack.sql("SELECT n FROM found WHERE type IS NULL").fetchall() == [(8,)]
    assert not check(place, now=0).missing
    assert max(len(each.name) for each in tmp_path.rglob("*")) <= 255


def test_any_number_of_values_can_divide_a_table(tmp_path: Path) -> None:
    """Also of integers, and each once however its rows are mixed; and no rows leave no trace."""
    place, columns = str(tmp_path / "t"), ["customer", "is_new"]
    numbers = [*range(1_100), *reversed(range(1_100))]
    rows = pa.table({"customer": numbers, "is_new": [each % 3 == 0 for each in numbers], "n": range(2_200)})
    assert write_parted(iter(rows.slice(0, 0).to_batches()), place, rows.schema, columns, 0) == []
    assert not Path(place).exists()
    assert [part.rows for part, _ in write_parted(iter(rows[:1].to_batches()), place, rows.schema, columns, 0)] == [1]
    commit_parted(place, rows, 0, columns)
    table = DeltaTable(place)
    assert pa.table(table.get_add_actions()).num_rows == 1_100
    found = table.to_pyarrow_table().select(rows.schema.names).sort_by("n")
    assert found.cast(rows.schema).equals(rows)


@for_each(
    ("partitions", "said"),
    [
        (["none"], "partitionBy=none: there is no such column"),
        (["days"], "partitionBy=days: a column of list"),
        (["id", "days"], "a column of list"),
    ],
)
def test_what_cannot_divide_a_table_is_told(partitions: list[str], said: str) -> None:
    with pytest.raises(OptionInvalid, match=said):
        check_place("/nowhere/t", ROWS.schema, partitions)


def test_a_table_that_is_divided_otherwise_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "t")
    commit_parted(place, PARTED, 0, ["kind"])
    for partitions, said in ((["day"], "is partitioned by kind, and these rows by day"), ([], "partitionBy=kind")):
        with pytest.raises(DeltaRefused, match=said):
            check_place(place, PARTED.schema, partitions)
    with pytest.raises(OptionInvalid, match="names all columns"):
        check_place(place, pa.schema([("kind", pa.string())]), ["kind"])


def test_the_number_of_a_batch_does_not_expire(tmp_path: Path) -> None:
    """A drain that is resumed after the table's transactions have: it would write its last batch a second time."""
    place = tmp_path / "t"
    expires = {"delta.setTransactionRetentionDuration": "interval 0 seconds", "delta.checkpointInterval": "1"}
    write_deltalake(place, SCHEMA.empty_table(), configuration=expires)
    for batch in range(3):
        add_files(str(place), SCHEMA, [written(place, f"{batch}.parquet", [batch])], "app", batch)
    table = DeltaTable(place)
    table.create_checkpoint()
    table.cleanup_metadata()
    assert not add_files(str(place), SCHEMA, [written(place, "again.parquet", [2])], "app", 2)
    assert sorted(DeltaTable(place).to_pyarrow_table()["n"].to_pylist()) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_drain_divides_its_table(spark: Any, stage: Stage) -> None:
    table = stage.directory / "t"
    with stage.make() as queue:
        queue.send_batch([Message(f"{n}", type=kind) for n, kind in enumerate(["a", "b", None, "a"])])
        drain(spark, stage.url(), f"delta:{table}", stage.directory / "d", partition_by=["type"])
        assert left(queue) == 0
    rows = DeltaTable(table).to_pyarrow_table().select(["body", "type"]).to_pylist()
    assert sorted((row["body"], row["type"]) for row in rows) == [("0", "a"), ("1", "b"), ("2", None), ("3", "a")]
    assert len(list(table.glob("type=*/*.parquet"))) == 3
