"""loop: what a run learns is what one look at everything tells, and it reads only what is new."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.pipeline.histories_stage import event, frame, received, table_of
from tests.support.histories import MadeUp, Workload, history, lognormal

from veilmq.pipeline import tables
from veilmq.pipeline.errors import HistoryGap, OptionInvalid
from veilmq.pipeline.estimates.buckets import CELL, GROUP, LATER, histogram
from veilmq.pipeline.events import export
from veilmq.pipeline.events.export import ExportTaken
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.jobs.attempts import attempts
from veilmq.pipeline.jobs.plan_changes import changes, helped, hours, reason
from veilmq.pipeline.loop import Loop, LoopTaken, Ran, _State

NOW = 1_767_312_000.0
HOURS = 3_600.0


@cache
def everything() -> Any:
    """The history, as a table."""
    how: dict[str, Any] = {"extend": 20.0, "crashes_per_second": 1 / 400, "lease": 30.0}
    workloads = [
        Workload("orders", lognormal(20, 0.8), "paid", 3_000, **how),
        Workload("orders", lognormal(5, 0.8), None, 1_000, **how),
    ]
    return history(workloads, seed=9, span=12 * HOURS)


class Stage:
    """A growing exported history and a loop over it."""

    def __init__(self, spark: Any, directory: Path) -> None:
        self.spark = spark
        self.exported = directory / "events"
        self.directory = directory / "loop"
        self.loop = Loop(self.directory)
        self.table = everything()

    def grow(self, share: float) -> None:
        """Export so much of the history."""
        from veilmq.pipeline.events.export import export

        export(MadeUp(self.table), self.exported, until=round(self.table.num_rows * share), file_rows=5_000)

    def run(self, now: float = NOW) -> Ran:
        seconds = iter(range(100))
        return self.loop.run(
            self.spark,
            ParquetHistory(str(self.exported)),
            {"path": str(self.exported)},
            now=now,
            timer=lambda: float(next(seconds)),
        )

    def timeouts(self) -> dict[str | None, Any]:
        return {row.type: row for row in tables.read(self.spark, self.loop.timeouts).collect()}


@pytest.fixture
def stage(spark: Any, tmp_path: Path) -> Stage:
    return Stage(spark, tmp_path)


class Half(NamedTuple):
    """A loop that has seen half of the history."""

    stage: Stage
    ran: Ran
    plans_before: Any


@pytest.fixture(scope="module")
def first_half(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Half:
    stage = Stage(spark, tmp_path_factory.mktemp("half") / "live")
    stage.exported.parent.mkdir()
    stage.grow(0.5)
    before = stage.loop.plans()
    ran = stage.run()
    shutil.copytree(stage.directory.parent, stage.directory.parent.with_name("kept"))
    return Half(stage, ran, before)


@pytest.fixture
def half(first_half: Half) -> Iterator[Half]:
    """As it was after that run, whatever other tests did with it: a run takes seconds, a copy none."""
    place = first_half.stage.directory.parent
    shutil.rmtree(place)
    shutil.copytree(place.with_name("kept"), place)
    loop = first_half.stage.loop
    yield first_half
    first_half.stage.loop = loop


def test_a_queue_that_was_deleted_after_its_data_aged_out_has_no_plan(half: Half) -> None:
    """Else its plan was published again and again, and refused."""
    stage = half.stage
    state = msgspec.json.decode((stage.directory / "state.json").read_bytes(), type=_State)
    state.deleted = {"/".join(queue) for queue in stage.loop.plans()}
    assert state.deleted
    shutil.rmtree(stage.directory / "cells")
    stage.loop._plan(stage.spark, state, None, lambda: None)
    assert stage.loop.plans() == {}


def test_a_table_of_an_earlier_release_gets_the_new_columns(half: Half) -> None:
    """The group that is not planned again keeps what it had, in the columns where it belongs."""
    stage = half.stage
    before = stage.timeouts()["paid"]
    later = ("timeout_low_s", "timeout_high_s", "first_lease_low_s", "first_lease_high_s")
    table = tables.load(stage.loop.timeouts)
    kept = table.filter(pc.equal(table["type"], "paid")).drop_columns([*later])
    shutil.rmtree(stage.loop.timeouts)
    stage.loop.timeouts.mkdir()
    pq.write_table(kept, stage.loop.timeouts / "part-0.parquet")
    assert stage.run().planned == 1
    found = stage.timeouts()
    assert found[None].first_lease_low_s < found[None].first_lease_s < found[None].first_lease_high_s
    was, now = before.asDict(), found["paid"].asDict()
    assert {name: now[name] for name in was} == was | dict.fromkeys(later)


def check_that_all_is_learnt(stage: Stage, last: Ran) -> None:
    assert last.stop == stage.table.num_rows
    keys = [*GROUP, *CELL]
    mine = stage.loop.cells().set_index(keys).leases
    source = stage.spark.read.format("veilmq-events").option("path", str(stage.exported)).load()
    pending = pq.read_table(next(stage.directory.glob("pending-*"))).num_rows
    whole = histogram(attempts(source)).toPandas().set_index(keys).leases
    assert mine.sum() + pending == whole.sum()
    assert pending == last.pending < 100
    apart = whole.sub(mine, fill_value=0)
    assert apart.min() == 0
    assert apart.sum() == pending


def test_one_run_learns_what_one_look_at_everything_tells(stage: Stage) -> None:
    stage.grow(1.0)
    check_that_all_is_learnt(stage, stage.run())


@pytest.mark.slow
def test_runs_add_up_to_one_look_at_everything(half: Half) -> None:
    stage, ran = half.stage, [half.ran]
    for share in (0.62, 0.63, 1.0):
        stage.grow(share)
        ran.append(stage.run())
    assert [each.start for each in ran[1:]] == [each.stop for each in ran[:-1]]
    check_that_all_is_learnt(stage, ran[-1])


@pytest.mark.slow
def test_groups_are_planned_again_when_they_grew(half: Half) -> None:
    stage = half.stage
    assert (half.ran.planned, half.ran.groups) == (2, 2)
    before = stage.timeouts()
    stage.grow(0.51)
    assert (stage.run().planned, stage.timeouts()) == (0, before)
    stage.grow(1.0)
    assert stage.run().planned == 2
    after = stage.timeouts()
    assert after["paid"].attempts > 1.5 * before["paid"].attempts
    assert after[None].first_lease_s > 0


@pytest.mark.slow
def test_groups_are_planned_again_though_old_days_go_as_new_ones_come(half: Half) -> None:
    """Of work that goes on evenly as much is dropped as is new: what is kept grows no more."""
    stage = half.stage
    before = stage.timeouts()
    month = 40 * 86_400.0
    assert stage.run(NOW + month).dropped_days == 1
    stage.grow(0.52)
    few = stage.run()
    stage.grow(1.0)
    assert (few.planned, stage.run().planned) == (2, 2)
    cells = stage.loop.cells()
    kept = cells[~cells.ended.isin(LATER)].leases.sum()
    assert kept < 1.15 * sum(row.attempts for row in before.values())
    assert sum(row.attempts for row in stage.timeouts().values()) == kept, "each message counts once"


def test_a_loop_has_its_own_offsets(stage: Stage) -> None:
    history, options = ParquetHistory("events"), {"path": "events", "from": "7"}
    with pytest.raises(OptionInvalid, match="goes on where it stopped"):
        stage.loop.run(stage.spark, history, options, now=NOW, timer=lambda: 0.0)


@pytest.mark.slow
def test_plans_are_what_was_learnt_above_what_heartbeats_need(half: Half) -> None:
    stage = half.stage
    assert half.plans_before == {}
    stage.grow(0.6)
    stage.run()
    rows = stage.timeouts()
    (plan,) = stage.loop.plans().values()
    # Clients extended every 20 s.
    assert plan["floor_us"] == 40_000_000
    assert plan["by_type"] == {"paid": int(rows["paid"].first_lease_s * 1e6)}
    assert plan["lease_us"] == int(rows[None].first_lease_s * 1e6)


@pytest.mark.slow
def test_nothing_new_is_a_success(half: Half) -> None:
    stage = half.stage
    ran = stage.run(NOW + 900)
    assert ran.pending == half.ran.pending > 0
    assert (ran.start, ran.settled, ran.planned) == (ran.stop, 0, 0)
    metrics = (stage.directory / "metrics.prom").read_text()
    assert f"veilmq_pipeline_last_success_timestamp_seconds {NOW + 900}\n" in metrics
    assert f"veilmq_pipeline_next_offset {ran.stop}\n" in metrics


@pytest.mark.slow
def test_a_run_that_died_is_done_again(half: Half, tmp_path: Path) -> None:
    stage = half.stage
    saved = shutil.copytree(stage.directory, tmp_path / "saved")
    stage.grow(1.0)
    stage.run()
    whole = stage.loop.cells()
    # As it would be had the second run died just before its end: all is written but the state.
    shutil.copy(saved / "state.json", stage.directory / "state.json")
    stage.run()
    assert stage.loop.cells().equals(whole)


@pytest.mark.slow
def test_one_run_at_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no tidy of the events that it reads."""
    stage.grow(0.1)
    stage.directory.mkdir()
    with (stage.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LoopTaken, match="Wait until it ends"):
            stage.run()
    real = stage.loop._take_in

    def amid(*given: Any) -> Any:
        with pytest.raises(ExportTaken, match="A job reads"):
            tables.compact(stage.exported)
        return real(*given)

    monkeypatch.setattr(export, "JOBS_WAIT_S", 0)
    monkeypatch.setattr(stage.loop, "_take_in", amid)
    assert stage.run().stop > 0
    assert tables.compact(stage.exported) == 0


