"""The redo log where the disk fails, is full, or whoever settles is interrupted."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.store.redo_stages import killed, started, unapplied
from tests.support.contract.stage import TESTER, Stage, bodies, expect, sending
from tests.support.faults import FaultDisk, full, io_error
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import Peek
from veilmq.model.errors import DiskLow, StoreFailed, StoreUnknown
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted
from veilmq.store import MIB
from veilmq.store.directory import DatabaseUnusable, DataDirectory
from veilmq.store.sqlite.batch.memtable import BATCHES_MAX
from veilmq.store.sqlite.disk import redo
from veilmq.store.sqlite.disk.redo import file as redo_file
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each


@pytest.fixture
def faulty(disk: FaultDisk, tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, disk=disk)))
    yield playing
    playing.store.close()


def full_at(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many settlements find the disk full."""
    apply_log, left = redo.apply_log, iter(range(times))

    def strike(*given: Any) -> None:
        if next(left, None) is not None:
            raise full()
        apply_log(*given)

    monkeypatch.setattr(redo, "apply_log", strike)


def test_a_log_that_cannot_be_made_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patched:
        patched.setattr(redo_file, "_zeros", refuse)
        stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = started(stage)
    stage.send(queue)
    assert unapplied(stage) == 0
    assert not store_of(stage).directory.redo.exists()
    stage.store.close()


def test_the_log_leaves_room_and_comes_when_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SMALL.redo_bytes - 1
    monkeypatch.setattr(DataDirectory, "free_bytes", lambda directory: free)
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = started(stage)
    stage.send(queue)
    assert unapplied(stage) == 0
    assert not store_of(stage).directory.redo.exists()
    store_of(stage)._writer.refusal = DiskLow(free_bytes=0)
    free = SMALL.redo_bytes
    stage.later(2 * SECOND_US)
    stage.send(queue)
    stage.send(queue)
    assert unapplied(stage) == 2
    stage.store.close()


def test_on_a_low_disk_every_batch_is_a_transaction(stage: Stage) -> None:
    """What is in the log must fit into the database one day: nobody may say "deleted" of what will not."""
    queue = started(stage)
    handle = stage.send(queue) and stage.take(queue).handle
    store_of(stage).apply_log()
    store_of(stage)._writer.refusal = DiskLow(free_bytes=0)
    expect(stage.delete(queue, handle), Deleted)
    assert unapplied(stage) == 0


def test_a_full_disk_refuses_the_batch_and_keeps_the_rest(faulty: Stage, disk: FaultDisk) -> None:
    queue = started(faulty)
    faulty.send(queue, "before")
    disk.fail("xWrite", full, for_good=True)
    applied = store_of(faulty).apply([sending(queue, "refused")], faulty.now)
    assert applied.wrote
    with pytest.raises(StoreFailed):
        store_of(faulty).commit()
    disk.mend()
    assert bodies(faulty.receive(queue, 10)) == ["before"]


def test_a_sync_that_fails_ends_the_store(faulty: Stage, disk: FaultDisk) -> None:
    queue = started(faulty)
    store_of(faulty).apply([sending(queue, "nobody knows")], faulty.now)
    disk.fail("xSync", io_error)
    with pytest.raises(Exception, match="Input/output error"):
        store_of(faulty).commit()
    with pytest.raises(Exception, match="Input/output error"):
        store_of(faulty).apply([sending(queue)], faulty.now)


def test_a_full_disk_at_a_settlement_loses_nothing(faulty: Stage, disk: FaultDisk) -> None:
    queue = started(faulty)
    faulty.send(queue, "committed")
    disk.fail("xWrite", full, for_good=True)
    store_of(faulty)._writer.memtable.batches = BATCHES_MAX
    assert store_of(faulty).work_ahead()
    assert bodies(faulty.peek(queue, 10)) == [], "readers go on with what was settled"
    (outcome,) = faulty.batch([sending(queue, "delayed", delay_us=SECOND_US)]).outcomes
    assert isinstance(outcome, DiskLow)
    disk.mend()
    assert bodies(faulty.peek(queue, 10)) == ["committed"]
    assert bodies(faulty.receive(queue, 10)) == ["committed"]


