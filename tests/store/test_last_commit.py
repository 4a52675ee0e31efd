"""What was committed last is known outside the WAL and the redo log: what is missing of it is never passed over."""

import os
import shutil
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.store.redo_stages import (
    BATCHES,
    FRAME_BYTES,
    WAL_HEADER_BYTES,
    execute,
    in_the_wal,
    killed,
    refused,
    started,
)
from tests.support.contract.stage import TESTER, Stage, bodies, expect
from tests.support.sqlite import SMALL, store_of

from veilmq.model.commands import StartMove
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import MoveStarted
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.directory import DatabaseFailed, DatabaseUnusable, NotOurs
from veilmq.store.files import RealDisk
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.disk.redo.last_commit import _FOLDED_PLACES, _PLACES, LastCommit, read
from veilmq.store.sqlite.disk.schema import VERSION
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import backup

FLIPS = 60
MISSING = "events that were committed last are missing"


@pytest.mark.parametrize("damage", ["flipped", "cut", "deleted"])
def test_a_damaged_wal_is_refused_wherever_the_damage_is(stage: Stage, tmp_path: Path, damage: str) -> None:
    database = in_the_wal(stage)
    kept = tmp_path / "kept"
    shutil.copytree(database.parent, kept)
    wal = kept / "veilmq.db-wal"
    size = wal.stat().st_size
    places = [size // 2] if damage == "deleted" else sorted(place * size // FLIPS for place in range(FLIPS))
    passed = 0
    for place in places:
        directory = tmp_path / str(place)
        shutil.copytree(kept, directory)
        damaged = directory / "veilmq.db-wal"
        if damage == "deleted":
            damaged.unlink()
        elif damage == "cut":
            os.truncate(damaged, place)
        else:
            content = bytearray(damaged.read_bytes())
            content[place] ^= 1 << place % 8
            damaged.write_bytes(content)
        try:
            store = SqliteStore(directory, SMALL)
        except (NotOurs, DatabaseUnusable):
            refused(directory / "veilmq.db", tmp_path)
        else:  # the damage is behind the last commit, or in a byte that says nothing
            store.close()
            passed += 1
            report = check(directory / "veilmq.db")
            assert (report.messages, report.problems) == (BATCHES, [])
        shutil.rmtree(directory)
    assert passed < FLIPS // 2
    stage.open()


def test_a_lost_wal_of_a_closed_server_costs_nothing_or_is_refused(stage: Stage, tmp_path: Path) -> None:
    """A stop folds the WAL in and removes it. Where another process reads meanwhile it stays, and is missed."""
    in_the_wal(stage)
    stage.open()
    database = store_of(stage).directory.database
    wal = database.with_name("veilmq.db-wal")
    store_of(stage)._writer.redo.close()
    (key,) = stage.store.reader.queues
    stage.send(key, "acknowledged last")
    assert wal.stat().st_size
    stage.store.close()
    assert not wal.exists()
    stage.open()
    assert len(stage.peek(key, 100)) == BATCHES + 1
    reading = connect(database)
    reading.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    reading.execute("BEGIN; SELECT count(*) FROM mark").fetchall()
    store_of(stage)._writer.redo.close()
    stage.send(key, "behind a reader")
    stage.store.close()
    reading.close()
    kept = wal.read_bytes()
    wal.unlink()
    refused(database, tmp_path)
    wal.write_bytes(kept)
    stage.open()
    assert len(stage.peek(key, 100)) == BATCHES + 2


def restarted(stage: Stage, queue: QueueKey, text: str) -> Path:
    """Acknowledge a message by a transaction, be killed, and start, which copies the whole WAL into the database;
    returns a copy of the database from between."""
    store_of(stage)._writer.redo.close()
    stage.send(queue, text)
    database = killed(stage)
    copy = database.with_name(f"earlier-{len(text)}")
    for ending in ("", "-wal"):
        shutil.copyfile(f"{database}{ending}", f"{copy}{ending}")
    stage.open()
    return copy


def test_a_cut_database_is_refused_beside_its_wal(stage: Stage, tmp_path: Path) -> None:
    """SQLite reads what is missing as zeros."""
    queue = started(stage)
    restarted(stage, queue, "x" * 100_000)
    store_of(stage)._writer.redo.close()
    stage.send(queue, "in the WAL")
    database = killed(stage)
    whole = database.read_bytes()
    size = len(whole)
    for lost in (1, 4096, 10 * 4096):
        database.write_bytes(whole[:-lost])
        refused(database, tmp_path)
        with pytest.raises(NotOurs, match=rf"veilmq\.db is cut, to {size - lost} of {size} bytes, and .* are missing"):
            SqliteStore(database.parent, SMALL)
    assert [problem for problem in check(database).problems if "veilmq.db is cut" in problem.text]
    with pytest.raises(NotOurs, match=r"of its pages are missing$"):  # a server of a cluster fills its copy again
        SqliteStore(database.parent, msgspec.structs.replace(SMALL, schema=VERSION))
    database.write_bytes(whole)
    stage.open()
    stage.store.close()
    closed = database.read_bytes()
    os.truncate(database, len(closed) - 4096)
    with pytest.raises(
        DatabaseUnusable, match=rf"malformed; the file is cut, to {len(closed) - 4096} of {len(closed)} bytes"
    ):
        SqliteStore(database.parent, SMALL)
    database.write_bytes(closed)
    stage.open()


def test_a_short_database_is_whole_if_the_wal_has_the_rest(stage: Stage, tmp_path: Path) -> None:
    queue = started(stage)
    store_of(stage)._writer.redo.close()
    stage.send(queue, "x" * 100_000)
    database = killed(stage)
    assert database.stat().st_size < 300_000
    disk = tmp_path / "another disk"
    disk.mkdir()
    for name in ("veilmq.db", "veilmq.db-wal"):  # SQLite keeps the WAL beside the file to which a link leads
        database.with_name(name).rename(disk / name)
    database.symlink_to(disk / "veilmq.db")
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["x" * 100_000]


def test_an_earlier_copy_of_the_database_is_refused_beside_a_newer_wal(stage: Stage, tmp_path: Path) -> None:
    queue = started(stage)
    earlier = restarted(stage, queue, "first")
    store_of(stage)._writer.redo.close()
    stage.send(queue, "in the WAL")
    database = killed(stage)
    whole = database.read_bytes()
    shutil.copyfile(earlier, database)
    assert database.stat().st_size == len(whole)
    refused(database, tmp_path)
    with pytest.raises(NotOurs, match=r"veilmq\.db is an earlier copy, .* echo lost > .*committed"):
        SqliteStore(database.parent, SMALL)
    database.write_bytes(whole)
    stage.open()
    store_of(stage)._writer.redo.close()
    older = database.read_bytes()
    stage.send(queue, "copied")
    store_of(stage).checkpointer.finish()
    stage.send(queue, "in the WAL that began anew")
    assert killed(stage) == database
    whole = database.read_bytes()
    database.write_bytes(older)
    refused(database, tmp_path)
    database.write_bytes(whole)
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["first", "in the WAL", "copied", "in the WAL that began anew"]


def test_an_earlier_wal_is_refused_beside_a_newer_database(stage: Stage, tmp_path: Path) -> None:
    """The redo log goes on where it ends, so no event seems to be missing; but pages would be older ones."""
    queue = started(stage)
    earlier = restarted(stage, queue, "first")
    stage.send(queue, "in the log")
    stage.store.close()
    database = store_of(stage).directory.database
    wal = database.with_name("veilmq.db-wal")
    shutil.copyfile(f"{earlier}-wal", wal)
    refused(database, tmp_path)
    with pytest.raises(NotOurs, match=r"veilmq\.db-wal is damaged or older than .*veilmq\.db, .*-shm away"):
        SqliteStore(database.parent, SMALL)
    wal.unlink()
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["first", "in the log"]


@pytest.mark.parametrize("damage", ["zeros", "its first record"])
def test_a_damaged_redo_log_is_refused(stage: Stage, tmp_path: Path, damage: str) -> None:
    queue = started(stage)
    for number in range(3):
        stage.send(queue, f"acknowledged {number}")
    database = killed(stage)
    log = database.with_name("redo")
    whole = log.read_bytes()
    log.write_bytes(bytes(len(whole)) if damage == "zeros" else b"\xff" * 16 + whole[16:])
    refused(database, tmp_path)
    assert MISSING in str(check(database).problems)
    log.write_bytes(whole)
    stage.open()
    assert len(stage.receive(queue, 10)) == 3


def test_who_goes_on_without_says_so_in_the_file(stage: Stage) -> None:
    database = in_the_wal(stage)
    database.with_name("veilmq.db-wal").write_bytes(b"")
    database.with_name("redo").write_bytes(bytes(SMALL.redo_bytes))
    with pytest.raises(NotOurs, match=rf"{MISSING}, from offset .* on: .* echo lost > .*committed"):
        SqliteStore(database.parent, SMALL)
    database.with_name("committed").write_text("lost\n")
    stage.open()
    stage.reopen(kill=True)
    assert check(database).problems == []


def test_it_is_written_after_each_commit_and_never_ahead(stage: Stage) -> None:
    queue = started(stage)
    path = store_of(stage).directory.committed
    stage.send(queue, "in the log")
    noted = read(path)
    assert noted is not None
    assert noted.offset == store_of(stage)._writer.mark.offset
    stage.send(queue, "x" * 40_000)
    later = read(path)
    assert later is not None
    assert later.offset == store_of(stage)._writer.mark.offset > noted.offset


@pytest.mark.parametrize("kind", ["ext4", "btrfs"])  # mapped, and not
def test_a_torn_write_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(RealDisk, "file_system", lambda disk, path: kind)
    path = tmp_path / "committed"
    file = LastCommit(path, SMALL, b"e" * 16, 5, 0)
    for offset in (6, 7, 8):
        file.note(offset, offset)
        file.note_folded(offset, offset)
    file.close()
    content = path.read_bytes()
    for places in (_PLACES, _FOLDED_PLACES):
        assert sorted(read_with(path, content, torn, places) for torn in places) == [7, 8]
    path.write_bytes(bytes(len(content)))
    assert read(path) is None


def read_with(path: Path, content: bytes, torn: int, places: tuple[int, int]) -> int:
    """The offset if the slot at byte `torn` is torn."""
    path.write_bytes(content[: torn + 20] + bytes(20) + content[torn + 40 :])
    noted = read(path, places)
    assert noted is not None
    return noted.offset


def test_it_is_synced_beside_the_batches_once_a_second(stage: Stage) -> None:
    """So what the disk has of it after a power cut is a second old: the window that stays undetectable."""
    queue = started(stage)
    last = store_of(stage)._writer.last_commit
    stage.later(SECOND_US)
    stage.send(queue, "first")
    assert last._syncing is not None
    last._syncing.join()
    stage.send(queue, "second")
    unsynced = store_of(stage)._writer.mark.offset
    stage.later(SECOND_US)
    stage.send(queue, "third")
    last._syncing.join()
    assert last._synced.offset == unsynced


def test_what_a_second_old_file_does_not_know_is_passed_over(stage: Stage) -> None:
    """The size of that window: all since the last sync of the file, and nothing before."""
    queue = started(stage)
    path = store_of(stage).directory.committed
    store_of(stage)._writer.redo.close()
    stage.send(queue, "known")
    synced, known = path.read_bytes(), store_of(stage)._writer.mark.offset
    wal = store_of(stage).directory.path / "veilmq.db-wal"
    known_bytes = WAL_HEADER_BYTES + store_of(stage)._writer.wal_pages * FRAME_BYTES
    stage.send(queue, "unknown")
    database = killed(stage)
    path.write_bytes(synced)
    whole = wal.read_bytes()
    wal.write_bytes(whole[: known_bytes - 1])
    with pytest.raises(NotOurs, match=MISSING):
        SqliteStore(database.parent, SMALL)
    wal.write_bytes(whole[:known_bytes])
    stage.open()
    assert stage.following() == known
    assert bodies(stage.receive(queue, 10)) == ["known"]


def test_a_copy_of_another_database_is_refused_beside_it(stage: Stage, tmp_path: Path) -> None:
    queue = started(stage)
    backup(store_of(stage).directory.database, tmp_path / "earlier.db")
    stage.send(queue, "later")
    store_of(stage).apply_log()
    store_of(stage).checkpointer.finish()
    database = killed(stage)
    for name in ("veilmq.db-wal", "veilmq.db-shm"):
        database.with_name(name).unlink(missing_ok=True)
    shutil.copyfile(tmp_path / "earlier.db", database)
    refused(database, tmp_path)
    assert "is another database's" in str(check(database).problems)
    given_up = shutil.copytree(database.parent, tmp_path / "given up")
    (given_up / "redo").write_text("lost\n")
    SqliteStore(given_up, SMALL).close()  # what the other one's file had is not missed, either
    database.with_name("committed").write_text("lost\n")
    stage.open()
    assert bodies(stage.receive(queue, 10)) == []


@pytest.mark.parametrize("left", ["the log", "nothing"])
def test_a_lost_receipt_key_is_no_new_database(stage: Stage, tmp_path: Path, left: str) -> None:
    """With a new key nobody could read the redo log: what it holds would be lost without a word."""
    queue = started(stage)
    stage.send(queue, "acknowledged")
    if left == "nothing":  # all is in the database
        stage.store.close()
    database = store_of(stage).directory.database if left == "nothing" else killed(stage)
    execute(database, "DELETE FROM secret")
    refused(database, tmp_path)
    with pytest.raises(NotOurs, match=r"the table `secret` is empty.* echo lost > .*redo"):
        SqliteStore(database.parent, SMALL)
    with pytest.raises(DatabaseFailed, match="the table `secret` is empty"):
        check(database)
    database.with_name("redo").write_text("lost\n")
    stage.open()
    assert bodies(stage.receive(queue, 10)) == (["acknowledged"] if left == "nothing" else [])
    stage.reopen(kill=True)
    assert [problem.kind for problem in check(database).problems if problem.kind != "books"] == []


def test_a_lost_mark_is_no_new_database(stage: Stage, tmp_path: Path) -> None:
    """With a new one, sequences and offsets would be given twice."""
    started(stage)
    database = store_of(stage).directory.database
    stage.store.close()
    kept = database.read_bytes()
    for lost in (("mark",), ("mark", "secret")):
        for table in lost:
            execute(database, f"DELETE FROM {table}")
        refused(database, tmp_path)
        database.with_name("veilmq.db-wal").unlink()
        database.write_bytes(kept)
    stage.open()


def test_where_commits_are_not_synced_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "committed"
    LastCommit(path, SMALL, b"e" * 16, 5, 0).close()
    assert path.exists()
    LastCommit(path, type(SMALL)(synchronous="NORMAL"), b"e" * 16, 5, 0).close()
    assert not path.exists()


def test_a_commit_without_an_event_is_missed_too(stage: Stage) -> None:
    """A move task's start is acknowledged, and has no event."""
    dead = stage.create("dead")
    source = stage.create("jobs", redrive=RedrivePolicy(dead, 1))
    stage.send(source, "fails")
    stage.take(source, lease_us=0)
    assert not stage.receive(source)
    stage.reopen()
    stage.later(SECOND_US)
    events = stage.following()
    earlier = (store_of(stage).directory.path / "veilmq.db").read_bytes()
    expect(stage.do(StartMove(queue=dead, origin=TESTER)), MoveStarted)
    assert stage.following() == events
    wal = store_of(stage).directory.path / "veilmq.db-wal"
    end = WAL_HEADER_BYTES + store_of(stage)._writer.wal_pages * FRAME_BYTES
    database = killed(stage)
    whole = wal.read_bytes()
    wal.write_bytes(whole[: end - 1] + bytes([whole[end - 1] ^ 1]) + whole[end:])
    with pytest.raises(NotOurs, match="what was committed last is missing, though no event of the history"):
        SqliteStore(database.parent, SMALL)
    wal.write_bytes(whole)
    stage.open()
    assert killed(stage) == database
    later = database.read_bytes()
    database.write_bytes(earlier)
    with pytest.raises(NotOurs, match=r"veilmq\.db is an earlier copy"):
        SqliteStore(database.parent, SMALL)
    database.write_bytes(later)
    stage.open()


def test_what_was_given_up_is_not_missed_later(stage: Stage) -> None:
    """The file cannot be replaced at the start that goes on without the log: then it must not say what was lost."""
    queue = started(stage)
    stage.send(queue, "given up")
    database = killed(stage)
    database.with_name("redo").write_text("lost\n")
    (database.parent / ".committed.part").mkdir()  # in the way of the new file
    stage.open()
    assert not database.with_name("committed").exists()
    stage.reopen(kill=True)
    assert check(database).problems == []


def test_a_word_that_gave_up_a_log_excuses_no_later_loss(stage: Stage) -> None:
    started(stage)
    database = killed(stage)
    database.with_name("redo").write_text("lost\n")
    SqliteStore(database.parent, msgspec.structs.replace(SMALL, redo_bytes=0)).close()
    assert not database.with_name("redo").exists()
    stage.open()


def test_the_owners_check_does_not_miss_what_a_deleted_log_had(stage: Stage) -> None:
    queue = started(stage)
    database = store_of(stage).directory.database
    stage.send(queue, "in the log")
    database.with_name("redo").unlink()
    store_of(stage).apply_log()
    stage.send(queue, "after its own look")
    assert MISSING not in str(check(database, is_owner=True).problems)


def test_a_file_that_cannot_be_read_is_refused_by_name(stage: Stage) -> None:
    database = killed(stage)
    database.with_name("committed").unlink()
    database.with_name("committed").mkdir()
    with pytest.raises(DatabaseUnusable):
        SqliteStore(database.parent, SMALL)
    with pytest.raises(DatabaseFailed):
        check(database)
    database.with_name("committed").rmdir()
    stage.open()
