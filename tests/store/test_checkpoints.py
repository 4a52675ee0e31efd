"""Checkpoints: what a commit copies by itself is little, however much has gathered behind a long read."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import TESTER, Stage, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import PurgeQueue, Sweep
from veilmq.model.instant import SECOND_US
from veilmq.store import MIB
from veilmq.store.directory import DATABASE
from veilmq.store.sqlite import disk
from veilmq.store.sqlite.disk import Checkpointer

TEXT = "x" * 4_000


class Copied:
    """Pages that each checkpoint copied, by who ran it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.by_commits: list[int] = []
        self.by_threads: list[int] = []
        run = Checkpointer._run

        def noted(checkpointer: Checkpointer) -> None:
            before = checkpointer._copied
            run(checkpointer)
            after = checkpointer._copied
            alone = threading.current_thread().name == "veilmq-checkpoint"
            (self.by_threads if alone else self.by_commits).append(after - before if after >= before else after)

        patch.setattr(Checkpointer, "_run", noted)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A fresh stage; a checkpoint begins at some dozen pages."""
    options = msgspec.structs.replace(SMALL, checkpoint_bytes=256 * 1024)
    playing = Stage(SqliteFactory(tmp_path / "data", options))
    yield playing
    playing.store.close()


def write(stage: Stage, batches: int) -> None:
    """Commits, each after the checkpoint before it has ended."""
    queue = stage.create(f"jobs-{stage.following()}")
    for _ in range(batches):
        stage.batch([sending(queue, TEXT)] * 20)
        bulk = store_of(stage).checkpointer._bulk
        if bulk is not None:
            bulk.join()


def test_what_gathered_behind_a_long_read_is_no_commits_to_copy(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied(monkeypatch)
    checkpointer = store_of(stage).checkpointer
    with store_of(stage).readers.lend() as connection:
        connection.execute("SELECT count(*) FROM mark").fetchall()
        write(stage, 60)
        gathered = checkpointer.wal_pages
        assert gathered > 4 * disk._REMAINDER_PAGES
    write(stage, 40)
    assert max(copied.by_commits, default=0) <= disk._REMAINDER_PAGES
    assert max(copied.by_threads) >= gathered // 2
    assert checkpointer.wal_pages < gathered // 4, "the WAL has begun anew"


def test_what_gathered_behind_a_long_read_is_copied_though_little_is_written(stage: Stage) -> None:
    checkpointer = store_of(stage).checkpointer
    with store_of(stage).readers.lend() as connection:
        connection.execute("SELECT count(*) FROM mark").fetchall()
        write(stage, 60)
        gathered = checkpointer.wal_pages
    queue = stage.create()
    for _ in range(6):
        stage.later(SECOND_US)
        stage.send(queue, "x")
        assert checkpointer._bulk is not None
        checkpointer._bulk.join()
    assert checkpointer.wal_pages < gathered, "the WAL has begun anew"


def test_what_gathered_behind_two_long_reads_is_copied_after_the_second_though_nothing_is_written(stage: Stage) -> None:
    checkpointer = store_of(stage).checkpointer

    def look() -> int:
        assert checkpointer._bulk is not None
        checkpointer._bulk.join()
        stage.later(SECOND_US)
        stage.store.apply([Sweep()], stage.clock.now)
        checkpointer._bulk.join()
        return checkpointer.wal_pages - checkpointer._copied

    with ExitStack() as first, ExitStack() as second:
        for reads in (first, second):
            reads.enter_context(store_of(stage).readers.lend()).execute("SELECT count(*) FROM mark").fetchall()
            write(stage, 30)
        behind = look()
        first.close()
        assert disk._REMAINDER_PAGES < look() < behind
        second.close()
        assert look() == 0


def test_commits_behind_a_long_read_do_not_each_ask_whether_it_has_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Copied(monkeypatch)
    queue = stage.create()
    with store_of(stage).readers.lend() as connection:
        connection.execute("SELECT count(*) FROM mark").fetchall()
        write(stage, 30)
        began, asked = store_of(stage).checkpointer.wal_pages, len(copied.by_threads)
        for _ in range(100):
            stage.send(queue, "x")
            bulk = store_of(stage).checkpointer._bulk
            assert bulk is not None
            bulk.join()
        grown = store_of(stage).checkpointer.wal_pages - began
    assert len(copied.by_threads) - asked <= grown // disk._REMAINDER_PAGES + 1 < 10


def test_a_remainder_is_copied_at_last_though_the_writer_is_faster(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_REMAINDER_PAGES", 0)
    copied = Copied(monkeypatch)
    write(stage, 40)
    assert copied.by_commits, "each bulk left something, and still the WAL begins anew"
    assert store_of(stage).checkpointer.wal_pages < 40 * 20


def test_a_commit_does_not_wait_for_a_checkpoint_that_has_not_let_the_wal_grow(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bulk stands still; commits go on as long as the WAL has grown by less than what lets a checkpoint begin."""
    go_on = threading.Event()
    run = Checkpointer._run

    def held(checkpointer: Checkpointer) -> None:
        if threading.current_thread().name == "veilmq-checkpoint":
            go_on.wait()
        run(checkpointer)

    monkeypatch.setattr(Checkpointer, "_run", held)
    monkeypatch.setattr(disk, "_WAIT_S", 0.001)
    checkpointer = store_of(stage).checkpointer
    queue = stage.create()  # delayed messages: what is unflushed comes into the tables many pages at once
    while checkpointer._bulk is None:
        assert not store_of(stage).commit_takes_long
        stage.send(queue, TEXT, delay_us=SECOND_US)
    began = checkpointer._began
    while checkpointer.wal_pages < began + 2 * checkpointer._pages_max - 20:
        stage.send(queue, TEXT, delay_us=SECOND_US)
    assert checkpointer._bulk.is_alive()
    assert store_of(stage).commit_takes_long, "it may have to wait for the bulk"
    go_on.set()
    checkpointer._bulk.join()
    assert store_of(stage).commit_takes_long, "it copies the remainder"
    short = 0
    for _ in range(40):
        stage.send(queue, TEXT, delay_us=SECOND_US)
        short += not store_of(stage).commit_takes_long
    assert checkpointer.wal_pages < 3 * checkpointer._pages_max
    assert short, "commits are short again, but for those that meet the next bulk"