@pytest.mark.slow
def test_a_history_trimmed_beyond_the_last_run_is_refused(half: Half) -> None:
    stage = half.stage
    state = stage.directory / "state.json"
    kept = state.read_bytes()
    for path in sorted(stage.exported.glob("day=*/*.parquet"))[:1]:
        path.unlink()
    state.write_text(json.dumps(json.loads(kept) | {"next": 10}))
    with pytest.raises(HistoryGap, match="and 10 is next"):
        stage.run()
    assert json.loads(state.read_bytes())["next"] == 10


@pytest.mark.slow
def test_another_history_is_refused(half: Half, tmp_path: Path) -> None:
    elsewhere = Stage(half.stage.spark, tmp_path)
    shutil.copytree(half.stage.exported, elsewhere.exported)
    elsewhere.loop = half.stage.loop
    with pytest.raises(HistoryGap, match="a directory of its own"):
        elsewhere.run()


@pytest.mark.slow
def test_old_days_are_dropped_and_new_ones_compacted(half: Half) -> None:
    stage = half.stage
    stage.loop = Loop(stage.directory, retention_days=2)
    (day,) = (stage.directory / "cells").glob("day=*")
    (file,) = day.glob("*.parquet")
    for number in range(30):
        shutil.copy(file, day / f"offset-{0:020}-{number:020}.parquet")
    old = stage.directory / "cells" / "day=2025-12-01"
    shutil.copytree(day, old)
    attempts_before = stage.loop.cells().leases.sum()
    ran = stage.run()
    assert ran.dropped_days == 1
    assert not old.exists()
    assert ran.compacted == 30
    assert len(list(day.glob("*.parquet"))) == 1
    assert stage.loop.cells().leases.sum() == pytest.approx(attempts_before / 2)


