"""The history as a Delta table: each event once, whatever dies between a file and its commit; what DuckDB reads."""

from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.support.histories import MadeUp, Workload, history, lognormal

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.events import export as exporting
from veilmq.pipeline.events.export import HISTORY, ExportTaken, export, keep_as_delta, unchanged
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.tables import compact, retain

DAY = 86_400.0


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 1_000)], seed=1, span=2 * DAY)


def events_of(place: Path) -> pa.Table:
    found = DeltaTable(str(place)).to_pyarrow_table().sort_by("offset")
    assert set(found.column("day").to_pylist()) <= {date(2026, 1, 1), date(2026, 1, 2)}
    return found.drop_columns(["day"])


def test_it_is_the_history(table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), tmp_path, file_rows=800, until=2_000, kept=keep_as_delta)
    assert DeltaTable(str(tmp_path)).transaction_version(HISTORY) == 2_000
    export(MadeUp(table), tmp_path, file_rows=800, kept=keep_as_delta)
    assert events_of(tmp_path).equals(table)
    exported = ParquetHistory(str(tmp_path))
    assert pa.Table.from_batches(exported.read(*exported.bounds())).equals(table)


def test_an_export_becomes_a_table(table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), tmp_path, file_rows=800, until=2_000)
    export(MadeUp(table), tmp_path, until=2_000, kept=keep_as_delta)
    assert events_of(tmp_path).equals(table.slice(0, 2_000))


class Died(Exception):
    """Instead of a kill."""


@pytest.mark.parametrize("landed", [False, True])
def test_a_death_between_a_file_and_its_commit_or_after_it(table: pa.Table, tmp_path: Path, landed: bool) -> None:
    calls = []

    def dying(directory: Path) -> None:
        calls.append(directory)
        if landed or len(calls) < 3:
            keep_as_delta(directory)
        if len(calls) == 3:
            raise Died

    with pytest.raises(Died):
        export(MadeUp(table), tmp_path, file_rows=500, kept=dying)
    assert events_of(tmp_path).num_rows == (1_000 if landed else 500)
    export(MadeUp(table), tmp_path, file_rows=500, kept=keep_as_delta)
    assert events_of(tmp_path).equals(table)


def test_another_table_is_refused(table: pa.Table, tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"a": [1]}))
    with pytest.raises(OptionInvalid, match=r"is a Delta table, and not of a history\. Name another directory"):
        export(MadeUp(table), tmp_path, kept=keep_as_delta)
    assert not list(tmp_path.glob("day=*"))


def test_it_is_kept_small_by_days(table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(MadeUp(table), tmp_path, file_rows=500, kept=keep_as_delta)
    assert compact(tmp_path) == 0
    monkeypatch.setattr(exporting, "JOBS_WAIT_S", 0)
    with unchanged(tmp_path), pytest.raises(ExportTaken, match="A job reads the files in"):
        retain(tmp_path, date(2026, 1, 2), vacuum_hours=0)
    assert events_of(tmp_path).equals(table)
    assert retain(tmp_path, date(2026, 1, 2), vacuum_hours=0) > 500
    left = events_of(tmp_path)
    assert 0 < left.num_rows < table.num_rows
    exported = ParquetHistory(str(tmp_path))
    assert pa.Table.from_batches(exported.read(*exported.bounds())).equals(left)
    export(MadeUp(table), tmp_path, kept=keep_as_delta)
    assert events_of(tmp_path).equals(left)


def test_duckdb_reads_it(table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), tmp_path, file_rows=500, kept=keep_as_delta)
    actions = pa.table(DeltaTable(str(tmp_path)).get_add_actions(flatten=True)).to_pylist()
    assert min((each["min.offset"], each["max.offset"]) for each in actions) == (0, 499)
    events: Any = DeltaTable(str(tmp_path)).to_pyarrow_dataset()
    with duckdb.connect() as quack:
        quack.register("events", events)
        found = quack.sql('SELECT kind, count(*) FROM events WHERE "offset" >= 700 GROUP BY kind').fetchall()
        ((of_a_day,),) = quack.sql("SELECT count(*) FROM events WHERE day = DATE '2026-01-01'").fetchall()
    expected = table.slice(700).group_by("kind").aggregate([("kind", "count")]).to_pylist()
    assert sorted(found) == sorted((each["kind"], each["kind_count"]) for each in expected)
    assert 0 < of_a_day < table.num_rows
