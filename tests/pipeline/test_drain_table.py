"""Tables that a drain does not write to, for their rows or the queue's messages would be lost."""

import errno
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.errors import StreamingQueryException
from tests.pipeline.drain_stage import Stage, left, send
from tests.pipeline.faults import side
from tests.support.postgres import until
from tests.users import NOBODY, other_user

from veilmq.cli.failures import Failure
from veilmq.cli.pipeline.session import reported
from veilmq.client.clock import SystemClock
from veilmq.client.records import ObjectStore
from veilmq.pipeline.drain import (
    DirectoryTaken,
    DirectoryUnwritable,
    DrainUnfinished,
    TableForeign,
    clear_checkpoint,
    drain,
)
from veilmq.pipeline.drain.manifests import Directory
from veilmq.pipeline.errors import OptionInvalid, PipelineError
from veilmq.pipeline.places import ObjectPath, Patience
from veilmq.pipeline.sinks.claims.parquet import SINK_LOG, Claims
from veilmq.pipeline.sinks.ownership import check_table, readable
from veilmq.store.files import locked
from veilmq.testing.for_each import for_each


def log(place: Path, *names: str) -> None:
    """One of Spark's logs with these entries."""
    place.mkdir(parents=True)
    for name in names:
        (place / name).touch()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_messages_stay_in_the_queue_if_the_table_is_another_query_s(spark: Any, stage: Stage) -> None:
    """Spark's sink says of the new query's first batch that it has it, and the source would delete the messages."""
    table = stage.directory / "table"
    with stage.make() as queue:
        send(queue, ["1", "2"])
        drain(spark, stage.url(), f"parquet:{table}", stage.directory / "d")
        send(queue, ["3"])
        with pytest.raises(TableForeign, match=r"rows of another query\. Bring its checkpoint back"):
            drain(spark, stage.url(), f"parquet:{table}", stage.directory / "other")
        with pytest.raises(TableForeign, match="is a Parquet table"):
            drain(spark, stage.url(), f"delta:{table}", stage.directory / "d")
        assert left(queue) == 1
        drain(spark, stage.url(), f"parquet:{table}", stage.directory / "d")
        assert (left(queue), spark.read.parquet(str(table)).count()) == (0, 3)
        # Somebody moves the table: Spark would write the next batch into a new one, and could not read that.
        table.rename(stage.directory / "elsewhere")
        send(queue, ["4"])
        with pytest.raises(TableForeign, match="lacks batch 1 of this query: it was removed"):
            drain(spark, stage.url(), f"parquet:{table}", stage.directory / "d")
        assert (left(queue), table.exists()) == (1, False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_drain_whose_directory_went_back_loses_nothing(spark: Any, stage: Stage) -> None:
    """A backup of the directory, without the table: the next batch has a number that the table knows."""
    table, home, saved = stage.directory / "table", stage.directory / "d", stage.directory / "saved"
    with stage.make() as queue:
        send(queue, ["1"])
        drain(spark, stage.url(), f"delta:{table}", home)
        shutil.copytree(home, saved)
        send(queue, ["2"])
        drain(spark, stage.url(), f"delta:{table}", home)
        send(queue, ["3"])
        said = r"has batch 1 of this query, and the checkpoint ends with batch 0.*messages that it already has a second"
        with pytest.raises(TableForeign, match=said):
            drain(spark, stage.url(), f"delta:{table}", saved)
        assert (left(queue), queue.stats().in_flight) == (1, 0)
        drain(spark, stage.url(), f"delta:{table}", home)
    assert sorted(DeltaTable(table).to_pyarrow_table()["body"].to_pylist()) == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@for_each("kind", ["delta", "parquet"])
def test_two_copies_of_a_drain_lose_no_message(kind: str, spark: Any, stage: Stage) -> None:
    """Both give their next batch the same number: the second one is not the first one, repeated."""
    home, copy = stage.directory / f"{kind}-d", stage.directory / f"{kind}-copy"
    table, name = f"{kind}:{stage.directory / kind}", f"{stage.name}-{kind}"

    def fail(batches: Any) -> Any:
        raise OSError("killed amid the batch")

    with stage.make(name) as queue:
        url = stage.url(name=name)
        send(queue, ["1"])
        drain(spark, url, table, home)
        shutil.copytree(home, copy)
        send(queue, ["2"])
        with pytest.raises(StreamingQueryException, match="killed amid the batch"):
            drain(spark, url, table, copy, lease=600, transform=lambda rows: rows.mapInArrow(fail, rows.schema))
        send(queue, ["3"])
        with pytest.raises(DrainUnfinished, match="1 in flight"):
            drain(spark, url, table, home, until=0)
        source = {"url": url, "directory": str(copy / "manifests")}
        source |= {"table": str(stage.directory / kind)} if kind == "parquet" else {}
        sink = {"path": str(stage.directory / kind), "checkpointLocation": str(copy / "checkpoint")}
        form = "parquet" if kind == "parquet" else "veilmq-delta"
        writer = spark.readStream.format("veilmq").options(**source).load().writeStream.format(form)
        said = "has another " + ("batch 1 of this query" if kind == "delta" else batch(2))
        with pytest.raises(StreamingQueryException, match=f"{said}: its checkpoint was copied"):
            writer.options(**sink).trigger(availableNow=True).start().awaitTermination()
        with pytest.raises(TableForeign, match=f"{said}.*or in its `manifests/bad_records`"):
            drain(spark, url, table, copy)
        assert left(queue) == 1  # message 2
        send(queue, ["4"])
        with pytest.raises(DrainUnfinished, match="1 in flight"):
            drain(spark, url, table, home, until=0)
    files = DeltaTable(stage.directory / kind).file_uris() if kind == "delta" else [str(stage.directory / kind)]
    assert sorted(row.body for row in spark.read.parquet(*files).collect()) == ["1", "3", "4"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_drain_into_parquet_whose_source_is_killed_goes_on_with_its_own_claim(spark: Any, stage: Stage) -> None:
    """Spark logged the batch; it is claimed; it is in the table, and its messages are in the queue."""
    register_pickle_by_value(side)
    spark.dataSource.register(side.FaultySource)
    table, marks, sent = stage.directory / "table", stage.directory, []
    given = {"url": stage.url(), "directory": f"{marks}/m", "marks": str(marks), "table": str(table), "rows": "2"}
    with stage.make() as queue:
        for step in ("before claim", "after claim", "before deletes"):
            sent += [f"{step} {number}" for number in range(4)]
            send(queue, sent[-4:])
            (marks / side.FAULT).write_text(json.dumps({"step": step, "how": "kill", "skip": 1}))
            with pytest.raises(StreamingQueryException):
                side.stream_of(spark, given | {"sink": "parquet"}).start().awaitTermination()
            assert (marks / side.STRUCK).exists(), step
            (marks / side.STRUCK).unlink()
            assert left(queue) > 0, step
        side.stream_of(spark, given | {"sink": "parquet"}).start().awaitTermination()
        assert left(queue) == 0
    assert sorted(row.body for row in spark.read.parquet(str(table)).collect()) == sorted(sent)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_copy_of_a_drain_whose_source_was_killed_amid_a_batch_is_refused(spark: Any, stage: Stage) -> None:
    """The kernel releases the source's lock, and Spark writes the batch all the same: the copy's batch of that number
    would count as written."""
    table, home, copy = stage.directory / "table", stage.directory / "d", stage.directory / "copy"
    go_on = str(stage.directory / "go-on")

    def wait(batches: Any) -> Any:
        while not os.path.exists(go_on):
            time.sleep(0.01)
        yield from batches

    with stage.make() as queue, ThreadPoolExecutor(1) as beside:
        send(queue, ["1"])
        drain(spark, stage.url(), f"parquet:{table}", home)
        shutil.copytree(home, copy)
        send(queue, ["2"])
        other = beside.submit(
            drain, spark, stage.url(), f"parquet:{table}", home, lease=600,
            transform=lambda rows: rows.mapInArrow(wait, rows.schema),
        )  # fmt: skip
        try:
            until((table / "_claims" / f"{2:020}").exists)
            os.kill(int((table / "_claims" / "lock").read_text()), signal.SIGKILL)
            send(queue, ["3"])
            with pytest.raises(DirectoryTaken, match=f"Another drain writes into {table}"):
                drain(spark, stage.url(), f"parquet:{table}", copy, until=0)
        finally:
            Path(go_on).touch()
        with pytest.raises(StreamingQueryException):
            other.result()
        drain(spark, stage.url(), f"parquet:{table}", home)
        assert left(queue) == 0
    assert sorted(row.body for row in spark.read.parquet(str(table)).collect()) == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_query_goes_on_whose_logs_only_spark_finds(
    spark: Any, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Python may know no such store, have no credentials for it, or not know that it is Spark's default."""
    mounted, link = "checkpoints", f"/{stage.directory.name}"
    spark.conf.set(f"fs.viewfs.mounttable.{mounted}.link.{link}", f"file:{stage.directory}")
    url, table, home = f"viewfs://{mounted}{link}", stage.directory / "table", stage.directory / "d"
    far = f"{url}/checkpoint"
    with stage.make() as queue:
        for number, checkpoint in enumerate((far, far, (stage.directory / "checkpoint").as_uri())):
            send(queue, [str(number)])
            drain(spark, stage.url(), f"parquet:{table}", home, checkpoint=checkpoint)
        assert (left(queue), spark.read.parquet(str(table)).count()) == (0, 3)
        send(queue, ["3"])
        for checkpoint, said in ((f"{far}-other", "rows of another query"), ("none://c", "Spark cannot read there")):
            with pytest.raises(PipelineError, match=said):
                drain(spark, stage.url(), f"parquet:{table}", home, checkpoint=checkpoint)
        shutil.copytree(stage.directory / "checkpoint", stage.directory / "behind")
        for entry in ("offsets/2", "commits/2"):
            (stage.directory / "behind" / entry).unlink()
        for checkpoint in (f"{url}/behind", f"{url}/none"):
            with pytest.raises(TableForeign, match="rows of another query"):
                drain(spark, stage.url(), f"parquet:{url}/table", home, checkpoint=checkpoint)
            assert f"table {url}/table: batches are not claimed, so a copy of this drain is not noticed" in caplog.text
        table.rename(stage.directory / "[moved]")
        with pytest.raises(TableForeign, match="lacks batch 2 of this query: it was removed"):
            drain(spark, stage.url(), f"parquet:{table}", home, checkpoint=far)
        assert left(queue) == 1
    spark.conf.set("fs.defaultFS", f"viewfs://{mounted}/")
    try:
        for there in (url, link):
            check_table("parquet", f"{there}/[moved]", f"{there}/checkpoint", spark)
            with pytest.raises(TableForeign, match="lacks batch 2 of this query: it was removed"):
                check_table("parquet", f"{there}/table", f"{there}/checkpoint", spark)
    finally:
        spark.conf.unset("fs.defaultFS")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_delta_table_does_not_take_is_known_before_anything_is_received(spark: Any, stage: Stage) -> None:
    table = stage.directory / "table"
    write_deltalake(table, pa.table({"id": ["0"]}))
    DeltaTable(table).alter.add_constraint({"numbers": "id < 'a'"})
    with stage.make() as queue:
        send(queue, ["1"])
        for path, columns, said in (
            (table, ["id"], "has a constraint numbers"),
            ("tables/t", ["id"], "an absolute path"),
            (stage.directory / "new", ["id", "interval 1 day x"], r"Invalid data type for Delta Lake: Duration.*Cast"),
            (stage.directory / "new", ["id", "type ID"], r"Duplicate field name \(case-insensitive\): 'ID'\. Cast"),
        ):
            with pytest.raises(PipelineError, match=said):
                drain(
                    spark, stage.url(), f"delta:{path}", stage.directory / "d",
                    transform=lambda rows, columns=columns: rows.selectExpr(*columns),
                )  # fmt: skip
        found = queue.stats()
        assert (found.visible, found.in_flight) == (1, 0)
    assert not (stage.directory / "d" / "manifests").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_drains_at_once_are_told_before_spark_is_asked(spark: Any, stage: Stage) -> None:
    """Amid the other's batch Spark says "assertion failed", or finds a log that it did not write."""
    directory = stage.directory / "d"
    directory.mkdir()
    with stage.make() as queue:
        send(queue, ["1"])
        with locked(directory / "lock", AssertionError, ""):  # type: ignore[arg-type]
            with pytest.raises(DirectoryTaken, match=f"Another drain works in {directory}"):
                drain(spark, stage.url(), f"parquet:{stage.directory}/table", directory)
            assert left(queue) == 1
            assert [each.name for each in directory.iterdir()] == ["lock"]
        assert drain(spark, stage.url(), f"parquet:{stage.directory}/table", directory).messages == 1


def test_a_query_goes_on_with_its_own_table(tmp_path: Path) -> None:
    checkpoint, table = tmp_path / "checkpoint", tmp_path / "table"
    check_table("parquet", str(table), checkpoint)
    log(checkpoint / "offsets", "9", "10", "11", ".11.crc")
    log(table / "_spark_metadata", "9.compact", "10", ".10.crc")
    (table / "part-1.parquet").touch()
    check_table("parquet", str(table), checkpoint)
    check_table("parquet", f"file:{table}", checkpoint)
    (checkpoint / "offsets" / "10").unlink()
    (checkpoint / "offsets" / "11").unlink()
    with pytest.raises(TableForeign, match="rows of another query"):
        check_table("parquet", f"file://{table}", checkpoint)
    check_table("parquet", f"s3://{table}", checkpoint)
    for each in (checkpoint, str(checkpoint), f"file:{checkpoint}", checkpoint.as_uri()):
        with pytest.raises(TableForeign, match="rows of another query"):
            check_table("parquet", str(table), each)
    # Whoever can look there does so later.
    check_table("parquet", str(table), f"s3a:/{checkpoint}")
    log(checkpoint / "commits", "10", ".10.crc")
    (checkpoint / "offsets" / "10").touch()
    check_table("parquet", str(table), checkpoint)
    (table / "_spark_metadata" / "10").unlink()
    with pytest.raises(TableForeign, match="lacks batch 10 of this query"):
        check_table("parquet", str(table), checkpoint)


def test_what_was_killed_amid_its_first_batch_begins_again(tmp_path: Path) -> None:
    for checkpoint in (tmp_path / "c", str(tmp_path / "s"), f"file:{tmp_path}/f", f"file://{tmp_path}/u"):
        there = Path(str(checkpoint).removeprefix("file://").removeprefix("file:"))
        log(there / "offsets", ".0.x.tmp")
        clear_checkpoint(checkpoint, tmp_path / "manifests")
        assert not any((there / "offsets").iterdir()), checkpoint
    clear_checkpoint("s3a://nobody/knows", tmp_path / "manifests")


def test_files_that_no_query_wrote_are_not_mixed_with_its_own(tmp_path: Path) -> None:
    """Spark's readers pass over them once there is a log, and a vacuum of Delta removes them."""
    top, divided = tmp_path / "top", tmp_path / "divided"
    for place in (top, divided / "type=a" / "day=1"):
        place.mkdir(parents=True)
        (place / "part-1.parquet").touch()
    for table in (top, divided):
        for kind in ("parquet", "delta"):
            with pytest.raises(TableForeign, match="Name an empty place"):
                check_table(kind, str(table), tmp_path / "checkpoint")
    # What a query left that was killed amid its first batch.
    log(tmp_path / "checkpoint" / "offsets", "0")
    for table in (top, divided):
        for kind in ("parquet", "delta"):
            check_table(kind, str(table), tmp_path / "checkpoint")


def test_delta_takes_a_new_query_s_rows_and_no_other_format_s(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "part-1.parquet").touch()
    check_table("delta", str(tmp_path), tmp_path / "checkpoint")
    with pytest.raises(TableForeign, match="is a Delta table"):
        check_table("parquet", str(tmp_path), tmp_path / "checkpoint")


def offset(seq: int, manifest: str) -> str:
    return f'{{"seq":{seq},"file":"{manifest}","sha256":""}}\n'


def batch(number: int) -> str:
    """How an error names a batch of a Parquet table."""
    return rf"batch {number} \(as in the column `batch`; Spark's log counts from 0\) of this query"


def test_a_batch_of_a_parquet_table_is_claimed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Spark repeats a batch with the same manifest; another manifest under its number is another drain's."""
    local, logged = tmp_path / "table", tmp_path / "checkpoint" / "offsets"
    Claims(local).claim(1, "a")
    assert not local.exists(), "Spark writes elsewhere"
    assert "not claimed, so a copy of this drain is not noticed: Spark has no _spark_metadata there" in caplog.text
    log(local / SINK_LOG, "1")
    log(logged)
    (logged / "1").write_text("v1\n{}\n" + offset(2, "c"))
    far = ObjectPath(ObjectStore(f"memory://{tmp_path.name}"), "table")
    for table in (local, far):
        one, other = Claims(table), Claims(table, Patience(0))
        for seq, manifest in ((1, "a"), (1, "a"), (2, "b"), (3, "c")):
            one.claim(seq, manifest)
        assert sorted(each.name for each in (table / "_claims").glob("0*")) == [f"{2:020}", f"{3:020}"]
        refused = DirectoryTaken if table is local else TableForeign
        with pytest.raises(refused, match=f"Another drain writes into .*process|another {batch(3)}"):
            other.claim(3, "d")
        one.close()
        for refuse in (other.claim, Claims(table).check):
            with pytest.raises(TableForeign, match=f"another {batch(3)}.* has that `batch`, remove .*3\\."):
                refuse(3, "d")
            with pytest.raises(TableForeign, match=f"has {batch(3)}, and the checkpoint ends with batch 1: it is"):
                refuse(1, "a")  # its claim was removed
        assert sorted(each.name for each in (table / "_claims").glob("0*")) == [f"{2:020}", f"{3:020}"]
        other.close()
        one.claim(3, "c")  # killed, and started again
        one.close()
    with pytest.raises(TableForeign, match=f"another {batch(2)}"):
        Claims(local).check_last(logged)
    for two in (offset(2, "x") + offset(4, "y"), offset(9, "x") + offset(2, "b")):  # several sources
        (logged / "1").write_text("v1\n{}\n-\n" + two)
        Claims(local).check_last(logged)
        assert (local / "_claims" / f"{3:020}").exists() == ("y" in two), "nobody knows whose it is"
    Claims(local).claim(3, "d")  # the table lacks batch 3, and nobody wrote there
    (local / "_claims" / f"{4:020}").mkdir()
    with pytest.raises(OptionInvalid, match="4 of the table cannot be read: Is a directory"):
        Claims(local).check(4, "e")


def test_a_copy_that_waits_while_another_one_writes_is_refused(tmp_path: Path) -> None:
    """What it read of the table before it waited for the lock is no longer true."""

    class Other(SystemClock):
        """A clock that is asked when the lock is taken: another drain has written three batches, and ends."""

        def monotonic(self) -> float:
            for number in (1, 2, 3):
                (table / SINK_LOG / str(number)).touch()
                one.claim(number + 1, f"of {number}")
            one.close()
            return super().monotonic()

    for is_at_start in (True, False):
        table, logged = tmp_path / f"{is_at_start}" / "table", tmp_path / f"{is_at_start}" / "offsets"
        log(table / SINK_LOG, "0")
        log(logged)
        (logged / "0").write_text("v1\n{}\n" + offset(1, "a"))
        one, waits = Claims(table), Claims(table, Patience(15, Other()))
        one.claim(1, "a")
        one.claim(2, "of 1")
        said = "has batch 3 of this query, and the checkpoint ends with batch 0" if is_at_start else batch(4)
        with pytest.raises(TableForeign, match=said):
            waits.check_last(logged) if is_at_start else waits.claim(2, "x")
        assert sorted(each.name for each in (table / "_claims").glob("0*")) == [f"{3:020}", f"{4:020}"]
        waits.close()


def test_a_drain_closes_its_table_to_no_other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of a Spark Connect server may be another user than the server, and root may run a service's drain.
    Not run as root, the test has one user and proves little."""
    tmp_path.chmod(0o711)
    monkeypatch.chdir(tmp_path)  # the way there is closed to others
    logged = Path("offsets")
    log(logged)
    (logged / "0").write_text("v1\n{}\n" + offset(1, "a"))

    def of_a_service(name: str) -> Path:
        log(Path(name) / SINK_LOG, "0")
        Path(name).chmod(0o777)
        if os.geteuid() == 0:
            os.chown(name, NOBODY, NOBODY)
        return Path(name)

    client = NOBODY - 1
    for user in (client, 0):
        table = of_a_service(f"of-{user}")
        with other_user(user), Claims(table).running():
            assert not (table / "_claims").exists(), "it is the source's"
        claims = Claims(table)
        with other_user():
            for seq, manifest in ((1, "a"), (2, "left by a kill")):
                claims.claim(seq, manifest)
        claims.close()
    with other_user():
        Claims(table).check_last(logged)
    assert [each.name for each in (table / "_claims").glob("0*")] == [f"{1:020}"]
    table = of_a_service("new")
    claims = Claims(table)
    claims.claim(1, "a")  # by root
    claims.close()
    with other_user():
        claims.claim(2, "b")
    claims.close()
    with other_user(client):
        Claims(table).check(2, "b")


def test_a_table_on_a_file_system_without_locks_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    log(tmp_path / SINK_LOG)
    monkeypatch.setattr("fcntl.flock", refuse)
    claims = Claims(tmp_path)
    claims.claim(1, "a")
    claims.claim(2, "b")
    with claims.running():
        pass
    assert [each.getMessage() for each in caplog.records] == [
        f"table {tmp_path}: batches are not claimed, so a copy of this drain is not noticed: No locks available"
    ]


def test_a_directory_that_is_closed_or_a_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed, file = tmp_path / "closed", tmp_path / "file"
    log(closed / "checkpoint" / "offsets")
    file.touch()
    closed.chmod(0)
    try:
        with other_user():
            for kind in ("parquet", "delta"):
                with pytest.raises(OptionInvalid, match="cannot be read: Permission denied"):
                    check_table(kind, str(tmp_path / "table"), closed / "checkpoint")
            with pytest.raises(DirectoryUnwritable, match="closed/m cannot be written: Permission denied"):
                Directory(closed / "m", "orders")
            with pytest.raises(DirectoryUnwritable, match="closed/_spark_metadata cannot be used: Permission denied"):
                Claims(closed).claim(1, "a")
            claims = Claims(closed)
            for _ in range(2):  # the rounds of one call of drain
                with claims.running():
                    assert caplog.text.count("another drain may remove claims of this one") == 1
    finally:
        closed.chmod(0o700)
    for table, checkpoint in ((tmp_path / "table", file), (tmp_path / "table", file / "c"), (file, closed)):
        with pytest.raises(OptionInvalid, match=r"/file is a file\. Name a directory"):
            check_table("delta", str(table), checkpoint)
    with pytest.raises(ConnectionRefusedError), readable(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    with pytest.raises(DirectoryUnwritable, match=r"file/m cannot be written: File exists"):
        Directory(file / "m", "orders")
    with pytest.raises(Failure, match=rf"{file}/out: Not a directory"), reported():
        (file / "out").mkdir()
