"""Directories in object stores: one process at a time, and what a process does that was taken for dead."""

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.pipeline.drain_stage import Stage, left, send
from tests.pipeline.stores import Store, commit_parted, falls_asleep, taken_over, told
from tests.pipeline.test_drain_driver import START, Play, bodies
from tests.pipeline.test_jobs_loop import Stage as LoopStage
from tests.support.commands import Run
from tests.support.histories import MadeUp, Workload, history, lognormal

from veilmq.cli.pipeline import Asked, Where
from veilmq.cli.pipeline import drain as archives
from veilmq.cli.pipeline import session as sessions
from veilmq.cli.pipeline.drain import stream_of, written
from veilmq.cli.pipeline.run import report
from veilmq.pipeline import tables
from veilmq.pipeline.drain import DirectoryTaken, bad_records, drain, manifests
from veilmq.pipeline.drain.manifests import Directory
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.events.export import ExportTaken, export
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.jobs.health import health
from veilmq.pipeline.loop import GROWING, Loop, LoopTaken, growing
from veilmq.pipeline.places import (
    ObjectPath,
    Patience,
    PlaceFailed,
    PlaceTaken,
    alone,
    listed,
    lock_of,
    place,
    put,
    source,
)
from veilmq.pipeline.places.delta import storage_of, table_at
from veilmq.pipeline.sinks.checking import check
from veilmq.pipeline.sinks.queue import replay
from veilmq.pipeline.tables import append_day, compact, counted, load, retain, write
from veilmq.pipeline.tables import read as read_table

DAY = 86_400.0


@pytest.fixture
def directory(store: Store, request: pytest.FixtureRequest) -> ObjectPath:
    name = "".join(each if each.isalnum() else "-" for each in request.node.name)
    found = place(f"{store.url}/{name}")
    assert isinstance(found, ObjectPath)
    return found


def test_one_process_holds_a_directory(directory: ObjectPath) -> None:
    first = lock_of(directory, "lock", Patience(0))
    first.save(b'{"a":1}')
    with pytest.raises(PlaceTaken, match="pid "):
        lock_of(directory, "lock", Patience(0))
    first.release()
    second = lock_of(directory, "lock", Patience(0))
    assert second.load() == b'{"a":1}'
    third = taken_over(str(directory / "lock"), lambda: lock_of(directory, "lock", Patience(0)), PlaceTaken)
    assert 0 == first.number < second.number < third.number
    with pytest.raises(PlaceTaken):
        second.save(b'{"a":2}')
    assert third.load() == b'{"a":1}'
    third.save(b'{"a":3}')
    second.release()
    with pytest.raises(PlaceTaken):
        lock_of(directory, "lock", Patience(0))
    third.release()


def test_a_forked_process_neither_keeps_nor_releases_a_lock(tmp_path: Path) -> None:
    """It has the same open file, as one that a user's code started with `multiprocessing`."""
    directories = [tmp_path / name for name in ("kept", "released")]
    for directory in directories:
        directory.mkdir()
    locks = [lock_of(directory, "state", Patience(0)) for directory in directories]
    held = ExitStack()
    held.enter_context(alone(tmp_path, "alone", DirectoryTaken, "Another drain"))
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            here.close()
            locks[1].release()
            there.send(b"1")
            there.recv(1)  # until the other end is closed
        finally:
            os._exit(0)
    there.close()
    try:
        assert here.recv(1) == b"1"
        with pytest.raises(PlaceTaken, match="process"):
            lock_of(directories[1], "state", Patience(0))
        for lock, directory in zip(locks, directories, strict=True):
            lock.release()
            lock_of(directory, "state", Patience(0)).release()
        held.close()
        with alone(tmp_path, "alone", DirectoryTaken, "Another drain"):
            pass
    finally:
        here.close()
        os.waitpid(child, 0)


def test_a_store_that_creates_what_exists_is_refused(s3: Store, store: Store, directory: ObjectPath) -> None:
    if store is not s3:
        return
    store.fault(overwrites="1")
    try:
        with pytest.raises(OptionInvalid, match="its store cannot lock, as it overwrites an object that exists"):
            lock_of(directory, "lock", Patience(0))
        assert not list(directory.glob("*"))
    finally:
        store.fault()


