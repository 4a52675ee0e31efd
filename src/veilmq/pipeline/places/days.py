"""Parquet files by day, `day=2026-01-31/NAME.parquet`: a day's files are merged into one.

Strategy: a reader sees a day's files before or after. A local day is replaced at once: its new file first is in a
directory that readers ignore. In an object store the merged file is there before its parts go; the offsets in their
names (`offset-FROM-UNTIL`) say that it has theirs, and `covering` leaves them out. So does it with what a process wrote
that slept while another one took over, which may be in another day.
"""

import re
import shutil
from collections.abc import Container, Iterable
from datetime import date
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from veilmq.pipeline.events.reading import KINDS_HELD
from veilmq.pipeline.places import Place, listed, source, whole
from veilmq.store.files import take_place

DAY: Final = "day="
_OFFSETS: Final = re.compile(r"offset-(\d{20})-(\d{20})\.parquet\Z")
_KINDS: Final = KINDS_HELD.encode()
_ROW_GROUP_ROWS: Final = 131_072
"""As in `veilmq events export`."""


def append_day(rows: Any, place: Place, day: date, name: str) -> None:
    """Add a pyarrow Table to one day of a growing Parquet table, as a file with that name."""
    with whole(place / f"{DAY}{day.isoformat()}" / f"{name}.parquet") as part:
        pq.write_table(rows, part, compression="zstd")


def counted(table: Place) -> list[Place]:
    """The files of all days that count."""
    return covering(file for day in listed(table, f"{DAY}*") for file in listed(day, "[!.]*.parquet"))


def compact_day(directory: Place, files_max: int, counting: Container[Place]) -> int:
    """Merge the day's files if there are more; returns how many were removed. counting: those that count."""
    there = listed(directory, "[!.]*.parquet")
    files = [each for each in there if each in counting]
    if len(files) <= files_max:
        return 0
    if not isinstance(directory, Path):
        merged = directory / _joined(files[0].name, files[-1].name)
        with whole(merged) as part:
            _join(files, part)
        for each in there:  # not what somebody who took over has added since
            if each != merged:
                each.unlink(missing_ok=True)
        return len(files) - 1
    beside = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    _join(files, beside / _joined(files[0].name, files[-1].name))
    take_place(beside, directory)
    return len(files) - 1


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


def _joined(first: str, last: str) -> str:
    """The name of the merged file. Events and the loop's cells have their offsets in it: `offset-FROM-UNTIL`."""
    start, stop = _OFFSETS.match(first), _OFFSETS.match(last)
    return f"offset-{start[1]}-{stop[2]}.parquet" if start and stop else last


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
        told = {
            name: value for file in files for name, value in (pq.read_metadata(source(file)).metadata or {}).items()
        }
        told.pop(b"ARROW:schema", None)
        kinds = [(pq.read_metadata(source(file)).metadata or {}).get(_KINDS, b"") for file in files]
        if any(kinds):
            told[_KINDS] = b",".join(sorted(set(b",".join(kinds).split(b",")) - {b""}))
        writer.add_key_value_metadata(told)