def test_a_bulk_that_ends_during_a_commit_leaves_its_remainder_to_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was thought to be short runs on the loop, which must not copy hundreds of pages."""
    copied = Copied(monkeypatch)
    store = store_of(stage)
    checkpointer, held = store.checkpointer, threading.Event()
    run = Checkpointer._run

    def slow(checkpointer: Checkpointer) -> None:
        run(checkpointer)
        if threading.current_thread().name == "veilmq-checkpoint":
            held.wait()

    def bulk_ends(point: str) -> None:
        if point == "after commit" and checkpointer._bulk is not None:
            held.set()
            checkpointer._bulk.join()

    monkeypatch.setattr(Checkpointer, "_run", slow)
    queue = stage.create()
    while checkpointer._bulk is None:
        stage.batch([sending(queue, TEXT)] * 5)
    monkeypatch.setattr(store, "_at_point", bulk_ends)
    assert not store.commit_takes_long
    stage.send(queue, TEXT)
    assert not copied.by_commits
    assert store.commit_takes_long, "the next one is known to copy it, and goes to the thread"
    stage.send(queue, TEXT)
    assert len(copied.by_commits) == 1


def test_what_the_database_gave_up_is_cut_from_the_file_however_short_the_wal(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    checkpointer, file = store_of(stage).checkpointer, tmp_path / "data" / DATABASE
    queue = stage.create()
    stage.batch([sending(queue, "x" * 500_000)] * 60)
    assert checkpointer._bulk is not None
    checkpointer._bulk.join()
    checkpointer.finish()
    full, bulk = file.stat().st_size, checkpointer._bulk
    checkpointer.give_back()
    assert checkpointer._bulk is bulk, "nothing to cut yet"
    stage.do(PurgeQueue(queue=queue, origin=TESTER))
    for _ in range(100):
        stage.do(Sweep())
    assert file.stat().st_size == full
    checkpointer.give_back()
    assert checkpointer._bulk is not bulk
    (bulk := checkpointer._bulk).join()
    assert file.stat().st_size < full - 8 * MIB
    checkpointer.give_back()
    assert checkpointer._bulk is bulk
    stage.store.close()


def test_while_the_disk_is_low_the_file_of_an_emptied_queue_is_cut(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    store, file = store_of(stage), tmp_path / "data" / DATABASE
    queue = stage.create()
    stage.batch([sending(queue, "x" * 500_000)] * 60)
    assert store.checkpointer._bulk is not None
    store.checkpointer._bulk.join()
    store.checkpointer.finish()
    full = file.stat().st_size
    stage.do(PurgeQueue(queue=queue, origin=TESTER))
    store.directory.free_bytes = lambda: -1  # type: ignore[method-assign] # a disk that is full of something else
    for _ in range(100):
        stage.later(SECOND_US)
        stage.do(Sweep())
        store.checkpointer._bulk.join()
    assert store.disk_low
    assert file.stat().st_size < full - 8 * MIB
    stage.store.close()


def test_while_the_disk_is_low_one_bulk_at_a_time_runs_behind_a_long_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would use one connection at once, and the store would stop."""
    stage = Stage(SqliteFactory(tmp_path / "data"))
    store, file = store_of(stage), tmp_path / "data" / DATABASE
    checkpointer, go_on = store.checkpointer, threading.Event()
    queue = stage.create()
    stage.batch([sending(queue, "x" * 500_000)] * 60)
    assert checkpointer._bulk is not None
    checkpointer._bulk.join()
    checkpointer.finish()
    full = file.stat().st_size
    run, begin, begun = Checkpointer._run, Checkpointer._begin, []

    def held(checkpointer: Checkpointer) -> None:
        go_on.wait()
        run(checkpointer)

    def noted(checkpointer: Checkpointer, wal_pages: int) -> None:
        begin(checkpointer, wal_pages)
        begun.append(checkpointer._bulk)

    def look() -> None:
        stage.later(SECOND_US)
        stage.do(Sweep())

    with store.readers.lend() as connection:
        connection.execute("SELECT count(*) FROM mark").fetchall()
        stage.do(PurgeQueue(queue=queue, origin=TESTER))
        for _ in range(100):
            stage.do(Sweep())
        other = stage.create("other")
        for _ in range(8):
            stage.batch([sending(other, "x" * 100_000)] * 10)
        store.directory.free_bytes = lambda: -1  # type: ignore[method-assign] # a disk that is full of something else
        for _ in range(2):
            look()
            checkpointer._bulk.join()
        assert (checkpointer._ended, checkpointer._ahead) == (True, False), "the latest bulk copied nothing"
        monkeypatch.setattr(Checkpointer, "_run", held)
        monkeypatch.setattr(Checkpointer, "_begin", noted)
        look()
        assert len(begun) == 1
        assert not store.commit_takes_long, "the WAL has not grown since the bulk began"
        go_on.set()
        begun[0].join()
    for _ in range(3):
        look()
        checkpointer._bulk.join()
    assert file.stat().st_size < full - 8 * MIB
    stage.store.close()