def test_a_bucket_that_is_not_there_is_told_in_a_sentence(store: Store) -> None:
    nowhere = place(f"{store.scheme}://nowhere/directory")
    with pytest.raises(PlaceFailed, match=f"{store.scheme}://nowhere/directory.* cannot be used"):
        lock_of(nowhere, "lock", Patience(0))


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # aiohttp's, of adlfs
def test_an_object_is_read_by_ranges(directory: ObjectPath) -> None:
    content = bytes(range(256)) * 40_000
    (directory / "a").write_bytes(content)
    with source(directory / "a") as file:
        file.seek(-10, 2)
        assert file.read() == content[-10:]
        file.seek(5_000_000)
        assert file.read(1_000) == content[5_000_000:5_001_000]
        assert file.read() == content[5_001_000:]
    assert [each.name for each in directory.glob("[!.]*")] == ["a"]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 1_000)], seed=1, span=2 * DAY)


def read(directory: ObjectPath) -> Any:
    exported = ParquetHistory(str(directory))
    return pa.Table.from_batches(exported.read(*exported.bounds()))


def test_an_export_goes_on_where_it_stopped(directory: ObjectPath, table: pa.Table) -> None:
    assert export(MadeUp(table), str(directory), file_rows=500, until=1_200) == (0, 1_200)
    assert export(MadeUp(table), str(directory), file_rows=500) == (1_200, table.num_rows)
    assert read(directory).equals(table)
    exported = ParquetHistory(str(directory))
    assert pa.Table.from_batches(exported.read(700, 1_300)).equals(table.slice(700, 600))
    reading = exported.read(0, table.num_rows)
    begun = [next(reading)]
    assert compact(directory) > 0
    assert pa.Table.from_batches([*begun, *reading]).equals(table)


def test_an_export_that_slept_writes_no_event_twice(directory: ObjectPath, table: pa.Table) -> None:
    class Slow(MadeUp):
        """While its second file is read, another export takes over and gets ahead."""

        def read(self, start: int, stop: int) -> Any:
            if start == 500:
                with pytest.raises(ExportTaken, match="Another export or tidy works in"):
                    export(MadeUp(table), str(directory))
                ahead = partial(export, MadeUp(table), str(directory), file_rows=700, until=1_300)
                assert taken_over(str(directory / ".lock"), ahead, ExportTaken) == (500, 1_300)
            yield from super().read(start, stop)

    with pytest.raises(ExportTaken):
        export(Slow(table), str(directory), file_rows=500)
    spans = sorted(each.name[7:-8] for each in directory.glob("day=*/*"))
    wanted = [(0, 500), (500, 1_000), (500, 1_200), (1_200, 1_300)]
    assert spans == [f"{start:020}-{stop:020}" for start, stop in wanted]
    assert export(MadeUp(table), str(directory)) == (1_300, table.num_rows)
    assert read(directory).equals(table)


def test_a_command_exports_to_a_url(store: Store, directory: ObjectPath, stage: Stage, run: Run) -> None:
    with stage.make() as queue:
        send(queue, bodies(20))
    source = ("--server", stage.server.admin, "--token-file", str(stage.server.data / "admin-token"))
    code, out, err = run("events", "export", str(directory), *source)
    assert (code, err) == (0, ""), err
    assert read(directory).num_rows >= 21
    assert "exported" in out
    code, out, err = run("events", "export", f"{store.scheme}://nowhere/x", *source)
    assert code == 1
    assert "cannot be used" in err


def test_a_drain_keeps_its_manifests_in_a_store(stage: Stage, directory: ObjectPath) -> None:
    with stage.make() as queue:
        send(queue, bodies(250))
        play = Play(stage, directory=directory)
        first = play.driver.latest(START, 100)
        play.run(START, first)
        second = play.driver.latest(first, 100)
        with pytest.raises(DirectoryTaken, match=r"is used by another query \(pid "):
            Directory(directory, stage.name, lock_seconds=0)
        play.again()
        # The batch was logged, and its process died before a row was read.
        play.run(first, second)
        end = play.to_the_end(second)
        assert sorted(play.rows) == sorted(bodies(250))
        assert left(queue) == 0
        assert end.seq == 3
        assert not play.driver.directory.files("arrow")
        play.driver.close()


