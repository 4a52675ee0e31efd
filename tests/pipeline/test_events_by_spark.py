"""Exported history through Spark's own Parquet reader: the rows of `veilmq-events`, and its refusals."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.histories import Workload, history, lognormal, write

from veilmq.cli.failures import Failure
from veilmq.cli.pipeline import Asked
from veilmq.cli.pipeline import session as sessions
from veilmq.pipeline.errors import HistoryGap, HistoryNewer, PipelineError
from veilmq.pipeline.events import export
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.events.source import load
from veilmq.pipeline.tables import compact

RANGE = {"from": "1400", "until": "3100"}
KINDS = ("sent", "deleted")


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 800)], seed=4)


@pytest.fixture
def place(table: pa.Table, tmp_path: Path) -> Path:
    """An export, in a directory whose name Spark would read as a pattern and as an encoded text."""
    return write(table, tmp_path / "a b%20[c]{d}*#+e=f", file_rows=1_500)


def rows(frame: Any) -> Any:
    return sorted(frame.collect())


def plan_of(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_the_same_rows_by_less_work(spark: Any, table: pa.Table, place: Path) -> None:
    found = load(spark, {"path": str(place)})
    assert found.orderBy("offset").toArrow().cast(table.schema).equals(table)
    some = load(spark, {"path": str(place)} | RANGE, KINDS)
    assert rows(some) == rows(spark.read.format("veilmq-events").options(path=str(place), **RANGE)
                              .option("kinds", ",".join(KINDS)).load())  # fmt: skip
    plan = plan_of(some.select("at"))
    assert "FileScan parquet [offset" in plan
    assert "GreaterThanOrEqual(offset,1400)" in plan
    assert "In(kind" in plan
    assert "detail" not in plan
    assert "PushedFilters: []" in plan_of(found.select("at"))  # a whole history needs none for offsets


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def shorten(file: Path) -> None:
    pq.write_table(pq.read_table(file, partitioning=None).slice(0, 1_000), file)


def widen(file: Path) -> None:
    there = pq.read_table(file, partitioning=None)
    pq.write_table(there.append_column("weight", pa.array([1] * there.num_rows)), file)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (Path.unlink, HistoryGap, r"no events from offset 1500 to 3000.*Restore the missing files"),
        (cut, PipelineError, r"cannot be read.*Export it anew"),
        (shorten, HistoryGap, r"no event 2500, though its name says so"),
        (widen, HistoryNewer, r"column weight of a later release. Upgrade veilmq here"),
    ],
)
def test_what_the_source_refuses_is_refused(
    spark: Any, place: Path, damage: Callable[[Path], None], error: type[PipelineError], said: str
) -> None:
    damage(sorted(place.glob("*/*.parquet"))[1])
    with pytest.raises(error, match=said):
        load(spark, {"path": str(place)})


def test_an_unknown_kind_is_refused_also_when_files_were_joined(spark: Any, table: pa.Table, tmp_path: Path) -> None:
    kinds = pa.array([*table.column("kind").to_pylist()[:-1], "blessed"])
    write(table.set_column(table.schema.get_field_index("kind"), "kind", kinds), tmp_path, file_rows=1_500)
    assert load(spark, {"path": str(tmp_path), "until": "1000"}, KINDS).count() > 0
    for _ in range(2):
        with pytest.raises(HistoryNewer, match=r"events of the kind 'blessed'. Upgrade veilmq here"):
            load(spark, {"path": str(tmp_path)}, KINDS)
        compact(tmp_path)


def test_a_file_that_goes_meanwhile_is_an_error_whatever_the_session_ignores(
    spark: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tidy` waits for the job. If somebody else removes a file, the job fails with one clear sentence."""
    monkeypatch.setattr(sessions, "started", lambda *where, is_short: nullcontext(spark))
    monkeypatch.setattr(export, "JOBS_WAIT_S", 0)
    asked = Asked(None, place, None, None, None, None, None, "parquet", False, None, None)
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with pytest.raises(Failure) as failed, sessions.session(asked, {}) as (_, events, seen):  # noqa: PT012
            with pytest.raises(export.ExportTaken, match="A job reads"):
                compact(place)
            assert events(None).count() == seen.stop
            found = events(None)
            gone = next(place.glob("*/*.parquet"))
            gone.unlink()
            found.count()
        assert "a file is gone that the job was to read" in str(failed.value)
        assert gone.name in str(failed.value)
        assert failed.value.advice.endswith("run the job again.")
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")


def test_files_with_other_types_are_read_by_python(spark: Any, table: pa.Table, place: Path) -> None:
    """As of an export that a user wrote anew, with dictionaries."""
    for file in place.glob("*/*.parquet"):
        there = pq.read_table(file, partitioning=None)
        at = there.schema.get_field_index("kind")
        pq.write_table(there.set_column(at, "kind", there.column("kind").dictionary_encode()), file)
    assert ParquetHistory(str(place)).checked(0, table.num_rows) is None
    found = load(spark, {"path": str(place)})
    assert "FileScan" not in plan_of(found)
    assert found.orderBy("offset").toArrow().cast(table.schema).equals(table)


def test_files_that_spark_cannot_see_are_read_by_python(spark: Any, table: pa.Table, place: Path) -> None:
    spark.sparkContext._jsc.hadoopConfiguration().set("fs.file.impl", "no.such.FileSystem")
    spark.sparkContext._jsc.hadoopConfiguration().set("fs.file.impl.disable.cache", "true")
    try:
        assert "FileScan" not in plan_of(load(spark, {"path": str(place)}))
    finally:
        spark.sparkContext._jsc.hadoopConfiguration().unset("fs.file.impl")
        spark.sparkContext._jsc.hadoopConfiguration().unset("fs.file.impl.disable.cache")
