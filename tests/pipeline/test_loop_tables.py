"""Tables that grow: one file of many, old days dropped, and nothing lost where a process dies amid that."""

import json
import re
import shutil
import struct
from base64 import b85encode
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from tests.pipeline.stores import commit_parted
from tests.support.histories import MadeUp, Workload, history, lognormal, write

from veilmq.pipeline import tables
from veilmq.pipeline.drain import clear_checkpoint, read_bad_records
from veilmq.pipeline.errors import HistoryGap, OptionInvalid
from veilmq.pipeline.events.export import changing, export, keep_as_delta, offset_kept, unchanged
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.events.source import Wanted
from veilmq.pipeline.loop import Loop, between_runs
from veilmq.pipeline.options import read_delta_options, read_options
from veilmq.pipeline.places.delta import table_at, write_parted
from veilmq.pipeline.sinks.checking import check
from veilmq.pipeline.sinks.delta import Written, add_files, check_place
from veilmq.pipeline.sinks.ownership import check_table

DAY = 86_400.0


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 1_500)], seed=6, span=3 * DAY)


@pytest.fixture
def exported(events: pa.Table, tmp_path: Path) -> Path:
    return write(events, tmp_path / "events", file_rows=700)


def read(place: Path) -> pa.Table:
    found = ParquetHistory(str(place))
    return pa.Table.from_batches(found.read(*found.bounds()))


@pytest.mark.parametrize("form", [Path, str, Path.as_uri])
def test_a_place_is_a_path_a_text_or_a_uri(
    events: pa.Table, tmp_path: Path, form: Callable[[Path], Path | str]
) -> None:
    """For every function of the pipeline that takes one and works without Spark."""

    def at(name: str) -> Path | str:
        return form(tmp_path / name)

    _, end = export(MadeUp(events), at("events"))
    assert ParquetHistory(at("events")).bounds() == Wanted({"path": at("events")}).history.bounds() == (0, end)
    keep_as_delta(at("events"))
    assert offset_kept(at("events")) == end
    for lock in (unchanged, changing):
        with lock(at("events")):
            pass
    tables.check_grows(at("events"))
    assert (tables.compact(at("events")), tables.retain(at("events"), date(2000, 1, 1))) == (0, 0)
    assert not check(at("events"), now=0).missing
    assert tables.load(at("events")).num_rows == events.num_rows

    rows, path = pa.table({"type": ["a"], "n": [1]}), str(at("table"))
    parts = write_parted(iter(rows.to_batches()), path, rows.schema, ["type"], 0)
    files = [Written(*part, "q", partition=values) for part, values in parts]
    check_place(at("table"), rows.schema, ["type"])
    assert add_files(at("table"), rows.schema, files, "q", 0)
    assert table_at(at("table")).transaction_version("q") == 0
    assert read_delta_options({"path": at("table")}).path == path
    check_table("delta", path, at("checkpoint"))
    clear_checkpoint(at("checkpoint"), tmp_path / "manifests")
    assert read_options({"url": "veil://h:1/q", "directory": at("manifests")}).directory == str(tmp_path / "manifests")
    assert read_bad_records(at("manifests")) == []

    loop = Loop(at("loop"))
    assert loop.timeouts == tmp_path / "loop" / "timeouts"
    loop.directory.mkdir()
    with between_runs(at("loop")):
        pass


def test_a_long_partition_value_stops_no_tidy(tmp_path: Path) -> None:
    """deltalake's own writers make the value a directory's name, and fail."""
    place = tmp_path / "t"
    types = ["ж" * 256, "~ " * 66, "a", None]
    times = [datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC), None]
    rows = pa.table({"type": types * 3, "sent": [each for each in times for _ in types], "n": range(12)})
    for batch, at in enumerate((0, 4, 8)):
        commit_parted(str(place), rows.slice(at, 4), batch, ["type"])
    assert pa.table(DeltaTable(place).get_add_actions()).num_rows == 12
    tables.compact(place)
    there = pa.table(DeltaTable(place).get_add_actions(flatten=True)).column("partition.type").to_pylist()
    assert sorted(map(str, there)) == sorted(map(str, types)), "a file of each"
    table = DeltaTable(place).to_pyarrow_table().sort_by("n")
    assert table.select(rows.schema.names).equals(rows)
    assert tables.retain(place, date(2026, 2, 1)) == 4
    assert tables.retain(place, date(2026, 2, 1)) == 0
    table = DeltaTable(place).to_pyarrow_table().sort_by("n")
    assert table.select(rows.schema.names).equals(rows.slice(4))
    assert not check(place, now=0).missing


