"""The check of each commit against the table of states can fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import transitions
from tests.support.contract.stage import Stage
from tests.support.sqlite import store_of
from tests.support.transitions import SteppingFactory

from veilmq.model.instant import HOUR_US
from veilmq.model.messages.states import State


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SteppingFactory(tmp_path / "data"))
    yield playing
    playing.store.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("UPDATE lease SET hidden = 0", "was in flight by its events, and is returned"),
        ("UPDATE lease SET attempt = 0, first = NULL", "was in flight by its events, and is delayed"),
        ("UPDATE lease SET attempt = 2", "by its events, and it is"),
        ("UPDATE lease SET rotation = 1", "by its events, and it is"),
        ("DELETE FROM message; DELETE FROM lease", "by its events, and is gone"),
        ("DELETE FROM lease; UPDATE message SET in_line = 0", "is in none of the places"),
        ("INSERT INTO quarantine SELECT sequence, generation, 0 FROM message", "is in none of the places"),
    ],
)
def test_a_step_without_an_event_is_found(stage: Stage, change: str, told: str) -> None:
    queue = stage.create()
    stage.send(queue)
    stage.take(queue, lease_us=HOUR_US)
    stage.sweep()
    store_of(stage)._writer.connection.execute(change)
    with pytest.raises(AssertionError, match=told):
        stage.create("other")


def test_a_message_without_an_event_is_found(stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue)
    stage.sweep()
    columns = "generation, line, in_line, priority, id, sent, sender, md5, body"
    copy = f"INSERT INTO message (sequence, {columns}) SELECT 77, {columns} FROM message"
    store_of(stage)._writer.connection.execute(copy)
    with pytest.raises(AssertionError, match=r"no event tells of messages \[77\]"):
        stage.create("other")


def test_a_step_that_the_table_does_not_have_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = stage.create()
    stage.send(queue)
    monkeypatch.delitem(transitions._STEPS, (State.READY, "receive"))
    with pytest.raises(AssertionError, match="no step 'receive' from ready"):
        stage.take(queue)
