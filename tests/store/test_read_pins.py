"""What is being read of a full history is not trimmed, within bounds."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import Sweep
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.store import SqliteStore

BYTES_MAX = 20_000
JOBS = QueueKey("000000000000", "us-east-1", "jobs")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Its history is full, and begins behind offset 0."""
    options = msgspec.structs.replace(SMALL, history_bytes_max=BYTES_MAX)
    stage = Stage(SqliteFactory(tmp_path / "data", options))
    stage.create()
    while not first_of(stage):
        grow(stage, 2_000)
    yield stage
    stage.store.close()


def grow(stage: Stage, size: int) -> None:
    """Let the history take so many bytes more, and the sweeper do what it may."""
    store = store_of(stage)
    end = store._writer.history_bytes + size
    while store._writer.history_bytes < end:
        stage.send(JOBS, "x")
        stage.delete(JOBS, stage.take(JOBS).handle)
    for _ in range(20):
        stage.do(Sweep())


def first_of(stage: Stage) -> int:
    try:
        stage.events()
    except HistoryTrimmed as trimmed:
        return trimmed.first_offset
    return 0


def test_what_is_held_stays_until_its_time_is_over(stage: Stage) -> None:
    first = first_of(stage)
    grow(stage, 1_000)
    assert first_of(stage) > first, "it is trimmed all the time"
    first = first_of(stage)
    assert store_of(stage).pins.keep(first, 30) == first
    grow(stage, 5_000)
    assert first_of(stage) == first
    stage.later(30 * SECOND_US)
    grow(stage, 100)
    assert first_of(stage) == first
    stage.later(20 * SECOND_US)
    grow(stage, 100)
    assert first_of(stage) > first


def test_of_many_holds_the_least_offset_counts(stage: Stage) -> None:
    first, keep = first_of(stage), store_of(stage).pins.keep
    for offset, seconds in ((first + 50, 10), (first + 40, 600), (first + 60, 30), (first + 45, 600)):
        keep(offset, seconds)
    for number in range(2_000):
        keep(first + 100 + number, 1 + number % 600)
    grow(stage, 5_000)
    assert first < first_of(stage) <= first + 40
    assert stage.events(first + 40)[0].offset == first + 40
    stage.later(650 * SECOND_US)
    grow(stage, 1_000)
    assert first_of(stage) > first + 40


def test_the_history_grows_by_no_more_than_half(stage: Stage) -> None:
    first = first_of(stage)
    store_of(stage).pins.keep(0, 600)
    for _ in range(8):
        grow(stage, 1_000)
    assert first_of(stage) == first
    for _ in range(20):
        grow(stage, 1_000)
    assert first_of(stage) > first
    (kept,) = store_of(stage)._writer.read_one("SELECT sum(length(events)) FROM history", ()) or (0,)
    assert BYTES_MAX < kept <= BYTES_MAX * 3 // 2 + 1_000


def test_nothing_gets_older_than_ten_minutes_more(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, history_us_max=HOUR_US)))
    stage.create()
    for minutes in range(0, 120, 5):
        store_of(stage).pins.keep(0, 600)
        grow(stage, 1_000)
        assert (first_of(stage) == 0) is (minutes <= 70), minutes
        stage.later(5 * MINUTE_US)
    stage.store.close()


def test_nothing_is_held_on_a_low_disk(stage: Stage) -> None:
    first, store = first_of(stage), store_of(stage)
    store.pins.keep(0, 600)
    grow(stage, 1_000)
    assert first_of(stage) == first
    store.directory.free_bytes = lambda: -1  # type: ignore[method-assign] # a disk that is full of something else
    stage.later(SECOND_US)
    for _ in range(20):
        stage.do(Sweep())
    assert store.disk_low
    assert first_of(stage) > first


def trim_uncommitted(stage: Stage) -> tuple[SqliteStore, int]:
    """A batch that trims is applied: the store, and the first offset that is still seen."""
    store, seen = store_of(stage), first_of(stage)
    for _ in range(20):
        stage.send(JOBS, "x")
    store.apply([Sweep()], stage.now)
    return store, seen


def test_who_comes_between_a_trim_and_its_commit_is_told_what_is_left(stage: Stage) -> None:
    store, seen = trim_uncommitted(stage)
    left = store.pins.keep(0, 600)
    assert left > seen
    store.commit()
    assert first_of(stage) == left


def test_what_a_batch_that_is_rolled_back_trimmed_is_there(stage: Stage) -> None:
    store, seen = trim_uncommitted(stage)
    store._roll_back(RuntimeError())
    assert store.pins.keep(0, 0) <= seen
    assert first_of(stage) == seen
