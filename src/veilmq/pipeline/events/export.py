"""`veilmq events export`: exports the history as partitioned Parquet and resumes where it stopped.

Strategy: each file holds the range of offsets in its name, in a folder for the day of its first event. It gets its name
when it is complete, locally by a rename and in an object store by one request, so the next run finds its start from the
names alone. A file is made durable before the next offsets are held, because the server may then trim its own copy.
Each file records the epoch of its history, so that events of a restored backup are never appended to those of the
server before it. A key that may see only some queues leaves holes, and the files record that too.

An export that was taken for dead (see `places`) may write one more file. Its offsets are in its name, and an offset
means the same event for ever, so a reader takes the events of one of the files.

Spark lists the files of a history when a job begins, and reads them until it ends. So jobs share a lock on a local
directory (`unchanged`) for which `tidy` waits (`changing`); exports only add files, and need neither.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from veilmq.client.clock import SYSTEM
from veilmq.pipeline.errors import HistoryGap, OptionInvalid, PipelineError, SourceUnreachable
from veilmq.pipeline.events import ARROW_SCHEMA
from veilmq.pipeline.events.reading import EPOCH, HOLES, KINDS_HELD, History, ParquetHistory, footer_of
from veilmq.pipeline.places import ObjectPath, Place, alone, make, place, whole
from veilmq.pipeline.places.delta import reason_of, table_at
from veilmq.store.directory import holds_database
from veilmq.store.files import restore

FILE_ROWS_MAX: Final = 1_000_000
ROW_GROUP_ROWS: Final = 131_072
"""Partitions that are a multiple of this read no row group twice."""

_TEXTS: Final = [field.name for field in ARROW_SCHEMA if pa.types.is_string(field.type)]
_LAST_TEXT: Final = "\U0010ffff"
_ENCODINGS: Final = dict.fromkeys((name for name in ARROW_SCHEMA.names if name not in _TEXTS), "DELTA_BINARY_PACKED")
"""Of numbers: most differ in every event, and a reader with a filter on `offset` would search their dictionaries."""

HISTORY: Final = "veilmq-events"
"""The name of the transactions in a Delta table of exported events."""
_HISTORY_SCHEMA: Final = ARROW_SCHEMA.append(pa.field("day", pa.date32()))
_FILES: Final = "day=*/offset-*.parquet"
JOBS_WAIT_S: Final = 600
"""How long `changing` waits for the jobs that read."""
_LOOK_SECONDS: Final = 0.2

log = logging.getLogger("veilmq.pipeline")

Progress = Callable[[int, int], None]
"""Called with the number of events written and the number to write."""


class ExportTaken(PipelineError):
    """Another export, or `tidy`, is working in the directory, or a job reads there for too long."""


def export(
    history: History,
    directory: Path | str | ObjectPath,
    *,
    start: int | None = None,
    until: int | None = None,
    file_rows: int = FILE_ROWS_MAX,
    progress: Progress = lambda done, total: None,
    kept: Callable[[Place], None] = lambda directory: None,
) -> tuple[int, int]:
    """Write the events that are missing; returns the range of offsets written.

    directory: a path, or a URL in an object store (s3://bucket/history). kept: called with the directory before the
    first file and after each, while nobody else works there. start: for an empty directory, the offset to begin with
    (by default the first). Raises HistoryGap if the history no longer holds the next offset or is another history,
    ExportTaken, and PipelineError.
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
        kept(directory)
        while seen < stop:
            history.hold(seen)
            check()
            end = min(seen + file_rows, stop)
            if _write(history, directory, at, seen, end) is not None:
                at = end
                kept(directory)
            seen = end
            progress(seen - first, stop - first)
    return first, at


def alone_in(directory: Place) -> AbstractContextManager[Callable[[], None]]:
    """Lock the directory: only one process at a time adds or joins exported events. Raises ExportTaken."""
    return alone(directory, ".lock", ExportTaken, "Another export or tidy")


@contextmanager
def unchanged(directory: Place | str | None) -> Iterator[None]:
    """Exported events stay as they are while the body reads them: `tidy` waits for its end. Amid a `tidy`, waits.

    A shared flock on the directory. An object store has none, nor has a file system that locks no directory (NFS):
    there a file may go while it is read. None: nothing to keep. Raises HistoryGap for a data directory: its server
    holds that lock until it ends.
    """
    if directory is not None and isinstance(at := place(directory), Path) and holds_database(at):
        raise HistoryGap(
            f"{at} is a data directory and holds no exported events.",
            "Name DIR of `veilmq events export DIR`, or the server with --server.",
        )
    file = None if directory is None else _opened(place(directory))
    try:
        if file is not None:
            _is_flocked(file, fcntl.LOCK_SH)
        yield
    finally:
        if file is not None:
            os.close(file)


@contextmanager
def changing(directory: Place | str) -> Iterator[None]:
    """Lock the directory to merge or drop its files: no job reads it (`unchanged`), and nothing else adds or merges.

    Waits `JOBS_WAIT_S` for jobs. Raises ExportTaken.
    """
    directory = place(directory)
    file = _opened(directory)
    end = SYSTEM.monotonic() + JOBS_WAIT_S
    is_logged = False
    try:
        while file is not None and not _is_flocked(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if SYSTEM.monotonic() >= end:
                raise ExportTaken(f"A job reads the files in {directory}.", "Run it again when the job has ended.")
            if not is_logged:
                log.warning("%s waits for the end of a job that reads it", directory)
            is_logged = True
            time.sleep(_LOOK_SECONDS)
        with alone_in(directory):
            yield
    finally:
        if file is not None:
            os.close(file)


def _opened(directory: Place) -> int | None:
    """What to lock; None: nothing is there that could be locked."""
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY) if isinstance(directory, Path) else None
    except OSError:
        return None  # who reads it says what is wrong


def _is_flocked(file: int, how: int) -> bool:
    """False: another process holds it. A file system without such locks counts as locked."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info("a directory cannot be locked: %s", error.strerror)
    return True


def kinds_of(batch: Any) -> set[str]:
    """The kinds of events in a record batch."""
    return set(pc.unique(batch.column("kind")).to_pylist())


def _next_of(directory: Place, history: History) -> int | None:
    """The next offset to export; the history must be the one already exported."""
    if not any(directory.glob(_FILES)):
        return None
    there = ParquetHistory(str(directory))
    following = there.bounds().following
    history.epoch = there.epoch
    return following


def _write(history: History, directory: Place, start: int, seen: int, stop: int) -> Place | None:
    """Write the events from `seen` on as a file for all offsets from `start` on; None if none are visible."""
    batches = (batch for batch in history.read(seen, stop) if batch.num_rows)
    head: Any = next(batches, None)
    if head is None:
        return None
    day = datetime.fromtimestamp(head.column("at")[0].as_py() / 1e6, UTC).date()
    path = directory / f"day={day.isoformat()}" / _name_of(start, stop)
    how: Any = {"compression": "zstd", "use_dictionary": _TEXTS, "column_encoding": _ENCODINGS}
    with whole(path) as part, pq.ParquetWriter(part, ARROW_SCHEMA, **how) as writer:
        waiting, rows = [head], head.num_rows
        written, kinds = rows, kinds_of(head)
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            written += batch.num_rows
            kinds |= kinds_of(batch)
            if rows >= ROW_GROUP_ROWS:
                table = pa.Table.from_batches(waiting, ARROW_SCHEMA)
                full = rows - rows % ROW_GROUP_ROWS
                writer.write_table(table.slice(0, full), ROW_GROUP_ROWS)
                waiting, rows = table.slice(full).to_batches(), rows - full
        if rows:
            writer.write_table(pa.Table.from_batches(waiting, ARROW_SCHEMA), ROW_GROUP_ROWS)
        recorded = {KINDS_HELD: ",".join(sorted(kinds))} | ({EPOCH: history.epoch} if history.epoch else {})
        writer.add_key_value_metadata(recorded | ({HOLES: "yes"} if written < stop - start else {}))
    return path


def _name_of(start: int, stop: int) -> str:
    return f"offset-{start:020}-{stop:020}.parquet"


def keep_as_delta(directory: Place | str) -> None:
    """Make exported events a Delta table, partitioned by `day`: name in its log those files that it does not name yet.

    For `export`: after each file. A commit holds the offset that follows its file, so one that landed before a crash is
    not repeated, and one that did not is made up for. It is made only if the table ends where its file begins. If two
    exports have files that overlap, because one slept while the other took over, the one that comes later writes the
    rest of its own as another file. Raises OptionInvalid for another table, DeltaRefused, SourceUnreachable.
    """
    from veilmq.pipeline.sinks.delta import Written, add_files

    directory = place(directory)
    if isinstance(directory, Path):
        directory = directory.resolve()  # as `add_files` needs it
    kept = _own_kept(directory)
    if not any(directory.glob(_FILES)):
        return
    history = ParquetHistory(str(directory))
    for start, following, path in history.files():
        while kept is None or kept < following:
            first = start if kept is None else max(start, kept)
            is_whole = path.name == _name_of(first, following)
            named = path if is_whole else _rest(history, directory, first, following)
            if named is None:
                break
            rows, stats = stats_of(named)
            day = {"day": named.parent.name.removeprefix("day=")}
            size = named.stat().st_size if isinstance(named, Path) else named.size_bytes()
            file = Written(
                f"{named.parent.name}/{named.name}", size, rows, HISTORY, partition=day, stats=_bounds(rows, stats)
            )
            after = -1 if kept is None else kept
            is_new = add_files(str(directory), _HISTORY_SCHEMA, [file], HISTORY, following, after=after)
            known, kept = kept, following if is_new else offset_kept(directory)
            assert kept != known, "another export has named a file since, or this one did"


def _rest(history: ParquetHistory, directory: Place, start: int, stop: int) -> Place | None:
    """A file of these events alone, though another one has them, too; None if none are visible."""
    history.bounds()  # its epoch, which the file records
    return _write(history, directory, start, start, stop)


def _own_kept(directory: Place) -> int | None:
    """As `offset_kept`. Raises OptionInvalid if the table there is not a history's. One without rows may be what an
    export left that died before its first commit."""
    table = _table(directory)
    kept: int | None = None if table is None else table.transaction_version(HISTORY)
    names = [] if table is None else [field.name for field in table.schema().fields]
    if table is not None and kept is None and (table.file_uris() or names != _HISTORY_SCHEMA.names):
        raise OptionInvalid(f"{directory} is a Delta table, and not of a history.", "Name another directory.")
    return kept


def offset_kept(directory: Place) -> int | None:
    """The offset that follows the events of a history's Delta table; None: there is none. Raises SourceUnreachable."""
    table = _table(directory)
    return None if table is None else table.transaction_version(HISTORY)


def _table(directory: Place) -> Any:
    """The Delta table there, or None. Raises SourceUnreachable."""
    from deltalake.exceptions import DeltaError

    try:
        return table_at(str(directory))
    except (DeltaError, OSError) as error:
        wrong = f"The table {directory} cannot be read: {reason_of(error)}."
        raise SourceUnreachable(wrong, "Run it again.") from error


def stats_of(path: Place) -> tuple[int, dict[str, Any]]:
    """How many events a file holds, and what a reader of the table skips it by: of each column the lowest and the
    highest value, where the file has them, and how often it is null. Raises HistoryGap."""
    metadata = footer_of(path)
    found: dict[str, Any] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    groups = [metadata.row_group(each) for each in range(metadata.num_row_groups)]
    for at, name in enumerate(metadata.schema.names):
        statistics = [(group.num_rows, group.column(at).statistics) for group in groups]
        if any(each is None or not each.has_null_count for _, each in statistics):
            continue
        found["nullCount"][name] = sum(each.null_count for _, each in statistics)
        valued = [each for rows, each in statistics if each.null_count < rows]
        if valued and all(each.has_min_max for each in valued):
            found["minValues"][name] = min(each.min for each in valued)
            found["maxValues"][name] = max(each.max for each in valued)
    return metadata.num_rows, found


def _bounds(rows: int, stats: dict[str, Any]) -> dict[str, Any]:
    """What the log gets: the bounds of every column. deltalake takes a column without bounds for one that is always
    null, and would skip the file for any filter on it. A file does not have those of long texts: these are the
    widest."""
    for name in _TEXTS:
        if stats["nullCount"].get(name) != rows:
            stats["minValues"].setdefault(name, "")
            stats["maxValues"].setdefault(name, _LAST_TEXT)
    return stats
