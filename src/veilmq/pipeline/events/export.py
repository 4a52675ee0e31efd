"""`veilmq events export`: the history as partitioned Parquet, resumed where it stopped.

Strategy: each file holds a range of offsets that its name tells, in a folder of the day of its first event; it is
written beside its place and renamed when it is whole, so that what is there is complete and the next run knows where to
go on by looking at names alone.
"""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from veilmq.pipeline.errors import HistoryGap
from veilmq.pipeline.events.columns import ARROW_SCHEMA
from veilmq.pipeline.events.reading import History, ParquetHistory

FILE_ROWS_MAX: Final = 1_000_000
ROW_GROUP_ROWS: Final = 131_072
"""Partitions that are a multiple of it read no row group twice."""

Progress = Callable[[int, int], None]
"""Called with the events written and how many there are to write."""


def export(
    history: History,
    directory: Path,
    *,
    start: int | None = None,
    until: int | None = None,
    file_rows: int = FILE_ROWS_MAX,
    progress: Progress = lambda done, total: None,
) -> tuple[int, int]:
    """Write the events that are not there yet; returns the range of offsets written.

    start: for an empty directory, the offset to begin with (the first unless told). Raises HistoryGap if the history no
    longer holds what comes next, and PipelineError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob("day=*/.*.part"):
        left.unlink()
    bounds = history.bounds()
    first = _next_of(directory)
    if first is None:
        first = bounds.first if start is None else start
    stop = bounds.following if until is None else min(until, bounds.following)
    if first < bounds.first:
        mend = "Export into another directory: events were trimmed before they were exported."
        raise HistoryGap(f"The history begins at offset {bounds.first}, and {first} is next.", mend)
    at = first
    while at < stop:
        end = min(at + file_rows, stop)
        _write(history, directory, at, end)
        at = end
        progress(at - first, stop - first)
    return first, max(stop, first)


def _next_of(directory: Path) -> int | None:
    if not any(directory.glob("day=*/offset-*.parquet")):
        return None
    return ParquetHistory(str(directory)).bounds().following


def _write(history: History, directory: Path, start: int, stop: int) -> None:
    batches = history.read(start, stop)
    head: Any = next(batches)
    day = datetime.fromtimestamp(head.column("at")[0].as_py() / 1e6, UTC).date()
    place = directory / f"day={day.isoformat()}"
    place.mkdir(exist_ok=True)
    name = f"offset-{start:020}-{stop:020}.parquet"
    part = place / f".{name}.part"
    with pq.ParquetWriter(part, ARROW_SCHEMA, compression="zstd", use_dictionary=True) as writer:
        waiting, rows = [head], head.num_rows
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            if rows >= ROW_GROUP_ROWS:
                whole = pa.Table.from_batches(waiting, ARROW_SCHEMA)
                full = rows - rows % ROW_GROUP_ROWS
                writer.write_table(whole.slice(0, full), ROW_GROUP_ROWS)
                waiting, rows = whole.slice(full).to_batches(), rows - full
        if rows:
            writer.write_table(pa.Table.from_batches(waiting, ARROW_SCHEMA), ROW_GROUP_ROWS)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(place / name)