def days(place: Path) -> list[str]:
    return sorted(each.name for each in place.iterdir())


def test_exported_events_are_joined_and_stay_what_they_are(events: pa.Table, exported: Path) -> None:
    """Who reads meanwhile goes on with the files that are there."""
    before = len(list(exported.glob("*/*.parquet")))
    reading = ParquetHistory(str(exported)).read(0, events.num_rows)
    begun = [next(reading)]
    assert tables.compact(exported) == before - 3
    assert pa.Table.from_batches([*begun, *reading]).equals(events)
    assert len(list(exported.glob("*/*.parquet"))) == 3
    assert read(exported).equals(events)
    assert tables.compact(exported) == 0


def test_old_days_of_exported_events_go(events: pa.Table, exported: Path) -> None:
    reading = ParquetHistory(str(exported)).read(0, events.num_rows)
    next(reading)
    assert tables.retain(exported, date(2026, 1, 3)) == 1
    with pytest.raises(HistoryGap, match=r"begins at offset \d+, and \d+ is next. Begin later with from=first"):
        list(reading)
    assert days(exported) == [".lock", "day=2026-01-02", "day=2026-01-03"]
    first = ParquetHistory(str(exported)).bounds().first
    assert read(exported).equals(events.slice(first))
    kept = first_of(events, date(2026, 1, 3))
    assert 0 < kept - 700 < first <= kept, "of the day before only the file that reaches midnight"


def first_of(events: pa.Table, day: date) -> int:
    """The offset of its first event."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1e6
    return next(offset for offset, at in enumerate(events["at"].to_pylist()) if at >= midnight)


def test_expiries_of_a_day_before_leave_no_gap(events: pa.Table, tmp_path: Path) -> None:
    """As when a queue's retention is shortened: they carry the instants at which they were due."""
    second = first_of(events, date(2026, 1, 2))
    late = range(second + 200, second + 400)
    times = [at - round(DAY * 1e6) if offset in late else at for offset, at in enumerate(events["at"].to_pylist())]
    events = events.set_column(events.schema.get_field_index("at"), "at", pa.array(times))
    for until in (100, second, late.start, late.stop, late.stop + 100, events.num_rows):
        export(MadeUp(events), tmp_path, until=until)
    assert tables.compact(tmp_path) == 2, "the first two and the last two"
    assert read(tmp_path).equals(events)
    assert tables.compact(tmp_path) == 0
    assert tables.retain(tmp_path, date(2026, 1, 2)) == 0
    assert read(tmp_path).equals(events.slice(second)), "the late ones as well, as they are between others"
    assert tables.retain(tmp_path, date(2026, 1, 3)) == 1
    assert read(tmp_path).equals(events.slice(late.stop)), "a file of two days, which began on the old one"
    assert export(MadeUp(events), tmp_path) == (events.num_rows, events.num_rows)


def test_a_day_is_never_lost(events: pa.Table, exported: Path) -> None:
    """As it is when a process dies between taking the old day away and putting the new one there."""
    (exported / "day=2026-01-02").rename(exported / ".day=2026-01-02.old")
    with pytest.raises(HistoryGap, match="Restore the missing files"):
        read(exported)
    tables.compact(exported)
    assert read(exported).equals(events)
    # Or after that, before the old one is removed.
    shutil.copytree(exported / "day=2026-01-02", exported / ".day=2026-01-02.old")
    tables.restore(exported)
    assert days(exported) == [".lock", "day=2026-01-01", "day=2026-01-02", "day=2026-01-03"]
    assert read(exported).equals(events)


@pytest.mark.parametrize(("column", "kept"), [("sent", 2), ("to", 2), ("day", 2), ("other", 3)])
def test_rows_of_delta_are_judged_by_what_tells_their_age(tmp_path: Path, column: str, kept: int) -> None:
    from deltalake import write_deltalake

    place = tmp_path / "table"
    for number in (1, 2, 3):
        at = datetime(2026, 1, number, 12, tzinfo=UTC)
        value: Any = pa.array([at.date().isoformat() if column == "day" else at])
        write_deltalake(str(place), pa.table({column: value, "n": [1]}), mode="append")
    assert tables.retain(place, date(2026, 1, 2)) == 3 - kept
    assert tables.compact(place) == (kept if kept > 1 else 0)
    assert tables.load(place).num_rows == kept


