"""`veilmq events export`: exports the history as partitioned Parquet and resumes where it stopped.

Strategy: each file holds the range of offsets in its name, in a folder for the day of its first event. It gets its name
when it is complete, locally by a rename and in an object store by one request, so the next run finds its start from the
names alone. A file is made durable before the next offsets are held, because the server may then trim its own copy.
Each file records the epoch of its history, so that events of a restored backup are never appended to those of the
server before it. A key that may see only some queues leaves holes, and the files record that too.

An export that was taken for dead (see `places`) may write one more file. Its offsets are in its name, and an offset
means the same event for ever, so a reader takes the events of one of the files.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from veilmq.pipeline.errors import HistoryGap, PipelineError
from veilmq.pipeline.events import ARROW_SCHEMA
from veilmq.pipeline.events.reading import EPOCH, HOLES, History, ParquetHistory
from veilmq.pipeline.places import ObjectPath, Place, alone, make, place, whole
from veilmq.store.files import restore

FILE_ROWS_MAX: Final = 1_000_000
ROW_GROUP_ROWS: Final = 131_072
"""Partitions that are a multiple of this read no row group twice."""

Progress = Callable[[int, int], None]
"""Called with the number of events written and the number to write."""


class ExportTaken(PipelineError):
    """Another export, or `tidy`, is working in the directory."""


def export(
    history: History,
    directory: Path | str | ObjectPath,
    *,
    start: int | None = None,
    until: int | None = None,
    file_rows: int = FILE_ROWS_MAX,
    progress: Progress = lambda done, total: None,
) -> tuple[int, int]:
    """Write the events that are missing; returns the range of offsets written.

    directory: a path, or a URL in an object store (s3://bucket/history). start: for an empty directory, the offset to
    begin with (by default the first). Raises HistoryGap if the history no longer holds the next offset or is another
    history, ExportTaken, and PipelineError.
    """
    directory = place(directory)
    make(directory)
    with alone_in(directory) as check:
        if isinstance(directory, Path):
            restore(directory)
            for left in directory.glob("day=*/.*.part"):
                left.unlink()
        found = _next_of(directory, history)
        first = start if found is None else found
        if first is None:
            first = history.hold(None)
        bounds = history.bounds()
        stop = bounds.following if until is None else min(until, bounds.following)
        if first < bounds.first:
            mend = "Export into another directory: events were trimmed before they were exported."
            raise HistoryGap(f"The history begins at offset {bounds.first}, and {first} is next.", mend)
        if first > bounds.following:
            mend = "Is it another server's, or a restored backup's? Export into another directory."
            raise HistoryGap(f"The history ends at offset {bounds.following}, and {first} is next.", mend)
        # If no event is visible, the name of the next file covers those offsets too.
        at = seen = first
        while seen < stop:
            history.hold(seen)
            check()
            end = min(seen + file_rows, stop)
            if _write(history, directory, at, seen, end):
                at = end
            seen = end
            progress(seen - first, stop - first)
    return first, at


def alone_in(directory: Place) -> AbstractContextManager[Callable[[], None]]:
    """Lock the directory: only one process at a time adds or joins exported events. Raises ExportTaken."""
    return alone(directory, ".lock", ExportTaken, "Another export or tidy")


def _next_of(directory: Place, history: History) -> int | None:
    """The next offset to export; the history must be the one already exported."""
    if not any(directory.glob("day=*/offset-*.parquet")):
        return None
    there = ParquetHistory(str(directory))
    following = there.bounds().following
    history.epoch = there.epoch
    return following


def _write(history: History, directory: Place, start: int, seen: int, stop: int) -> bool:
    """Write the events from `seen` on as a file for all offsets from `start` on; False if none are visible."""
    batches = (batch for batch in history.read(seen, stop) if batch.num_rows)
    head: Any = next(batches, None)
    if head is None:
        return False
    day = datetime.fromtimestamp(head.column("at")[0].as_py() / 1e6, UTC).date()
    path = directory / f"day={day.isoformat()}" / f"offset-{start:020}-{stop:020}.parquet"
    with whole(path) as part, pq.ParquetWriter(part, ARROW_SCHEMA, compression="zstd", use_dictionary=True) as writer:
        waiting, rows = [head], head.num_rows
        written = rows
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            written += batch.num_rows
            if rows >= ROW_GROUP_ROWS:
                table = pa.Table.from_batches(waiting, ARROW_SCHEMA)
                full = rows - rows % ROW_GROUP_ROWS
                writer.write_table(table.slice(0, full), ROW_GROUP_ROWS)
                waiting, rows = table.slice(full).to_batches(), rows - full
        if rows:
            writer.write_table(pa.Table.from_batches(waiting, ARROW_SCHEMA), ROW_GROUP_ROWS)
        told = {EPOCH: history.epoch} if history.epoch else {}
        writer.add_key_value_metadata(told | ({HOLES: "yes"} if written < stop - start else {}))
    return True
