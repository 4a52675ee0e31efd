"""What is kept of operators' commands has bounds: how many, and how many bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.contract.operators import done, operating
from tests.support.contract.stage import Stage, sending
from tests.support.sqlite import SqliteFactory

from veilmq.store.sqlite.upkeep import operators


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()


def kept(stage: Stage) -> list[str]:
    with stage.store.readers.lend() as connection:  # type: ignore[attr-defined] # the SQLite store's own
        return [found for (found,) in connection.execute("SELECT id FROM operator_command ORDER BY number")]


def test_the_oldest_commands_go_beyond_their_number(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "COMMANDS_MAX", 3)
    queue = stage.create()
    for number in range(5):
        done(stage, operating(sending(queue), id=str(number)))
    assert kept(stage) == ["2", "3", "4"]


def test_the_oldest_outcomes_go_beyond_their_bytes_but_never_the_newest(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "OUTCOMES_BYTES_MAX", 1_000)
    queue = stage.create()
    for number in range(20):
        done(stage, operating(sending(queue), id=str(number)))
    ids = kept(stage)
    assert 1 < len(ids) < 20
    assert ids[-1] == "19"
    done(stage, operating(*[sending(queue)] * 100, id="long"))
    assert kept(stage) == ["long"]
    assert done(stage, operating(*[sending(queue)] * 100, id="long")).repeated
