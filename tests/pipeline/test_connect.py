"""Spark Connect: the commands with `--remote`, against a server that is killed under them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.pipeline import cluster_stage
from tests.pipeline.cluster_stage import Process, command
from tests.pipeline.drain_stage import Stage, left, send

from veilmq.pipeline.errors import Unready
from veilmq.pipeline.session import session
from veilmq.testing.local import VEILMQ

SHOWN = """
import sys
from veilmq.pipeline.session import session

spark = session(remote=sys.argv[1])
print(spark.conf.get("spark.sql.session.timeZone"), spark.conf.get("spark.sql.python.filterPushdown.enabled"))
"""
"""A session's settings where the server says something, and where it says nothing."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Process]]:
    """What a test started."""
    started: list[Process] = []
    try:
        yield started
    finally:
        for each in started:
            each.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("spark-processes")
def test_archive_and_replay_over_spark_connect_whose_server_is_killed(stage: Stage, servers: list[Process]) -> None:
    sent = [f"body {number}" for number in range(2_000)]
    kept = stage.directory / "kept"
    archive = ["pipeline", "archive", "--queue", stage.url(), "--out", kept, "--format", "delta"]
    with stage.make(timeout=5) as queue:
        send(queue, sent)
        server, remote = cluster_stage.connect_server(stage.directory, "first")
        servers.append(server)
        client = Process(stage.directory, "client", *VEILMQ, *archive, "--remote", remote)
        servers.append(client)
        # Received and written down, and nothing more of it can have happened yet.
        while not list(kept.glob("drain/manifests/*.arrow")):
            assert client.is_running, client.tail()
            time.sleep(0.01)
        server.kill()
        client.kill()
        assert left(queue) == 2_000
        server, remote = cluster_stage.connect_server(stage.directory, "second")
        servers.append(server)
        code, out, err = command(stage.directory, *archive, "--remote", remote, "--json")
        assert code == 0, err
        assert left(queue) == 0
    table = DeltaTable(str(kept / "messages")).to_pyarrow_table()
    assert sorted(table["body"].to_pylist()) == sorted(sent)

    again = stage.name + "-again.fifo"
    replay = ["pipeline", "replay", kept / "messages", "--queue", stage.url(name=again), "--where", "position < 100"]
    with stage.make(again, fifo=True) as queue:
        code, _, err = command(stage.directory, *replay[:-1], "nosuch < 1", SPARK_REMOTE=remote)
        assert (code, "Traceback" in err) == (2, False), err
        assert "where='nosuch < 1' cannot be: [UNRESOLVED_COLUMN" in err
        code, out, err = command(stage.directory, *replay, SPARK_REMOTE=remote)
        assert (code, out) == (0, "sent 100 messages\n"), err
        assert left(queue) == 100
    said = subprocess.run([sys.executable, "-c", SHOWN, remote], capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines()[-1:] == ["Europe/Paris true"], said.stderr


def test_a_spark_connect_server_that_is_not_there_is_told_at_once() -> None:
    for remote, said in (("sc://127.0.0.1:1", "refused"), ("sc://h:x", "cannot be used"), ("http://h", "sc://HOST")):
        with pytest.raises(Unready, match=said):
            session(remote=remote)
