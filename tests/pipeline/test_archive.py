"""Archives sent back to queues, and what `archive` and `replay` say before Spark starts."""

import re
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.pipeline.cluster_stage import command
from tests.pipeline.drain_stage import Stage, left, send

from veilmq.client.messages import Message
from veilmq.pipeline import tables
from veilmq.pipeline.drain import drain
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.sinks.queue import replay, row_by_row
from veilmq.testing.for_each import for_each


@pytest.mark.slow
@for_each(
    ("arguments", "said"),
    [
        (["archive", "--queue", "veil://127.0.0.1:1/q", "--out", "kept"], "--queue veil://127.0.0.1:1/q cannot be"),
        (["archive", "--queue", "veil://h/q", "--queues", "q*", "--out", "kept"], "names a queue: connect_account"),
        (["archive", "--queue", "ftp://h/q", "--out", "kept"], "--queue ftp://h/q cannot be used"),
        (["archive", "--queue", "veil://127.0.0.1:1/q", "--out", "kept", "--format", "csv"], "none of parquet"),
        (["archive", "--queue", "veil://127.0.0.1:1/q", "--out", "kept", "--until", "soon"], "--until"),
        (["replay", "kept", "--queue", "veil://127.0.0.1:1/q"], "Is it there?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_spark_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    code, out, err = command(tmp_path, "pipeline", *arguments)
    assert (code in {1, 2}, out) == (True, "")
    assert said in err
    assert "Traceback" not in err
    assert "WARN" not in err
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestReplay:
    @pytest.fixture(params=["parquet", "delta"])
    def archive(self, request: pytest.FixtureRequest, spark: Any, stage: Stage) -> Path:
        """Of a FIFO queue with 60 messages of three groups, in three batches."""
        table = stage.directory / "table"
        with stage.make(stage.name + ".fifo", fifo=True) as queue:
            for number in range(60):
                given: Any = {"group": f"g{number % 3}", "deduplication_id": str(number)}
                queue.send(Message(str(number), attributes={"n": "x"}, type="t", **given))
            drain(
                spark, stage.url(name=queue.name), f"{request.param}:{table}", stage.directory / "d", max_rows=20,
                partitions=2,
            )  # fmt: skip
            assert left(queue) == 0
        return table

    def test_a_fifo_queue_gets_each_message_once_and_in_its_order(
        self, spark: Any, stage: Stage, archive: Path
    ) -> None:
        with stage.make(stage.name + "-again.fifo", fifo=True) as queue:
            # A part, and then all: as after a replay that failed half way.
            assert replay(spark, archive, stage.url(name=queue.name), where="int(body) < 25") == 25
            assert replay(spark, archive, stage.url(name=queue.name)) == 60
            assert left(queue) == 60
            found: list[Any] = []
            while came := queue.receive(10):
                found += came
                queue.delete_batch([each.handle for each in came])
        for group in ("g0", "g1", "g2"):
            numbers = [int(each.body) for each in found if each.group == group]
            assert numbers == [number for number in range(60) if f"g{number % 3}" == group]
        assert all((each.type, dict(each.attributes)) == ("t", {"n": "x"}) for each in found)

    def test_another_queue_gets_them_as_often_as_they_are_sent(self, spark: Any, stage: Stage, archive: Path) -> None:
        with stage.make(stage.name + "-again") as queue:
            for _ in range(2):
                assert replay(spark, archive, stage.url(name=queue.name), where="group = 'g1'") == 20
            assert left(queue) == 40

    def test_what_is_wrong_is_named(self, spark: Any, stage: Stage, archive: Path) -> None:
        with stage.make(stage.name + "-again") as queue:
            url = stage.url(name=queue.name)
            with pytest.raises(OptionInvalid, match="no column order"):
                replay(spark, archive, url, key="order")
            for where in ("type =", "weight > 1", "length(body)"):
                with pytest.raises(OptionInvalid, match=re.escape(f"where='{where}' cannot be: [")):
                    replay(spark, archive, url, where=where)
            with pytest.raises(OptionInvalid, match=r"where='int\(type\) < 2' fails on a row: \[CAST_INVALID_INPUT\]"):
                replay(spark, archive, url, where="int(type) < 2")
            with pytest.raises(Exception, match="does not deduplicate"):
                replay(spark, archive, url, key="id")
            with pytest.raises(SourceUnreachable, match=r"queue does not exist: no queue nowhere\. Create it"):
                replay(spark, archive, stage.url(name="nowhere"))
            spark.range(1).write.parquet(str(stage.directory / "other"))
            with pytest.raises(OptionInvalid, match="no column body"):
                replay(spark, stage.directory / "other", url)
            assert left(queue) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_without_a_group_are_one_in_a_fifo_queue(spark: Any, stage: Stage) -> None:
    table = stage.directory / "table"
    with stage.make() as queue:
        send(queue, ["a", "b", "c"])
        drain(spark, stage.url(), f"parquet:{table}", stage.directory / "d")
    with stage.make(stage.name + "-again.fifo", fifo=True) as queue:
        assert replay(spark, table, stage.url(name=queue.name)) == 3
        assert left(queue) == 3
        assert {each.group for each in queue.receive(10)} == {"table"}
        other = stage.directory / "other"
        spark.createDataFrame([("1", "x"), ("1", "y")], "`order.no` string, body string").write.parquet(str(other))
        assert replay(spark, other, stage.url(name=queue.name), where="body > 'a'", key="order.no") == 2
        assert queue.stats().visible == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_large_bodies_are_written_and_read_in_parts(spark: Any, stage: Stage) -> None:
    """A task that writes holds a row group, one that reads a batch of rows: Spark's own sizes were a heap full."""
    table = stage.directory / "table"
    with stage.make() as queue:
        size = queue.capabilities.body_bytes_max
        for _ in range(48):
            # Text that does not become smaller in a file.
            queue.send(token_urlsafe(size * 3 // 4)[:size])
        drain(spark, stage.url(), f"parquet:{table}", stage.directory / "d", partitions=1)
        (file,) = table.glob("*.parquet")
        told = pq.read_metadata(file)
        assert all(told.row_group(at).total_byte_size <= (34 << 20) for at in range(told.num_row_groups))
        assert replay(spark, table, stage.url(), where="position < 3") == 3
        assert left(queue) == 3
    rows = tables.read(spark, table)
    with row_by_row(spark):
        assert "Batched: false" in rows._jdf.queryExecution().executedPlan().toString()
    assert "Batched: true" in tables.read(spark, table)._jdf.queryExecution().executedPlan().toString()
