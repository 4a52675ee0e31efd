"""What the commands refuse before Spark starts, whole tables left as they are; and how they end by Ctrl-C."""

import logging
import os
import signal
import subprocess
import time
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake
from pyspark.errors import StreamingQueryException
from tests.pipeline.cluster_stage import command, environment
from tests.pipeline.histories_stage import frame, table_of
from tests.support.commands import Run
from tests.support.histories import Workload, history, lognormal, write

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.pipeline import Asked, Where
from veilmq.cli.pipeline.run import _write_analysis
from veilmq.cli.pipeline.session import print_json, reported, started
from veilmq.pipeline import tables
from veilmq.pipeline.errors import OptionInvalid, Unready
from veilmq.pipeline.loop import Loop
from veilmq.pipeline.report import Analysis
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ

NO_SPARK = {"JAVA_HOME": "/nowhere"}
"""With it a session ends in an error of its own."""
TRACES = ("Traceback", "KeyboardInterrupt", " ERROR ", "\tat ")
NAMES = ("survival", "timeouts", "split", "health")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return write(history([Workload("q", lognormal(3, 0.5), "t", 100)], seed=5), tmp_path / "events")


def content(place: Path) -> dict[str, bytes]:
    return {str(each.relative_to(place)): each.read_bytes() for each in place.rglob("*") if each.is_file()}


