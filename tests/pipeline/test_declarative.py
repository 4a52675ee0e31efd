"""The Spark Declarative Pipelines project of the examples, as `spark-pipelines run` runs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.support.histories import Workload, history, lognormal, write
from tests.support.java import without_spark

from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.session import find_java

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "declarative"
WITH_A_SOURCE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

from veilmq.pipeline import register

spark = SparkSession.active()
register(spark)


@dp.materialized_view
def events():
    return spark.read.format("veilmq-events").option("path", {path!r}).load()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("spark-processes")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workloads = [
        Workload("media", lognormal(3, 0.5), "icon", 400, lease=120.0, crashes_per_second=1 / 2_000),
        Workload("media", lognormal(200, 0.5), "video", 400, lease=120.0, crashes_per_second=1 / 2_000),
    ]
    return write(history(workloads, seed=5), tmp_path_factory.mktemp("exported"))


def run(project: Path) -> tuple[int, str]:
    """`spark-pipelines run` there; its exit code and what it said."""
    scripts = Path(sys.executable).parent
    environment = without_spark() | {
        "PATH": f"{scripts}:/usr/bin:/bin",
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(find_java(project)),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [str(scripts / "spark-pipelines"), "run", "--spec", "spark-pipeline.yml"]
    log = project / "log"
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, cwd=project, env=environment, timeout=500)
    return done.returncode, log.read_text()


def spec(project: Path, exported: Path) -> None:
    """The example's, with places of this test."""
    text = (PROJECT / "spark-pipeline.yml").read_text()
    text = text.replace("file:///tmp/veilmq-declarative", (project / "storage").as_uri())
    (project / "spark-pipeline.yml").write_text(text.replace("/tmp/veilmq-events", str(exported)))


def table(project: Path, name: str) -> Any:
    return pq.read_table(project / "spark-warehouse" / name)


def test_the_example_makes_the_tables_of_the_jobs(exported: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec(project, exported)
    code, said = run(project)
    assert code == 0, said[-3_000:]
    names = ("events", "attempts", "lease_histogram", "survival", "timeouts", "health")
    rows = {name: table(project, name) for name in names}
    assert rows["events"].num_rows == ParquetHistory(str(exported)).bounds().following
    found = {row["type"]: row["first_lease_s"] for row in rows["timeouts"].to_pylist()}
    assert found.keys() == {"icon", "video"}
    assert 0 < found["icon"] < found["video"]
    medians = {row["type"]: row["p50_s"] for row in rows["survival"].to_pylist()}
    assert medians == {"icon": pytest.approx(3, rel=0.15), "video": pytest.approx(200, rel=0.15)}
    assert sum(rows["health"].column("received").to_pylist()) == rows["attempts"].num_rows


def test_with_a_python_source_the_tables_are_written_and_the_run_fails(exported: Path, tmp_path: Path) -> None:
    """Why the example reads Parquet. Should this fail with a later Spark, the example can use `veilmq-events`."""
    project = tmp_path / "project"
    transformations = project / "transformations"
    transformations.mkdir(parents=True)
    spec(project, exported)
    (transformations / "bronze.py").write_text(WITH_A_SOURCE.format(path=str(exported)))
    code, said = run(project)
    assert table(project, "events").num_rows == ParquetHistory(str(exported)).bounds().following
    assert code == 1, said[-3_000:]
    assert re.search("Traceback|Exception|Error", said)
