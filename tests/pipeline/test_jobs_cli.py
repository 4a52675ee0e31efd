"""The commands, as processes: what a person and what a program sees."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.pipeline import cluster_stage
from tests.support.commands import Run
from tests.support.histories import Workload, history, lognormal, write
from tests.support.java import without_spark

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.pipeline import Asked
from veilmq.cli.pipeline.run import SHOWN
from veilmq.cli.pipeline.session import reported, show, token_of
from veilmq.client.adapters.connect import connect
from veilmq.pipeline.errors import OptionInvalid, PipelineError, SourceRefused, SourceUnreachable, TokenRefused
from veilmq.pipeline.events.export import export
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.jobs import plan_changes, split, survival, timeouts
from veilmq.pipeline.whatif import SCHEMA as WHATIF
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ, ServerProcess, port_kept


def veilmq(*arguments: object, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """One command to its end: exit code, stdout, stderr. Its output goes to files: a JVM may outlive a pipe."""
    with (cwd / "out").open("w") as out, (cwd / "err").open("w") as err:
        done = subprocess.run(
            [*VEILMQ, *map(str, arguments)],
            stdout=out,
            stderr=err,
            timeout=300,
            cwd=cwd,
            env=without_spark() | environment,
        )
    return done.returncode, (cwd / "out").read_text(), (cwd / "err").read_text()


@pytest.fixture
def server(tmp_path: Path) -> Any:
    started = ServerProcess(tmp_path).start()
    try:
        with connect(f"veil://{started.sqs.removeprefix('http://')}/orders?create=1") as queue:
            queue.send_batch([str(number) for number in range(50)])
        yield started
    finally:
        started.stop()


def test_help_knows_the_jobs_and_imports_neither_spark_nor_a_store() -> None:
    script = (
        "import sys\nfrom veilmq.cli import main\nsys.argv = ['veilmq', 'pipeline', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'pyspark', 'pandas', 'pyarrow', 'numpy', 'matplotlib', 'asyncio', 'sqlite3', 'ssl'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    for job in (
        "attempts",
        "survival",
        "timeouts",
        "split",
        "whatif",
        "health",
        "audit",
        "report",
        "loop",
        "archive",
        "replay",
    ):
        assert f"  {job} " in done.stdout
    assert done.stdout.endswith("set()\n")


ESTIMATES = {
    "survival": (survival.QUANTILES_SCHEMA, "attempts", ["p50", "p90", "p99"]),
    "timeouts": (timeouts.SCHEMA, "attempts", ["timeout", "timeout cost", "first lease", "renew after", "cost"]),
    "split": (split.SCHEMA, "attempts", ["median", "timeout", "gain"]),
    "whatif": (WHATIF, "messages", ["duplicates", "recovery", "wait", "wait p95", "cost", "cost change"]),
    "helped": (plan_changes.SCHEMA, "messages after", ["change"]),
}
"""What prints estimates: its columns, the number that they rest on, and what must have an interval."""


def test_what_is_estimated_is_printed_with_its_interval_and_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veilmq.cli.output._WIDTH_PIPED", 2_000)
    asked = Asked(None, None, None, None, None, None, None, "parquet", False, None, None)

    def shown(job: str, **values: Any) -> dict[str, str]:
        known = {name: "x" if kind == "string" else 50.0 for name, kind in map(str.split, columns_of[job])}
        known |= {name: 40.0 for name in known if "_low" in name} | {name: 60.0 for name in known if "_high" in name}
        show(asked, [known | values], SHOWN[job])
        lines = capsys.readouterr().out.splitlines()
        heads, row = (re.split(r"\s{2,}", lines[at].strip()) for at in (1, 3))
        return dict(zip(heads, row, strict=True))

    show(asked, [], SHOWN["timeouts"])
    assert capsys.readouterr().err == "no rows: the history has too little for this analysis\n"
    columns_of = {job: columns.split(", ") for job, (columns, *_) in ESTIMATES.items()}
    for job, (_, number, estimated) in ESTIMATES.items():
        told = shown(job)
        between = re.compile(r"^(50 s \(40 s to 60 s\)|50 \(40 to 60\)|5000.0 % \(4000.0 % to 6000.0 %\))$")
        assert [name for name, text in told.items() if between.match(text)] == estimated, (job, told)
        assert told[number] == "50", job
    unknown = {"timeout_s": None, "timeout_high_s": None, "timeout_at_least_s": 55.0}
    assert shown("timeouts", **unknown)["timeout"] == "at least 55 s (40 s or more)"
    assert shown("timeouts", timeout_high_s=None)["timeout"] == "50 s (40 s or more)"
    assert shown("survival", p99_s=None, p99_high_s=None, at_least_s=45.0)["p99"] == "at least 45 s (40 s or more)"
    assert shown("split", median_s=None, median_high_s=None)["median"] == "at least 40 s (40 s or more)"
    assert "p99" not in shown("survival", p99_s=None, p99_low_s=0.0, p99_high_s=None, at_least_s=0.0)
    nothing = dict.fromkeys(("timeout_s", "timeout_low_s", "timeout_high_s", "timeout_at_least_s"))
    assert "timeout" not in shown("timeouts", **nothing), "a column that says nothing is left out"


def test_events_are_printed_and_exported(
    server: ServerProcess, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEILMQ_ADMIN", server.admin)
    monkeypatch.setenv("VEILMQ_TOKEN_FILE", str(server.data / "admin-token"))
    code, out, err = run("events", "--limit", "3", "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line)["offset"] for line in out.splitlines()] == [0, 1, 2]
    code, out, err = run("events", "export", "exported")
    assert (code, err) == (0, "")
    assert out == "exported 51 events, offsets 0 to 51\n"
    code, out, err = run("events", "export", "exported", "--json")
    assert json.loads(out) == {"from": 51, "until": 51, "events": 0}
    (day,) = (tmp_path / "exported").glob("day=*/")
    assert len(list(day.glob("*.parquet"))) == 1
    (tmp_path / "file").touch()
    code, out, err = run("events", "export", "file")
    assert (code, out) == (2, "")
    assert err.startswith("veilmq: DIR: file: File exists")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / day.name).touch()
    code, out, err = run("events", "export", "other")
    assert (code, out) == (1, "")
    assert "veilmq: other: File exists" in err
    assert "Traceback" not in err


@for_each(
    ("arguments", "code", "said"),
    [
        (["pipeline", "timeouts", "--path", "nowhere", "--master", "local[02 , 3]"], 1, "holds no exported events"),
        (
            ["pipeline", "timeouts", "--path", "nowhere", "--master", "spork://x"],
            2,
            "'spork://x' is nothing where Spark",
        ),
        (["pipeline", "timeouts", "--path", "nowhere", "--master", "local[0]"], 2, "local[2] (so many threads)"),
        (["pipeline", "timeouts", "--server", "127.0.0.1:1"], 1, "http://127.0.0.1:1 cannot be reached"),
        (["pipeline", "timeouts", "--server", "http://h", "--path", "x"], 2, "exclude each other"),
        (["pipeline", "loop", "--path", "x"], 2, "a loop needs a place"),
        (["pipeline", "report", "--path", "x"], 2, "a report needs a place"),
        (["pipeline", "health", "--path", "x", "--window", "5 minutes"], 2, "--window: expected a time such as"),
        (["pipeline", "health", "--path", "x", "--window", "0"], 2, "--window: must be above 0"),
        (["pipeline", "audit", "--path", "x", "--token-file", "none", "--server", "h"], 2, "exclude each other"),
        (["pipeline", "timeouts", "--path", "s4://b/events"], 2, "s4://: Protocol not known"),
        (["pipeline", "report", "--path", "x", "--out", "s3://b/kept"], 2, "no table of parquet can be replaced there"),
        (["pipeline", "health", "--path", "x", "--follow", "--out", "s3://b/kept"], 2, "Use --format delta"),
        (
            ["pipeline", "health", "--path", "x", "--follow", "--out", "s3://b/kept", "--format", "delta"],
            2,
            "s3://b/kept is a URL, and Spark's own progress needs another place",
        ),
        (["pipeline", "health", "--path", "x", "--checkpoint", "d"], 2, "--checkpoint is for --follow"),
        (["pipeline", "timeouts", "--server", "http://h:99999"], 2, "server='http://h:99999' is no URL"),
        (["events", "export", "x", "--server", "h:1", "--token-file", "none"], 2, "none is not there"),
        (["events", "export", "x", "--server", "127.0.0.1:1"], 4, "http://127.0.0.1:1 cannot be reached"),
        (["events", "export", "x", "--server", "http://[::1"], 2, "server='http://[::1' is no URL"),
        (["events", "export", "x", "--server", "https://h", "--certificate", "none"], 2, "No such file"),
    ],
)
def test_what_is_wrong_is_said_with_its_mend(run: Run, arguments: list[str], code: int, said: str) -> None:
    done, out, err = run(*arguments)
    assert (done, out) == (code, "")
    assert err.startswith("veilmq: ")
    assert said in err
    assert "Traceback" not in err


@for_each("content", [b"-----BEGIN PRIVATE KEY-----\nhidden\n", b"a: b\nhidden", b"two hidden", b"hidden\xff", b"\n"])
def test_a_file_that_holds_no_token_is_not_shown(tmp_path: Path, run: Run, content: bytes) -> None:
    (tmp_path / "server.key").write_bytes(content)
    with pytest.raises(Failure, match=r"server\.key holds no token$") as refused:
        token_of(tmp_path / "server.key", {})
    assert refused.value.code == Exit.USAGE
    code, out, err = run("events", "export", "x", "--token-file", "server.key")
    assert (code, out) == (2, "")
    assert err.startswith("veilmq: server.key holds no token\n")
    assert "hidden" not in err


@pytest.mark.parametrize("token", ["x" * 32, "reader:secret+/=", "reader:secret:of reader"])
def test_a_token_or_a_key_is_read_from_a_file(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(f"{token}\n")
    assert token_of(None, {"VEILMQ_TOKEN_FILE": str(tmp_path / "token")}) == token
    assert token_of(None, {"VEILMQ_DATA": str(tmp_path)}) is None


def test_how_an_export_ends_is_told_by_its_code(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x" * 32)
    (tmp_path / "key").write_text("reader:wrong")
    for name in ("other", "key"):
        code, out, err = veilmq("events", "export", "x", "--server", server.admin, "--token-file", name, cwd=tmp_path)
        assert (code, out) == (2, "")
        assert f"veilmq: {server.admin.rstrip('/')}" in err
        assert "--token-file" in err
    where = {"VEILMQ_TOKEN_FILE": str(server.data / "admin-token")}
    code, out, err = veilmq("events", "export", "x", "--server", server.sqs, cwd=tmp_path, **where)
    assert (code, out) == (4, "")
    assert "is no VeilMQ admin port" in err
    (tmp_path / "x" / "day=2026-01-01").mkdir()
    (tmp_path / "x" / "day=2026-01-01" / f"offset-{0:020}-{9:020}.parquet").write_text("cut")
    code, out, err = veilmq("events", "export", "x", "--server", server.admin, cwd=tmp_path, **where)
    assert (code, out) == (1, "")
    assert "cannot be read" in err


@for_each("kind", [OptionInvalid, SourceUnreachable, SourceRefused, TokenRefused])
def test_of_a_job_only_a_wrong_option_is_wrong_usage(kind: type[PipelineError]) -> None:
    with pytest.raises(Failure, match=r"^it$") as failed, reported():
        raise kind("it", "mend")
    assert failed.value.code == (Exit.USAGE if kind is OptionInvalid else Exit.WRONG)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workloads = [
        Workload("media", lognormal(3, 0.5), "icon", 400, lease=120.0, crashes_per_second=1 / 2_000),
        Workload("media", lognormal(200, 0.5), "video", 400, lease=120.0, crashes_per_second=1 / 2_000),
    ]
    return write(history(workloads, seed=5), tmp_path_factory.mktemp("exported"))


@pytest.mark.parametrize("job", ["timeouts", "loop"])
def test_a_place_that_cannot_be_is_said_before_spark_starts(exported: Path, tmp_path: Path, run: Run, job: str) -> None:
    (tmp_path / "file").touch()
    done, out, err = run("pipeline", job, "--path", str(exported), "--out", "file")
    assert (done, out) == (2, "")
    assert err.startswith("veilmq: --out: file: File exists")
    # It is there, and takes no file whoever asks.
    done, out, err = run("pipeline", job, "--path", str(exported), "--out", "/proc/self")
    assert (done, out) == (2, "")
    assert err.startswith("veilmq: --out: /proc/self: ")
    done, out, err = run("pipeline", job, "--path", str(exported), "--out", "typo/kept")
    assert (done, out) == (2, "")
    assert "--out: typo/kept is not made, because its parent is not there" in err
    done, out, err = run("pipeline", job, "--path", str(exported), "--out", "s3://bucket/kept")
    assert (done, out) == (2, "")
    assert "no table of parquet can be replaced there.\n  Use --format delta." in err
    done, out, err = run("pipeline", job, "--path", str(exported), "--out", "kept", "--conf", "memory=4g")
    assert (done, out) == (2, "")
    assert "--conf memory=4g: it is no KEY=VALUE" in err
    assert not (tmp_path / "typo").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_is_told(spark: Any, tmp_path: Path) -> None:
    """As pyarrow raises it and as Spark does, and so that a loop goes on; a bug keeps its trace."""
    said = "a file cannot be written: No space left on device"
    failing = spark.range(1).selectExpr("raise_error(concat('No space left on device ', id)) AS a")
    with pytest.raises(Failure, match=said), reported():
        failing.write.parquet(str(tmp_path / "table"))
    with pytest.raises(Failure, match=said), reported():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), reported():
        (tmp_path / "missing").read_text()


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from veilmq.cli import main

ran = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["veilmq", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    ran[name] = [code, out.getvalue(), err.getvalue()]
    with open("ran.json", "w") as file:
        json.dump(ran, file)
"""