@for_each(
    ("arguments", "said"),
    [
        (["tidy", "events", "--retention-days", "-1"], "--retention-days"),
        (["tidy", "events", "--retention-days", "99999999999"], "--retention-days"),
        (["tidy", "events", "--vacuum-hours", "-1"], "--vacuum-hours"),
        (["tidy", "events", "--vacuum-hours", "99999999999"], "--vacuum-hours"),
        (["loop", "--path", "events", "--out", "kept", "--retention-days", "-1"], "--retention-days"),
        (["loop", "--path", "events", "--out", "kept", "--retention-days", "99999999999"], "--retention-days"),
        (["survival", "--path", "events", "--from", "one"], "--from one: it is an offset, first or next"),
        (["survival", "--path", "events", "--from", "-1"], "--from -1: it is an offset"),
        (["survival", "--path", "events", "--until", "-1"], "--until -1: it is an offset"),
        (["survival", "--path", "events", "--from", "20", "--until", "10"], "--until 10 is before offset 20"),
        (["tidy", "."], "holds no table"),
        (["tidy", "archive"], "Of an archive that is archive/messages"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    exported: Path, tmp_path: Path, run: Run, arguments: list[str], said: str
) -> None:
    (tmp_path / "archive" / "messages").mkdir(parents=True, exist_ok=True)
    before = content(exported)
    code, out, err = run("pipeline", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert content(exported) == before
    assert not (tmp_path / "kept").exists()


def test_an_offset_that_there_is_not_is_told_before_spark_starts(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code, out, err = command(tmp_path, "pipeline", "survival", "--path", exported, "--from", 10**6, **NO_SPARK)
    assert (code, out) == (1, "")
    assert "There is no offset 1000000." in err
    code, out, err = command(tmp_path, "pipeline", "survival", "--path", exported, "--from", "next", **NO_SPARK)
    assert "JAVA_HOME=/nowhere" in err
    monkeypatch.setenv("JAVA_HOME", NO_SPARK["JAVA_HOME"])
    with pytest.raises(Unready), started(Where(None, None, None)):
        pass
    logging.getLogger().error("Exception while sending command.")  # as py4j when Ctrl-C comes while Spark starts
    assert caplog.text == ""


def test_the_jobs_know_the_bounds_too(tmp_path: Path) -> None:
    for days in (-1, tables.RETENTION_DAYS_MAX + 1):
        with pytest.raises(OptionInvalid, match="It is 0 to 36500"):
            Loop(tmp_path, retention_days=days)
    assert tables.oldest_kept(date(2026, 1, 31), 0) == date(2026, 1, 31)
    write_deltalake(tmp_path / "t", pa.table({"day": ["2026-01-01"]}))
    for hours in (-1, tables.VACUUM_HOURS_MAX + 1):
        with pytest.raises(OptionInvalid, match="It is 0 to 876000"):
            tables.vacuum(tmp_path / "t", hours)
    assert tables.load(tmp_path / "t").num_rows == 1


def test_what_has_been_kept_and_dropped_is_still_a_table(exported: Path, run: Run) -> None:
    """A timer's tidy: after it took the last day, and of an export that had nothing to write yet."""
    for dropped in (1, 0):
        code, out, err = run("pipeline", "tidy", str(exported), "--retention-days", "1")
        assert (code, out) == (0, f"{exported}: dropped days: {dropped}, joined files: 0\n"), err


def test_a_tidy_of_delta_removes_what_only_older_versions_name(tmp_path: Path, run: Run) -> None:
    """Also what it has itself merged, and without --retention-days."""
    for number in (1, 2):
        write_deltalake(tmp_path / "t", pa.table({"n": [number]}), mode="append")
    code, out, err = run("pipeline", "tidy", "t", "--vacuum-hours", "0")
    assert (code, out) == (0, "t: dropped rows: 0, joined files: 2\n"), err
    assert len(list((tmp_path / "t").glob("*.parquet"))) == 1
    assert sorted(tables.load(tmp_path / "t")["n"].to_pylist()) == [1, 2]


def test_what_delta_refuses_is_told_in_a_sentence(tmp_path: Path, run: Run) -> None:
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)
    code, out, err = run("pipeline", "tidy", "t")
    assert (code, out) == (1, "")
    assert err.startswith("veilmq: Delta: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("job", "kind"), [("health", "parquet"), ("health", "delta"), ("report", "parquet"), ("report", "delta")]
)
def test_a_stream_s_table_is_replaced_by_no_job(exported: Path, tmp_path: Path, run: Run, job: str, kind: str) -> None:
    place = tmp_path / "kept" / "health"
    if kind == "delta":
        write_deltalake(place, pa.table({"n": [1]}))
        (tmp_path / "kept" / "health-checkpoint").mkdir()
    else:
        (place / "_spark_metadata").mkdir(parents=True)
        (place / "_spark_metadata" / "0").write_text("v1")
    before = content(place)
    options = ["--path", str(exported), "--out", "kept", "--format", kind]
    code, out, err = run("pipeline", job, *options)
    assert (code, out) == (2, "")
    assert f"{place} is a stream's table" in err
    with pytest.raises(OptionInvalid, match="is a stream's table"):
        tables.write(SimpleNamespace(), place, kind)  # type: ignore[arg-type]
    assert content(place) == before


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_job_s_table_is_taken_by_no_stream(exported: Path, tmp_path: Path, run: Run, kind: str) -> None:
    place = tmp_path / "kept" / "health"
    if kind == "delta":
        write_deltalake(place, pa.table({"n": [1]}))
    else:
        place.mkdir(parents=True)
        pq.write_table(pa.table({"n": [1]}), place / "part-0.parquet")
    before = content(tmp_path / "kept")
    options = ["--path", str(exported), "--out", "kept", "--format", kind, "--follow"]
    code, out, err = run("pipeline", "health", *options)
    assert (code, out) == (2, "")
    assert f"{place} is a table of no stream" in err
    assert content(tmp_path / "kept") == before


@pytest.mark.parametrize(
    ("transactions", "said"),
    [
        ([("q", 1)], "has batch 1 of this query, and the checkpoint ends with batch 0: "),
        ([("q", 0), ("q/offsets", 5)], "has another batch 0 of this query: "),
    ],
)
def test_a_stream_whose_table_has_batches_that_its_checkpoint_lacks_is_told_what_to_do(
    exported: Path, tmp_path: Path, run: Run, transactions: list[tuple[str, int]], said: str
) -> None:
    """A new checkpoint, which a drain may begin with, is refused for this table."""
    batch = CommitProperties(app_transactions=[Transaction(*each) for each in transactions])
    write_deltalake(tmp_path / "kept" / "health", pa.table({"n": [1]}), commit_properties=batch)
    checkpoint = tmp_path / "kept" / "health-checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").touch()
    (checkpoint / "metadata").write_text('{"id":"q"}')
    options = ["--path", str(exported), "--out", "kept", "--format", "delta", "--follow"]
    code, out, err = run("pipeline", "health", *options)
    assert (code, out) == (1, "")
    assert said in err
    assert "\n  Bring the newest checkpoint back, or name another --out.\n" in err


def test_a_query_that_spark_ends_is_told_in_a_sentence() -> None:
    error = StreamingQueryException("[STREAM_FAILED] Query terminated with exception: assertion failed\n\tat org")
    with pytest.raises(Failure, match=r"^Spark: \[STREAM_FAILED\] Query .* assertion failed$") as failed, reported():
        raise error
    assert failed.value.code == Exit.WRONG


def test_instants_are_printed_with_their_zone(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"from": pd.Timestamp("2026-01-31 12:00:00"), "to": datetime(2026, 1, 31, 12, tzinfo=UTC)})
    assert capsys.readouterr().out == '{"from":"2026-01-31T12:00:00Z","to":"2026-01-31T12:00:00Z"}\n'


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_report_about_nothing_leaves_no_tables_of_before(spark: Any, tmp_path: Path) -> None:
    """They would be taken for its own: old curves beside new and empty recommendations."""
    given: Any = {"out": tmp_path, "format": "parquet"}
    asked = Asked(**(dict.fromkeys(Asked._fields) | given))
    events = history([Workload("q", lognormal(3, 0.5), "t", 100)], seed=5)
    kept = {}
    for table in (events, table_of([])):
        _write_analysis(asked, spark, Analysis(frame(spark, table)), NAMES)
        found = {each.name: tables.load(each) for each in tmp_path.iterdir()}
        assert set(found) == {"survival", "quantiles", "timeouts", "redelivery", "split", "health"}
        assert all((each.num_rows > 0) == (table is events) for each in found.values())
        kept = kept or found
        assert {name: each.schema.remove_metadata() for name, each in found.items()} == {
            name: each.schema.remove_metadata() for name, each in kept.items()
        }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_stream_without_a_trace(exported: Path, tmp_path: Path) -> None:
    begun = tmp_path / "kept" / "health-checkpoint" / "offsets" / "0"
    options = ["--path", exported, "--out", "kept", "--follow", "--master", "local[1]"]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*VEILMQ, "pipeline", "health", *map(str, options)], stdout=err, stderr=err, cwd=tmp_path,
            env=environment(tmp_path), start_new_session=True,
        )  # fmt: skip
    try:
        while not begun.exists():
            assert process.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.1)
        # As a terminal does it, to all of the command's processes.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / "err").read_text()
    assert not [each for each in TRACES if each in said], said
