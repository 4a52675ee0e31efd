"""Power cuts: whatever the disk made of the unsynced writes, what was acknowledged is there.

Strategy: after each commit of a random workload, and amid each batch, directories are built as a cut at that instant
could leave them, opened on the ordinary file layer, and held against the log.
"""

import shutil
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.support.acknowledged import Workload
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER, Stage, bodies, expect
from tests.support.faults import FaultDisk
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import CreateQueue
from veilmq.model.errors import StoreUnknown
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Deleted
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Options
from veilmq.store.directory import DatabaseUnusable, NotOurs
from veilmq.store.sqlite.disk.redo import Redo
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")
FIFO_QUEUE = QueueKey("000000000000", "us-east-1", "jobs.fifo")


def losses_after_cuts(
    disk: FaultDisk,
    options: Options,
    path: Path,
    seed: int,
    batches: int,
    body_bytes: int = 40,
    queue: QueueKey = QUEUE,
) -> list[str]:
    """Run a workload with a cut at each commit and amid each batch; everything that was lost."""
    found: list[str] = []
    store = SqliteStore(path / "data", options)
    now = EPOCH
    change = {"fifo": True, "delay_us": SECOND_US} if queue is FIFO_QUEUE else {}
    store.apply([CreateQueue(queue=queue, origin=TESTER, change=change)], now)
    store.commit()
    work = Workload(queue, seed, body_bytes)

    def cut(number: int) -> None:
        left = path / "left"
        disk.power_cut(path / "data", left, seed * 1_000 + number)
        found.extend(after_reopening(left, work, now))
        shutil.rmtree(left)

    for number in range(batches):
        now = Instant(now + (number % 7) * SECOND_US)
        commands = work.batch(now)
        applied = store.apply(commands, now)
        if number % 3 == 0:
            cut(2 * number)
        if applied.wrote:
            store.commit()
        work.acknowledge(commands, applied.outcomes)
        if number % 4 == 2:
            store.apply_log()  # as somebody does who reads: in no synced transaction
        cut(2 * number + 1)
    store.close()
    cut(2 * batches)
    return found


def after_reopening(left: Path, work: Workload, now: Instant) -> list[str]:
    """What the store that opens on these files has lost."""
    try:
        store = SqliteStore(left, SMALL)
    except (apsw.Error, DatabaseUnusable, NotOurs) as error:
        return [f"everything is lost: {error}"]
    try:
        found = [f"{problem.kind}: {problem.text}" for problem in check(left / "veilmq.db").problems]
        # SQLite may run for ever on pages of different moments, so nothing is asked of a damaged database.
        return found or work.log.losses(store, work.queue, now)
    except StoreUnknown as error:
        return [f"everything is lost: {error}"]
    finally:
        store.close()


@pytest.mark.parametrize("queue", [QUEUE, FIFO_QUEUE], ids=["standard", "fifo"])
@for_each("seed", range(6))
def test_nothing_acknowledged_is_lost(
    disk: FaultDisk, options: Options, tmp_path: Path, seed: int, queue: QueueKey
) -> None:
    (place := tmp_path / str(seed)).mkdir()
    assert losses_after_cuts(disk, options, place, seed, batches=25, queue=queue) == []


def test_nothing_acknowledged_is_lost_across_checkpoints(disk: FaultDisk, options: Options, tmp_path: Path) -> None:
    assert losses_after_cuts(disk, options, tmp_path, 77, batches=40, body_bytes=20_000) == []
    assert disk.calls["xSync"] > 45, "the checkpoints sync too"


@for_each("seed", range(8))
def test_what_readers_apply_is_kept_until_it_is_synced(
    disk: FaultDisk, options: Options, tmp_path: Path, seed: int
) -> None:
    (place := tmp_path / str(seed)).mkdir()
    stage = Stage(SqliteFactory(place / "data", options))
    queue = stage.create()
    for number in range(12):
        stage.send(queue, str(number))
        store_of(stage).apply_log()
        left = place / f"left-{number}"
        disk.power_cut(place / "data", left, seed * 100 + number)
        found = Stage(SqliteFactory(left))
        assert bodies(found.receive(queue, 100)) == [str(each) for each in range(number + 1)]
        found.store.close()
    stage.store.close()


@for_each("seed", range(8))
def test_what_was_settled_before_a_kill_is_kept_over_a_power_cut(
    disk: FaultDisk, options: Options, tmp_path: Path, seed: int
) -> None:
    (place := tmp_path / str(seed)).mkdir()
    stage = Stage(SqliteFactory(place / "data", options))
    queue = stage.create()
    stage.send(queue, "dies unflushed")
    expect(stage.delete(queue, stage.take(queue).handle), Deleted)
    store_of(stage).apply_log()
    store_of(stage)._broken = "killed"
    stage.reopen()
    stage.send(queue, "next")
    disk.power_cut(place / "data", place / "left", seed)
    found = SqliteStore(place / "left", SMALL)
    assert found._writer.mark.offset == store_of(stage)._writer.mark.offset
    assert check(place / "left" / "veilmq.db").problems == []
    found.close()
    stage.store.close()


@for_each("seed", range(8))
def test_what_was_settled_before_a_kill_is_synced_before_the_log_begins_anew(
    disk: FaultDisk, options: Options, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut comes amid the start, when there is a new file; and nothing else in that start was to be synced."""
    (place := tmp_path / str(seed)).mkdir()
    stage = Stage(SqliteFactory(place / "data", options))
    queue = stage.create()
    stage.send(queue, "dies unflushed")
    expect(stage.delete(queue, stage.take(queue).handle), Deleted)
    store_of(stage).apply_log()
    store_of(stage)._broken = "killed"
    opened = Redo.open

    def opened_and_cut(redo: Redo, room_bytes: int, connection: apsw.Connection) -> None:
        opened(redo, room_bytes, connection)
        disk.power_cut(place / "data", place / "left", seed)

    with monkeypatch.context() as patched:
        patched.setattr(Redo, "open", opened_and_cut)
        stage.reopen()
    found = SqliteStore(place / "left", SMALL)
    assert found._writer.mark.offset == store_of(stage)._writer.mark.offset
    assert check(place / "left" / "veilmq.db").problems == []
    found.close()
    stage.store.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@for_each("seed", range(100, 120))
def test_nothing_acknowledged_is_lost_at_many_seeds(
    disk: FaultDisk, options: Options, tmp_path: Path, seed: int
) -> None:
    body_bytes, queue = 4_000 if seed % 2 else 40, FIFO_QUEUE if seed % 4 > 1 else QUEUE
    (place := tmp_path / str(seed)).mkdir()
    assert losses_after_cuts(disk, options, place, seed, batches=40, body_bytes=body_bytes, queue=queue) == []


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
def test_the_check_finds_what_a_store_without_fsync_loses(
    disk: FaultDisk, options: Options, tmp_path: Path, synchronous: str
) -> None:
    careless = msgspec.structs.replace(options, synchronous=synchronous)
    found = losses_after_cuts(disk, careless, tmp_path, 1, batches=25)
    assert any("lost" in loss for loss in found)
