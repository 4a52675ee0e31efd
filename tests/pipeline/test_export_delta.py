"""The history as a Delta table: each event once, whatever dies between a file and its commit; what DuckDB reads."""

import secrets
import signal
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.pipeline.drain_stage import Stage, send
from tests.pipeline.stores import Store, taken_over, told
from tests.support.histories import MadeUp, Workload, history, lognormal
from tests.support.postgres import until

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.events import ARROW_SCHEMA
from veilmq.pipeline.events import export as exporting
from veilmq.pipeline.events.export import HISTORY, ExportTaken, export, keep_as_delta, unchanged
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.places import Place, place
from veilmq.pipeline.tables import compact, retain, vacuum
from veilmq.testing.local import VEILMQ

DAY = 86_400.0
KEPT_AT = ("disk", "s3")


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 1_000)], seed=1, span=2 * DAY)


class Kept:
    """Where a history is kept, and how deltalake reads it there."""

    def __init__(self, directory: Place, storage: dict[str, str] | None = None) -> None:
        self.directory, self.storage = directory, storage

    def table(self) -> DeltaTable:
        return DeltaTable(str(self.directory), storage_options=self.storage)

    def events(self) -> pa.Table:
        """Of the table, in their order."""
        found = self.table().to_pyarrow_table().sort_by("offset")
        return found.drop_columns(["day"])

    def exported(self) -> pa.Table:
        """Of the files, whatever the table says."""
        exported = ParquetHistory(str(self.directory))
        return pa.Table.from_batches(exported.read(*exported.bounds()))


def kept_at(store: Store) -> Kept:
    """A new directory."""
    return Kept(place(f"{store.url}/{secrets.token_hex(8)}"), store.storage())


@pytest.fixture
def kept(home: str) -> Kept:
    return Kept(place(home))


def test_it_is_the_history(table: pa.Table, kept: Kept) -> None:
    export(MadeUp(table), kept.directory, file_rows=1_200, until=2_000, kept=keep_as_delta)
    assert kept.table().transaction_version(HISTORY) == 2_000
    export(MadeUp(table), kept.directory, kept=keep_as_delta)
    assert kept.events().equals(table)
    assert set(kept.table().to_pyarrow_table(columns=["day"])["day"].to_pylist()) <= {
        date(2026, 1, 1), date(2026, 1, 2),
    }  # fmt: skip
    assert kept.exported().equals(table)


