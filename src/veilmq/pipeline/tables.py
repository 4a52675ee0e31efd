"""The tables that jobs write: directories of Parquet, or Delta tables through deltalake.

Strategy: a result is written completely beside its place and then renamed, so that a reader sees the old table or the
new one. Tables that grow are stored by day: `compact` merges a day's files into one, `retain` drops days. Delta does
the same with its own operations. The Delta writer is Rust in this process: Spark needs no jar. In an object store,
where nothing can be renamed, a result is a Delta table.

Days need not ascend with offsets: an expiry carries the instant at which it was due, which may be days ago. So files
are merged only if no other day's file lies between them, and a history loses only files at its start whose events are
all old.

By day, `day=2026-01-31/NAME.parquet`, a reader sees a day's files before or after their merge. A local day is replaced
at once: its new file first is in a directory that readers ignore. In an object store the merged file is there before
its parts go; the offsets in their names (`offset-FROM-UNTIL`) say that it has theirs, and `covering` leaves them out.
So does it with what a process wrote that slept while another one took over, which may be in another day.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date, timedelta
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.events.export import HISTORY, changing, offset_kept, stats_of
from veilmq.pipeline.events.reading import KINDS_HELD, footer_of
from veilmq.pipeline.places import ObjectPath, Place, delta, is_url, listed, remove, source, whole
from veilmq.pipeline.places import place as placed
from veilmq.store.files import replace_directory, restore, sync_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = ("parquet", "delta")
_ARCHIVED: Final = "messages"
"""The table within the result of `archive`."""
_LOCK: Final = ".lock"
"""The lock file of `alone`."""
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]")
_BEYOND: Final = frozenset({"deletionVectors", "columnMapping"})
"""Features of the Delta protocol with which a table's Parquet files alone are not its rows."""
_JUDGED: Final = ("day", "to", "sent")
"""Columns that give the age of a row in a Delta table."""
VACUUM_HOURS_DEFAULT: Final = 168
"""How long a Delta table keeps files that the current version no longer names: readers may still use them."""
RETENTION_DAYS_MAX: Final = 36_500
VACUUM_HOURS_MAX: Final = 24 * RETENTION_DAYS_MAX
DAY: Final = "day="
_OFFSETS: Final = re.compile(r"offset-(\d{20})-(\d{20})\.parquet\Z")
_KINDS: Final = KINDS_HELD.encode()
_ROW_GROUP_ROWS: Final = 131_072
"""As in `veilmq events export`."""


def check_format(kind: str, place: Place | str | None) -> None:
    """Raises OptionInvalid, also if tables of that format cannot be below `place`."""
    if kind not in FORMATS:
        raise OptionInvalid(f"format={kind!r} is none of {' and '.join(FORMATS)}.", "")
    if kind == "delta" and place is not None:
        delta.check_named(str(placed(place)))


def oldest_kept(today: date, retention_days: int) -> date:
    """The day before which `retain` drops data. Raises OptionInvalid."""
    if not 0 <= retention_days <= RETENTION_DAYS_MAX:
        raise OptionInvalid(f"retention_days={retention_days} cannot be.", f"It is 0 to {RETENTION_DAYS_MAX}.")
    return today - timedelta(days=retention_days)


def checkpoint_of(place: Path) -> Path:
    """Where the stream that writes the table at `place` keeps its progress."""
    return place.with_name(f"{place.name}-checkpoint")


def check_replaced(place: Place, kind: str) -> None:
    """Raises OptionInvalid unless the table there may be replaced; a stream's may not."""
    if isinstance(place, ObjectPath):
        if kind != "delta":
            raise OptionInvalid(f"{place}: no table of {kind} can be replaced there.", "Use --format delta.")
    elif checkpoint_of(place).is_dir() or (place / "_spark_metadata").is_dir():
        raise OptionInvalid(f"{place} is a stream's table, which this would replace.", "Name another place.")


