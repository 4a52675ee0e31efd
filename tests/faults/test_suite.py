"""The suite of faults in its short form, and against a server that loses its data."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.faults.suite.conductor import Record, conduct, temporary
from tests.faults.suite.kinds import KINDS
from tests.faults.suite.stage import Kind, Stage

SEED = 33
SECONDS = 5
SERVERS = 2
"""That are struck at the same time: most of a round is waiting for leases to end."""


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary() as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_kind_of_fault_once(place: Path) -> None:
    """What this machine cannot have (no root, no strace) is in the record, and is said by `make faults`."""
    kinds = [kind for kind in KINDS if not kind.is_long]

    def struck(number: int) -> Record:
        return conduct(place / str(number), SEED + number, 0, SECONDS, kinds[number::SERVERS], once=True)

    with ThreadPoolExecutor(SERVERS) as pool:
        records = list(pool.map(struck, range(SERVERS)))
    assert all(record.clean for record in records), [(record.stories, record.unexpected) for record in records]
    tallies = {name: tally for record in records for name, tally in record.kinds.items()}
    skipped = {name for record in records for name in record.skipped}
    assert tallies.keys() | skipped == {kind.name for kind in kinds}
    assert [name for name, tally in tallies.items() if not (tally.strikes and tally.operations)] == []
    assert sum(record.total.kills for record in records) > 10


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