class Ran(NamedTuple):
    """What one command left."""

    code: int
    out: str
    err: str


def one_after_another(
    commands: dict[str, list[str]], place: Path, environment: dict[str, str] | None = None
) -> dict[str, Ran]:
    """Run them in one process there."""
    script = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)]
    with (place / "log").open("w") as log:
        subprocess.run(script, stdout=log, stderr=log, cwd=place, env=environment or without_spark(), timeout=500)
    assert (place / "ran.json").exists(), (place / "log").read_text()[-3_000:]
    said = json.loads((place / "ran.json").read_text())
    assert list(said) == list(commands), (place / "log").read_text()[-3_000:]
    return {name: Ran(*each) for name, each in said.items()}


@pytest.mark.parametrize("command", [["timeouts", "--publish"], ["loop", "--out", "kept", "--publish"]])
def test_a_server_that_takes_no_plans_is_said_before_spark_starts(
    server: ServerProcess, exported: Path, run: Run, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job on a large history takes minutes, and its plans came to nothing then."""
    monkeypatch.setenv("VEILMQ_ADMIN", server.admin)
    done, out, err = run("pipeline", *command, "--path", str(exported))
    assert (done, out) == (1, "")
    assert "refuses: " in err
    assert "Give its token" in err


def test_a_java_that_does_not_fit_is_said_with_its_mend(exported: Path, tmp_path: Path) -> None:
    done, out, err = veilmq("pipeline", "timeouts", "--path", exported, cwd=tmp_path, JAVA_HOME="/nowhere")
    assert (done, out) == (1, "")
    assert err.startswith("veilmq: JAVA_HOME=/nowhere holds no Java that runs")
    assert "Install Java 17 or later" in err


def test_tables_that_grow_are_tidied(exported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    table = history([Workload("q", lognormal(3, 0.5), None, 400)], seed=5)
    write(table, tmp_path / "more", file_rows=500)
    code, out, err = veilmq("pipeline", "tidy", "more", "--json", cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["files_joined"] > 0
    code, out, err = veilmq("pipeline", "tidy", copy, "--retention-days", 1, cwd=tmp_path)
    assert (code, out) == (0, f"{copy}: dropped days: 1, joined files: 0\n"), err
    code, out, err = veilmq("pipeline", "tidy", "nowhere", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "nowhere is no directory" in err


COMMANDS = {
    "report": ["report", "--out", "found", "--format", "delta"],
    "audit": ["audit"],
    "loop": ["loop", "--out", "kept", "--json", "--publish"],
}
PARTS_OF_THEM = {
    "loop again": ["loop", "--out", "kept", "--json", "--publish"],
    "attempts": ["attempts", "--json"],
    "survival": ["survival", "--json"],
    "split": ["split", "--json"],
    "health": ["health", "--window", "5m", "--json"],
    "timeouts": ["timeouts", "--publish"],
}
"""What these ask of Spark, report and loop do, too: they run over Spark Connect alone, which spares a JVM for each."""


@pytest.fixture(scope="module", params=["--master", "--remote"])
def spark_at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Where the commands find their Spark: in a JVM of their own, or over Spark Connect."""
    if request.param == "--master":
        yield ["--master", "local[2]"]
        return
    server, url = cluster_stage.connect_server(tmp_path_factory.mktemp("connect"), "jobs")
    try:
        yield ["--remote", url]
    finally:
        server.kill()


@pytest.fixture(scope="module")
def place(spark_at: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def ran(place: Path, exported: Path, spark_at: list[str]) -> dict[str, Ran]:
    """All commands, beside a server that has the queue."""
    wanted = COMMANDS | PARTS_OF_THEM if "--remote" in spark_at else COMMANDS
    commands = {name: ["pipeline", *own, "--path", str(exported), *spark_at] for name, own in wanted.items()}
    server = ServerProcess(place).start()
    try:
        with connect(f"veil://{server.sqs.removeprefix('http://')}/media?create=1"):
            pass
        environment = without_spark() | {
            "VEILMQ_ADMIN": server.admin,
            "VEILMQ_TOKEN_FILE": str(server.data / "admin-token"),
        }
        return one_after_another(commands, place, environment)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("pipeline-cli")
class TestJobs:
    """The commands over exported Parquet, each with a session of its own in one process: a JVM takes long to start.

    Each on a Spark of its own, and over Spark Connect.
    """

    def test_a_report_leaves_tables_and_a_page(self, ran: dict[str, Ran], place: Path) -> None:
        done = ran["report"]
        assert done.code == 0, done.err
        assert "icon" in done.out
        assert "wrote found/report.html" in done.out
        found = {each.name for each in (place / "found").iterdir()}
        assert found == {"survival", "quantiles", "timeouts", "redelivery", "split", "health", "report.html"}
        from deltalake import DeltaTable

        rows = DeltaTable(str(place / "found" / "timeouts")).to_pyarrow_table().to_pylist()
        assert {row["type"] for row in rows} == {"icon", "video"}
        assert all(row["first_lease_s"] > 0 for row in rows)

    def test_an_audit_ends_with_its_verdict(self, ran: dict[str, Ran]) -> None:
        assert ran["audit"][:2] == (0, "nothing is wrong\n")

    def test_a_loop_runs_once_and_tells_the_server(self, ran: dict[str, Ran], place: Path) -> None:
        done = ran["loop"]
        assert done.code == 0, done.err
        learnt, said = map(json.loads, done.out.splitlines())
        assert learnt["groups"] == learnt["planned"] == 2
        assert said == {"account": "000000000000", "region": "us-east-1", "queue": "media", "said": "suggested"}
        assert (place / "kept" / "metrics.prom").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("pipeline-cli")
@pytest.mark.parametrize("spark_at", ["--remote"], indirect=True)
class TestPartsOfThem:
    """The commands that show one of the report's answers, and a loop that goes on."""

    def test_every_lease_is_an_attempt(self, ran: dict[str, Ran]) -> None:
        done = ran["attempts"]
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in done.out.splitlines()]
        assert len({(row["sequence"], row["attempt"]) for row in rows}) == len(rows) >= 800
        assert {row["type"] for row in rows} == {"icon", "video"}

    def test_a_loop_goes_on_and_tells_the_server_again(self, ran: dict[str, Ran]) -> None:
        learnt, said = map(json.loads, ran["loop"].out.splitlines())
        again = [json.loads(line) for line in ran["loop again"].out.splitlines()]
        assert again[0]["start"] == learnt["stop"]
        assert again[1] == said, "a new process cannot know what the server was told"

    def test_programs_get_every_column(self, ran: dict[str, Ran]) -> None:
        done = ran["survival"]
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in done.out.splitlines()]
        assert [row["type"] for row in rows] == ["icon", "video"]
        assert rows[0]["p50_s"] == pytest.approx(3, rel=0.15)

    def test_what_should_part_and_how_it_goes_are_told(self, ran: dict[str, Ran]) -> None:
        for job in ("split", "health"):
            done = ran[job]
            assert done.code == 0, done.err
            assert all(row["queue"] == "media" for row in map(json.loads, done.out.splitlines()))
            assert done.out

    def test_timeouts_are_shown_and_published(self, ran: dict[str, Ran]) -> None:
        done = ran["timeouts"]
        assert done.code == 0, done.err
        video = next(line for line in done.out.splitlines() if "video" in line)
        assert len(re.findall(r"\([^()]+ to [^()]+\)", video)) >= 3, done.out  # a timeout, a first lease, a cost
        assert done.out.endswith("media: suggested\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_loop_outlives_what_goes_wrong_meanwhile(server: ServerProcess, exported: Path, tmp_path: Path) -> None:
    """Its first run is good; then the history is away, and comes back; then there is no server to tell of a plan."""
    here, away = tmp_path / "events", tmp_path / "away"
    events = ParquetHistory(str(exported))
    export(events, here, until=events.bounds().following // 3)
    connect(f"veil://{server.sqs.removeprefix('http://')}/media?create=1").close()
    command = ["pipeline", "loop", "--path", str(here), "--out", "kept", "--every", "1s", "--master", "local[1]"]
    where = {"VEILMQ_ADMIN": server.admin, "VEILMQ_TOKEN_FILE": str(server.data / "admin-token")}
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*VEILMQ, *command, "--publish"], stdout=out, stderr=err, cwd=tmp_path, env=without_spark() | where
        )

    def wait_for(file: str, text: str, times: int) -> None:
        while (tmp_path / file).read_text().count(text) < times:
            assert process.poll() is None, (tmp_path / "err").read_text()[-2_000:]
            time.sleep(0.2)

    try:
        wait_for("out", "media: suggested", 1)
        here.rename(away)
        wait_for("err", "holds no exported events", 1)
        before = (tmp_path / "out").read_text().count("leases settled")
        away.rename(here)
        wait_for("out", "leases settled", before + 1)
        told = (tmp_path / "out").read_text().count("media: suggested")
        port = server.admin.rpartition(":")[2]
        server.kill()
        with port_kept(int(port)):
            export(events, here)
            wait_for("err", "cannot be reached", 1)
            server.options = ("--admin", f"127.0.0.1:{port}")
            server.start()
        wait_for("out", "media: suggested", told + 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_archived_can_be_replayed(server: ServerProcess, tmp_path: Path) -> None:
    place = f"veil://{server.sqs.removeprefix('http://')}"
    archive = ["pipeline", "archive", "--queue", f"{place}/orders", "--out", "kept", "--json"]
    replay = ["pipeline", "replay", "kept/messages", "--queue", f"{place}/again"]
    commands = {"archive": archive, "replay": [*replay, "--where", "int(body) < 20"]}
    with connect(f"{place}/again?create=1") as queue:
        ran = one_after_another({name: [*each, "--master", "local[1]"] for name, each in commands.items()}, tmp_path)
        assert ran["archive"].code == 0, ran["archive"].err
        assert json.loads(ran["archive"].out)["messages"] == 50
        assert ran["replay"][:2] == (0, "sent 20 messages\n"), ran["replay"].err
        bodies = {each.body for _ in range(4) for each in queue.receive(10)}
    assert bodies == {str(number) for number in range(20)}

    code, out, err = veilmq(*replay, "--where", "weight > 1", "--master", "local[1]", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "veilmq: where='weight > 1' cannot be: [UNRESOLVED_COLUMN" in err
    # Spark's own words of it, and its traces, are not for who mistyped a name.
    assert err.count("UNRESOLVED_COLUMN") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_master_that_is_none_is_said_with_its_mend(exported: Path, tmp_path: Path) -> None:
    code, out, err = veilmq("pipeline", "health", "--path", exported, "--master", "local-cluster[x]", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert "veilmq: Spark does not start: Could not parse Master URL: 'local-cluster[x]'.\n" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_python_of_spark_s_that_lacks_packages_is_said_with_its_mend(exported: Path, tmp_path: Path) -> None:
    """As on a cluster or a Spark Connect server where nobody installed them."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    code, out, err = veilmq("pipeline", "survival", "--path", exported, cwd=tmp_path, PYSPARK_PYTHON=python)
    assert (code, out) == (1, ""), err
    said = err[err.rindex("veilmq: ") :]
    assert said.startswith("veilmq: Spark cannot run its Python workers: No module named '"), said
    assert "PYSPARK_PYTHON" in said


@for_each(
    "trace",
    [
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark",
        'Caused by: java.io.IOException: Cannot run program "/none/python": error=2',
        "Traceback\nModuleNotFoundError: No module named 's3fs'\n SQLSTATE",
    ],
)
def test_spark_s_trace_of_its_python_is_one_sentence(trace: str) -> None:
    said = r"^Spark cannot run its Python workers: (Python|Cannot|No mod)"
    with pytest.raises(Failure, match=said) as failed, reported():
        raise OSError(trace)
    assert "object store, if one is used (s3fs, adlfs)" in failed.value.advice


SETTINGS_SHOWN = """
import json
from veilmq.pipeline.session import session

spark = session("local[1]", settings={"spark.sql.ansi.enabled": "false"}, is_short=True)
names = ("spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.ui.enabled",
         "spark.app.name", "spark.sql.python.filterPushdown.enabled")
java = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
compilers = [each for each in java if "TieredStopAtLevel" in each]
level = spark._jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel().toString()
print("said", json.dumps([level, *(spark.conf.get(name) for name in names), *compilers]))
spark.stop()
"""


@pytest.mark.slow
def test_java_tells_errors_where_nobody_wants_more(spark: Any) -> None:
    assert spark.sparkContext.getConf().get("spark.log.level") == "ERROR"


@pytest.mark.slow
def test_the_user_s_configuration_wins_over_ours(tmp_path: Path) -> None:
    """Of a local session, too, and what the caller says wins over both."""
    defaults = "spark.sql.shuffle.partitions 3\nspark.sql.session.timeZone Europe/Paris\nspark.sql.ansi.enabled true\n"
    defaults += "spark.driver.extraJavaOptions -XX:TieredStopAtLevel=4\nspark.log.level FATAL\n"
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    environment = os.environ | {"SPARK_CONF_DIR": str(tmp_path), "SPARK_SUBMIT_OPTS": ""}
    script = [sys.executable, "-c", SETTINGS_SHOWN]
    done = subprocess.run(script, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, timeout=240, check=True)
    said = next(line for line in done.stdout.decode().splitlines() if line.startswith("said "))
    *found, ours, theirs = json.loads(said.removeprefix("said "))
    assert found == ["FATAL", "3", "Europe/Paris", "false", "false", "veilmq", "true"]
    # Of two such options Java takes the last.
    assert (ours, theirs) == ("-XX:TieredStopAtLevel=1", "-XX:TieredStopAtLevel=4")