def write(frame: "DataFrame", place: Place | str, kind: str = "parquet") -> None:
    """Replace the table at `place` with these rows. Raises OptionInvalid, also for a stream's table."""
    check_format(kind, place)
    place = placed(place)
    check_replaced(place, kind)
    if isinstance(place, ObjectPath):
        delta.replace(frame, str(place), VACUUM_HOURS_DEFAULT)
        return
    beside = place.with_name(f".{place.name}.new")
    # Not a file URI from Python: Spark takes its %20 as part of the name.
    frame.write.mode("overwrite").parquet(f"file:{beside}" if beside.is_absolute() else str(beside))
    if kind == "delta":
        import pyarrow.dataset
        from deltalake import write_deltalake

        rows = pyarrow.dataset.dataset(beside, format="parquet", exclude_invalid_files=True)
        write_deltalake(str(place), rows.scanner().to_reader(), mode="overwrite", schema_mode="overwrite")
        shutil.rmtree(beside)
        vacuum(place)  # each replacement leaves the files of the previous version
        return
    replace_directory(beside, place)


def read(spark: "SparkSession", place: Place | str) -> "DataFrame":
    """A table of either format, from `write`, a drain or any other writer; Delta without extras. Raises
    OptionInvalid."""
    if is_url(place):
        return delta.read(spark, str(place), _check_plain)
    place = Path(str(place))
    if (place / "_delta_log").is_dir():
        import pyarrow as pa
        from deltalake import DeltaTable
        from pyspark.sql.types import StructType

        table = DeltaTable(str(place))
        # The log has paths encoded, below the table or absolute (Delta protocol, "Add File"); file_uris() mixes both.
        paths = [unquote(each) for each in pa.table(table.get_add_actions()).column("path").to_pylist()]
        files = [each if "://" in each else str(place / each) for each in paths]
        _check_plain(table, place)
        if not files:
            raise OptionInvalid(f"{place} is an empty table.", "")
        names = table.metadata().partition_columns
        if any(f"/{name}=" not in f"/{path}" for name in names for path in paths):
            return delta.read(spark, str(place.resolve()), _check_plain)
        # By itself Spark takes the columns of any one file, and other files may have more; values of a partition's
        # columns come from the directories below the base path, if those have them.
        schema = StructType.fromJson(json.loads(table.schema().to_json()))
        return spark.read.schema(schema).option("basePath", str(place)).parquet(*map(literal, files))
    # Spark reads files there, and below the directories of partitions.
    if not any(place.glob("*.parquet")) and not any(place.glob("*=*/**/*.parquet")):
        mend = "Name a directory of Parquet files or a Delta table."
        if (place / _ARCHIVED).is_dir():
            mend = f"Of an archive that is {place / _ARCHIVED}."
        raise OptionInvalid(f"{place} holds no table.", mend)
    return spark.read.parquet(literal(str(place)))


def _check_plain(table: Any, place: Path | str) -> None:
    """Raises OptionInvalid unless the table's files hold exactly its rows."""
    mend = "Read it with Spark's own Delta, and write a plain table."
    beyond = _BEYOND.intersection(table.protocol().reader_features or ())
    if beyond or table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        raise OptionInvalid(f"{place} has {', '.join(sorted(beyond)) or 'columnMapping'}.", mend)


def literal(path: str) -> str:
    """Escape a path for Spark, which would read some characters as patterns."""
    return _PATTERN.sub(r"\\\g<0>", path)


def load(place: Place | str) -> Any:
    """A table from `write`, or a file, as a pyarrow Table and without Spark: for small ones."""
    place = placed(place)
    if (place / "_delta_log").is_dir():
        return delta.load(str(place))
    import pyarrow.parquet as pq

    if isinstance(place, ObjectPath):
        return pq.read_table(source(place))
    return pq.read_table(sorted(place.glob("[!._]*.parquet")), partitioning=None)


