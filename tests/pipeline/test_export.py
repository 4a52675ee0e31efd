"""`veilmq events export`: whole files, resumed by offset, the same events."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.support.histories import MadeUp, Workload, history, lognormal

from veilmq.pipeline.errors import HistoryGap
from veilmq.pipeline.events import export as exporting
from veilmq.pipeline.events.export import ROW_GROUP_ROWS, ExportTaken, alone_in, export, unchanged
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.tables import compact, retain

DAY = 86_400.0
TODAY = date(2026, 1, 1)


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
    assert [each.name for each in sorted(tmp_path.iterdir())] == [".lock", "day=2026-01-01", "day=2026-01-02"]


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


@pytest.mark.parametrize("then", [lambda table: table, lambda table: table.slice(0, 900)])
def test_another_history_is_not_put_behind_the_first(
    table: pa.Table, tmp_path: Path, then: Callable[[pa.Table], pa.Table]
) -> None:
    """As after a restored backup, whether it has come further already or not."""
    export(MadeUp(table, "first"), tmp_path, until=1_000)
    with pytest.raises(HistoryGap, match=r"another history than what was read before: a backup was restored"):
        export(MadeUp(then(table), "second"), tmp_path)
    assert read(tmp_path).num_rows == 1_000
    assert export(MadeUp(table, "first"), tmp_path) == (1_000, table.num_rows)
    compact(tmp_path)
    with pytest.raises(HistoryGap, match=r"another history"):
        export(MadeUp(table, "second"), tmp_path)


def test_a_history_that_ends_before_what_was_exported_is_another_one(table: pa.Table, tmp_path: Path) -> None:
    export(MadeUp(table), tmp_path, until=500)
    with pytest.raises(HistoryGap, match=r"ends at offset 300, and 500 is next. Is it another server's"):
        export(MadeUp(table.slice(0, 300)), tmp_path)


def test_one_at_a_time(
    table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But for jobs that read: an export adds files meanwhile, and a tidy waits for their end."""
    export(MadeUp(table), tmp_path, until=500)
    with alone_in(tmp_path):
        for work in (
            lambda: export(MadeUp(table), tmp_path),
            lambda: compact(tmp_path),
            lambda: retain(tmp_path, TODAY),
        ):
            with pytest.raises(ExportTaken, match=r"Another export or tidy works in .* Wait until it ends"):
                work()
    jobs = ExitStack()
    for _ in range(2):
        jobs.enter_context(unchanged(tmp_path))
    assert export(MadeUp(table), tmp_path, file_rows=500) == (500, table.num_rows)
    files = sorted(tmp_path.glob("*/*.parquet"))

    class Ends(logging.Handler):
        """The jobs end when a tidy says that it waits for them."""

        def emit(self, record: logging.LogRecord) -> None:
            assert sorted(tmp_path.glob("*/*.parquet")) == files
            jobs.close()

    monkeypatch.setattr(exporting.log, "handlers", [Ends()])
    assert compact(tmp_path) == len(files) - len(list(tmp_path.glob("day=*"))) > 0
    assert [each.message for each in caplog.records] == [f"{tmp_path} waits for the end of a job that reads it"]
    monkeypatch.setattr(exporting, "JOBS_WAIT_S", 0)
    with unchanged(tmp_path), pytest.raises(ExportTaken, match=r"A job reads the files in .*Run it again when"):
        retain(tmp_path, TODAY)
    assert retain(tmp_path, TODAY.replace(year=2027)) == 2


class Partly(MadeUp):
    """What a key is shown that may see some of the events only."""

    def __init__(self, table: pa.Table, seen: pa.Array) -> None:
        super().__init__(table)
        self._seen = seen

    def read(self, start: int, stop: int) -> Iterator[Any]:
        for batch in super().read(start, stop):
            yield batch.filter(pc.is_in(batch.column("offset"), self._seen))


def test_a_key_that_sees_a_part_exports_that_part(table: pa.Table, tmp_path: Path) -> None:
    seen = pa.array([at for at in range(table.num_rows) if at % 3 == 0 and not 700 <= at < 1_900])
    expected = table.filter(pc.is_in(table.column("offset"), seen))
    export(Partly(table.slice(0, 900), seen), tmp_path, file_rows=500)
    assert ParquetHistory(str(tmp_path)).bounds().following == 900
    assert export(Partly(table.slice(0, 1_700), seen), tmp_path, file_rows=500) == (900, 900)
    assert export(Partly(table, seen), tmp_path, file_rows=500) == (900, table.num_rows)
    for _ in range(2):
        assert read(tmp_path).equals(expected)
        part = pa.Table.from_batches(ParquetHistory(str(tmp_path)).read(100, 2_000))
        assert part.column("offset").to_pylist() == [at for at in seen.to_pylist() if 100 <= at < 2_000]
        compact(tmp_path)