def test_a_table_that_is_replaced_keeps_no_old_versions_for_ever(spark: Any, tmp_path: Path) -> None:
    place = tmp_path / "table"
    tables.write(spark.range(3), place, "delta")
    (old,) = place.glob("*.parquet")
    # Two weeks ago, for the log's reader: the log tells when a file was left, in milliseconds.
    tables.write(spark.range(2), place, "delta")
    assert old.exists(), "a reader may still be at it"
    log = sorted((place / "_delta_log").glob("*.json"))[-1]
    text = log.read_text()
    left = re.search(r'"deletionTimestamp":(\d+)', text)
    assert left is not None
    log.write_text(text.replace(left[1], str(int(left[1]) - 14 * 86_400_000)))
    tables.write(spark.range(1), place, "delta")
    assert not old.exists()
    assert tables.load(place).num_rows == 1


def test_what_does_not_grow_by_days_is_refused(spark: Any, tmp_path: Path) -> None:
    tables.write(spark.range(3), tmp_path / "table")
    with pytest.raises(OptionInvalid, match="Jobs replace theirs whole"):
        tables.compact(tmp_path / "table")
    with pytest.raises(OptionInvalid, match="Jobs replace theirs whole"):
        tables.retain(tmp_path / "table", date(2026, 1, 1))
    stream = tmp_path / "stream"
    (stream / "_spark_metadata").mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), stream / "part.parquet")
    with pytest.raises(OptionInvalid, match=r"its log says which files count. Let streams write Delta"):
        tables.compact(stream)
    assert (stream / "part.parquet").exists()


PLACES = ["my tables", "b\u00fccher", "{a,b}", "st*r?", "5%"]
UNTAKEN = ["100%25", "[1]", "a|b", "a\\b", "a\tb"]
"""Names of directories that deltalake does not take, or takes for others."""


@pytest.mark.parametrize("kind", tables.FORMATS)
def test_places_may_have_any_name(spark: Any, tmp_path: Path, kind: str) -> None:
    """Spark takes some characters for patterns, and a URI's escapes for themselves."""
    for name in UNTAKEN if kind == "delta" else []:
        untaken = str(tmp_path / name / "table")
        with pytest.raises(OptionInvalid, match="cannot be the place of a Delta table"):
            tables.write(spark.range(3), untaken, kind)
        with pytest.raises(OptionInvalid, match="cannot be the place of a Delta table"):
            check_place(untaken, pa.schema([("n", pa.int64())]))
    for name in [*PLACES, *UNTAKEN[:3]] if kind == "parquet" else PLACES:
        place = tmp_path / name / "table"
        place.parent.mkdir()
        tables.write(spark.range(3), place, kind)
        tables.write(spark.range(4), place, kind)
        assert tables.read(spark, place).count() == 4
        assert [each.name for each in place.parent.iterdir()] == ["table"]


def test_a_delta_table_is_read_with_all_its_columns(spark: Any, tmp_path: Path) -> None:
    """Whichever of its files came last: some were written before a column was."""
    place = tmp_path / "table"
    for rows in ({"body": ["a"]}, {"body": ["b"], "type": ["t"]}, {"body": ["c"]}):
        write_deltalake(str(place), pa.table(rows), mode="append", schema_mode="merge")
    found = {row.body: row["type"] for row in tables.read(spark, place).collect()}
    assert found == {"a": None, "b": "t", "c": None}


def test_a_delta_table_in_partitions_is_read_with_their_columns(spark: Any, tmp_path: Path) -> None:
    place = tmp_path / "table"
    rows = {"body": ["a", "b", "c"], "type": ["x y/z=%20", None, "1"], "day": [date(2026, 1, 1)] * 3}
    write_deltalake(str(place), pa.table(rows), partition_by=["type", "day"])
    found = tables.read(spark, place).orderBy("body").collect()
    assert [(row.body, row["type"], row.day) for row in found] == [
        (body, kind, date(2026, 1, 1)) for body, kind in zip(rows["body"], rows["type"], strict=True)
    ]


