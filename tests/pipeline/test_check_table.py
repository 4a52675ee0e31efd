"""`veilmq pipeline check`: files that a table names and no longer has."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from veilmq.cli import application
from veilmq.cli.failures import Failure
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.places.delta import reason_of
from veilmq.pipeline.sinks.checking import Checked, check

DAY = 86_400.0


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": list(numbers)})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Version 0 has rows 1 and 2, version 1 adds row 3; each is a file."""
    place = tmp_path / "table"
    write_deltalake(place, rows(1, 2))
    write_deltalake(place, rows(3), mode="append")
    return place


def file_of(table: Path, version: int) -> Path:
    """The one that a version added."""
    entry = (table / "_delta_log" / f"{version:020}.json").read_text().splitlines()
    [add] = [json.loads(line)["add"] for line in entry if "add" in json.loads(line)]
    return table / str(add["path"])


def found(table: Path, later_s: float = 0) -> Checked:
    return check(str(table), now=time.time() + later_s)


def test_a_table_that_has_its_files_is_in_order(table: Path) -> None:
    (table / "nobody-names-me.parquet").write_bytes(b"")
    assert found(table) == Checked(str(table), 1, 2, ())


def test_a_missing_file_is_named_with_its_version_and_rows(table: Path) -> None:
    gone = file_of(table, 0)
    size = gone.stat().st_size
    gone.unlink()
    [missing] = found(table).missing
    assert (missing.path, missing.version, missing.is_current) == (gone.name, 0, True)
    assert (missing.rows, missing.size_bytes) == (2, size)


def test_a_log_that_goes_back_less_far_still_tells_the_file_and_its_rows(table: Path) -> None:
    gone = file_of(table, 0)
    gone.unlink()
    DeltaTable(table).create_checkpoint()
    (table / "_delta_log" / f"{0:020}.json").unlink()
    [missing] = found(table).missing
    assert (missing.path, missing.version, missing.rows, missing.is_current) == (gone.name, None, 2, True)


def test_files_of_partitions_are_found_whatever_they_are_called(tmp_path: Path) -> None:
    values = ["a b", "1/2", "50%", "ü", None]
    write_deltalake(tmp_path, pa.table({"p": values, "n": range(5)}), partition_by=["p"])
    assert found(tmp_path).files == 5
    assert not found(tmp_path).missing
    for each in tmp_path.glob("p=*/*.parquet"):
        each.unlink()
    assert len(found(tmp_path).missing) == 5


def overwrite(table: Path) -> None:
    write_deltalake(table, rows(4), mode="overwrite")


def vacuum(table: Path) -> None:
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)


def repair(table: Path) -> None:
    DeltaTable(table).repair()


@pytest.mark.parametrize(
    ("before", "loses", "after", "later_s", "missing"),
    [
        (overwrite, True, None, 0, 1),
        (overwrite, False, None, 0, 0),
        (overwrite, False, vacuum, 0, 0),
        (overwrite, True, None, 8 * DAY, 0),
        (None, True, repair, 8 * DAY, 1),
    ],
    ids=["lost", "there", "vacuumed", "perhaps vacuumed", "repaired"],
)
def test_an_older_version_misses_what_no_vacuum_can_have_removed(
    table: Path,
    before: Callable[[Path], None] | None,
    loses: bool,
    after: Callable[[Path], None] | None,
    later_s: float,
    missing: int,
) -> None:
    gone = file_of(table, 0)
    if before is not None:
        before(table)
    if loses:
        gone.unlink()
    if after is not None:
        after(table)
    if after is vacuum:
        assert not gone.exists()
    seen = found(table, later_s).missing
    assert [(each.path, each.version, each.rows, each.is_current) for each in seen] == [
        (gone.name, 0, 2, False)
    ] * missing


def test_the_table_says_how_long_it_keeps_removed_files(tmp_path: Path) -> None:
    kept = {"delta.deletedFileRetentionDuration": "interval 2 hours"}
    write_deltalake(tmp_path, rows(1), configuration=kept)
    gone = file_of(tmp_path, 0)
    overwrite(tmp_path)
    gone.unlink()
    assert len(found(tmp_path, 3_600).missing) == 1
    assert not found(tmp_path, 3 * 3_600).missing


