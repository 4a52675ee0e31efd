"""What is being read of a full history is not trimmed, within bounds."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from veilmq.model.commands import Sweep
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import SECOND_US
from veilmq.model.queue import QueueKey
from veilmq.store.sqlite import holds
from veilmq.store.sqlite.holds import Holds
from veilmq.testing.contract.stage import Stage
from veilmq.testing.sqlite import SMALL, SqliteFactory, store_of

BYTES_MAX = 20_000


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
    queue, store = QueueKey("000000000000", "us-east-1", "jobs"), store_of(stage)
    end = store._writer.history_bytes + size
    while store._writer.history_bytes < end:
        stage.send(queue, "x")
        stage.delete(queue, stage.take(queue).handle)
    for _ in range(20):
        stage.do(Sweep())


def first_of(stage: Stage) -> int:
    try:
        stage.events()
    except HistoryTrimmed as trimmed:
        return trimmed.first_offset
    return 0


def test_what_is_held_stays_until_its_time_is_over(stage: Stage) -> None:
    first, reader = first_of(stage), object()
    grow(stage, 1_000)
    assert first_of(stage) > first, "it is trimmed all the time"
    first = first_of(stage)
    store_of(stage).holds.keep(reader, first, stage.now + 10 * SECOND_US)
    grow(stage, 5_000)
    assert first_of(stage) == first
    stage.later(10 * SECOND_US - 1)
    grow(stage, 100)
    assert first_of(stage) == first
    stage.later(1)
    grow(stage, 100)
    assert first_of(stage) > first


def test_a_reader_that_goes_on_holds_what_is_left_to_it(stage: Stage) -> None:
    reader, keep = object(), store_of(stage).holds.keep
    first = first_of(stage)
    keep(reader, first, stage.now + SECOND_US)
    keep(reader, first + 50, stage.now + SECOND_US)
    grow(stage, 5_000)
    assert first < first_of(stage) <= first + 50
    assert stage.events(first + 50)[0].offset == first + 50
    store_of(stage).holds.release(reader)
    grow(stage, 1_000)
    assert first_of(stage) > first + 50


def test_the_history_grows_by_no_more_than_half(stage: Stage) -> None:
    first = first_of(stage)
    store_of(stage).holds.keep(object(), 0, stage.now + 600 * SECOND_US)
    for _ in range(8):
        grow(stage, 1_000)
    assert first_of(stage) == first
    for _ in range(20):
        grow(stage, 1_000)
    assert first_of(stage) > first
    (kept,) = store_of(stage)._writer.read_one("SELECT sum(length(events)) FROM history", ()) or (0,)
    assert BYTES_MAX < kept <= BYTES_MAX * 3 // 2 + 1_000


def test_nothing_is_held_on_a_low_disk(stage: Stage) -> None:
    first, store = first_of(stage), store_of(stage)
    store.holds.keep(object(), 0, stage.now + 600 * SECOND_US)
    grow(stage, 1_000)
    assert first_of(stage) == first
    store.directory.free_bytes = lambda: -1  # type: ignore[method-assign] # a disk that is full of something else
    stage.later(SECOND_US)
    for _ in range(20):
        stage.do(Sweep())
    assert store.disk_low
    assert first_of(stage) > first


def test_there_is_a_most_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "HOLDS_MAX", 2)
    held = Holds()
    for offset, until in ((5, 10), (7, 30), (9, 20)):
        held.keep(object(), offset, until)
    assert held.first(0) == 7
    assert held.first(20) == 7
    assert held.first(30) is None