def compact(place: Place | str, *, files_max: int = 1) -> int:
    """Merge the files of each day that has more than `files_max` (Delta: all; a history: none); returns how many went.

    Rows stay unchanged. A day is replaced at once: its new files first get a name that readers ignore. A day that has
    another one's offsets between its own keeps several files. Jobs that read exported events are waited for. Raises
    OptionInvalid for a table that does not grow, ExportTaken, HistoryGap for a damaged file.
    """
    place = placed(place)
    if (place / "_delta_log").is_dir():
        from deltalake import DeltaTable

        if offset_kept(place) is not None:
            return 0  # our readers know the offsets by the names of its files
        table = DeltaTable(str(place), storage_options=delta.storage_of(str(place)))
        return _joined_delta(table)
    _check_days(place)
    if not place.is_dir():
        return 0
    with changing(place):
        if isinstance(place, Path):
            restore(place)
        there = {day: listed(day, "[!.]*.parquet") for day in listed(place, f"{DAY}*")}
        runs = _runs(covering(chain.from_iterable(there.values())), files_max)
        return sum(compact_day(day, there[day], runs[day]) for day in runs)


def _joined_delta(table: Any) -> int:
    """Merge the files of each partition; returns how many went."""

    def joined(*filters: Any) -> int:
        return int(table.optimize.compact(partition_filters=list(filters) or None)["numFilesRemoved"])

    long = delta.long_values(table)
    gone = joined(*((name, "not in", values) for name, values in long))
    for name, values in long:
        gone += joined((name, "=", ""))  # null, which is neither in a list nor not in it
        gone += sum(delta.rewrite(table, name, value) for value in values)
    return gone


def _drop(table: Any, column: str, oldest: date) -> int:
    """Remove the rows whose value in that column is older; returns how many there were."""
    instant = oldest.isoformat() + ("" if column == "day" else "T00:00:00Z")
    gone, at = 0, pc.field(column)
    predicate = f"\"{column}\" < '{instant}'"
    for name, values in delta.long_values(table):
        texts = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        predicate += f' AND ("{name}" IS NULL OR "{name}" NOT IN ({texts}))'
        for value in values:
            table.update_incremental()
            rows = table.to_pyarrow_dataset()
            limit = pa.scalar(instant).cast(rows.schema.field(column).type)
            old = rows.count_rows(filter=(pc.field(name) == value) & (at < limit))
            if old:
                delta.rewrite(table, name, value, (at >= limit) | at.is_null())
            gone += old
    table.update_incremental()
    return gone + int(table.delete(predicate)["num_deleted_rows"])


def check_grows(place: Place | str) -> None:
    """Raises OptionInvalid unless `compact` and `retain` can work there."""
    place = placed(place)
    grows = ("_delta_log", f"{DAY}*", f".{DAY}*.old", "*.parquet", "_spark_metadata")
    # An export or a loop without data yet, or any more, still has its lock.
    if (place / _LOCK).exists() or any(any(place.glob(each)) for each in grows):
        return
    mend = "Name exported events, a Delta table or a loop's directory."
    if (place / _ARCHIVED).is_dir():
        mend = f"Of an archive that is {place / _ARCHIVED}."
    raise OptionInvalid(f"{place} holds no table.", mend)


def _check_days(place: Place) -> None:
    if (place / "_spark_metadata").is_dir():
        mend = "Let streams write Delta (--format delta) to keep their tables small."
        raise OptionInvalid(f"{place} is a stream's Parquet table: its log says which files count.", mend)
    if place.exists() and not any(place.glob(f"{DAY}*")) and any(place.glob("*.parquet")):
        raise OptionInvalid(f"{place} is no table that grows by days.", "Jobs replace theirs whole: run the job again.")


def retain(place: Place | str, oldest: date) -> int:
    """Drop data of days before `oldest`: returns how many days, for Delta how many rows.

    The age of a row of Delta is `day`, the end of its window (`to`, of `health`) or its send (`sent`, of an archive).
    A history loses its first files, up to one with an event of `oldest` or later; a day of which files are left does
    not count. Jobs that read exported events are waited for. Raises OptionInvalid for a table that does not grow,
    ExportTaken, HistoryGap for a damaged file.
    """
    place = placed(place)
    if (place / "_delta_log").is_dir():
        with _delta_alone(place) as table:
            if table.transaction_version(HISTORY) is not None:
                return _drop_first(table, oldest)
            names = [field.name for field in table.schema().fields]
            judged = [name for name in _JUDGED if name in names]
            return _drop(table, judged[0], oldest) if judged else 0
    _check_days(place)
    if not place.is_dir():
        return 0
    with changing(place):
        if isinstance(place, Path):
            restore(place)
        days = [each for each in listed(place, f"{DAY}*") if each.name.removeprefix(DAY) < oldest.isoformat()]
        first = next((file for day in days for file in listed(day, "offset-*.parquet")), None)
        if first is not None and _is_event_file(first):
            for each in _aged(place, oldest):
                each.unlink()
            days = [each for each in days if not any(each.glob("*.parquet"))]
        for each in days:
            remove(each)
    return len(days)


