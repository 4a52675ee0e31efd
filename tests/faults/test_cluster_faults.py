"""The suite of a cluster's faults in its short form, and against a cluster that loses its log."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.cluster.conductor import conduct
from tests.faults.cluster.kinds import KINDS, STANDARD
from tests.faults.cluster.stage import Fault, Stage
from tests.faults.suite.conductor import temporary

from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import init
from veilmq.engine.directory import STATE_FORMAT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("cluster")]
SEED = 35


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary() as directory:
        yield Path(directory)


def test_one_kill_of_each_kind(place: Path) -> None:
    """Of the owner, a follower, the standby, and the primary, whose standby is promoted."""
    kinds = [kind for kind in KINDS if kind.strike in STANDARD]
    record = conduct(place, SEED, kinds=kinds, once=True, whole=False, in_a_round=2)
    assert record.clean, [record.stories, record.unexpected]
    assert list(record.faults.values()) == [1] * len(STANDARD)
    assert record.acknowledged
    assert record.owners


def lose_everything(stage: Stage) -> None:
    """A cluster whose log and copies are gone."""
    stage.pause(2, 3)
    stage.kill(*stage.members)
    stage.databases.primary.query("drop schema veilmq cascade")
    init(Postgres(stage.databases.dsn), state_format=STATE_FORMAT)
    for each in stage.members:
        shutil.rmtree(each.data)


def test_a_cluster_that_loses_its_log_is_found_out(place: Path) -> None:
    record = conduct(place, SEED, kinds=[Fault("loss", lose_everything)], once=True, whole=False)
    assert record.violations > 0
    assert {each.split(": ")[1] for each in record.stories} >= {"veil-0", "sqs-1"}
