"""The redo log: a batch of unflushed messages is one record and no transaction, and nobody sees the difference."""

import os
import shutil
import threading
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.store.redo_stages import killed, started, unapplied, wal_pages
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER, Stage, bodies, expect, impossible, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import Delete, Receive
from veilmq.model.errors import StoreFailed
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted, Received
from veilmq.store.directory import DatabaseUnusable, NotOurs
from veilmq.store.sqlite.disk import connect, redo
from veilmq.store.sqlite.repair.repair import repair
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import backup
from veilmq.testing.for_each import for_each


def test_a_life_of_a_unflushed_message_is_no_transaction(stage: Stage) -> None:
    queue = started(stage)
    before = wal_pages(stage)
    stage.send(queue, "short")
    expect(stage.delete(queue, stage.take(queue).handle), Deleted)
    assert wal_pages(stage) == before
    assert unapplied(stage) == 3


def test_it_is_there_after_a_kill(stage: Stage) -> None:
    queue = started(stage)
    for text in ("deleted", "in flight", "waits"):
        stage.send(queue, text)
    expect(stage.delete(queue, stage.take(queue).handle), Deleted)
    handle = stage.take(queue).handle
    told = stage.events()
    stage.send(queue, "sent after somebody read")
    stage.reopen(kill=True)
    assert stage.events()[: len(told)] == told
    assert bodies(stage.receive(queue, 10)) == ["waits", "sent after somebody read"]
    expect(stage.delete(queue, handle), Deleted)


def test_who_reads_sees_all_that_is_committed_and_nothing_more(stage: Stage) -> None:
    queue = started(stage)
    before = len(stage.events())
    stage.send(queue, "committed")
    store_of(stage).apply([sending(queue, "applied")], stage.now)
    assert bodies(stage.peek(queue, 10)) == ["committed"]
    assert len(stage.events()) == before + 1
    store_of(stage).commit()
    assert bodies(stage.peek(queue, 10)) == ["committed", "applied"]


def test_who_reads_amid_a_transaction_waits_for_nobody(stage: Stage) -> None:
    queue = started(stage)
    stage.send(queue, "committed")
    store_of(stage).apply([sending(queue, "applied", delay_us=SECOND_US)], stage.now)
    assert bodies(stage.peek(queue, 10)) == ["committed"]
    store_of(stage).commit()


def test_a_batch_that_fails_leaves_what_was_before_it(stage: Stage) -> None:
    queue = started(stage)
    for text in ("one", "two"):
        stage.send(queue, text)
    handle = stage.take(queue).handle
    deletion = Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now)
    outcomes = stage.batch([sending(queue, "three"), deletion, impossible()]).outcomes
    assert isinstance(outcomes[-1], StoreFailed)
    assert bodies(stage.receive(queue, 10)) == ["two", "three"]
    stage.send(queue, "four")
    store_of(stage).apply([Receive(queue=queue, origin=TESTER, count_max=10, lease_us=SECOND_US)], stage.now)
    stage.factory.abandon(stage.store)
    assert bodies(stage.receive(queue, 10)) == ["four"]


def test_the_records_begin_anew_after_a_transaction(stage: Stage) -> None:
    queue = started(stage)
    path = store_of(stage).directory.redo
    size = path.stat().st_size
    for number in range(40):
        stage.send(queue, "x" * 4_000)
        expect(stage.delete(queue, stage.take(queue).handle), Deleted)
        assert path.stat().st_size == size, f"it grew in round {number}"
    stage.send(queue, "last")
    stage.reopen(kill=True)
    assert bodies(stage.receive(queue, 10)) == ["last"]


def test_a_transaction_that_changes_nothing_lets_no_record_go(stage: Stage) -> None:
    """Who reads had the log settled, which syncs nothing; and this does not either."""
    stage.send(stage.create())
    store_of(stage).apply_log()
    writer = store_of(stage)._writer
    place = writer.redo._at
    assert place > 0
    writer.begin(stage.now)
    writer.write("UPDATE mark SET clock = clock WHERE false", ())
    writer.finish()
    writer.commit()
    assert writer.redo._at == place


