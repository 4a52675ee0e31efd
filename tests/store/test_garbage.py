"""Queues that clients create, fill and delete again and again: the sweeper keeps up, in bounded steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import AnyCommand, CreateQueue, DeleteQueue, Receive, Sweep
from veilmq.model.instant import HOUR_US
from veilmq.model.outcomes import Swept
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite import upkeep
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each

CLIENTS = 40
STEPS = 32


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data", SMALL))
    yield stage
    stage.store.close()


def count(stage: Stage, table: str) -> int:
    return int(store_of(stage)._writer.connection.execute(f"SELECT count(*) FROM {table}").get)


def life(key: QueueKey, step: int, messages: int) -> list[AnyCommand]:
    """What the client of a queue asks for in a round: a queue, messages, one leased, no queue."""
    match step % 4:
        case 0:
            return [CreateQueue(queue=key, origin=TESTER)]
        case 1:
            return [sending(key) for _ in range(messages)]
        case 2:
            return [Receive(queue=key, origin=TESTER, count_max=1)]
        case _:
            return [DeleteQueue(queue=key, origin=TESTER)]


@for_each("messages", [1, 10], fresh="stage")
def test_churn_does_not_outrun_the_sweeper(stage: Stage, messages: int) -> None:
    keys = [QueueKey(ACCOUNT, REGION, f"queue-{number}") for number in range(CLIENTS)]
    most = 0
    for step in range(80):
        commands = [each for number, key in enumerate(keys) for each in life(key, step + number, messages)]
        stage.batch([command for command in commands if not isinstance(command, DeleteQueue)])
        deletes = [command for command in commands if isinstance(command, DeleteQueue)]
        stage.batch([*deletes, Sweep()])  # the sweep comes first: it finds what the rounds before have left
        most = max(most, count(stage, "garbage"))
    assert most <= 4 * CLIENTS
    stage.sweep()
    assert count(stage, "garbage") == 0
    assert count(stage, "lease") <= count(stage, "message") <= CLIENTS * messages
    stage.store.close()
    assert check(store_of(stage).directory.database).problems == []
    stage.open()


def test_a_step_deletes_a_bounded_number_of_rows(stage: Stage) -> None:
    for number in range(100):
        key = stage.create(f"queue-{number}")
        stage.batch([sending(key) for _ in range(20)])
        stage.drop(key)
    left = count(stage, "message")
    assert left == 2_000
    while left:
        outcome = stage.do(Sweep(steps_max=STEPS))
        assert isinstance(outcome, Swept)
        now_left = count(stage, "message")
        assert 0 < left - now_left <= STEPS * upkeep.SHARES_MAX
        left = now_left


def test_what_has_expired_goes_beside_garbage_without_end(stage: Stage) -> None:
    kept = stage.create("kept", retention_us=HOUR_US)
    stage.send(kept)
    for number in range(50):
        key = stage.create(f"queue-{number}")
        stage.batch([sending(key) for _ in range(40)])
        stage.drop(key)
    stage.later(2 * HOUR_US)
    stage.do(Sweep(steps_max=STEPS))
    assert count(stage, "garbage") > 0
    assert stage.counts(kept) == (0, 0, 0)