@pytest.mark.parametrize("amid", ["a batch", "an idle stream"])
def test_a_drain_that_slept_removes_no_manifest_of_the_next(stage: Stage, directory: ObjectPath, amid: str) -> None:
    with stage.make(timeout=2) as queue:
        send(queue, bodies(300))
        asleep = Play(stage, directory=directory, lease=2)
        first = asleep.driver.latest(START, 100)
        asleep.run(START, first)
        falls_asleep(str(directory / "query.json"))
        awake = Play(stage, directory=directory, lease=2)
        second = awake.driver.latest(first, 100)
        with pytest.raises(DirectoryTaken, match="used by another query"):
            asleep.driver.latest(first if amid == "a batch" else START, 100)
        asleep.driver.close()
        awake.run(first, second)
        awake.to_the_end(second)
        assert sorted(asleep.rows + awake.rows) == sorted(bodies(300))
        assert left(queue) == 0
        awake.driver.close()


@pytest.mark.parametrize("dies", [False, True])
def test_a_manifest_that_comes_late_counts_for_nothing(
    stage: Stage, directory: ObjectPath, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A process slept before it wrote its manifest, and found out after it that another one has taken over, or died."""
    real = manifests.put
    found: list[Any] = []

    def late(path: Any, content: Any) -> None:
        if path.name.endswith(".arrow") and not found:
            falls_asleep(str(directory / "query.json"))
            awake = Play(stage, directory=directory, lease=2)
            found.append(awake)
            found.append(awake.driver.latest(first, 100))
            real(path, content)
            if dies:
                raise KeyboardInterrupt
            return
        real(path, content)

    with stage.make(timeout=2) as queue:
        send(queue, bodies(300))
        asleep = Play(stage, directory=directory, lease=2)
        first = asleep.driver.latest(START, 100)
        asleep.run(START, first)
        monkeypatch.setattr(manifests, "put", late)
        with pytest.raises(KeyboardInterrupt if dies else DirectoryTaken):
            asleep.driver.latest(first, 100)
        asleep.driver.close()
        awake, second = found
        awake.run(first, second)
        awake.driver.close()
        last = Play(stage, directory=directory, lease=2, wait=3)  # until the leases of who slept end
        last.to_the_end(second)
        assert sorted(asleep.rows + awake.rows + last.rows) == sorted(bodies(300))
        assert left(queue) == 0
        assert not last.driver.directory.files("arrow")
        last.driver.close()


def test_a_day_that_is_joined_keeps_what_came_meanwhile(directory: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process slept, and another one has added a file."""
    day, join = date(2026, 1, 31), tables._join
    rows = [pa.table({"n": [number]}) for number in range(3)]
    for number in range(2):
        append_day(rows[number], directory, day, f"offset-{number:020}-{number + 1:020}")

    def joins(files: Any, into: Any) -> None:
        join(files, into)
        append_day(rows[2], directory, day, f"offset-{2:020}-{3:020}")

    monkeypatch.setattr(tables, "_join", joins)
    assert compact(directory) == 1
    assert sorted(pq.read_table(source(each))["n"].to_pylist() for each in listed(directory, "day=*/*")) == [
        [0, 1],
        [2],
    ]


def test_what_a_process_wrote_that_slept_past_midnight_counts_once(directory: ObjectPath) -> None:
    """The next one has read the same events and some more, of the day after: its file has all."""
    first, second = date(2026, 1, 31), date(2026, 2, 1)
    spans = ((0, 25, first), (25, 50, first), (50, 120, second), (50, 100, first))
    for start, stop, day in spans:
        append_day(pa.table({"n": range(start, stop)}), directory, day, f"offset-{start:020}-{stop:020}")

    def numbers() -> list[int]:
        return sorted(number for file in counted(directory) for number in pq.read_table(source(file))["n"].to_pylist())

    assert numbers() == list(range(120))
    assert compact(directory) == 1
    assert numbers() == list(range(120))
    assert [each.name for each in listed(directory, "day=*/*")] == [
        f"offset-{0:020}-{50:020}.parquet", f"offset-{50:020}-{120:020}.parquet",
    ]  # fmt: skip


def test_files_are_joined_unless_another_days_are_between(directory: ObjectPath) -> None:
    """Else the joined one's offsets say that it has what the other day's file has."""
    first, second = date(2026, 1, 31), date(2026, 2, 1)
    for start, stop, day in ((0, 25, first), (30, 50, first), (50, 60, second), (60, 75, first)):
        append_day(pa.table({"n": range(start, stop)}), directory, day, f"offset-{start:020}-{stop:020}")
    assert compact(directory) == 1
    assert sorted(len(pq.read_table(source(file))) for file in counted(directory)) == [10, 15, 45]


def test_exports_that_overlap_are_not_joined(directory: ObjectPath, table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), directory, until=500)
    export(MadeUp(table), directory, until=1_000)
    export(MadeUp(table), tmp_path, start=700, until=1_300)
    (slept,) = tmp_path.glob("day=*/*.parquet")
    put(directory / slept.parent.name / slept.name, slept.read_bytes())
    assert read(directory).equals(table.slice(0, 1_300))
    assert compact(directory) == 1
    assert read(directory).equals(table.slice(0, 1_300))


