"""Statements stay compiled, however many rows a batch has, and they are few.

At each one apsw lets the interpreter go: with eight threads that burn the CPU it has it back after 40 ms.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apsw import SQLITE_TRACE_ROW, SQLITE_TRACE_STMT
from tests.support.contract.stage import TESTER, Stage, sending
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import Delete
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US
from veilmq.model.settings.queue import QueueKey

MESSAGES = 100
MANY = 240
"""No more than one step of a sweep looks at."""


def test_a_large_batch_compiles_nothing_anew(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = stage.create()

    def live() -> None:
        """The lives of many messages, in three batches."""
        stage.batch([sending(queue, "hello") for _ in range(MESSAGES)])
        messages = stage.receive(queue, MESSAGES)
        stage.batch([Delete(queue=queue, origin=TESTER, handle=each.handle, arrived=stage.now) for each in messages])

    for _ in range(3):
        live()
    before = stage.store._writer.connection.cache_stats()["misses"]  # type: ignore[attr-defined]
    live()
    assert stage.store._writer.connection.cache_stats()["misses"] == before  # type: ignore[attr-defined]
    stage.store.close()


def returned(stage: Stage, queue: QueueKey) -> None:
    stage.receive(queue, MANY, lease_us=SECOND_US)
    stage.sweep()
    stage.later(SECOND_US)


def dropped(stage: Stage, queue: QueueKey) -> None:
    stage.receive(queue, MANY // 2, lease_us=HOUR_US)
    stage.sweep()
    stage.purge(queue)


def dead(stage: Stage, queue: QueueKey) -> None:
    stage.receive(queue, MANY // 2, lease_us=SECOND_US)
    stage.sweep()
    stage.later(DAY_US)
    stage.sweep_once()


def unflushed(stage: Stage, queue: QueueKey) -> None:
    stage.receive(queue, MANY // 2, lease_us=HOUR_US)


@pytest.mark.parametrize("before", [returned, dropped, dead, unflushed])
def test_a_step_of_a_sweep_takes_few_turns(tmp_path: Path, before: Callable[[Stage, QueueKey], None]) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = stage.create(retention_us=DAY_US)
    stage.batch([sending(queue, "hello") for _ in range(MANY)])
    before(stage, queue)
    turns = 0

    def turn(_trace: object) -> None:
        nonlocal turns
        turns += 1

    connection: Any = stage.store._writer.connection  # type: ignore[attr-defined]
    connection.trace_v2(SQLITE_TRACE_STMT | SQLITE_TRACE_ROW, turn)
    steps = stage.sweep_once().steps
    connection.trace_v2(0, None)
    assert before is unflushed or steps >= 100
    assert turns <= 60
    stage.store.close()