def test_the_log_of_a_delta_table_says_which_partition_a_file_is_of(spark: Any, tmp_path: Path) -> None:
    """Paths need not tell it, and those of long values do not (`places.delta.write_parted`)."""
    place = tmp_path / "table"
    rows = {"type": ["x", "ж" * 200, "y" * 256, None, "__HIVE_DEFAULT_PARTITION__"], "n": [1, 2, 3, 4, 5]}
    rows |= {"day": [date(2026, 1, 1)] * 5}
    commit_parted(str(place), pa.table(rows), 0, ["type", "day"])
    (log,) = (place / "_delta_log").glob("*1.json")
    (file,) = place.glob("type=x/*/*.parquet")
    file.rename(place / "elsewhere.parquet")
    log.write_text(log.read_text().replace(str(file.relative_to(place)), "elsewhere.parquet"))
    schema = pa.schema([("type", pa.string()), ("day", pa.date32()), ("n", pa.int64()), ("new", pa.string())])
    write_deltalake(str(place), schema.empty_table(), mode="append", schema_mode="merge")
    found = tables.read(spark, place).orderBy("n").collect()
    assert [(row["type"], row.day, row.n, row.new) for row in found] == [
        (kind, date(2026, 1, 1), n, None) for kind, n in zip(rows["type"], rows["n"], strict=True)
    ]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_a_delta_table_with_column_mapping_is_refused(tmp_path: Path, mode: str) -> None:
    """Its files have other names for its columns, and Spark would find none of them."""
    place = tmp_path / "table"
    write_deltalake(str(place), pa.table({"body": ["a"]}), configuration={"delta.columnMapping.mode": mode})
    (file,) = place.glob("*/*.parquet")
    assert pq.read_schema(file).names != ["body"]
    with pytest.raises(OptionInvalid, match="has columnMapping"):
        tables.read(None, place)  # type: ignore[arg-type]


def test_a_delta_table_with_deletion_vectors_is_refused(tmp_path: Path) -> None:
    """Its files still have the rows that it has no longer."""
    place = tmp_path / "table"
    rows = pa.table({"body": ["a", "b", "c"]})
    write_deltalake(str(place), rows, configuration={"delta.enableDeletionVectors": "true"})
    _delete_first_row(place)
    left = pa.table(QueryBuilder().register("rows", DeltaTable(str(place))).execute("select body from rows"))
    assert left["body"].to_pylist() == ["b", "c"]
    with pytest.raises(OptionInvalid, match="has deletionVectors"):
        tables.read(None, place)  # type: ignore[arg-type]


def _delete_first_row(place: Path) -> None:
    """By a deletion vector within the log, which deltalake reads and does not write.

    Source: Delta protocol, "Deletion Vectors" and "Deletion Vector Format"; the Roaring format's array container.
    """
    log = place / "_delta_log"
    actions = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    (add,) = (each["add"] for each in actions if "add" in each)
    magic, bitmaps, key, cookie, containers, container, rows_less_one, header_bytes, row = (
        1681511377, 1, 0, 12346, 1, 0, 0, 16, 0,
    )  # fmt: skip
    vector = struct.pack(
        "<iqiIIHHIH", magic, bitmaps, key, cookie, containers, container, rows_less_one, header_bytes, row
    )
    told = {"storageType": "i", "pathOrInlineDv": _z85(vector), "sizeInBytes": len(vector), "cardinality": 1}
    gone = {name: add[name] for name in ("path", "partitionValues", "size")}
    gone |= {"deletionTimestamp": add["modificationTime"], "dataChange": True, "extendedFileMetadata": True}
    changed = [{"remove": gone}, {"add": add | {"deletionVector": told}}]
    (log / f"{1:020}.json").write_text("\n".join(map(json.dumps, changed)))


def _z85(content: bytes) -> str:
    """ZeroMQ's base 85, of whole words."""
    padded = content + bytes(-len(content) % 4)
    return b85encode(padded).decode().translate(str.maketrans(_B85, _Z85))


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Z85 = _DIGITS + ".-:+=^!/*?&<>()[]{}@%$#"
_B85 = _DIGITS[:10] + _DIGITS[36:] + _DIGITS[10:36] + "!#$%&()*+-;<=>?@^_`{|}~"
"""Python's digits of the same values."""