@pytest.mark.parametrize("step", ["request", "answer"])
def test_a_lock_whose_creation_was_not_answered_is_known_as_ones_own(
    store: Store, directory: ObjectPath, step: str
) -> None:
    store.fault(at=f"lock.{1:012}", do=step)
    lock = lock_of(directory, "lock", Patience(0))
    assert not store.is_armed()
    lock.save(b"{}")
    with pytest.raises(PlaceTaken, match="pid "):
        lock_of(directory, "lock", Patience(0))
    lock.release()


def test_bad_records_lie_beside_manifests_in_a_store(directory: ObjectPath) -> None:
    manifest = directory / "00000000000000000001-0123456789abcdef.arrow"
    row = bad_records.BadRecord(id="1", body="b", reason="r")
    bad_records.write(manifest, 0, [row])
    ((path, rows),) = bad_records.unsent(manifest)
    assert rows == [row]
    bad_records.mark_sent(path)
    assert not list(bad_records.unsent(manifest))
    assert bad_records.read_bad_records(str(directory)) == bad_records.of_manifest(manifest) == [row]


@pytest.mark.slow
def test_a_loop_keeps_its_state_and_tables_in_a_store(spark: Any, s3: Store, tmp_path: Path) -> None:
    with told(s3.environment):
        directory = place(f"{s3.url}/loop")
        here, far = LoopStage(spark, tmp_path), LoopStage(spark, tmp_path / "none")
        far.exported = directory / "events"  # type: ignore[assignment]
        with pytest.raises(OptionInvalid, match="Use --format delta"):
            Loop(directory / "kept")
        far.loop = Loop(directory / "kept", kind="delta")
        far.grow(0.5)
        far.run()
        for each in (here, far):
            each.grow(1)
            each.run()
        assert rows(here) == rows(far)
        assert far.loop.plans().keys() == here.loop.plans().keys() != set()
        assert far.timeouts().keys() == here.timeouts().keys()
        lock = lock_of(directory / "kept", "state.json", Patience(0))
        with pytest.raises(LoopTaken, match="Another run works in"):
            far.run()
        lock.release()
        assert len({row["type"] for row in load(far.loop.timeouts).to_pylist()}) == 2
        # A process that died while it joined a day's files left the joined one beside its parts.
        cells = directory / "kept" / "cells"
        parts = {each: each.read_bytes() for each in listed(cells, "day=*/*.parquet")}
        assert len(parts) == 2
        assert compact(cells) == 1
        for path, content in parts.items():
            put(path, content)
        assert rows(here) == rows(far)
        assert retain(cells, date(2027, 1, 1)) == 1
        assert far.loop.cells().empty


