"""The commands, as processes: what a person and what a program sees."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from veilmq.client.connect import connect
from veilmq.testing.histories import Workload, history, lognormal, write
from veilmq.testing.server import ServerProcess

COMMAND = [sys.executable, "-c", "from veilmq.cli import main; main()"]


def veilmq(*arguments: object, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """One command to its end: exit code, stdout, stderr. Its output goes to files: a JVM may outlive a pipe."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VEILMQ")}
    with (cwd / "out").open("w") as out, (cwd / "err").open("w") as err:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)], stdout=out, stderr=err, timeout=300, cwd=cwd, env=inherited | environment
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


def test_help_knows_the_jobs_and_imports_no_spark(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom veilmq.cli import main\nsys.argv = ['veilmq', 'pipeline', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'pyspark', 'pandas', 'pyarrow', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    for job in ("attempts", "survival", "timeouts", "split", "health", "audit", "report", "loop", "archive", "replay"):
        assert f"  {job} " in done.stdout
    assert done.stdout.endswith("set()\n")


def test_events_are_printed_and_exported(server: ServerProcess, tmp_path: Path) -> None:
    where = {"VEILMQ_ADMIN": server.admin, "VEILMQ_TOKEN_FILE": str(server.data / "admin-token")}
    code, out, err = veilmq("events", "--limit", 3, "--json", cwd=tmp_path, **where)
    assert (code, err) == (0, "")
    assert [json.loads(line)["offset"] for line in out.splitlines()] == [0, 1, 2]
    code, out, err = veilmq("events", "export", "exported", cwd=tmp_path, **where)
    assert (code, err) == (0, "")
    assert out == "exported 51 events, offsets 0 to 51\n"
    code, out, err = veilmq("events", "export", "exported", "--json", cwd=tmp_path, **where)
    assert json.loads(out) == {"from": 51, "until": 51, "events": 0}
    assert len(list((tmp_path / "exported").glob("day=*/*.parquet"))) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["pipeline", "timeouts", "--path", "nowhere"], 1, "holds no exported events"),
        (["pipeline", "timeouts", "--server", "127.0.0.1:1"], 1, "http://127.0.0.1:1 cannot be reached"),
        (["pipeline", "timeouts", "--server", "http://h", "--path", "x"], 1, "exclude each other"),
        (["pipeline", "loop", "--path", "x"], 2, "a loop needs a place"),
        (["pipeline", "report", "--path", "x"], 2, "a report needs a place"),
        (["pipeline", "audit", "--path", "x", "--token-file", "none", "--server", "h"], 1, "exclude each other"),
        (["events", "export", "x", "--server", "h:1", "--token-file", "none"], 2, "none is not there"),
    ],
)
def test_what_is_wrong_is_said_with_its_mend(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    done, out, err = veilmq(*arguments, cwd=tmp_path)
    assert (done, out) == (code, "")
    assert err.startswith("veilmq: ")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.slow
class TestJobs:
    """One command each, over exported Parquet, on a Spark of its own."""

    @pytest.fixture(scope="class")
    def exported(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        workloads = [
            Workload("media", lognormal(3, 0.5), "icon", 400, lease=120.0, crashes_per_second=1 / 2_000),
            Workload("media", lognormal(200, 0.5), "video", 400, lease=120.0, crashes_per_second=1 / 2_000),
        ]
        return write(history(workloads, seed=5), tmp_path_factory.mktemp("exported"))

    def run(self, tmp_path: Path, exported: Path, *arguments: object) -> tuple[int, str, str]:
        return veilmq("pipeline", *arguments, "--path", exported, "--master", "local[1]", cwd=tmp_path)

    @pytest.mark.timeout(600)
    def test_a_report_leaves_tables_and_a_page(self, tmp_path: Path, exported: Path) -> None:
        code, out, err = self.run(tmp_path, exported, "report", "--out", "found", "--format", "delta")
        assert code == 0, err
        assert "icon" in out
        assert "wrote found/report.html" in out
        found = {each.name for each in (tmp_path / "found").iterdir()}
        assert found == {"survival", "quantiles", "timeouts", "redelivery", "split", "health", "report.html"}
        from deltalake import DeltaTable

        rows = DeltaTable(str(tmp_path / "found" / "timeouts")).to_pyarrow_table().to_pylist()
        assert {row["type"] for row in rows} == {"icon", "video"}
        assert all(row["first_lease_s"] > 0 for row in rows)

    @pytest.mark.timeout(600)
    def test_programs_get_every_column(self, tmp_path: Path, exported: Path) -> None:
        code, out, err = self.run(tmp_path, exported, "survival", "--json")
        assert code == 0, err
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["type"] for row in rows] == ["icon", "video"]
        assert rows[0]["p50_s"] == pytest.approx(3, rel=0.15)

    @pytest.mark.timeout(600)
    def test_an_audit_ends_with_its_verdict(self, tmp_path: Path, exported: Path) -> None:
        assert self.run(tmp_path, exported, "audit")[:2] == (0, "nothing is wrong\n")

    @pytest.mark.timeout(600)
    def test_a_loop_runs_once_or_again(self, tmp_path: Path, exported: Path) -> None:
        code, out, err = self.run(tmp_path, exported, "loop", "--out", "kept", "--json")
        assert code == 0, err
        assert json.loads(out)["groups"] == 2
        assert (tmp_path / "kept" / "metrics.prom").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_archived_can_be_replayed(server: ServerProcess, tmp_path: Path) -> None:
    place = f"veil://{server.sqs.removeprefix('http://')}"
    code, out, err = veilmq(
        "pipeline", "archive", "--queue", f"{place}/orders", "--out", "kept", "--master", "local[1]", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["messages"] == 50
    with connect(f"{place}/again?create=1") as queue:
        code, out, err = veilmq(
            "pipeline", "replay", "kept/messages", "--queue", f"{place}/again", "--where", "int(body) < 20",
            "--master", "local[1]", cwd=tmp_path,
        )  # fmt: skip
        assert (code, out) == (0, "sent 20 messages\n"), err
        bodies = {each.body for _ in range(4) for each in queue.receive(10)}
    assert bodies == {str(number) for number in range(20)}