def test_a_batch_without_room_is_a_transaction(stage: Stage) -> None:
    queue = started(stage)
    before = wal_pages(stage)
    stage.batch([sending(queue, f"{number}" * 10_000) for number in range(4)])
    assert wal_pages(stage) > before
    assert unapplied(stage) == 0
    stage.reopen(kill=True)
    assert len(stage.receive(queue, 10)) == 4


def test_records_of_an_earlier_run_are_none(stage: Stage) -> None:
    """Records of an earlier run lie behind those of this one, to the byte where the next would begin."""
    queue = started(stage)
    for run in ("one", "two"):
        for number in range(3):
            stage.send(queue, f"{run} {number}")
        if run == "one":
            stage.sweep()
            store_of(stage)._writer.redo.restart()
    stage.sweep()
    stage.send(queue, "last")
    database = killed(stage)
    connection = connect(database)
    missing, is_damaged, _ = redo.lacking(database.parent / "redo", connection)
    assert [len(entry.messages) for entry in missing] == [1]
    assert not is_damaged
    connection.close()
    stage.open()
    assert len(stage.receive(queue, 10)) == 7


@for_each("cut", [1, 5, 40, 120], fresh="stage")
def test_a_torn_record_is_none(stage: Stage, cut: int) -> None:
    queue = started(stage)
    stage.send(queue, "whole")
    log = store_of(stage)._writer.redo
    begin = log._at
    stage.send(queue, "torn")
    end = log._at
    assert end - cut > begin
    path = store_of(stage).directory.redo
    database = killed(stage)
    content = path.read_bytes()
    path.write_bytes(content[: end - cut] + bytes(len(content) - end + cut))
    database.with_name("committed").unlink()  # the power went before it was written
    assert not check(database).problems
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["whole"]


def test_the_log_of_another_database_is_none(stage: Stage, tmp_path: Path) -> None:
    queue = started(stage)
    backup(store_of(stage).directory.database, tmp_path / "copy.db")
    stage.send(queue, "later")
    database = killed(stage)
    shutil.copyfile(tmp_path / "copy.db", database)
    for name in ("veilmq.db-wal", "committed"):
        database.with_name(name).unlink()
    stage.open()
    assert stage.receive(queue, 10) == []