@pytest.mark.slow
@pytest.mark.parametrize("amid", ["leases", "plans"])
def test_a_loop_that_slept_takes_nothing_of_the_next(spark: Any, s3: Store, tmp_path: Path, amid: str) -> None:
    """Amid its run another one read the same events and some more; its own run then counts for nothing."""
    with told(s3.environment):
        directory = place(f"{s3.url}/asleep-{amid}")
        here, asleep, awake = (LoopStage(spark, tmp_path / name) for name in ("here", "asleep", "awake"))
        here.directory.parent.mkdir()
        for far in (asleep, awake):
            far.exported = directory / "events"  # type: ignore[assignment]
            far.loop = Loop(directory / "kept", kind="delta")
        asleep.grow(0.4)
        asleep.run()
        asleep.grow(0.7)
        step = {"leases": "_take_in", "plans": "_recommended"}[amid]
        real = getattr(asleep.loop, step)
        plans: list[Any] = []

        def sleeps(*given: Any) -> Any:
            done = real(*given) if amid == "plans" else None
            awake.grow(1)
            taken_over(str(directory / "kept" / "state.json"), awake.run, LoopTaken)
            plans.extend(load(awake.loop.timeouts).to_pylist())
            return done if amid == "plans" else real(*given)

        setattr(asleep.loop, step, sleeps)
        with pytest.raises(LoopTaken):
            asleep.run()
        here.grow(1)
        here.run()
        assert rows(awake) == rows(here)
        assert load(awake.loop.timeouts).to_pylist() == plans
        awake.run()
        assert rows(awake) == rows(here)


def test_tidy_waits_for_a_loops_run(directory: ObjectPath, run: Run) -> None:
    """And leaves an object alone that has the name of a table that is not there yet."""
    *there, missing = GROWING
    for table in there:
        append_day(pa.table({"n": [1]}), directory / table, date(2026, 1, 31), f"offset-{0:020}-{9:020}")
    lock = lock_of(directory, "state.json", Patience(0))
    lock.save(b'{"next": 9}')
    put(directory / missing, b"a note")
    assert [table.name for table in growing(directory)] == there
    code, _, err = run("pipeline", "tidy", str(directory), "--retention-days", "1")
    assert (code, "Another run works in" in err) == (1, True), err
    assert len(listed(directory / "cells", "day=*/*")) == 1
    lock.release()
    code, _, err = run("pipeline", "tidy", str(directory), "--retention-days", "1")
    assert code == 0, err
    assert not [each for table in there for each in listed(directory / table, "day=*/*")]
    assert (directory / missing).read_bytes() == b"a note"


def rows(stage: LoopStage) -> list[str]:
    """What its loop has learnt, whatever the order in which numbers were added."""
    return sorted(str(row) for row in stage.loop.cells().round(6).itertuples(index=False))


@pytest.mark.slow
def test_a_table_in_a_store_is_replaced_read_and_replayed(spark: Any, s3: Store, stage: Stage) -> None:
    with told(s3.environment):
        table = f"{s3.url}/bodies"
        write(spark.range(9).selectExpr("id"), table, "delta")
        write(spark.range(5).selectExpr("concat('body ', id) AS body"), table, "delta")
        assert sorted(row.body for row in read_table(spark, table).collect()) == bodies(5)
        with stage.make() as queue:
            assert replay(spark, table, stage.url()) == 5
            assert sorted(each.body for each in queue.receive(10)) == bodies(5)
        write_deltalake(f"{table}-parted", pa.table({"a": [1, None], "b": [2, 3]}), partition_by=["a"])
        assert sorted(read_table(spark, f"{table}-parted").collect(), key=str) == [(1, 2), (None, 3)]
        with pytest.raises(OptionInvalid, match="holds no table that can be read"):
            read_table(spark, f"{table}-none")


