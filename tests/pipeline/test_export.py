"""`veilmq events export`: whole files, resumed by offset, the same events."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from veilmq.pipeline.errors import HistoryGap
from veilmq.pipeline.events.export import ROW_GROUP_ROWS, export
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.testing.histories import MadeUp, Workload, history, lognormal

DAY = 86_400.0


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 1_000)], seed=1, span=2 * DAY)


def read(directory: Path) -> pa.Table:
    exported = ParquetHistory(str(directory))
    return pa.Table.from_batches(exported.read(*exported.bounds()))


def test_what_is_exported_is_what_happened(table: pa.Table, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = export(MadeUp(table), tmp_path, file_rows=1_000, progress=lambda *at: seen.append(at))
    assert done == (0, table.num_rows)
    assert read(tmp_path).equals(table)
    assert seen[-1] == (table.num_rows, table.num_rows)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["day=2026-01-01", "day=2026-01-02"]


def test_it_goes_on_where_it_stopped(table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), tmp_path, file_rows=500, until=1_200)
    files = {each: each.stat().st_mtime_ns for each in tmp_path.glob("*/*.parquet")}
    part = next(tmp_path.glob("day=*")) / ".offset-left.parquet.part"
    part.write_bytes(b"half a file")
    assert export(MadeUp(table), tmp_path, file_rows=500) == (1_200, table.num_rows)
    assert read(tmp_path).equals(table)
    assert not part.exists()
    assert all(each.stat().st_mtime_ns == at for each, at in files.items())
    assert export(MadeUp(table), tmp_path) == (table.num_rows, table.num_rows)


def test_it_may_begin_later(table: pa.Table, tmp_path: Path) -> None:
    assert export(MadeUp(table), tmp_path, start=700) == (700, table.num_rows)
    assert read(tmp_path).equals(table.slice(700))


def test_events_trimmed_before_they_were_exported_are_missed_aloud(table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), tmp_path, until=500)
    with pytest.raises(HistoryGap, match=r"begins at offset 800, and 500 is next. Export into another directory"):
        export(MadeUp(table.slice(800)), tmp_path)
    assert read(tmp_path).num_rows == 500


def test_row_groups_fit_the_partitions(tmp_path: Path) -> None:
    long = history([Workload("q", lognormal(5, 1), "t", 60_000, lease=600.0)], seed=1)
    assert long.num_rows > ROW_GROUP_ROWS
    export(MadeUp(long), tmp_path)
    (file,) = tmp_path.glob("*/*.parquet")
    metadata: Any = pq.ParquetFile(file).metadata
    sizes = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
    assert set(sizes[:-1]) == {ROW_GROUP_ROWS}
    assert sum(sizes) == long.num_rows
