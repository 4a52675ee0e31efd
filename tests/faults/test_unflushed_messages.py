"""Unflushed messages on a disk that fails: memory says of them what the journal says, and nothing is lost."""

import shutil
from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies
from tests.support.faults import FaultDisk, full, io_error
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.commands import CreateQueue, Delete, Origin
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.outcomes import Deleted
from veilmq.model.settings.queue import QueueKey
from veilmq.store import MIB
from veilmq.store.directory import DatabaseUnusable


@pytest.fixture
def stage(disk: FaultDisk, tmp_path: Path) -> Stage:
    """The cache holds two pages: a batch writes before its commit."""
    return Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, disk=disk, cache_bytes=8 * 1024)))


@pytest.mark.parametrize("skip", range(6))
@pytest.mark.parametrize("kill", [False, True])
def test_a_disk_that_is_full_amid_a_delete(disk: FaultDisk, stage: Stage, skip: int, kill: bool) -> None:
    """The first use by a client writes a row, and that may find the disk full."""
    queue = stage.create()
    stage.send(queue, "precious")
    handle = stage.take(queue, lease_us=HOUR_US).handle
    disk.fail("xWrite", full, skip=skip, for_good=False)
    _, deleted = stage.batch(
        [
            CreateQueue(queue=QueueKey(ACCOUNT, REGION, "another"), origin=TESTER),
            Delete(queue=queue, origin=Origin("sqs", "tester", "new"), handle=handle, arrived=stage.now),
        ]
    ).outcomes
    disk.mend()
    left = [] if isinstance(deleted, Deleted) else ["precious"]
    assert stage.counts(queue) == (0, 0, len(left))
    if kill:
        stage.reopen(kill=True)
    stage.later(2 * HOUR_US)
    stage.sweep()
    assert bodies(stage.receive(queue, 10)) == left
    assert [event.kind for event in stage.events()].count("deleted") == (not left)
    stage.store.close()


@pytest.mark.parametrize("call", ["xSync", "xWrite"])
def test_an_io_error_of_the_last_flush_is_the_last_word(disk: FaultDisk, stage: Stage, call: str) -> None:
    queue = stage.create()
    stage.send(queue, "kept")
    disk.fail(call, io_error)
    stage.store.close()
    assert disk.struck
    assert disk.writes_after_failure == 0
    disk.mend()
    stage.store = stage.factory.open()
    assert bodies(stage.receive(queue)) == ["kept"]
    stage.store.close()


@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize("call", ["xSync", "xWrite"])
def test_a_start_with_an_io_error_fails(disk: FaultDisk, stage: Stage, call: str, skip: int) -> None:
    """Not even a flush that a start could do without: what the disk has is not known any more."""
    queue = stage.create()
    stage.send(queue, "kept")
    stage.factory.kill(stage.store)
    disk.fail(call, io_error, skip=skip)
    try:
        stage.store = stage.factory.open()
    except DatabaseUnusable:
        assert disk.writes_after_failure == 0
        disk.mend()
        stage.store = stage.factory.open()
    else:
        assert not disk.struck
        disk.mend()
    assert bodies(stage.receive(queue)) == ["kept"]
    stage.store.close()


@pytest.mark.parametrize(("reserve_bytes", "told"), [(MIB, "the reserve was freed"), (0, "there is no reserve")])
def test_a_start_on_a_full_disk_leaves_them_in_the_journal(
    disk: FaultDisk, tmp_path: Path, reserve_bytes: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = msgspec.structs.replace(SMALL, disk=disk, reserve_bytes=reserve_bytes)
    stage = Stage(SqliteFactory(tmp_path / "data", options))
    queue = stage.create()
    stage.send(queue, "kept")
    stage.factory.kill(stage.store)
    for skip in range(100):
        copied = shutil.copytree(tmp_path / "data", tmp_path / str(skip))
        disk.fail("xWrite", full, skip=skip, for_good=False)
        try:
            stage.store = SqliteFactory(copied, options).open()
        except DatabaseUnusable:  # full before anything was read, and nothing to free
            assert not reserve_bytes
            continue
        finally:
            struck = disk.struck
            disk.mend()
        assert bodies(stage.peek(queue)) == ["kept"]
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue)) == ["kept"]
        stage.store.close()
        if not struck:
            break
    else:
        raise AssertionError("the disk was always full")
    assert "stay in their journal" in caplog.text
    assert told in caplog.text