def _aged(history: Place, oldest: date) -> Iterator[Place]:
    """The files at the start of a history whose events are all of days before `oldest`."""
    midnight = _midnight(oldest)

    def is_old(file: Place) -> bool:
        if file.parent.name >= f"{DAY}{oldest.isoformat()}":
            return False
        _, stats = stats_of(file)
        return bool(stats["maxValues"].get("at", midnight) < midnight)

    return takewhile(is_old, sorted(history.glob(f"{DAY}*/offset-*.parquet"), key=_offsets))


def _drop_first(table: Any, oldest: date) -> int:
    """Remove the files at the start of a history's Delta table whose events are all of days before `oldest`; returns
    how many events there were."""
    files = pa.table(table.get_add_actions(flatten=True))
    if not files.num_rows:
        return 0
    ends = files.sort_by("max.offset").select(["max.offset", "max.at"]).to_pylist()
    midnight = _midnight(oldest)
    old = list(takewhile(lambda end: end["max.at"] is not None and end["max.at"] < midnight, ends))
    return int(table.delete(f'"offset" <= {old[-1]["max.offset"]}')["num_deleted_rows"]) if old else 0


def _midnight(day: date) -> int:
    """Its beginning as an `Instant`."""
    return (day - date(1970, 1, 1)) // timedelta(microseconds=1)


def _is_event_file(file: Place) -> bool:
    """Whether it holds exported events. Raises HistoryGap."""
    return "offset" in footer_of(file).schema.names


def vacuum(place: Place | str, hours: int = VACUUM_HOURS_DEFAULT) -> None:
    """Delta: remove the files that no version of the last `hours` names. Other tables have no such files.

    Jobs that read exported events are waited for. Raises OptionInvalid, ExportTaken.
    """
    if not 0 <= hours <= VACUUM_HOURS_MAX:
        raise OptionInvalid(f"vacuum_hours={hours} cannot be.", f"It is 0 to {VACUUM_HOURS_MAX}.")
    place = placed(place)
    if not (place / "_delta_log").is_dir():
        return
    with _delta_alone(place) as table:
        if isinstance(place, Path):
            sync_tree(place)  # what replaces those files is durable before they go
        table.vacuum(hours, dry_run=False, enforce_retention_duration=False)


@contextmanager
def _delta_alone(place: Place) -> Iterator[Any]:
    """The Delta table there; one of a history while no job reads it. Raises ExportTaken."""
    from deltalake import DeltaTable

    with nullcontext() if offset_kept(place) is None else changing(place):
        yield DeltaTable(str(place), storage_options=delta.storage_of(str(place)))


def append_day(rows: Any, place: Place, day: date, name: str) -> None:
    """Add a pyarrow Table to one day of a growing Parquet table, as a file with that name."""
    with whole(place / f"{DAY}{day.isoformat()}" / f"{name}.parquet") as part:
        pq.write_table(rows, part, compression="zstd")


def counted(table: Place) -> list[Place]:
    """The files of all days that count."""
    return covering(file for day in listed(table, f"{DAY}*") for file in listed(day, "[!.]*.parquet"))


