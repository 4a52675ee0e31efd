"""`veilmq serve --archive`, killed at random: what the archive gives has everything but the last seconds."""

from contextlib import closing
from pathlib import Path
from threading import Timer
from time import perf_counter

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tests.support.commands import Run, in_process
from tests.support.postgres import until
from tests.support.sqlite import SMALL

from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing import Random
from veilmq.testing.local import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVERY_S = 0.2
LAG_S = 3.0
"""So long before a kill everything is there, on a busy machine."""
KILLS = 6


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return in_process(monkeypatch, capsys, tmp_path)


def sqs(server: ServerProcess) -> "boto3.client":  # type: ignore[valid-type]
    keys = {"aws_access_key_id": "A", "aws_secret_access_key": "s"}
    once = Config(retries={"max_attempts": 0})
    return boto3.client("sqs", endpoint_url=server.sqs, region_name="us-east-1", config=once, **keys)


def bodies(directory: Path) -> set[str]:
    """Of all messages in a data directory."""
    SqliteStore(directory, SMALL).close()
    with closing(connect(directory / "veilmq.db")) as connection:
        return {str(body) for (body,) in connection.execute("SELECT CAST(body AS TEXT) FROM message")}


def test_a_kill_at_any_moment_leaves_what_is_older_than_some_seconds(run: Run, tmp_path: Path) -> None:
    choose = Random(35)
    place = tmp_path / "place"
    options = ("--archive", str(place), "--archive-every-s", str(EVERY_S))
    acknowledged: dict[str, float] = {}
    attempted = set()
    for number in range(KILLS):
        server = ServerProcess(tmp_path, *options).start()
        client = sqs(server)
        url = client.create_queue(QueueName="jobs")["QueueUrl"]
        Timer(0.5 + 4 * choose.random(), server.process.kill).start()
        try:
            while True:
                body = f"{number}-{len(acknowledged)}"
                attempted.add(body)
                client.send_message(QueueUrl=url, MessageBody=body)
                acknowledged[body] = perf_counter()
        except (BotoCoreError, ClientError):
            killed = perf_counter()
        server.process.wait()
        restored = tmp_path / f"restored {number}"
        ended = run("restore", str(restored), "--from", str(place))
        assert (ended.code, ended.err) == (0, "")
        found = bodies(restored)
        lacking = [body for body, at in acknowledged.items() if at < killed - LAG_S and body not in found]
        assert lacking == []
        assert found <= attempted
    assert len(acknowledged) > 100


def test_after_a_clean_stop_nothing_is_lacking(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "place"
    server = ServerProcess(tmp_path, "--archive", str(place)).start()
    client = sqs(server)
    url = client.create_queue(QueueName="jobs")["QueueUrl"]
    for number in range(20):
        client.send_message(QueueUrl=url, MessageBody=str(number))
    assert server.stop() == 0
    assert run("restore", "restored", "--from", str(place)).code == 0
    assert bodies(tmp_path / "restored") == set(map(str, range(20)))


def test_lag_is_shown_and_warned_of(tmp_path: Path) -> None:
    """While the place cannot be written."""
    place = tmp_path / "place"
    place.touch()
    server = ServerProcess(tmp_path, "--archive", str(place), "--archive-every-s", "0.1").start()
    sqs(server).create_queue(QueueName="jobs")

    def health() -> str:
        return str(httpx.get(f"{server.admin}/health/ready").json()["warnings"].get("archive", ""))

    until(lambda: "the archive lags by" in health())
    lag = next(
        line for line in httpx.get(f"{server.admin}/metrics").text.splitlines() if line.startswith("veilmq_archive_lag")
    )
    assert float(lag.split()[1]) > 0
    place.unlink()
    until(lambda: not health())
    server.kill()
