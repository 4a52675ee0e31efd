"""Spark's own processes: a standalone cluster, a Spark Connect server, `spark-submit`, each with its log in a file.

Strategy: a process is ready when its log says so, which also tells the port that the kernel gave it; it ends with its
whole process group.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyspark
from tests.support.java import QUICK, without_spark

from veilmq.pipeline.session import find_java
from veilmq.testing.local import VEILMQ

HOME = Path(pyspark.__file__).parent
ROOT = Path(__file__).parents[2]
_SECONDS = 120
_LOOK_SECONDS = 0.05


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Of a process that keeps its files in `directory`."""
    return without_spark() | {
        "JAVA_HOME": str(find_java(directory)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # What is killed leaves its files behind.
        "SPARK_LOCAL_DIRS": str(directory),
        "TMPDIR": str(directory),
        "PYSPARK_PYTHON": sys.executable,
        "TERM": "dumb",
    } | more  # fmt: skip


class Process:
    """One of them, in a group of its own."""

    def __init__(self, directory: Path, name: str, *command: object, **more: str) -> None:
        self.log = directory / f"log-{name}"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(each) for each in command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, cwd=directory, env=environment(directory, **more),
            )  # fmt: skip

    def said(self, pattern: str) -> str:
        """The group of the pattern, once the log has it. Raises RuntimeError with the log if that does not come."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            found = re.search(pattern, self.log.read_text(errors="replace"))
            if found:
                return found[1]
            time.sleep(_LOOK_SECONDS)
        raise RuntimeError(self.tail())

    @property
    def is_running(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def ended(self) -> int:
        """Its exit code, in the end."""
        return self._process.wait(_SECONDS * 2)

    def kill(self) -> None:
        """SIGKILL to all of the group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-4_000:]


def master(directory: Path) -> tuple[Process, str]:
    """A standalone cluster's master, and its URL."""
    kind = "org.apache.spark.deploy.master.Master"
    address = ["--host", "127.0.0.1", "--port", 0, "--webui-port", 0]
    process = Process(directory, "master", HOME / "bin" / "spark-class", kind, *address, SPARK_DAEMON_JAVA_OPTS=QUICK)
    return process, process.said(r"Starting Spark master at (spark://\S+)")


def worker(directory: Path, url: str) -> Process:
    """One with room for two executors."""
    kind = "org.apache.spark.deploy.worker.Worker"
    room = ["--host", "127.0.0.1", "--webui-port", 0, "--cores", 2, "--memory", "2g", "--work-dir", directory / "work"]
    process = Process(directory, "worker", HOME / "bin" / "spark-class", kind, *room, url, SPARK_DAEMON_JAVA_OPTS=QUICK)
    process.said(r"(Successfully registered) with master")
    return process


def connect_server(directory: Path, name: str) -> tuple[Process, str]:
    """A Spark Connect server on two threads, and its URL; what start-connect-server.sh starts, in the foreground."""
    settings = [
        "spark.ui.enabled=false", "spark.connect.grpc.binding.address=127.0.0.1", "spark.connect.grpc.binding.port=0",
        f"spark.local.dir={directory}", f"spark.sql.warehouse.dir={directory}/warehouse",
        "spark.sql.session.timeZone=Europe/Paris", "spark.sql.shuffle.partitions=2",
    ]  # fmt: skip
    process = Process(
        directory, name, HOME / "bin" / "spark-submit", "--master", "local[2]",
        *(part for each in settings for part in ("--conf", each)),
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--name", name, "spark-internal",
        SPARK_CONNECT_MODE="0",
    )  # fmt: skip
    return process, f"sc://127.0.0.1:{process.said(r'Spark Connect server started at: 127.0.0.1:([0-9]+)')}"


def wheel(directory: Path) -> Path:
    """The wheel, built, under the name that Spark ships Python code by."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (directory / "dist").glob("*.whl")
    return built.rename(directory / "veilmq.zip")


def command(directory: Path, *arguments: object, **more: str) -> tuple[int, str, str]:
    """One `veilmq` command to its end: exit code, stdout, stderr. In files: a JVM may outlive a pipe."""
    with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        done = subprocess.run(
            [*VEILMQ, *map(str, arguments)], stdout=out, stderr=err, timeout=300, cwd=directory,
            env=environment(directory, **more),
        )  # fmt: skip
    return done.returncode, (directory / "out").read_text(), (directory / "err").read_text()