class TestTables:
    """Both formats: a table is replaced whole, read back, compacted and trimmed."""

    @pytest.mark.parametrize("kind", tables.FORMATS)
    def test_what_is_written_is_read(self, spark: Any, tmp_path: Path, kind: str) -> None:
        place = tmp_path / "table"
        for number in (3, 2):
            tables.write(spark.range(number).selectExpr("id", "string(id) AS name"), place, kind)
        assert sorted(tables.read(spark, place).collect()) == [(0, "0"), (1, "1")]
        assert (place / "_delta_log").exists() == (kind == "delta")
        assert [each.name for each in tmp_path.iterdir()] == ["table"]

    def test_delta_tables_are_compacted_and_trimmed(self, spark: Any, tmp_path: Path) -> None:
        from deltalake import DeltaTable, write_deltalake

        place = tmp_path / "table"
        for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
            for _ in range(3):
                rows = spark.sql(f"SELECT '{day}' AS day, 1L AS n").toArrow()
                write_deltalake(str(place), rows, mode="append", partition_by=["day"])
        assert tables.compact(place) == 9
        assert tables.retain(place, date(2026, 1, 3)) > 0
        tables.vacuum(place, 0)
        assert len(DeltaTable(str(place)).file_uris()) == 1
        assert len(list(place.glob("day=*/*.parquet"))) == 1
        assert tables.read(spark, place).count() == 3

    def test_a_format_that_is_none_is_refused(self, spark: Any, tmp_path: Path) -> None:
        with pytest.raises(OptionInvalid, match="none of parquet and delta"):
            tables.write(spark.range(1), tmp_path / "table", "csv")
        assert list(tmp_path.iterdir()) == []

    def test_a_directory_without_a_table_is_refused(self, spark: Any, tmp_path: Path) -> None:
        with pytest.raises(OptionInvalid, match="holds no table"):
            tables.read(spark, tmp_path)
        spark.range(1).write.parquet(str(tmp_path / "messages"))
        with pytest.raises(OptionInvalid, match=f"Of an archive that is {tmp_path}/messages"):
            tables.read(spark, tmp_path)
        spark.range(2).selectExpr("id", "id AS n").write.partitionBy("n").parquet(str(tmp_path / "parts"))
        assert tables.read(spark, tmp_path / "parts").count() == 2