def test_a_streams_parquet_table_is_checked_by_sparks_log(tmp_path: Path) -> None:
    """Entry 2 is on its own, 0 and 1 are joined, as every tenth is."""
    table = tmp_path / "a table"
    log = table / "_spark_metadata"
    log.mkdir(parents=True)

    def line(name: str, action: str = "add") -> str:
        (table / name).write_bytes(b"rows")
        return json.dumps({"path": f"{table.as_uri()}/{name}", "size": 4, "action": action})

    (log / "0").write_text(f"v1\n{line('zero.parquet')}")
    (log / "1.compact").write_text(f"v1\n{line('zero.parquet')}\n{line('one.parquet')}")
    (log / "2").write_text(f"v1\n{line('two.parquet')}\n{line('gone.parquet', 'delete')}")
    (table / "gone.parquet").unlink()
    assert found(table) == Checked(str(table), 2, 3, ())
    (table / "zero.parquet").unlink()
    (table / "two.parquet").unlink()
    seen = {each.path: (each.version, each.rows, each.size_bytes) for each in found(table).missing}
    assert seen == {"zero.parquet": (0, None, 4), "two.parquet": (2, None, 4)}


def test_what_is_no_table_is_refused(tmp_path: Path, table: Path) -> None:
    (tmp_path / "messages").mkdir()
    with pytest.raises(OptionInvalid, match=r"holds no table with a log\. Of an archive that is .*/messages\."):
        found(tmp_path)
    (table / "_delta_log" / f"{1:020}.json").write_text("{")
    with pytest.raises(SourceUnreachable, match=r"cannot be read: .*object\.$") as damaged:
        found(table)
    assert "\n" not in str(damaged.value)
    # deltalake draws the causes below each other, in colour.
    storage = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "max_retries": "0"}
    storage |= {"aws_region": "eu-west-1", "aws_endpoint_url": "http://127.0.0.1:1", "aws_allow_http": "true"}
    with pytest.raises(SourceUnreachable, match=r"cannot be read: [^\n]*: Connection refused \(os error 111\)\.$"):
        check("s3://bucket/orders", storage, now=0)
    answer = 'status code: 403 Forbidden: <?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>.\n'
    assert reason_of(OSError(answer)) == answer.replace("\n<", " <").rstrip(".\n")


class TestTheCommand:
    def run(self, *given: Any) -> Any:
        return CliRunner().invoke(application(), ["pipeline", "check", *map(str, given)])

    def test_it_says_what_is_missing_and_fails(self, table: Path) -> None:
        done = self.run(table)
        assert (done.exit_code, done.stdout) == (0, f"{table}: version 1, files: 2, missing: 0\n")
        gone = file_of(table, 0)
        gone.unlink()
        done = self.run(table.as_uri())
        assert done.stdout.splitlines()[1:] == [f"  {gone.name}: added by version 0, rows: 2"]
        assert isinstance(done.exception, Failure)
        assert int(done.exception.code) == 1
        assert str(done.exception) == f"files of {table} are missing: 1, rows in them: 2"

    def test_programs_read_json(self, table: Path) -> None:
        gone = file_of(table, 1)
        gone.unlink()
        told = json.loads(self.run(table, "--json").stdout)
        assert told["version"] == 1
        assert told["missing"][0] | {"size_bytes": 0} == {
            "path": gone.name, "version": 1, "is_current": True, "rows": 1, "size_bytes": 0,
        }  # fmt: skip

    @pytest.mark.parametrize("content", [None, "[]"])
    def test_storage_options_are_a_file_of_json(self, table: Path, content: str | None) -> None:
        file = table / "storage.json"
        if content is not None:
            file.write_text(content)
        done = self.run(table, "--storage", file)
        assert isinstance(done.exception, Failure)
        assert int(done.exception.code) == 2
