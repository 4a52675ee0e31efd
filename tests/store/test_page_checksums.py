"""Pages that do not match their checksums: put right where one bit flipped, else told and served, and never silent."""

import logging
from contextlib import closing
from pathlib import Path
from typing import Final

import apsw
import msgspec
import pytest
from tests.store.test_log import LoggedFactory
from tests.store.test_schema import bring
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.errors import StoreFailed, StoreUnknown
from veilmq.store.directory import DatabaseDamaged, DatabaseFailed, DatabaseUnusable
from veilmq.store.log import Diverged
from veilmq.store.sqlite import disk, tools
from veilmq.store.sqlite.disk import connect, schema
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.repair.repair import repair
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import backup

PAGE_BYTES: Final = 4096
LABEL: Final = "the-label-that-a-bit-flips-in"


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A closed directory: a queue with a label, which nothing else says, and messages."""
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = stage.create("jobs", labels={"team": LABEL})
    for number in range(30):
        stage.send(queue, f"message {number}".ljust(200, "x"))
    stage.store.close()
    return tmp_path / "data"


def damage(directory: Path, *flips: tuple[int, int]) -> int:
    """Flip bits of the page with the label; returns its number. flips: how far behind the label, and which bit."""
    content = bytearray((directory / "veilmq.db").read_bytes())
    place = content.index(LABEL.encode())
    assert content.count(LABEL.encode()) == 1
    for far, bit in flips:
        content[place + far] ^= 1 << bit
    (directory / "veilmq.db").write_bytes(content)
    return place // PAGE_BYTES + 1


def checkpoint(directory: Path) -> None:
    """Copy the whole WAL into the database, whose pages have checksums."""
    with closing(connect(directory / "veilmq.db")) as connection:
        assert connection.execute("SELECT count(*) FROM queue").get  # the WAL is open
        assert schema.has_checksums(connection)
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


ONE: Final = ((3, 1),)
TWO: Final = ((3, 1), (9, 0))


def label_of(store: SqliteStore) -> str:
    (queue,) = store.reader.queues.values()
    return dict(queue.settings.labels)["team"]


def test_one_flipped_bit_is_told_and_put_right_by_a_start(
    closed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = damage(closed, *ONE)
    told = [each.text for each in check(closed / "veilmq.db").problems]
    assert told == [f"page {page} does not match its checksum: what its rows say may be wrong"]
    report = repair(closed, tmp_path / "new", None, lambda stage, done, total: None)
    assert report.is_whole
    assert "veilmq.db: 1 page had one bit flipped, which was flipped back" in report.found
    with closing(SqliteStore(closed, SMALL)) as store:
        assert (label_of(store), store.reader.pages_damaged) == (LABEL, False)
    assert f"a bit had flipped, and was flipped back, in page {page}" in caplog.text
    assert not check(closed / "veilmq.db").problems


@pytest.mark.parametrize("place", [0, 20, 16, PAGE_BYTES - 3])
def test_so_it_is_with_what_says_how_pages_are_read(closed: Path, place: int) -> None:
    content = bytearray((closed / "veilmq.db").read_bytes())
    content[place] ^= 8
    (closed / "veilmq.db").write_bytes(content)
    with closing(SqliteStore(closed, SMALL)) as store:
        assert label_of(store) == LABEL
    assert not check(closed / "veilmq.db").problems


def test_more_is_served_as_it_is_and_told(closed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = damage(closed, *TWO)
    with pytest.raises(DatabaseFailed, match="does not match its checksum"):
        backup(closed / "veilmq.db", tmp_path / "copy")
    with closing(SqliteStore(closed, SMALL)) as store:
        assert label_of(store) != LABEL
        assert store.reader.pages_damaged
        (line,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert (line.levelname, "run `veilmq check`" in line.getMessage()) == ("ERROR", True)
        assert any(f"page {page} " in each.text for each in store.reader.check(lambda *_: None).problems)
    report = repair(closed, tmp_path / "new", None, lambda stage, done, total: None)
    assert (report.pages_wrong, report.is_whole, report.of("000000000000/us-east-1/jobs").visible) == (1, False, 30)


def test_a_running_store_carries_out_what_met_such_a_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = stage.create("jobs")
    for number in range(400):
        stage.send(queue, f"message {number}".ljust(1_000, "x"))
    stage.reopen()
    with (tmp_path / "data" / "veilmq.db").open("r+b") as file:
        place = file.read().index(b"message 300x") + 500  # a start does not read the messages
        file.seek(place)
        file.write(b"yy")
    got = [message.body for _ in range(40) for message in stage.receive(queue, 10, lease_us=600_000_000)]
    assert len(got) == 399
    with store_of(stage).reader.look() as view:
        assert view.quarantined_count() == 1
    assert store_of(stage).reader.pages_damaged
    assert caplog.text.count("is served as it is") == 1


def test_a_reader_says_it_once_and_reads_on(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(SqliteStore(closed, SMALL)) as store:
        damage(closed, *TWO)
        for _ in range(2):
            with pytest.raises(DatabaseFailed, match="does not match its checksum"):
                store.reader.backup(lambda: None)
            assert (store.reader.pages_damaged, caplog.text.count("is served as it is")) == (True, 1)
        store.readers.trusting = False
        with pytest.raises(Exception, match="does not match its checksum"), store.reader.look() as view:
            view._connection.execute("SELECT * FROM queue").fetchall()
        with store.reader.look() as view:
            assert view._connection.execute("SELECT count(settings) FROM queue").get == 1
        assert store.reader.pages_damaged


def test_in_a_cluster_another_server_has_a_better_copy(tmp_path: Path) -> None:
    SqliteFollower(tmp_path / "owner").close()  # as the first server of a cluster does, before it owns the empty log
    factory = LoggedFactory(tmp_path / "owner")
    log, stage = factory.log, Stage(factory)
    stage.create("jobs", labels={"team": LABEL})
    stage.store.close()
    with closing(SqliteFollower(tmp_path / "copy")) as follower:
        log.bring(follower)
        assert follower.format == schema.VERSION
    factory.path = tmp_path / "copy"
    stage.open()  # takes over, and writes to that file
    stage.create("more")
    stage.store.close()
    for name in ("owner", "copy"):
        assert not check(tmp_path / name / "veilmq.db", is_owner=True).problems
        checkpoint(tmp_path / name)
        damage(tmp_path / name, *TWO)
    with pytest.raises(DatabaseDamaged, match="does not match its checksum"):
        SqliteStore(tmp_path / "owner", SMALL, log=log)
    with closing(SqliteFollower(tmp_path / "copy")) as follower, pytest.raises(Diverged, match="its checksum"):
        follower.queues()


@pytest.mark.parametrize("gives_up", [True, False])
def test_an_owner_that_meets_one_gives_its_copy_up_or_serves_it(tmp_path: Path, gives_up: bool) -> None:
    said = list[str]()

    def asked(why: str) -> bool:
        said.append(why)
        return gives_up

    factory = LoggedFactory(tmp_path / "owner")
    factory.options = msgspec.structs.replace(SMALL, gives_up=asked)
    stage = Stage(factory)
    queue = stage.create("jobs", labels={"team": LABEL})
    stage.send(queue, "a")
    store = store_of(stage)
    store.apply_log()
    checkpoint(tmp_path / "owner")
    damage(tmp_path / "owner", *TWO)
    with pytest.raises(StoreFailed, match="does not match"), store.reader.look() as view:
        view._connection.execute("SELECT * FROM queue").fetchall()
    if gives_up:
        with pytest.raises(StoreUnknown, match="does not match"):
            stage.receive(queue)
    else:
        assert [each.body for each in stage.receive(queue)] == ["a"]
    assert said == ["a page does not match its checksum"]
    store.close()


def test_a_follower_whose_readers_met_one_has_diverged(tmp_path: Path) -> None:
    factory = LoggedFactory(tmp_path / "owner")
    stage = Stage(factory)
    jobs = stage.create("jobs", labels={"team": LABEL})
    with closing(stage.store), closing(SqliteFollower(tmp_path / "copy")) as follower:
        factory.log.bring(follower)
        checkpoint(tmp_path / "copy")
        damage(tmp_path / "copy", *TWO)
        with pytest.raises(StoreFailed, match="does not match"), follower.look() as view:
            view._connection.execute("SELECT * FROM queue").fetchall()
        stage.send(jobs)  # which touches other pages
        with pytest.raises(Diverged, match="does not match"):
            factory.log.bring(follower)


FORMAT_10: Final = Path(__file__).parent / "fixtures" / "schema-10.db"


def test_a_file_of_the_format_before_has_none_and_its_backup_has(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    bring(FORMAT_10, tmp_path / "data")
    for _ in range(2):
        SqliteStore(tmp_path / "data", SMALL).close()
    backup(tmp_path / "data" / "veilmq.db", tmp_path / "copy")
    for name, has in (("data/veilmq.db", False), ("copy", True)):
        found = check(tmp_path / name)
        assert found.page_checksums == has
        assert {each.kind for each in found.problems} == {"quarantine"}  # which was there


def test_more_than_sqlite_keeps_in_memory_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(disk, "_VFS", None)
        stage = Stage(SqliteFactory(tmp_path / "data"))
        queue = stage.create("jobs")
        for _ in range(40):
            stage.send(queue, "x" * 200_000)
        stage.store.close()
    backup(tmp_path / "data" / "veilmq.db", tmp_path / "copy")
    backup(tmp_path / "copy", tmp_path / "second")
    for name in ("copy", "second"):
        found = check(tmp_path / name)
        assert (found.page_checksums, found.problems, found.messages) == (True, [], 40)


def test_without_sqlites_extensions_files_have_none_and_others_are_refused(
    closed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_VFS", None)
    with pytest.raises(DatabaseUnusable, match="this apsw cannot write them: install it from its wheel"):
        SqliteStore(closed, SMALL)
    with pytest.raises(DatabaseFailed, match="this apsw cannot write them"):
        backup(closed / "veilmq.db", tmp_path / "copy")
    assert not check(closed / "veilmq.db").page_checksums  # nothing verified them
    SqliteStore(tmp_path / "new", SMALL).close()
    assert not check(tmp_path / "new" / "veilmq.db").page_checksums


def test_other_databases_of_the_process_have_none(tmp_path: Path) -> None:
    with closing(apsw.Connection(str(tmp_path / "theirs.db"))) as connection:
        assert connection.open_vfs == "unix"


def test_a_check_of_the_file_takes_steps_and_can_be_ended(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes for a large one: an archive goes on meanwhile, and who has asked for it may leave."""
    monkeypatch.setattr(tools, "_STEPS", 100)
    steps: list[str] = []

    def step(stage: str, done: int, total: int) -> None:
        steps.append(stage)
        if len(steps) > 5:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        check(closed / "veilmq.db", step)
    assert steps == 6 * ["file"]
