"""Failed writes, failed syncs, a full disk, a slow one."""

import threading
from pathlib import Path

import msgspec
import pytest
from tests.support.acknowledged import Workload
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER, Stage, bodies, refused, sending
from tests.support.faults import FaultDisk, full, io_error
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import CreateQueue, Delete, Peek
from veilmq.model.errors import DiskLow, StoreFailed, StoreUnknown
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Deleted, Received, Sent
from veilmq.model.settings.queue import QueueKey
from veilmq.store import MIB, Options
from veilmq.store.sqlite.store import SqliteStore

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")


@pytest.fixture
def stage(options: Options, tmp_path: Path) -> Stage:
    return Stage(SqliteFactory(tmp_path / "data", options))


@pytest.mark.parametrize("call", ["xSync", "xWrite"])
@pytest.mark.parametrize("skip", range(3))
def test_an_io_error_is_unknown_and_the_last_word(
    disk: FaultDisk, options: Options, tmp_path: Path, call: str, skip: int
) -> None:
    # A checkpoint that is under way when a commit fails may end its copying: none here.
    store = SqliteStore(tmp_path / "data", msgspec.structs.replace(options, checkpoint_bytes=MIB))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    work = Workload(QUEUE, skip, 3_000)
    disk.fail(call, io_error, skip=skip, for_good=False)
    now = EPOCH

    def run_on() -> None:
        nonlocal now
        for _ in range(50):
            now = Instant(now + SECOND_US)
            commands = work.batch(now)
            applied = store.apply(commands, now)
            if applied.wrote:
                store.commit()
            work.acknowledge(commands, applied.outcomes)

    with pytest.raises(StoreUnknown):
        run_on()
    with pytest.raises(StoreUnknown):
        store.apply([sending(QUEUE)], now)
    with pytest.raises(StoreUnknown):
        store.apply_each([sending(QUEUE)], now)
    store.close()
    assert disk.writes_after_failure == 0
    reopened = SqliteStore(tmp_path / "data", SMALL)
    assert work.log.losses(reopened, QUEUE, now) == []
    reopened.close()


def test_an_io_error_of_a_checkpoint_ends_it_too(disk: FaultDisk, options: Options, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "data", msgspec.structs.replace(options, checkpoint_bytes=16 * 1024))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    checkpoint = threading.Event()
    main = threading.current_thread()

    def syncing(path: str) -> None:
        if threading.current_thread() is not main:
            disk.fail("xSync", io_error)
            checkpoint.set()

    disk.syncing = syncing

    def run_on() -> None:
        for number in range(200):
            store.apply([sending(QUEUE, "x" * 4_000)], Instant(EPOCH + number))
            store.commit()

    with pytest.raises(StoreUnknown):
        run_on()
    assert checkpoint.is_set()
    with pytest.raises(StoreUnknown):
        store.apply([sending(QUEUE)], EPOCH)
    store.close()


def test_a_full_disk_rolls_back_and_everything_but_sending_goes_on(disk: FaultDisk, stage: Stage) -> None:
    queue = stage.create()
    for number in range(3):
        stage.send(queue, str(number))
    before = stage.describe(queue)
    disk.fail("xWrite", full)
    stage.store.apply([sending(queue, "too much")], stage.now)
    with pytest.raises(StoreFailed):
        stage.store.commit()
    assert stage.describe(queue) == before
    refused(stage.do(sending(queue)), DiskLow)
    refused(stage.do(CreateQueue(queue=QueueKey("000000000000", "r", "q"), origin=TESTER)), DiskLow)
    message = stage.take(queue)
    assert isinstance(stage.delete(queue, message.handle), Deleted)
    stage.later(2 * SECOND_US)
    stage.send(queue, "space again")
    stage.reopen()
    assert bodies(stage.receive(queue, 10)) == ["1", "2", "space again"]
    stage.store.close()


@pytest.mark.parametrize("skip", range(8))
def test_a_disk_that_is_full_amid_a_batch(disk: FaultDisk, stage: Stage, skip: int) -> None:
    queue = stage.create()
    stage.send(queue, "kept")
    message = stage.take(queue)
    disk.fail("xWrite", full, skip=skip)
    commands = [sending(queue, "x" * 100_000) for _ in range(4)]
    commands.append(Delete(queue=queue, origin=TESTER, handle=message.handle, arrived=stage.now))  # type: ignore[arg-type]
    applied = stage.store.apply(commands, stage.now)
    try:
        if applied.wrote:
            stage.store.commit()
        outcomes = applied.outcomes
    except StoreFailed:
        outcomes = stage.store.apply_each(commands, stage.now).outcomes
        assert {type(outcome) for outcome in outcomes[:4]} == {DiskLow}
    assert isinstance(outcomes[4], Deleted)
    sent = sum(isinstance(outcome, Sent) for outcome in outcomes)
    stage.reopen(kill=True)
    assert stage.counts(queue) == (sent, 0, 0)
    stage.store.close()


def test_a_checkpoint_that_finds_the_disk_full_fails_no_commit(
    disk: FaultDisk, options: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(tmp_path / "data", msgspec.structs.replace(options, checkpoint_bytes=16 * 1024))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    checkpointing = store.checkpointer._run

    def run_on_a_full_disk() -> None:
        disk.fail("xWrite", full)
        checkpointing()

    store.checkpointer._run = run_on_a_full_disk  # type: ignore[method-assign]
    for number in range(100):
        store.apply([sending(QUEUE, f"{number}-".ljust(4_000, "x"))], Instant(EPOCH + number))
        store.commit()
        bulk = store.checkpointer._bulk
        if bulk is not None:
            bulk.join()
        disk.mend()
    assert store.reader.queues[QUEUE].visible == 100
    # Every commit tried again, and the log has one line of it.
    assert sum("checkpoint: the disk is full" in each for each in caplog.messages) == 1
    store.close()
    reopened = SqliteStore(tmp_path / "data", SMALL)
    assert reopened.reader.queues[QUEUE].visible == 100
    reopened.close()


def test_a_slow_disk_holds_up_nobody_who_only_looks(disk: FaultDisk, stage: Stage) -> None:
    queue = stage.create()
    stage.send(queue, "committed")
    # The first look brings it into the database; SQLite may sync for that, where a checkpoint has emptied the WAL.
    assert bodies(stage.peek(queue)) == ["committed"]
    reached, go_on = threading.Event(), threading.Event()

    def syncing(path: str) -> None:
        reached.set()
        go_on.wait()

    disk.syncing = syncing
    stage.store.apply([sending(queue, "on its way")], stage.now)
    committing = threading.Thread(target=stage.store.commit)
    committing.start()
    reached.wait()
    seen = stage.store.query(Peek(queue=queue, origin=TESTER, count_max=10), stage.now)
    assert isinstance(seen, Received)
    assert bodies(seen.messages) == ["committed"]
    go_on.set()
    committing.join()
    assert bodies(stage.peek(queue)) == ["committed", "on its way"]
    stage.store.close()
