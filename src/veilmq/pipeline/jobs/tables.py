"""Tables that jobs leave behind: directories of Parquet, or Delta tables through deltalake.

Strategy: a result is written whole, beside its place, and then takes it, so that a reader meets the old table or the
new one. Tables that grow are kept by day: `compact` makes one file of a day's many, `retain` drops days. Delta does the
same by its own means. The Delta writer is Rust in this process: Spark needs no jar.
"""

import shutil
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.errors import OptionInvalid

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = ("parquet", "delta")
_DAY: Final = "day="
VACUUM_HOURS_DEFAULT: Final = 168
"""How long a Delta table keeps files that no version of today names: readers may still be at them."""


def check_format(kind: str) -> None:
    """Raises OptionInvalid."""
    if kind not in FORMATS:
        raise OptionInvalid(f"format={kind!r} is none of {' and '.join(FORMATS)}.", "")


def write(frame: "DataFrame", place: Path, kind: str = "parquet") -> None:
    """Replace the table at `place` with these rows. Raises OptionInvalid."""
    check_format(kind)
    beside = place.with_name(f".{place.name}.new")
    frame.write.mode("overwrite").parquet(beside.as_uri() if beside.is_absolute() else str(beside))
    if kind == "delta":
        import pyarrow.dataset
        from deltalake import write_deltalake

        rows = pyarrow.dataset.dataset(beside, format="parquet", exclude_invalid_files=True)
        write_deltalake(str(place), rows.scanner().to_reader(), mode="overwrite", schema_mode="overwrite")
        shutil.rmtree(beside)
        return
    _take_place(beside, place)


def _take_place(beside: Path, place: Path) -> None:
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    beside.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def read(spark: "SparkSession", place: Path) -> "DataFrame":
    """A table that `write`, a drain or anybody else left, of either format. Raises OptionInvalid."""
    if (place / "_delta_log").is_dir():
        from deltalake import DeltaTable

        files = DeltaTable(str(place)).file_uris()
        if not files:
            raise OptionInvalid(f"{place} is an empty table.", "")
        return spark.read.parquet(*files)
    if not any(place.glob("**/*.parquet")):
        raise OptionInvalid(f"{place} holds no table.", "Name a directory of Parquet files or a Delta table.")
    return spark.read.parquet(str(place))


def append_day(rows: Any, place: Path, day: date, name: str) -> None:
    """Add a pyarrow Table to a day of a growing Parquet table, as a file of that name."""
    import pyarrow.parquet as pq

    directory = place / f"{_DAY}{day.isoformat()}"
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f".{name}.part"
    pq.write_table(rows, part, compression="zstd")
    part.rename(directory / f"{name}.parquet")


def compact(place: Path, *, files_max: int = 1) -> int:
    """Make one file of each day that has more than `files_max`; returns how many files went. Of Delta, all of it.

    Rows are kept as they are. A day is replaced at once: its new file first gets a name that readers pass over.
    """
    if (place / "_delta_log").is_dir():
        from deltalake import DeltaTable

        return int(DeltaTable(str(place)).optimize.compact()["numFilesRemoved"])
    import pyarrow.parquet as pq

    gone = 0
    for directory in sorted(place.glob(f"{_DAY}*")):
        files = sorted(directory.glob("[!.]*.parquet"))
        if len(files) <= files_max:
            continue
        beside = directory.with_name(f".{directory.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        # The last file's name tells how far the day goes.
        pq.write_table(pq.read_table(files, partitioning=None), beside / files[-1].name, compression="zstd")
        _take_place(beside, directory)
        gone += len(files) - 1
    return gone


def retain(place: Path, oldest: date, *, vacuum_hours: int = VACUUM_HOURS_DEFAULT) -> int:
    """Drop days before `oldest`; returns how many. Of Delta, also files that no version names any longer."""
    if (place / "_delta_log").is_dir():
        from deltalake import DeltaTable

        table = DeltaTable(str(place))
        gone = 0
        if "day" in [field.name for field in table.schema().fields]:
            gone = int(table.delete(f"day < '{oldest.isoformat()}'")["num_deleted_rows"])
        table.vacuum(vacuum_hours, dry_run=False, enforce_retention_duration=False)
        return gone
    days = [each for each in place.glob(f"{_DAY}*") if each.name.removeprefix(_DAY) < oldest.isoformat()]
    for each in days:
        shutil.rmtree(each)
    return len(days)
