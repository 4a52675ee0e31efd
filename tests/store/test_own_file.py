"""The database's own file under its WAL: what a start may refuse of it, and what a checkpoint notes of it."""

import os
from collections.abc import Callable
from pathlib import Path, PosixPath

import msgspec
import pytest
from tests.store.redo_stages import killed, started
from tests.support.contract.stage import Stage, bodies
from tests.support.faults import FaultDisk
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.store.directory import NotOurs
from veilmq.store.sqlite.disk import connect, fold, own_file
from veilmq.store.sqlite.disk.redo.last_commit import _FOLDED_PLACES, read
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import format_of

PAGE_BYTES = 4096


class Watched(PosixPath):
    """A path whose size is looked at while a server works."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        found = super().stat(follow_symlinks=follow_symlinks)
        WATCHING.get(self, lambda: None)()
        return found


WATCHING: dict[Path, Callable[[], None]] = {}
"""What the server does after each look at the size of a path."""


def test_a_database_that_a_server_writes_on_is_not_cut(stage: Stage) -> None:
    queue = started(stage)
    store_of(stage)._writer.redo.close()

    def write_on() -> None:  # the checkpoint copies the pages, and the WAL begins anew
        store_of(stage).checkpointer.finish()
        stage.send(queue, "x" * 100_000)

    write_on()
    database = Watched(store_of(stage).directory.database)
    WATCHING[database] = write_on
    assert format_of(database)[2] == []
    assert stage.following() > 5


def test_the_page_that_sqlite_never_writes_is_not_missed(tmp_path: Path) -> None:
    """At 1 GiB: the file ends before it, and the WAL has what comes after it."""
    path = tmp_path / "veilmq.db"
    connection = connect(path)
    connection.pragma("journal_mode", "WAL")
    connection.execute("CREATE TABLE other (content)")
    connection.close()
    pages = 2**30 // PAGE_BYTES
    with path.open("r+b") as file:
        file.seek(28)  # of the header: how many pages the database has
        file.write(pages.to_bytes(4, "big"))
        file.truncate(pages * PAGE_BYTES)
    connection = connect(path)
    connection.wal_autocheckpoint(0)
    connection.execute("INSERT INTO other VALUES (zeroblob(20000))")
    assert path.stat().st_size == 2**30 < (pages + 1) * PAGE_BYTES < connection.pragma("page_count") * PAGE_BYTES
    assert own_file.lacks(path, connection) is None
    connection.close()


def test_a_checkpoint_is_noted_only_if_the_file_was_synced(tmp_path: Path, disk: FaultDisk) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, disk=disk)))
    queue = started(stage)
    store, path = store_of(stage), store_of(stage).directory.committed
    store._writer.redo.close()
    before = read(path, _FOLDED_PLACES)
    synced: list[str] = []
    is_committing = False

    def commit_meanwhile(path: str) -> None:
        nonlocal is_committing
        synced.append(Path(path).name)
        if synced[-1] == "veilmq.db-wal" and not is_committing:
            is_committing = True
            stage.send(queue, "meanwhile")
            is_committing = False

    stage.send(queue, "copied")
    disk.syncing = commit_meanwhile
    store.checkpointer.finish()
    assert "veilmq.db-wal" in synced
    assert "veilmq.db" not in synced
    assert read(path, _FOLDED_PLACES) == before
    disk.syncing = synced.append
    with store.readers.lend() as connection:
        connection.execute("SELECT count(*) FROM mark").fetchall()
        stage.send(queue, "behind a reader")
        store.checkpointer.finish()
        assert read(path, _FOLDED_PLACES) == before
    store.checkpointer.finish()
    noted = read(path, _FOLDED_PLACES)
    assert noted
    assert noted[2:] == (store._writer.mark.offset, store._writer.mark.clock)
    stage.store.close()


def test_a_checkpoint_copies_on_if_the_mark_cannot_be_read(tmp_path: Path) -> None:
    noted: list[tuple[int, int]] = []
    connection = connect(tmp_path / "veilmq.db")
    connection.pragma("journal_mode", "WAL")
    connection.execute("CREATE TABLE other (number)")
    pages, copied = fold(connection, lambda *mark: noted.append(mark))
    assert pages == copied > 0
    assert noted == []
    connection.close()


def test_a_torn_page_under_the_wal_is_passed_over(stage: Stage) -> None:
    """A power cut amid a checkpoint leaves it; the WAL still has the whole page."""
    queue = started(stage)
    stage.send(queue, "first")
    stage.reopen()
    root = store_of(stage)._writer.connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'mark'").get
    store_of(stage)._writer.redo.close()
    stage.send(queue, "second")
    database = killed(stage)
    content = bytearray(database.read_bytes())
    page = (root - 1) * PAGE_BYTES
    cell = page + int.from_bytes(content[page + 8 : page + 10], "big")
    content[cell + 1 + content[cell]] ^= 0x7F  # the offset of the next event
    database.write_bytes(content)
    assert check(database).problems == []
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["first", "second"]


@pytest.mark.parametrize("copied", ["all", "half"])
def test_a_wal_is_to_be_moved_away_only_if_the_file_does_without_it(stage: Stage, copied: str) -> None:
    queue = started(stage)
    for _ in range(3):
        for number in range(30):
            stage.send(queue, f"{number}" * 1_500)
        stage.reopen()
    store_of(stage)._writer.redo.close()
    for number in range(20):
        stage.send(queue, f"{number}" * 1_200)
    committed = store_of(stage).directory.committed
    database = store_of(stage).directory.database
    before, noted = database.read_bytes(), committed.read_bytes()
    store_of(stage).checkpointer.finish()
    killed(stage)
    after = database.read_bytes()
    if copied == "half":  # a checkpoint copies pages in their order
        pages = [
            at for at in range(0, len(after), PAGE_BYTES) if after[at : at + PAGE_BYTES] != before[at : at + PAGE_BYTES]
        ]
        half = pages[len(pages) // 2]
        database.write_bytes(after[:half] + before[half:])
        committed.write_bytes(noted)
    wal = database.with_name("veilmq.db-wal")
    content = bytearray(wal.read_bytes())
    content[len(content) // 4] ^= 1
    wal.write_bytes(content)
    with pytest.raises(NotOurs, match="-shm away" if copied == "all" else "last are missing") as refusal:
        SqliteStore(database.parent, SMALL)
    assert any("may need pages from it" in problem.text for problem in check(database).problems) == (copied == "half")
    if copied == "all":
        wal.unlink()
    else:
        assert "-shm" not in str(refusal.value)
        committed.write_text("lost\n")
    stage.open()
    stage.store.close()
    report = check(database)
    assert report.problems == []
    assert (report.messages == 110) == (copied == "all")
    stage.open()