def test_fsspecs_configuration_of_s3_is_deltas_too(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """`FSSPEC_S3_KEY` and the others; before, only its lock and its manifests knew them."""
    for name in s3.environment:
        monkeypatch.delenv(name, raising=False)
    known = {"key": "x", "secret": "x", "endpoint_url": s3.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", known)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    table = f"{s3.url}/fsspecs"
    rows = pa.table({"type": ["a", "b"], "n": [1, 2]})
    commit_parted(table, rows, 0, ["type"])
    assert table_at(table).transaction_version("q") == 0
    assert load(table).sort_by("n").select(rows.schema.names).equals(rows)
    assert not check(table, now=0).missing
    assert (compact(table), retain(table, date(2026, 1, 1))) == (0, 0)
    assert storage_of(table, {"aws_region": "eu-west-1"}) == {
        "aws_access_key_id": "x", "aws_secret_access_key": "x", "aws_endpoint_url": s3.endpoint,
        "aws_allow_http": "true", "aws_region": "eu-west-1",
    }  # fmt: skip
    monkeypatch.setitem(fsspec.config.conf, "s3", {})
    assert storage_of(table) is None
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_drain_at_a_url_needs_a_place_for_sparks_checkpoint() -> None:
    with pytest.raises(OptionInvalid, match="Name a place that Spark itself can write"):
        drain(None, "veil://127.0.0.1:1/q", "delta:s3://b/t", "s3://b/drain")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_drain_keeps_all_but_sparks_checkpoint_in_a_store(spark: Any, s3: Store, stage: Stage) -> None:
    """Its manifests, its lock and its table; a second call goes on, and another drain is refused meanwhile."""
    with told(s3.environment), stage.make() as queue:
        home, table, checkpoint = f"{s3.url}/drained/d", f"{s3.url}/drained/t", stage.directory / "checkpoint"
        for bodies_now in (bodies(30), bodies(60)[30:]):
            send(queue, bodies_now)
            assert drain(spark, stage.url(), f"delta:{table}", home, checkpoint=checkpoint).messages == 30
        assert sorted(load(table)["body"].to_pylist()) == sorted(bodies(60))
        assert left(queue) == 0
        assert any((checkpoint / "commits").glob("1*"))
        lock = lock_of(place(home), "lock", Patience(0))
        with pytest.raises(DirectoryTaken, match="Another drain works in"):
            drain(spark, stage.url(), f"delta:{table}", home, checkpoint=checkpoint)
        lock.release()
        # A new checkpoint would begin anew with batch 0, which the table has.
        with pytest.raises(Exception, match="begins anew"):
            drain(spark, stage.url(), f"delta:{table}", home, checkpoint=stage.directory / "other")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_health_is_followed_and_a_report_written_into_a_store(
    spark: Any, s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = history([Workload("q", lognormal(3, 0.5), "t", 300)], seed=5)
    with told(s3.environment):
        exported = f"{s3.url}/seen/events"
        export(MadeUp(table), exported)
        out, checkpoint = Path(f"{s3.url}/seen/out"), tmp_path / "checkpoint"
        stream = stream_of(out, "delta", checkpoint)
        source_of = spark.readStream.format("veilmq-events").option("path", exported).load()
        _until_there(stream.table, lambda: written(spark, health(source_of), stream))
        spark.sparkContext.setLogLevel("ERROR")
        assert DeltaTable(stream.table).to_pyarrow_table()["sent"].to_pylist()
        stream_of(out, "delta", checkpoint)
        with pytest.raises(OptionInvalid, match="is a table of no stream"):
            stream_of(out, "delta", tmp_path / "other")
        asked = Asked(
            None, Path(exported), None, None, None, None, Path(f"{s3.url}/seen/report"), "delta", False, None, None
        )
        monkeypatch.setattr(sessions, "started", lambda where, is_short: nullcontext(spark))
        report(asked, {})
        assert f"wrote {s3.url}/seen/report/report.html" in capsys.readouterr().out
        page = place(f"{s3.url}/seen/report/report.html").read_text()
        assert "How long should a lease be?" in page
        assert load(f"{s3.url}/seen/report/timeouts").num_rows == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_azure_keeps_an_archive(
    spark_at_azure: Any,
    abfs: Store,
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(archives, "started", lambda where, **given: nullcontext(spark_at_azure))
    where, kept = Where(None, None, None), Path(f"{abfs.url}/archived")
    with told(abfs.environment), stage.make() as queue:
        for bodies_now in (bodies(30), bodies(60)[30:]):
            send(queue, bodies_now)
            archives.archive(stage.url(), None, kept, "delta", None, tmp_path / "archiving", where, as_json=False)
            assert "archived 30 messages" in capsys.readouterr().out
            assert left(queue) == 0
        table = f"{abfs.url}/archived/messages"
        assert sorted(load(table)["body"].to_pylist()) == sorted(bodies(60))
        archives.check(table, None, as_json=False)
        assert "missing: 0" in capsys.readouterr().out
        archives.replay(Path(table), stage.url(), None, None, where, as_json=False)
        assert left(queue) == 60


def _until_there(table: str, follow: Any) -> None:
    """Follow until the table has rows; then as if the user pressed Ctrl-C."""

    def watch() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if DeltaTable.is_deltatable(table) and DeltaTable(table).to_pyarrow_table().num_rows:
                break
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    follow()
    watcher.join()