def test_a_plan_after_which_it_got_worse_is_found(stage: Stage) -> None:
    """By its runs alone, which saw the plan's days apart; what the job says of the whole history is the same."""
    applied = {"plan": "suggested", "applied": {"lease_us": 9, "made": 77, "why": "40 attempts"}}
    change = event("queue_changed", 20 * 3_600, 0, sequence=None, detail=applied)
    first_day, next_day = day_of_work(0, redone=False), day_of_work(24, redone=True)
    stage.table = table_of([*first_day, change, *next_day])
    stage.grow(len(first_day) / (len(first_day) + len(next_day)))
    stage.run(now=2 * 24 * HOURS)
    assert stage.loop.worse() == {}
    stage.grow(1.0)
    stage.run(now=2 * 24 * HOURS)
    (row,) = helped(
        hours(attempts(frame(stage.spark, stage.table))), changes(frame(stage.spark, stage.table))
    ).collect()
    assert (row.verdict, row.messages_before, row.messages_after) == ("worse", 14 * 20, 14 * 20)
    assert stage.loop.worse() == {("000000000000", "us-east-1", "q"): (77, reason(row.asDict()))}
    assert Loop(stage.directory).worse() == stage.loop.worse()


def day_of_work(first_hour: int, *, redone: bool) -> list[Any]:
    """Twenty messages in each of 14 hours; redone: most workers outlive their leases."""
    found = []
    for number in range(14 * 20):
        at, sequence = (first_hour + number // 20) * 3_600 + number % 20 * 100, first_hour * 1_000 + number + 1
        found += [received(at, lease=5, sequence=sequence)]
        if redone and number % 3:
            found += [
                received(at + 6, attempt=2, sequence=sequence),
                event("delete_refused", at + 10, sequence=sequence, detail={"reason": "stale"}),
                event("deleted", at + 20, 2, sequence=sequence),
            ]
        else:
            found += [event("deleted", at + 3, sequence=sequence)]
    return found