def test_a_backup_and_a_check_of_killed_files_know_it(stage: Stage, tmp_path: Path) -> None:
    queue = started(stage)
    stage.send(queue, "in the log")
    stage.send(queue, "and another")
    events = store_of(stage)._writer.mark.offset
    database = killed(stage)
    report = check(database)
    assert (report.messages, report.books, report.problems) == (2, "balanced", [])
    assert report.events == events
    copy = tmp_path / "copy" / "veilmq.db"
    copy.parent.mkdir(mode=0o700)
    backup(database, copy)
    assert [path.name for path in copy.parent.iterdir()] == ["veilmq.db"]
    assert check(copy) == report
    restored = SqliteStore(copy.parent, SMALL)
    outcome = restored.apply([Receive(queue=queue, origin=TESTER, count_max=10)], stage.now).outcomes[0]
    assert bodies(expect(outcome, Received).messages) == ["in the log", "and another"]
    restored.close()
    stage.open()


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_damaged_record_before_others_is_told(
    stage: Stage, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A repair reports it, too, even if `committed` is older, as after a power cut."""
    queue = started(stage)
    before = store_of(stage).directory.committed.read_bytes()
    for text in ("first", "second", "third"):
        stage.send(queue, text)
    database = killed(stage)
    path = database.parent / "redo"
    content = path.read_bytes()
    path.write_bytes(content.replace(place.encode(), b"?" * len(place), 1))
    assert "a batch is damaged or missing" in str(check(database).problems)
    with pytest.raises(NotOurs, match="events that were committed last are missing"):
        SqliteStore(database.parent, SMALL)
    database.with_name("committed").write_bytes(before)
    report = repair(database.parent, tmp_path / "new", None, lambda stage, done, total: None)
    assert (report.events_missing, report.is_whole) == (1, False)
    database.with_name("committed").write_text("lost\n")
    stage.open()
    assert "a batch is damaged or missing" in caplog.text
    assert bodies(stage.receive(queue, 10)) == (["first"] if place == "second" else [])
    assert check(database).problems == []
    assert (database.parent / "redo.damaged").exists()


def test_a_database_without_its_wal_is_told(stage: Stage) -> None:
    stage.reopen()
    queue = started(stage)
    stage.send(queue, "behind what is missing")
    database = killed(stage)
    database.with_name("veilmq.db-wal").unlink()
    assert "a batch is damaged or missing" in str(check(database).problems)
    with pytest.raises(NotOurs, match=r"events that were committed last are missing, .* veilmq.db-wal or redo"):
        SqliteStore(database.parent, SMALL)
    database.with_name("committed").unlink()
    with pytest.raises(NotOurs, match=r"what was committed before the first record of .*redo is missing.*-wal\?"):
        stage.open()
    database.with_name("redo").write_text("lost\n")
    stage.open()
    assert check(database).problems == []


def test_a_wal_without_its_database_is_no_new_start(stage: Stage) -> None:
    """SQLite would delete it. The log may be empty: all was transactions."""
    started(stage)
    database = killed(stage)
    database.unlink()
    database.with_name("redo").write_bytes(b"")
    wal = database.with_name("veilmq.db-wal").read_bytes()
    assert wal
    with pytest.raises(
        NotOurs, match=r"veilmq.db is empty or missing, but .*veilmq.db-wal shows that something was acknowledged"
    ):
        SqliteStore(database.parent, SMALL)
    assert database.with_name("veilmq.db-wal").read_bytes() == wal
    database.with_name("veilmq.db-wal").unlink()
    with pytest.raises(NotOurs, match=r"veilmq.db is empty or missing, but .*committed shows"):
        SqliteStore(database.parent, SMALL)
    database.with_name("committed").unlink()
    part = database.with_name("veilmq.db.part")
    part.touch()  # as of a killed backup or repair
    with pytest.raises(NotOurs, match=r"veilmq.db.part is a copy or a repair that did not end: make another"):
        SqliteStore(database.parent, SMALL)
    part.unlink()
    stage.open()


@pytest.mark.parametrize("lost", ["the database", "its WAL", "what is in it"])
def test_a_log_without_its_database_is_no_new_start(stage: Stage, lost: str) -> None:
    queue = started(stage)
    stage.send(queue, "acknowledged")
    database = killed(stage)
    directory = database.parent
    if lost == "the database":
        database.unlink()
    elif lost == "what is in it":
        database.write_bytes(b"")
    for each in directory.glob("veilmq.db-*"):
        each.unlink()
    log = (directory / "redo").read_bytes()
    said = "events that were committed last are missing" if lost == "its WAL" else "something was acknowledged"
    with pytest.raises(NotOurs, match=said):
        SqliteStore(directory, SMALL)
    assert (directory / "redo").read_bytes() == log
    if lost == "its WAL":
        (directory / "redo").write_text("lost")
    else:
        (directory / "redo").rename(directory / "redo.old")
        (directory / "committed").unlink()
    stage.open()
    assert stage.events() == []


@pytest.mark.parametrize("left", [None, 0, 100, 20_000])
def test_a_killed_database_without_its_whole_log_is_no_start(stage: Stage, tmp_path: Path, left: int | None) -> None:
    """As after a deletion, or a copy onto a full disk. A repair reports it even if `committed` is older."""
    queue = started(stage)
    before = store_of(stage).directory.committed.read_bytes()
    stage.send(queue, "acknowledged")
    database = killed(stage)
    log = database.with_name("redo")
    whole = log.read_bytes()
    if left is None:
        log.unlink()
    else:
        os.truncate(log, left)
    content = database.read_bytes()
    what = "missing" if left is None else f"cut, to {left} of {SMALL.redo_bytes} bytes"
    for _ in range(2):
        with pytest.raises(
            NotOurs, match=rf"redo is {what}, and with it the last acknowledged batches.*echo lost > .*redo"
        ):
            SqliteStore(database.parent, SMALL)
    assert database.read_bytes() == content
    assert what in str(check(database).problems)
    with pytest.raises(NotOurs, match=what):
        backup(database, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()
    database.with_name("committed").write_bytes(before)
    report = repair(database.parent, tmp_path / "new", None, lambda stage, done, total: None)
    assert (report.may_miss, report.is_whole) == (True, False)
    log.write_bytes(whole)
    stage.open()
    assert bodies(stage.receive(queue)) == ["acknowledged"]


def test_who_goes_on_without_the_log_says_so_in_it(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    queue = started(stage)
    stage.send(queue, "acknowledged")
    database = killed(stage)
    database.with_name("redo").write_text("lost\n")
    assert check(database).problems == []
    stage.open()
    assert "redo was given up: the last acknowledged batches before the crash may be missing" in caplog.text
    assert stage.receive(queue) == []
    stage.reopen()
    assert caplog.text.count("given up") == 1


def test_a_copy_of_the_database_alone_is_no_start(stage: Stage, tmp_path: Path) -> None:
    """Without its WAL, in which the latest start wrote."""
    queue = started(stage)
    stage.reopen()
    stage.send(queue, "acknowledged")
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    shutil.copyfile(killed(stage), copy / "veilmq.db")
    assert "redo is missing" in str(check(copy / "veilmq.db").problems)
    with pytest.raises(NotOurs, match="redo is missing"):
        SqliteStore(copy, SMALL)
    stage.open()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_log_that_goes_under_its_owner_is_made_anew(
    stage: Stage, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = started(stage)
    stage.send(queue, "before")
    store = store_of(stage)
    store.directory.redo.unlink()
    if how == "replaced":
        store.directory.redo.touch()
    stage.send(queue, "between")
    store.apply_log()
    assert check(store.directory.database, is_owner=True).problems == []
    backup(store.directory.database, tmp_path / "copy.db", is_owner=True)
    stage.later(SECOND_US)
    stage.send(queue, "after")
    assert "the redo log was deleted or replaced while the server ran: nothing is lost" in caplog.text
    assert unapplied(stage) == 1
    stage.reopen(kill=True)
    assert bodies(stage.receive(queue, 10)) == ["before", "between", "after"]


def test_a_database_that_was_closed_needs_no_log(stage: Stage) -> None:
    queue = started(stage)
    stage.send(queue, "acknowledged")
    stage.store.close()
    store_of(stage).directory.redo.unlink()
    assert check(store_of(stage).directory.database).problems == []
    stage.open()
    assert bodies(stage.receive(queue)) == ["acknowledged"]


def test_a_start_that_ends_after_it_moved_a_damaged_log_is_made_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = started(stage)
    for text in ("damaged", "second"):
        stage.send(queue, text)
    log = killed(stage).with_name("redo")
    log.write_bytes(log.read_bytes().replace(b"damaged", b"???????", 1))
    log.with_name("committed").write_text("lost")

    def end(*_: object) -> None:
        raise apsw.IOError("as a kill would")

    with monkeypatch.context() as patch:
        patch.setattr(redo.Redo, "open", end)
        with pytest.raises(DatabaseUnusable):
            stage.open()
    assert not log.exists()
    stage.open()
    assert log.exists()


def test_a_message_in_the_log_that_is_damaged_is_found(stage: Stage) -> None:
    queue = started(stage)
    stage.send(queue, "damaged")
    database = killed(stage)
    content = (database.parent / "redo").read_bytes()
    assert content.count(b"damaged") == 1
    connection = connect(database)
    ((entry,), *_) = redo.lacking(database.parent / "redo", connection)
    connection.close()
    contents = msgspec.structs.replace(entry.messages[0], body=b"changed")
    changed = msgspec.structs.replace(entry, messages=[contents])
    (database.parent / "redo").write_bytes(record_of(database, changed).ljust(SMALL.redo_bytes, b"\0"))
    assert "its body does not match" in str(check(database).problems)
    stage.open()
    assert stage.receive(queue) == []


def record_of(database: Path, entry: redo.Entry) -> bytes:
    connection = connect(database)
    log = redo.Redo(database.parent / "other", SMALL, connection.execute("SELECT receipts FROM secret").get)
    connection.close()
    record = log.record(entry)
    log.close()
    assert record is not None
    return record


def test_without_a_log_every_batch_is_a_transaction(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, redo_bytes=0)))
    queue = started(stage)
    before = wal_pages(stage)
    stage.send(queue)
    assert wal_pages(stage) > before
    assert not store_of(stage).directory.redo.exists()
    stage.store.close()


def test_the_log_is_closed_to_others_and_made_anew_in_another_size(tmp_path: Path) -> None:
    path = tmp_path / "data"
    stage = Stage(SqliteFactory(path))
    queue = started(stage)
    stage.send(queue, "kept")
    killed(stage)
    larger = msgspec.structs.replace(SMALL, redo_bytes=100_000)
    stage.store = SqliteStore(path, larger)
    assert (path / "redo").stat().st_size == 100_000
    assert (path / "redo").stat().st_mode & 0o777 == 0o600
    assert bodies(stage.receive(queue, 10)) == ["kept"]
    stage.store.close()


def test_what_a_client_wrote_is_no_record(stage: Stage) -> None:
    """Not even where an earlier run left it behind this one, to the byte where the next record would begin."""
    queue = started(stage)
    path = store_of(stage).directory.redo
    log = store_of(stage)._writer.redo
    stage.send(queue, "the last of this run")
    end = log._at
    content = path.read_bytes()
    assert content[end : end + 8] == bytes(8)
    database = killed(stage)
    connection = connect(database)
    ((entry, *_), *_) = redo.lacking(path, connection)
    epoch = connection.execute("SELECT epoch FROM secret").get
    connection.close()
    forger = redo.Redo(path.with_name("forged"), SMALL, epoch)
    forged = forger.record(msgspec.structs.replace(entry, offset=entry.following))
    assert forged is not None
    path.write_bytes(content[:end] + forged + content[end + len(forged) :])
    stage.open()
    assert bodies(stage.receive(queue, 10)) == ["the last of this run"]


def test_readers_in_threads_see_every_commit(stage: Stage) -> None:
    queue = started(stage)
    store, found, done = store_of(stage), list[str](), threading.Event()
    committed = store._writer.mark.offset

    def look() -> None:
        while not done.is_set():
            before = committed
            with store.readers.lend() as connection:
                following = connection.execute("SELECT offset FROM mark").get
                last = connection.execute("SELECT max(offset + count) FROM history").get
            if following < before or last != following:
                found.append(f"{before} were committed, the mark said {following}, the history {last}")

    readers = [threading.Thread(target=look) for _ in range(3)]
    for each in readers:
        each.start()
    for number in range(400):
        stage.send(queue, str(number), delay_us=SECOND_US if number % 7 == 0 else None)
        if number % 3:
            stage.delete(queue, stage.take(queue).handle)
        committed = store._writer.mark.offset
    done.set()
    for each in readers:
        each.join()
    assert found == []


def test_the_clock_does_not_go_back_over_a_kill(stage: Stage) -> None:
    queue = started(stage)
    stage.later(5 * SECOND_US)
    stage.send(queue)
    stage.reopen(kill=True)
    assert stage.store.mark == EPOCH + 5 * SECOND_US