def test_an_export_becomes_a_table(table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(MadeUp(table), tmp_path, file_rows=800, until=2_000)
    monkeypatch.chdir(tmp_path.parent)  # a relative path is the same directory
    export(MadeUp(table), tmp_path.name, until=2_000, kept=keep_as_delta)
    assert Kept(tmp_path).events().equals(table.slice(0, 2_000))


class Died(Exception):
    """Instead of a kill."""


@pytest.mark.parametrize("landed", [False, True])
def test_a_death_between_a_file_and_its_commit_or_after_it(table: pa.Table, tmp_path: Path, landed: bool) -> None:
    calls = []

    def dying(directory: Place) -> None:
        calls.append(directory)
        if landed or len(calls) < 3:
            keep_as_delta(directory)
        if len(calls) == 3:
            raise Died

    with pytest.raises(Died):
        export(MadeUp(table), tmp_path, file_rows=500, kept=dying)
    assert Kept(tmp_path).events().num_rows == (1_000 if landed else 500)
    export(MadeUp(table), tmp_path, kept=keep_as_delta)
    assert Kept(tmp_path).events().equals(table)


def test_a_death_before_the_first_commit(table: pa.Table, tmp_path: Path) -> None:
    """The table was made, and no file is in it."""
    export(MadeUp(table), tmp_path, until=500)
    write_deltalake(
        str(tmp_path), ARROW_SCHEMA.append(pa.field("day", pa.date32())).empty_table(), partition_by=["day"]
    )
    export(MadeUp(table), tmp_path, kept=keep_as_delta)
    assert Kept(tmp_path).events().equals(table)


def test_an_export_that_took_over_has_named_a_part(s3: Store, table: pa.Table) -> None:
    """One is about to write the events 500 to 1,200 and falls asleep; the other exports those to 1,000."""

    class Asleep(MadeUp):
        def read(self, start: int, stop: int) -> Any:
            if start == 500 and not awake:
                ahead = partial(export, MadeUp(table), kept.directory, until=1_000, kept=keep_as_delta)
                awake.append(taken_over(str(kept.directory / ".lock"), ahead, ExportTaken))
            yield from super().read(start, stop)

    with told(s3.environment):
        kept, awake = kept_at(s3), list[Any]()
        export(MadeUp(table), kept.directory, until=500, kept=keep_as_delta)
        with pytest.raises(ExportTaken):
            export(Asleep(table), kept.directory, file_rows=700, kept=keep_as_delta)
        assert awake == [(500, 1_000)]
        assert kept.events().equals(table.slice(0, 1_200))
        export(MadeUp(table), kept.directory, kept=keep_as_delta)
        assert kept.events().equals(kept.exported())
        assert kept.events().equals(table)


def test_of_two_that_name_files_at_once_one_does_and_the_other_the_rest(s3: Store, table: pa.Table) -> None:
    """The first has asked the table where it ends; its entry of the log is on its way when the other's arrives."""
    with told(s3.environment), ThreadPoolExecutor(1) as beside:
        kept = kept_at(s3)
        export(MadeUp(table), kept.directory, until=500, kept=keep_as_delta)
        export(MadeUp(table), kept.directory, until=1_200)
        s3.fault(at=f"{2:020}.json", do="hold")
        first = beside.submit(keep_as_delta, kept.directory)
        until(lambda: not s3.is_armed())
        # The other wrote its file before it could see that one.
        (longer,) = kept.directory.glob(f"day=*/offset-{500:020}-{1_200:020}.parquet")
        content = longer.read_bytes()
        longer.unlink()
        export(MadeUp(table), kept.directory, until=1_000, kept=keep_as_delta)
        longer.write_bytes(content)
        s3.fault()
        first.result(60)
        assert kept.events().equals(table.slice(0, 1_200))
        export(MadeUp(table), kept.directory, kept=keep_as_delta)
        assert kept.events().equals(kept.exported())
        assert kept.events().equals(table)


@pytest.mark.slow
def test_a_command_that_is_killed_amid_its_requests_names_each_event_once(
    store: Store, s3: Store, stage: Stage, all_kills: bool
) -> None:
    """At every step on S3, and with `--all-kills` on Azure's blobs."""
    kept = kept_at(store)
    source = ["--server", stage.server.admin, "--token-file", str(stage.server.data / "admin-token")]
    command = [*VEILMQ, "events", "export", str(kept.directory), "--format", "delta", *source]
    steps = [
        (f"{0:020}.json", "kill-after"),  # the table is made, the file not in it
        (f"{1:020}.json", "kill-before"),
        (f"{1:020}.json", "kill-after"),
        (".parquet", "kill-after"),
    ]
    if store is not s3 and not all_kills:
        steps = [(f"{1:020}.json", "kill-after")]
    with stage.make() as queue:
        for at, step in [*steps, ("", "")]:
            send(queue, [f"{at} {step}"])
            process = subprocess.Popen(command, stderr=subprocess.PIPE)
            if at:
                store.fault(at=at, do=step, pid=str(process.pid))
            _, said = process.communicate(timeout=60)
            assert process.returncode == (-signal.SIGKILL if at else 0), said
    events = kept.events()
    assert events.equals(kept.exported())
    assert events["offset"].to_pylist() == list(range(events["offset"][0].as_py(), 1 + events["offset"][-1].as_py()))
    assert events.filter(pc.equal(events["queue"], stage.name)).num_rows > len(steps)


def test_another_table_is_refused(table: pa.Table, tmp_path: Path) -> None:
    for name, rows in {"others": pa.table({"a": [1]}), "empty": pa.table({"a": pa.array([], pa.int64())})}.items():
        write_deltalake(str(tmp_path / name), rows)
        with pytest.raises(OptionInvalid, match=r"is a Delta table, and not of a history\. Name another directory"):
            export(MadeUp(table), tmp_path / name, kept=keep_as_delta)
        assert not list(tmp_path.glob("*/day=*"))


def test_it_is_kept_small_by_days(table: pa.Table, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    export(MadeUp(table), kept.directory, file_rows=1_500, kept=keep_as_delta)
    assert compact(kept.directory) == 0
    monkeypatch.setattr(exporting, "JOBS_WAIT_S", 0)
    if isinstance(kept.directory, Path):
        with unchanged(kept.directory):
            with pytest.raises(ExportTaken, match="A job reads the files in"):
                retain(kept.directory, date(2026, 1, 2))
            with pytest.raises(ExportTaken, match="A job reads the files in"):
                vacuum(kept.directory, 0)
    assert kept.events().equals(table)
    assert retain(kept.directory, date(2026, 1, 2)) > 500
    vacuum(kept.directory, 0)
    left = kept.events()
    assert 0 < left.num_rows < table.num_rows
    assert kept.exported().equals(left)
    export(MadeUp(table), kept.directory, kept=keep_as_delta)
    assert kept.events().equals(left)


def test_expiries_of_a_day_before_leave_no_gap(table: pa.Table, kept: Kept) -> None:
    """They carry the instants at which they were due, and are between the events of the next day."""
    at = table["at"].to_pylist()
    second = next(offset for offset, each in enumerate(at) if each >= round(at[0] + DAY * 1e6))
    late = range(second + 200, second + 400)
    times = [each - round(DAY * 1e6) if offset in late else each for offset, each in enumerate(at)]
    table = table.set_column(table.schema.get_field_index("at"), "at", pa.array(times))
    details = table["detail"].to_pylist()
    details[second + 10] = "x" * 5_000  # a footer has no bounds of so long a text
    table = table.set_column(table.schema.get_field_index("detail"), "detail", pa.array(details))
    for each in (second, late.start, late.stop, table.num_rows):
        export(MadeUp(table), kept.directory, until=each, kept=keep_as_delta)
    assert retain(kept.directory, date(2026, 1, 2)) == second
    assert retain(kept.directory, date(2026, 1, 2)) == 0
    vacuum(kept.directory, 0)
    assert kept.exported().equals(table.slice(second))
    assert kept.events().equals(table.slice(second))
    assert retain(kept.directory, date(2027, 1, 1)) == table.num_rows - second
    assert retain(kept.directory, date(2027, 1, 1)) == 0


def test_duckdb_reads_it(table: pa.Table, kept: Kept) -> None:
    details = table["detail"].to_pylist()
    details[2_000] = "x" * 5_000  # a footer has no bounds of so long a text
    table = table.set_column(table.schema.get_field_index("detail"), "detail", pa.array(details))
    export(MadeUp(table), kept.directory, file_rows=1_500, kept=keep_as_delta)
    actions = pa.table(kept.table().get_add_actions(flatten=True)).to_pylist()
    assert {(0, 1_499), (1_500, 2_999)} < {(each["min.offset"], each["max.offset"]) for each in actions}
    events: Any = kept.table().to_pyarrow_dataset()
    with duckdb.connect() as quack:
        quack.register("events", events)
        found = quack.sql('SELECT kind, count(*) FROM events WHERE "offset" >= 700 GROUP BY kind').fetchall()
        ((of_a_day,),) = quack.sql("SELECT count(*) FROM events WHERE day = DATE '2026-01-01'").fetchall()
        since = """"at" >= epoch_us(TIMESTAMP '2026-01-02')"""
        of_kind = dict(quack.sql("SELECT kind, count(*) FROM events WHERE kind != 'sent' GROUP BY kind").fetchall())
        ((empty, full),) = quack.sql('SELECT count(*), count(detail) FROM events WHERE "group" IS NULL').fetchall()
        ((long,),) = quack.sql(f"SELECT count(*) FROM events WHERE detail = '{'x' * 5_000}'").fetchall()
        ((by_instant,),) = quack.sql(f"SELECT count(*) FROM events WHERE {since}").fetchall()
    expected = table.slice(700).group_by("kind").aggregate([("kind", "count")]).to_pylist()
    assert sorted(found) == sorted((each["kind"], each["kind_count"]) for each in expected)
    assert 0 < of_a_day < table.num_rows
    assert of_kind == Counter(kind for kind in table["kind"].to_pylist() if kind != "sent")
    assert long == 1
    assert (empty, full) == (table.num_rows, table.num_rows - table["detail"].null_count)
    second = pc.sum(pc.greater_equal(table["at"], table["at"][0].as_py() + round(DAY * 1e6))).as_py()
    assert by_instant == second > table.num_rows - of_a_day, "a file's events may be of more than one day"
