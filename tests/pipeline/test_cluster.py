"""A standalone cluster of processes, a script by `spark-submit`, the code from the wheel; an executor is killed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.pipeline import cluster_stage, drain_side
from tests.pipeline.cluster_stage import HOME, Process
from tests.pipeline.drain_stage import Stage, left, send
from tests.support.java import QUICK

KEPT_AT = ("s3",)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("spark-processes")]


@pytest.fixture
def master(tmp_path: Path, home: str) -> Iterator[str]:
    """The URL of a cluster, whose executors know the store of `home`."""
    first, url = cluster_stage.master(tmp_path)
    try:
        second = cluster_stage.worker(tmp_path, url)
        try:
            yield url
        finally:
            second.kill()
    finally:
        first.kill()


def test_an_executor_killed_in_a_standalone_cluster_loses_nothing_and_repeats_nothing(
    stage: Stage, master: str, home: str
) -> None:
    code = cluster_stage.wheel(stage.directory)
    sent = [f"body {number}" for number in range(drain_side.BATCH_ROWS * 3)]
    with stage.make(timeout=2) as queue:
        send(queue, sent)
        submitted = Process(
            stage.directory, "submit", HOME / "bin" / "spark-submit", "--master", master, "--py-files", code,
            "--executor-cores", 1, "--executor-memory", "512m", "--conf", f"spark.executor.extraJavaOptions={QUICK}",
            drain_side.__file__, stage.url(), stage.directory, "in-executor", master, json.dumps({"home": home}),
            # Spark gives --py-files to executors; a source's own process on the driver inherits this.
            PYTHONPATH=str(code),
        )  # fmt: skip
        try:
            assert submitted.ended() == 0, submitted.tail()
        finally:
            submitted.kill()
        assert (stage.directory / "killed-in-executor").exists()
        table = DeltaTable(f"{home}/table").to_pyarrow_table(columns=["body"])
        assert sorted(table["body"].to_pylist()) == sorted(sent)
        assert left(queue) == 0
    found = {path.name.partition("-")[0]: path.read_text() for path in (stage.directory / "code").iterdir()}
    assert found.keys() == {"driver", "source", "executor"}
    assert all("veilmq.zip/veilmq/" in place for place in found.values()), found
    # It ran there, and the master saw the executor end by the signal.
    assert "Command exited with code 137" in submitted.log.read_text()
