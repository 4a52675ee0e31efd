"""`veilmq clock accept`, through an admin port and straight on a directory."""

import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Serve
from tests.support.contract.stage import ACCOUNT, REGION, TESTER
from tests.support.sqlite import SMALL

from veilmq.cli import main
from veilmq.model.commands import CreateQueue
from veilmq.model.instant import DAY_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.server.clock import wall
from veilmq.store.sqlite.store import SqliteStore


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory that was written to ten days ago."""
    store = SqliteStore(tmp_path / "data", SMALL)
    store.apply([CreateQueue(queue=QueueKey(ACCOUNT, REGION, "jobs"), origin=TESTER)], Instant(wall() - 10 * DAY_US))
    store.commit()
    store.close()
    return tmp_path / "data"


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints; it must succeed."""
    monkeypatch.setattr(sys, "argv", ["veilmq", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


def test_a_step_is_accepted_on_a_directory(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said(monkeypatch, capsys, "queues", "list", "--data", str(data))  # a look accepts nothing
    assert said(monkeypatch, capsys, "clock", "accept", "--data", str(data)) == "accepted a step of 10 d\n"
    assert said(monkeypatch, capsys, "clock", "accept", "--data", str(data)) == "there was nothing to accept\n"


def test_a_server_is_asked(
    data: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve().ready()  # in development mode it has accepted the step by itself
    shown = said(monkeypatch, capsys, "clock", "accept", "--data", str(data), "--json")
    assert shown == '{"accepted_us":0,"held_us":0}\n'
    assert server.stop() == 0
    assert "s ahead of the data: accepted" in server.told()
