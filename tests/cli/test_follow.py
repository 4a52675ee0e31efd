"""`veilmq events --follow`: real servers that come, go, and come back, and one that is no longer the same."""

import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from tests.cli.conftest import INTERRUPTIBLE, WAIT_S, Serve, Server
from tests.support.commands import bare

from veilmq.store.sqlite.disk import connect


class Follower:
    """One `veilmq events --follow --json`; its events and what it says arrive as they are written."""

    def __init__(self, *arguments: str) -> None:
        self.events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.said: SimpleQueue[str] = SimpleQueue()
        self.process = subprocess.Popen(
            [*INTERRUPTIBLE, "events", "--follow", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=bare(),
        )
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        self._readers = [
            threading.Thread(target=lambda: [self.events.put(json.loads(line)) for line in out], daemon=True),
            threading.Thread(target=lambda: [self.said.put(line) for line in err], daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def until_sent(self, body_bytes: int) -> list[dict[str, Any]]:
        """The events up to the send of a body of that size."""
        found: list[dict[str, Any]] = []
        while not found or (found[-1]["kind"], found[-1]["body_bytes"]) != ("sent", body_bytes):
            try:
                found.append(self.events.get(timeout=WAIT_S))
            except Empty:
                raise AssertionError(f"no such event in {found}; {self.told()}") from None
        return found

    def waits(self) -> str:
        return self.said.get(timeout=WAIT_S)

    def told(self) -> list[str]:
        return [self.said.get() for _ in range(self.said.qsize())]

    def ended(self) -> int:
        code = self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        with self.process:  # closes its pipes
            return code


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    started: list[Follower] = []

    def start(*arguments: str) -> Follower:
        started.append(Follower(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.ended()


def send(server: Server, size: int) -> None:
    sqs = server.sqs()
    sqs.send_message(QueueUrl=sqs.create_queue(QueueName="orders")["QueueUrl"], MessageBody="x" * size)


def offsets(events: list[dict[str, Any]]) -> list[int]:
    return [event["offset"] for event in events]


@pytest.mark.slow
def test_it_goes_on_after_restarts_without_loss_or_repetition(serve: Serve, follow: Follow, tmp_path: Path) -> None:
    """Ports change from start to start: the directory tells the new ones."""
    server = serve().ready()
    send(server, 1)
    follower = follow("--data", str(tmp_path / "data"))
    seen = follower.until_sent(1)
    server.stop()
    assert "waiting for it, to go on from offset" in follower.waits()
    server = serve().ready()
    send(server, 2)
    seen += follower.until_sent(2)
    assert "continuing from offset" in follower.waits()
    send(server, 3)
    server.process.kill()
    server = serve().ready()
    send(server, 4)
    seen += follower.until_sent(4)
    assert offsets(seen) == list(range(len(seen)))
    assert sum(event["kind"] == "sent" for event in seen) == 4
    follower.process.send_signal(signal.SIGINT)
    assert follower.ended() == 0


def test_a_server_that_is_not_there_at_the_start_is_not_waited_for(
    serve: Serve, follow: Follow, tmp_path: Path
) -> None:
    nobody = follow("--admin", "127.0.0.1:1")
    assert nobody.ended() == 4
    assert "no server answers on 127.0.0.1:1" in nobody.waits()
    serve().ready().stop()
    # Straight on the directory it would hold it, so that no server could ever start there.
    alone = follow("--data", str(tmp_path / "data"))
    assert alone.ended() == 4
    assert f"no server runs on {tmp_path / 'data'}" in alone.waits()


@pytest.mark.slow
def test_another_token_is_no_matter_of_waiting(serve: Serve, follow: Follow, tmp_path: Path) -> None:
    server = serve().ready()
    send(server, 1)
    mine = tmp_path / "token"
    shutil.copy(tmp_path / "data" / "admin-token", mine)
    follower = follow("--data", str(tmp_path / "data"), "--token-file", str(mine))
    follower.until_sent(1)
    server.stop()
    assert "waiting" in follower.waits()
    (tmp_path / "data" / "admin-token").unlink()
    serve().ready()
    assert follower.ended() == 2
    assert "--token-file FILE" in "".join(follower.told())


@pytest.mark.slow
def test_a_token_made_anew_is_read(serve: Serve, follow: Follow, tmp_path: Path) -> None:
    server = serve().ready()
    send(server, 1)
    follower = follow("--data", str(tmp_path / "data"))
    follower.until_sent(1)
    server.stop()
    (tmp_path / "data" / "admin-token").unlink()
    send(serve().ready(), 2)
    follower.until_sent(2)


@pytest.mark.slow
def test_a_trimmed_offset_is_no_matter_of_waiting(serve: Serve, follow: Follow, tmp_path: Path) -> None:
    server = serve().ready()
    send(server, 1)
    follower = follow("--data", str(tmp_path / "data"))
    follower.until_sent(1)
    follower.process.send_signal(signal.SIGSTOP)
    server.stop()
    database = connect(tmp_path / "data" / "veilmq.db")
    database.execute("UPDATE mark SET offset = offset + 1000; UPDATE history SET offset = offset + 1000")
    database.close()
    serve().ready()
    follower.process.send_signal(signal.SIGCONT)
    assert follower.ended() == 1
    assert "--from first" in "".join(follower.told())


@pytest.mark.slow
def test_a_restored_backup_is_another_history(
    serve: Serve, follow: Follow, veilmq: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    """Its offsets go on from those of the copy: an offset alone would not tell."""
    data = tmp_path / "data"
    server = serve().ready()
    send(server, 1)
    follower = follow("--data", str(data))
    follower.until_sent(1)
    assert veilmq("backup", str(tmp_path / "copy"), "--data", str(data)).returncode == 0
    server.stop()
    assert "waiting" in follower.waits()
    restored = serve(data=tmp_path / "copy").ready()
    send(restored, 2)
    restored.stop()
    for each in data.iterdir():
        each.unlink()
    for each in (tmp_path / "copy").iterdir():
        shutil.copy(each, data / each.name)
    serve().ready()
    assert follower.ended() == 1
    assert "another history" in "".join(follower.told())
