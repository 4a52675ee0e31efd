"""Snapshots as SQLite tells them: their size, a low disk, data that an earlier release trimmed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.contract.stage import Stage, expect, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import Sweep
from veilmq.model.errors import DiskLow
from veilmq.model.events import HistoryTrimmed
from veilmq.model.outcomes import Swept
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.upkeep import snapshots
from veilmq.testing.replaying import replay

MESSAGES = 5_000


def opened(tmp_path: Path, history_bytes_max: int) -> Stage:
    return Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, history_bytes_max=history_bytes_max)))


def left(stage: Stage) -> list[Any]:
    try:
        return stage.events()
    except HistoryTrimmed as trimmed:
        return stage.events(trimmed.first_offset)


def fill(stage: Stage, queue: QueueKey, count: int) -> None:
    for start in range(0, count, 500):
        stage.batch([sending(queue, "x" * 200) for _ in range(start, min(start + 500, count))])


def test_it_is_small_and_every_step_is(tmp_path: Path) -> None:
    stage = opened(tmp_path, 100_000)
    queue = stage.create()
    fill(stage, queue, MESSAGES)
    store = store_of(stage)
    before, steps, sizes = store._writer.history_bytes, 0, [0]
    while True:
        at = store._writer.history_bytes
        swept = expect(stage.do(Sweep(steps_max=256)), Swept)
        sizes.append(store._writer.history_bytes - at)
        steps += 1
        if not swept.unhurried:
            break
    assert steps == -(-(MESSAGES + snapshots.QUEUE_STEPS + 1) // 256)
    assert store._writer.history_bytes - before < 55 * MESSAGES
    assert max(sizes) < 55 * 256
    stage.store.close()


def test_a_snapshot_larger_than_the_bound_does_not_follow_on_itself(tmp_path: Path) -> None:
    stage = opened(tmp_path, 1_000)
    queue = stage.create()
    fill(stage, queue, 500)
    stage.sweep_snapshot()
    before = left(stage)[-1].offset
    for number in range(50):
        stage.send(queue, str(number))
        stage.sweep_snapshot()
    told = [event for event in left(stage) if event.offset > before and event.kind == "snapshot"]
    assert told == []
    stage.store.close()


def test_on_a_low_disk_the_bounds_come_first(tmp_path: Path) -> None:
    stage = opened(tmp_path, 2_000)
    queue = stage.create()
    fill(stage, queue, 40)
    stage.sweep_snapshot()
    message = stage.take(queue, lease_us=1_000_000)
    assert stage.sweep_once(1)
    store_of(stage)._writer.refusal = DiskLow(free_bytes=1)  # the clock stands still: nobody looks at the disk again
    for _ in range(100):
        stage.extend(queue, message.handle, 1_000_000)
    swept = [stage.sweep_once() for _ in range(5)]
    assert not any(each.unhurried for each in swept)
    with store_of(stage).readers.lend() as connection:
        assert snapshots.newest(connection) is None
        (size,) = connection.execute("SELECT sum(length(events)) FROM history").fetchone()
    assert size < 3_000
    store_of(stage)._writer.refusal = None
    stage.sweep_snapshot(steps_max=8)
    instant = stage.now
    assert replay(left(stage)).at(instant) == stage.state().at(instant)
    stage.store.close()


@pytest.mark.parametrize("kill", [False, True])
def test_data_that_was_trimmed_before_there_were_snapshots_gets_one(tmp_path: Path, kill: bool) -> None:
    stage = opened(tmp_path, 1 << 30)
    queue = stage.create()
    fill(stage, queue, 100)
    stage.send(queue)
    stage.store.close()
    connection = connect(tmp_path / "data" / "veilmq.db")
    connection.execute("DELETE FROM history WHERE offset < 50")
    connection.close()
    stage.store = stage.factory.open()
    assert stage.sweep_once(20).unhurried
    stage.reopen(kill=kill)
    first = left(stage)[0].offset
    stage.sweep_snapshot()
    instant = stage.now
    assert replay(left(stage)).at(instant) == stage.state().at(instant)
    assert left(stage)[0].offset == first
    stage.store.close()