def test_an_io_error_at_a_settlement_ends_the_store(faulty: Stage, disk: FaultDisk) -> None:
    """Whether the store meets it between two batches, or a reader."""
    queue = started(faulty)
    faulty.send(queue, "committed")
    disk.fail("xWrite", io_error)
    store_of(faulty)._writer.memtable.batches = BATCHES_MAX
    assert store_of(faulty).work_ahead()
    with pytest.raises(StoreUnknown):
        store_of(faulty).apply([sending(queue)], faulty.now)
    faulty.store.close()
    faulty.open()
    faulty.send(queue, "committed again")
    disk.fail("xWrite", io_error)
    with pytest.raises(StoreUnknown):
        store_of(faulty).query(Peek(queue=queue, origin=TESTER), faulty.now)
    with pytest.raises(StoreUnknown):
        store_of(faulty).apply([sending(queue)], faulty.now)
    faulty.store.close()
    faulty.open()
    assert bodies(faulty.receive(queue, 10)) == ["committed", "committed again"]


class Interrupted(Exception):
    """As a signal's handler raises it, anywhere."""


@for_each("statement", ["PRAGMA synchronous = 1", "BEGIN", "INSERT", "COMMIT", "PRAGMA synchronous = 2"], fresh="stage")
@for_each("when", ["before", "after"], fresh="stage")
def test_a_settlement_that_is_interrupted_is_made_again(stage: Stage, statement: str, when: str) -> None:
    queue = started(stage)
    stage.send(queue, "one")
    writer = store_of(stage)._writer
    execute, struck = writer._execute, list[str]()

    def strike(text: str, *given: Any) -> Any:
        strikes = text.startswith(statement) and not struck
        if strikes:
            struck.append(text)
            if when == "before":
                raise Interrupted
        result = execute(text, *given)
        if strikes:
            raise Interrupted
        return result

    writer._execute = strike
    with pytest.raises(Interrupted):
        store_of(stage).query(Peek(queue=queue, origin=TESTER), stage.now)
    writer._execute = execute
    assert bodies(stage.peek(queue)) == ["one"]
    stage.send(queue, "two")
    stage.send(queue, "delayed", delay_us=SECOND_US)
    assert writer.connection.pragma("synchronous") == 2
    assert bodies(stage.receive(queue, 10)) == ["one", "two"]
    assert check(store_of(stage).directory.database).problems == []


def test_a_store_that_failed_shows_nothing_old(faulty: Stage, disk: FaultDisk) -> None:
    queue = started(faulty)
    faulty.send(queue, "acknowledged")
    store_of(faulty).apply([sending(queue)], faulty.now)
    disk.fail("xSync", io_error)
    with pytest.raises(StoreUnknown):
        store_of(faulty).commit()
    with pytest.raises(StoreUnknown):
        store_of(faulty).query(Peek(queue=queue, origin=TESTER), faulty.now)


def test_a_store_that_failed_closes_while_somebody_reads(faulty: Stage, disk: FaultDisk) -> None:
    queue = started(faulty)
    faulty.send(queue, "acknowledged")
    begun, goes_on = threading.Event(), threading.Event()
    store = store_of(faulty)
    execute = store._writer._execute

    def slow(text: str, *given: Any) -> Any:
        if text == "COMMIT":
            begun.set()
            goes_on.wait(5)
        return execute(text, *given)

    store._writer._execute = slow
    reader = threading.Thread(target=store.apply_log)
    reader.start()
    assert begun.wait(5)
    store._broken = "a checkpoint failed"
    closing = threading.Thread(target=store.close)
    closing.start()
    goes_on.set()
    reader.join()
    closing.join()
    faulty.open()
    assert bodies(faulty.receive(queue, 10)) == ["acknowledged"]


def test_a_child_that_was_forked_amid_a_settlement_closes(stage: Stage) -> None:
    with store_of(stage)._writer._gate:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                stage.store.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_a_start_on_a_full_disk_takes_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, reserve_bytes=MIB)))
    queue = started(stage)
    stage.send(queue, "committed")
    killed(stage)
    full_at(1, monkeypatch)
    stage.open()
    assert store_of(stage).disk_low
    assert bodies(stage.receive(queue, 10)) == ["committed"]
    stage.store.close()


def test_a_start_on_a_full_disk_without_a_reserve_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = started(stage)
    stage.send(queue, "committed")
    killed(stage)
    full_at(1, monkeypatch)
    with pytest.raises(DatabaseUnusable, match="free space"):
        stage.factory.open()
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["committed"]