def _runs(files: list[Place], files_max: int) -> dict[Place, list[list[Place]]]:
    """Of each day with more than `files_max` files: what becomes one file each. Raises HistoryGap.

    Files between whose offsets lie another day's stay apart, and in a history those that do not continue each other.
    """
    numbers = Counter(file.parent for file in files)
    runs: dict[Place, list[list[Place]]] = {day: [] for day, number in numbers.items() if number > files_max}
    is_history = bool(runs) and _is_event_file(max(files, key=_offsets))
    before: Place | None = None
    for file in sorted(files, key=_offsets):
        if file.parent in runs:
            continues = before is not None and before.parent == file.parent
            if before is not None and is_history:
                continues = continues and _offsets(before)[1] == _offsets(file)[0]
            if not continues:
                runs[file.parent].append([])
            runs[file.parent][-1].append(file)
        before = file
    return {day: parts for day, parts in runs.items() if numbers[day] - len(parts) >= files_max}


def compact_day(directory: Place, there: list[Place], runs: list[list[Place]]) -> int:
    """Merge each run of the day's files into one; returns how many were removed. there: all files of the day, also
    those that do not count."""
    removed = sum(len(files) - 1 for files in runs)
    if not removed:
        return 0
    if not isinstance(directory, Path):
        kept = {directory / _joined(files): files for files in runs}
        for merged, files in kept.items():
            if len(files) > 1:
                with whole(merged) as part:
                    _join(files, part)
        for each in there:  # not what somebody who took over has added since
            if each not in kept:
                each.unlink(missing_ok=True)
        return removed
    beside = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for files in runs:
        if len(files) > 1:
            _join(files, beside / _joined(files))
        else:
            shutil.copy(str(files[0]), beside)
    replace_directory(beside, directory)
    return removed


def covering(files: Iterable[Place]) -> list[Place]:
    """The files of an object store without those whose offsets another has: a process died before it removed them, or
    slept and wrote what another one had written. A local directory has none."""
    files = list(files)
    if any(isinstance(each, Path) for each in files):
        return files
    named = [(_OFFSETS.match(each.name), each) for each in files]
    if not all(found for found, _ in named):
        return [each for _, each in named]
    kept: list[Place] = []
    reached = -1
    for found, each in sorted(named, key=lambda each: (int(each[0][1]), -int(each[0][2])) if each[0] else (0, 0)):
        if found and int(found[2]) > reached:
            kept.append(each)
            reached = int(found[2])
    return kept


def _offsets(file: Place) -> tuple[int, int]:
    """The range in a file's name; files without one come first."""
    found = _OFFSETS.match(file.name)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def _joined(files: list[Place]) -> str:
    """The name of the merged file. Events and the loop's cells have their offsets in it: `offset-FROM-UNTIL`."""
    start, stop = _OFFSETS.match(files[0].name), _OFFSETS.match(files[-1].name)
    return f"offset-{start[1]}-{stop[2]}.parquet" if start and stop else files[-1].name


def _join(files: list[Place], into: Any) -> None:
    """Merge several files into one, holding at most one row group at a time."""
    schema = pq.read_schema(source(files[0]))
    with pq.ParquetWriter(into, schema, compression="zstd") as writer:
        waiting: list[Any] = []
        for file in files:
            for batch in pq.ParquetFile(source(file)).iter_batches(_ROW_GROUP_ROWS):
                waiting.append(batch)
                if sum(each.num_rows for each in waiting) >= _ROW_GROUP_ROWS:
                    whole = pa.Table.from_batches(waiting, schema)
                    full = whole.num_rows - whole.num_rows % _ROW_GROUP_ROWS
                    writer.write_table(whole.slice(0, full), _ROW_GROUP_ROWS)
                    waiting = whole.slice(full).to_batches()
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, schema), _ROW_GROUP_ROWS)
        # Metadata of exported files, such as their epoch, holds for the merged file; the schema is there already.
        metadata = {
            name: value for file in files for name, value in (pq.read_metadata(source(file)).metadata or {}).items()
        }
        metadata.pop(b"ARROW:schema", None)
        kinds = [(pq.read_metadata(source(file)).metadata or {}).get(_KINDS, b"") for file in files]
        if any(kinds):
            metadata[_KINDS] = b",".join(sorted(set(b",".join(kinds).split(b",")) - {b""}))
        writer.add_key_value_metadata(metadata)
