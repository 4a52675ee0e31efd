"""The suite of faults in its short form, and against a server that loses its data."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.suite.conductor import conduct, temporary
from tests.faults.suite.kinds import KINDS
from tests.faults.suite.stage import Kind, Stage

SEED = 33
SECONDS = 5


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary() as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_kind_of_fault_once(place: Path) -> None:
    """What this machine cannot have (no root, no strace) is in the record, and is said by `make faults`."""
    kinds = [kind for kind in KINDS if not kind.is_long]
    record = conduct(place, SEED, 0, SECONDS, kinds, once=True)
    assert record.clean, [record.stories, record.unexpected]
    assert record.kinds.keys() | record.skipped.keys() == {kind.name for kind in kinds}
    assert [name for name, tally in record.kinds.items() if not (tally.strikes and tally.operations)] == []
    assert record.total.kills > 10


def lose_everything(stage: Stage) -> None:
    """A kill after which the directory is gone."""
    stage.server.start()
    stage.pause(2, 3)
    stage.kill()
    shutil.rmtree(stage.server.data)
    stage.server.start()
    stage.pause(SECONDS, SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_loses_its_data_is_found_out(place: Path) -> None:
    record = conduct(place, SEED, 0, SECONDS, [Kind("loss", lose_everything)], once=True)
    assert not record.clean
    assert record.total.violations > 0
    assert {each.split(": ")[1] for each in record.stories} >= {"veil-0", "sqs-1", "azure-3", "mns-4", "shared"}
