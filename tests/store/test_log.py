"""A store whose batches are durable in a log: each end of an append, what a follower refuses, and a takeover."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, sending
from tests.support.following import compare
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import AnyCommand, DeleteQueue
from veilmq.model.errors import StoreFailed, StoreUnknown
from veilmq.model.outcomes import Deleted
from veilmq.model.settings.access import Share
from veilmq.model.settings.queue import QueueKey
from veilmq.store.directory import NotOurs
from veilmq.store.log import AppendUnknown, Changed, Diverged, Entry, FormatUnknown, NotAppended, NotOwner, Record
from veilmq.store.sqlite import disk, effects
from veilmq.store.sqlite.batch.memtable import BATCHES_MAX
from veilmq.store.sqlite.disk import connect, schema
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools.backup import backup


class MemoryLog:
    """A log in memory. See `veilmq.store.log.Log`."""

    def __init__(self) -> None:
        self.epoch = 1
        self.records: list[tuple[int, bytes]] = []
        """Epoch and record, from record 1 on."""
        self.ends: Exception | None = None
        """How the next append ends; None: well."""
        self.keeps = False
        """Whether an append that does not end well keeps the record."""

    def append(self, lsn: int, record: bytes) -> None:
        """See `Log.append`."""
        assert lsn == len(self.records) + 1
        ends, self.ends = self.ends, None
        if ends is None or self.keeps:
            self.records.append((self.epoch, record))
        if ends is not None:
            raise ends

    def send(self, lsn: int, record: bytes) -> int | None:
        """See `Log.send`: `append` does it all."""

    def confirmed(self) -> bool:
        """See `Log.confirmed`."""
        return False

    def bring(self, follower: SqliteFollower) -> None:
        """Apply what the follower lacks."""
        lacking = [Entry(lsn, *entry) for lsn, entry in enumerate(self.records, 1) if lsn > follower.position.lsn]
        while lacking:
            follower.apply(lacking[:3])
            del lacking[:3]


class LoggedFactory(SqliteFactory):
    """Opens one directory again and again, with a log."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.log = MemoryLog()
        self.kind = lambda path, options: SqliteStore(path, options, log=self.log)  # type: ignore[assignment]


@pytest.fixture
def factory(tmp_path: Path) -> LoggedFactory:
    return LoggedFactory(tmp_path / "owner")


@pytest.fixture
def stage(factory: LoggedFactory) -> Iterator[Stage]:
    playing = Stage(factory)
    yield playing
    playing.store.close()


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[SqliteFollower]:
    with closing(SqliteFollower(tmp_path / "follower", SMALL)) as opened:
        yield opened


def equal(store: SqliteStore, follower: SqliteFollower) -> None:
    store.apply_log()
    compare(store._writer.connection, follower._connection)


def ways(stage: Stage, commands: list[AnyCommand], alone: bool) -> list[object]:
    """Apply and commit in one batch, or each command alone; the outcomes."""
    store = stage.store
    if alone:
        return list(store.apply_each(commands, stage.now).outcomes)
    outcomes = list(store.apply(commands, stage.now).outcomes)
    store.commit()
    return outcomes


def test_each_batch_is_one_record_and_nothing_written_is_none(stage: Stage, factory: LoggedFactory) -> None:
    jobs = stage.create()
    before = len(factory.log.records)
    stage.batch([sending(jobs, "a"), sending(jobs, "b")])
    assert len(factory.log.records) == before + 1
    assert stage.store.commit_takes_long
    stage.describe(jobs)
    assert len(factory.log.records) == before + 1


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_not_in_the_log_did_not_happen(stage: Stage, factory: LoggedFactory, alone: bool) -> None:
    jobs = stage.create()
    factory.log.ends = NotAppended("no room")
    if alone:
        first, *others = ways(stage, [sending(jobs, "c"), sending(jobs, "a"), sending(jobs, "a")], alone)
        assert isinstance(first, StoreFailed)
        assert others == [first, first]  # the log is not asked again: each would wait as long for it
    else:
        with pytest.raises(StoreFailed, match="no room"):
            ways(stage, [sending(jobs, "a"), sending(jobs, "a")], alone)
    stage.send(jobs, "b")
    assert bodies(stage.receive(jobs, 10)) == ["b"]


def test_who_owns_nothing_any_more_takes_nothing_more(stage: Stage, factory: LoggedFactory) -> None:
    jobs = stage.create()
    factory.log.ends = NotOwner("epoch 2 is another server's")
    with pytest.raises(StoreFailed, match="another server"):
        ways(stage, [sending(jobs)], False)
    with pytest.raises(StoreUnknown, match="another server"):
        stage.send(jobs)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_nobody_is_answered_while_the_end_is_unknown(
    stage: Stage, factory: LoggedFactory, follower: SqliteFollower, alone: bool, kept: bool
) -> None:
    jobs = stage.create()
    factory.log.ends, factory.log.keeps = AppendUnknown("no answer"), kept
    with pytest.raises(StoreUnknown, match="no answer"):
        ways(stage, [sending(jobs)], alone)
    with pytest.raises(StoreUnknown):
        stage.send(jobs)
    stage.store.close()
    with closing(SqliteFollower(factory.path, SMALL)) as own:  # the file goes on from what it has
        factory.log.bring(own)
    stage.store = factory.open()
    assert bodies(stage.receive(jobs)) == ["hello"] * kept
    factory.log.bring(follower)
    equal(store_of(stage), follower)


@pytest.mark.parametrize("of_its_own", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_what_the_log_has_is_committed_though_the_file_fails(
    stage: Stage, factory: LoggedFactory, alone: bool, of_its_own: bool
) -> None:
    """of_its_own: at the COMMIT of a batch that needs a transaction, not at a later one of a batch that needs none."""
    jobs = stage.create()
    store_of(stage)._writer.connection.set_commit_hook(lambda: True)  # SQLite then rolls back
    ways(stage, [DeleteQueue(queue=jobs, origin=TESTER) if of_its_own else sending(jobs)], alone)
    if not of_its_own:
        with pytest.raises(StoreUnknown, match="lacks"):
            store_of(stage).apply_log()
    with pytest.raises(StoreUnknown, match="lacks"):
        stage.send(jobs)
    stage.store.close()
    with closing(SqliteFollower(factory.path, SMALL)) as own:
        factory.log.bring(own)
    stage.store = factory.open()
    if of_its_own:
        assert jobs not in store_of(stage).reader.queues
    else:
        assert bodies(stage.receive(jobs, 10)) == ["hello"]


class TestWrittenLater:
    """A batch that needs no table is durable by its record; the owner's file gets it later."""

    def test_readers_see_it_and_a_kill_loses_nothing(self, stage: Stage, factory: LoggedFactory) -> None:
        jobs = stage.create()
        for body in ("one", "two", "three"):
            stage.send(jobs, body)
        assert lacking(stage, factory) == 3
        assert [each.body for each in stage.peek(jobs)] == ["one", "two", "three"]
        assert lacking(stage, factory) == 0
        stage.send(jobs, "four")
        assert lacking(stage, factory) == 1
        stage.store = killed(stage, factory)
        assert bodies(stage.receive(jobs, 10)) == ["one", "two", "three", "four"]

    def test_the_file_never_lacks_many(self, stage: Stage, factory: LoggedFactory) -> None:
        jobs, found = stage.create(), set()
        for _ in range(2 * BATCHES_MAX):
            stage.send(jobs)
            found.add(lacking(stage, factory))
        assert found == set(range(BATCHES_MAX + 1))

    def test_it_is_written_while_an_append_is_under_way(
        self, stage: Stage, factory: LoggedFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs = stage.create()
        monkeypatch.setattr(factory.log, "send", lambda lsn, record: 1)
        store, found = store_of(stage), []
        for number in range(40):
            store.apply([sending(jobs, str(number))], stage.now)
            assert store.begin_commit() == 1
            found.append(lacking(stage, factory))
            store.commit()
        assert max(found) == 15
        assert sorted(bodies(stage.receive(jobs, 10))) == sorted(map(str, range(10)))

    @pytest.mark.parametrize("ends", [AppendUnknown("no answer"), NotOwner("another server owns the queues")])
    def test_a_store_that_ends_keeps_what_was_confirmed(
        self, stage: Stage, factory: LoggedFactory, ends: Exception
    ) -> None:
        """Nothing may be left but its file."""
        jobs = stage.create()
        stage.send(jobs, "confirmed")
        factory.log.ends = ends
        stage.store.apply([sending(jobs)], stage.now)
        with pytest.raises((StoreUnknown, StoreFailed)):
            stage.store.commit()
        assert lacking(stage, factory) == 0
        stage.store.close()
        stage.store = factory.open()
        assert bodies(stage.receive(jobs, 10)) == ["confirmed"]

    def test_a_file_without_room_for_it_ends_the_store(self, stage: Stage, factory: LoggedFactory) -> None:
        """So that another server goes on."""
        jobs = stage.create()
        connection = store_of(stage)._writer.connection
        connection.pragma("max_page_count", connection.pragma("page_count"))
        for number in range(5):
            stage.send(jobs, f"{number}" * 12_000)
        assert isinstance(stage.do(DeleteQueue(queue=jobs, origin=TESTER)), StoreFailed)
        with pytest.raises(StoreUnknown, match="no room for what the log has"):
            stage.send(jobs)

    def test_a_batch_that_the_log_refuses_leaves_the_others(self, stage: Stage, factory: LoggedFactory) -> None:
        jobs = stage.create()
        stage.send(jobs, "there")
        factory.log.ends = NotAppended("no room")
        factory.log.keeps = False
        (sent,) = ways(stage, [sending(jobs, "not there")], alone=True)
        assert isinstance(sent, StoreFailed)
        stage.send(jobs, "also there")
        stage.store = killed(stage, factory)
        assert bodies(stage.receive(jobs, 10)) == ["there", "also there"]


def lacking(stage: Stage, factory: LoggedFactory) -> int:
    """How many records the owner's file lacks."""
    with closing(apsw.Connection(str(store_of(stage).directory.database), flags=apsw.SQLITE_OPEN_READONLY)) as reader:
        found = effects.position(reader)
    assert found is not None
    return len(factory.log.records) - found.lsn


def killed(stage: Stage, factory: LoggedFactory) -> SqliteStore:
    """The same directory after a kill, opened as a server does: with what the log has."""
    (factory.path / "redo").touch()
    factory.kill(stage.store)
    (factory.path / "redo").unlink()
    with closing(SqliteFollower(factory.path, SMALL)) as own:
        factory.log.bring(own)
    return factory.open()


def test_a_follower_takes_over(stage: Stage, factory: LoggedFactory, tmp_path: Path) -> None:
    """Handles stay good, and what the opening writes is a record of the new owner's."""
    jobs = stage.create()
    stage.send(jobs, "in flight")
    taken = stage.take(jobs)
    stage.send(jobs, "waiting")
    with closing(SqliteFollower(tmp_path / "follower", SMALL)) as follower:
        factory.log.bring(follower)
    old = stage.store
    factory.path, factory.log.epoch = tmp_path / "follower", 2
    stage.store = factory.open()
    assert {epoch for epoch, _ in factory.log.records} == {1, 2}
    assert isinstance(stage.delete(jobs, taken.handle), Deleted)
    assert bodies(stage.receive(jobs, 10)) == ["waiting"]
    old.close()
    with closing(SqliteFollower(tmp_path / "owner", SMALL)) as back:  # the old owner follows
        factory.log.bring(back)
        equal(store_of(stage), back)


def test_only_a_server_with_a_log_opens_the_directory(stage: Stage, factory: LoggedFactory) -> None:
    stage.store.close()
    with pytest.raises(NotOurs, match="--cluster"):
        SqliteStore(factory.path, SMALL)
    stage.store = factory.open()


def test_a_backup_follows_no_log(stage: Stage, tmp_path: Path) -> None:
    stage.send(stage.create())
    (tmp_path / "restored").mkdir(mode=0o700)
    backup(store_of(stage).directory.database, tmp_path / "restored" / "veilmq.db", is_owner=True)
    with closing(SqliteStore(tmp_path / "restored", SMALL)) as restored:
        assert [queue.name for queue in restored.reader.queues] == ["jobs"]


def test_a_follower_folds_in_what_gathered_behind_a_long_read_without_a_further_record(
    stage: Stage, factory: LoggedFactory, tmp_path: Path
) -> None:
    queue = stage.create()
    options = msgspec.structs.replace(SMALL, checkpoint_bytes=256 * 1024)
    with closing(SqliteFollower(tmp_path / "copy", options)) as follower:
        checkpointer = follower._checkpointer
        factory.log.bring(follower)
        with follower.look() as view:
            view.bounds()
            for _ in range(40):
                stage.batch([sending(queue, "x" * 4_000)] * 20)
                factory.log.bring(follower)
                if checkpointer._bulk is not None:
                    checkpointer._bulk.join()
        assert checkpointer.wal_pages - checkpointer._copied > disk._REMAINDER_PAGES
        follower.look_again()
        assert checkpointer._bulk is not None
        checkpointer._bulk.join()
        assert checkpointer.wal_pages == checkpointer._copied


class TestFollower:
    """What a follower refuses, with nothing changed."""

    @pytest.fixture(autouse=True)
    def history(self, stage: Stage, factory: LoggedFactory, follower: SqliteFollower) -> None:
        """The follower lacks the last record."""
        stage.send(stage.create())
        factory.log.bring(follower)
        stage.create("more")

    @pytest.mark.parametrize("case", ["skipped", "another history", "older schema", "changed row", "unknown table"])
    def test_it_has_diverged(self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage, case: str) -> None:
        (epoch, packed), lsn = factory.log.records[-1], len(factory.log.records)
        record = msgspec.msgpack.decode(packed, type=Record)
        why = "does not continue"
        if case == "skipped":
            lsn += 1
        elif case == "another history":
            record = msgspec.structs.replace(record, before=record.before ^ 1)
        elif case == "older schema":
            record, why = msgspec.structs.replace(record, schema=record.schema - 1), "schema"
        elif case == "changed row":
            follower._connection.execute("UPDATE mark SET offset = offset + 1")
            why = "DATA: UPDATE in mark"
        else:
            follower._connection.execute("DROP TABLE history")
            why = "rows of"
        before, queues = follower.position, self.queues(follower)
        with pytest.raises(Diverged, match=why):
            follower.apply([Entry(lsn, epoch, msgspec.msgpack.encode(record))])
        assert (follower.position, self.queues(follower)) == (before, queues)
        if case == "changed row":
            follower.apply([Entry(lsn, epoch, packed)], forced=lsn)
            equal(store_of(stage), follower)

    def test_it_has_diverged_from_what_is_shipped_plainly(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage
    ) -> None:
        """A send of a message that has no rows yet changes nothing but the history, the memtable and the mark."""
        jobs = QueueKey(ACCOUNT, REGION, "jobs")
        factory.log.bring(follower)
        stage.send(jobs)
        (epoch, packed), lsn = factory.log.records[-1], len(factory.log.records)
        record = msgspec.msgpack.decode(packed, type=Record)
        assert (record.patch, record.change) == (b"", b"")
        assert record.plain is not None
        before = follower.position
        place = record.plain.history[0]
        rows = (
            ("UPDATE mark SET offset = offset + 1", "the mark is not at", "UPDATE mark SET offset = offset - 1"),
            (
                f"INSERT INTO history SELECT {place}, 1, 1, 1, 1, x'90'",
                "UNIQUE",
                f"DELETE FROM history WHERE offset = {place}",
            ),
            (f"INSERT INTO memtable VALUES ({place}, x'90')", "UNIQUE", f"DELETE FROM memtable WHERE offset = {place}"),
        )
        gone = ("ALTER TABLE history RENAME TO gone", "no such table", "ALTER TABLE gone RENAME TO history")
        for wrong, why, undo in (*rows, gone):
            follower._connection.execute(wrong)
            with pytest.raises(Diverged, match=why):
                follower.apply([Entry(lsn, epoch, packed)])
            assert follower.position == before
            follower._connection.execute(undo)
        for wrong, _, _ in rows:
            follower._connection.execute(wrong)
        follower.apply([Entry(lsn, epoch, packed)], forced=lsn)
        equal(store_of(stage), follower)

    def queues(self, follower: SqliteFollower) -> object:
        return follower._connection.execute("SELECT name FROM queue").fetchall()

    def test_of_records_applied_together_those_before_a_bad_one_stay(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage, tmp_path: Path
    ) -> None:
        more, before = stage.create("together"), len(factory.log.records)
        factory.log.bring(follower)
        for number in range(3):
            stage.send(more, str(number))
        (epoch, good), (_, bad) = factory.log.records[before], factory.log.records[before + 2]

        with pytest.raises(Diverged, match="does not continue"):
            follower.apply([Entry(before + 1, epoch, good), Entry(before + 2, epoch, bad)])
        with closing(connect(follower.directory.database)) as reading:
            assert reading.execute("SELECT lsn FROM log_position").get == before + 1
        factory.log.bring(follower)
        equal(store_of(stage), follower)

    def test_one_that_does_not_fit_is_found_among_others_that_are_written_as_one(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage
    ) -> None:
        jobs, more = (stage.create(name) for name in ("written", "wrong here"))
        factory.log.bring(follower)
        before, follower._applier.merges_from = follower.position.lsn, 3
        numbers = {info.key: number for number, info in follower.queues().items() if info is not None}
        for key, timeout_us in ((jobs, 1_000_000), (more, 2_000_000), (jobs, 3_000_000)):
            stage.change(key, visibility_timeout_us=timeout_us)
        follower._connection.execute("UPDATE queue SET modified = 1 WHERE incarnation = ?", (numbers[more],))
        lacking = [Entry(lsn, *factory.log.records[lsn - 1]) for lsn in range(before + 1, before + 4)]
        with pytest.raises(Diverged, match="DATA: UPDATE in queue"):
            follower.apply(lacking)
        assert follower.position.lsn == before + 1
        found = follower.queues()[numbers[jobs]]
        assert found is not None
        assert found.settings.visibility_timeout_us == 1_000_000
        changed = follower.apply(lacking[1:], forced=before + 2)
        assert changed.queues == {numbers[jobs], numbers[more]}
        equal(store_of(stage), follower)

    @pytest.mark.parametrize("kept_up", [False, True])
    def test_a_damaged_row_of_the_owner_is_found_unless_the_follower_is_far_behind(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage, kept_up: bool
    ) -> None:
        """It merges the records before and after the damage, so it must not where the damage is known."""
        jobs = stage.create("damaged")
        factory.log.bring(follower)
        before = follower.position.lsn
        stage.change(jobs, visibility_timeout_us=1_000_000)
        store_of(stage)._writer.connection.execute("UPDATE queue SET modified = modified + 1")
        stage.later(1_000_000)
        stage.change(jobs, visibility_timeout_us=2_000_000)
        lacking = [Entry(lsn, *factory.log.records[lsn - 1]) for lsn in range(before + 1, before + 3)]
        if not kept_up:
            follower._applier.merges_from = 2
        with pytest.raises(Diverged, match="DATA: UPDATE in queue"):
            follower.apply(lacking, alone=() if kept_up else {before + 2})
        assert follower.position.lsn == before + 1

    @pytest.mark.parametrize("merges_from", [2, 100])
    def test_a_full_disk_amid_records_leaves_the_position_where_the_file_is(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage, merges_from: int
    ) -> None:
        jobs, more = stage.create("on a full disk"), stage.create("changed")
        factory.log.bring(follower)
        before, follower._applier.merges_from = follower.position, merges_from
        stage.send(jobs)
        for number in range(3):
            stage.change(more, visibility_timeout_us=number)
            stage.batch([sending(jobs, "x" * 100_000) for _ in range(3)])
        connection = follower._connection
        connection.pragma("max_page_count", int(connection.pragma("page_count")) + 1)
        lacking = [Entry(lsn, *entry) for lsn, entry in enumerate(factory.log.records, 1) if lsn > before.lsn]
        with pytest.raises(StoreUnknown, match="full"):
            follower.apply(lacking)
        assert connection.execute("SELECT lsn FROM log_position").get == follower.position.lsn
        connection.pragma("max_page_count", 1_000_000)
        factory.log.bring(follower)
        equal(store_of(stage), follower)

    def test_a_copy_goes_on_from_its_last_record(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage, tmp_path: Path
    ) -> None:
        (tmp_path / "copied").mkdir(mode=0o700)
        assert follower.copy(tmp_path / "copied" / "veilmq.db").position == follower.position
        with closing(SqliteFollower(tmp_path / "copied", SMALL)) as copied:
            factory.log.bring(copied)
            equal(store_of(stage), copied)

    def test_a_rotten_copy_is_told(self, follower: SqliteFollower, tmp_path: Path) -> None:
        follower._connection.execute("UPDATE memtable SET messages = x'90'")
        with pytest.raises(Diverged, match="a check of the copy found"):
            follower.copy(tmp_path / "copy.db")

    def test_a_later_start_goes_on_from_its_position(
        self, factory: LoggedFactory, follower: SqliteFollower, stage: Stage, tmp_path: Path
    ) -> None:
        shutil.copytree(tmp_path / "follower", tmp_path / "killed")
        with closing(SqliteFollower(tmp_path / "killed", SMALL)) as again:
            assert again.position.lsn == len(factory.log.records) - 1
            factory.log.bring(again)
            equal(store_of(stage), again)


def test_every_table_has_a_primary_key(stage: Stage) -> None:
    """A session takes no notice of a table without one."""
    connection = store_of(stage)._writer.connection
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    for (name,) in names.fetchall():
        assert connection.execute("SELECT 1 FROM pragma_table_info(?) WHERE pk", (name,)).fetchone(), name


def test_a_follower_says_which_queues_were_changed(
    stage: Stage, factory: LoggedFactory, follower: SqliteFollower
) -> None:
    def changed() -> set[int]:
        lsn = follower.position.lsn + 1
        epoch, record = factory.log.records[lsn - 1]
        found = follower.apply([Entry(lsn, epoch, record)])
        assert not found.shared
        return found.queues

    while follower.position.lsn < len(factory.log.records):
        changed()
    jobs = stage.create("under_score", alias="under-score")
    (number,) = changed()
    (info,) = follower.queues().values()
    assert info is not None
    assert (info.key, info.settings.alias) == (jobs, "under-score")
    stage.change(jobs, visibility_timeout_us=7_000_000)
    assert changed() == {number}
    found = follower.queues([number])[number]
    assert found is not None
    assert found.settings.visibility_timeout_us == 7_000_000
    stage.send(jobs)
    assert changed() == set()
    stage.drop(jobs)
    assert changed() == {number}
    assert follower.queues([number]) == {number: None}
    assert follower.queues() == {}


class TestFormats:
    """A later release has one more table. It works without, until the log says that all servers know it."""

    @pytest.fixture
    def later(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """The version of its tables."""
        version = schema.VERSION + 1
        monkeypatch.setattr(schema, "OLDEST_SERVED", schema.VERSION)
        monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE later (id INTEGER PRIMARY KEY)"))
        monkeypatch.setattr(schema, "VERSION", version)
        return version

    @pytest.fixture
    def log(self, factory: LoggedFactory, later: int) -> MemoryLog:
        """Written by a later release: five messages with the tables of this one, five with its own."""
        for version in (later - 1, later):
            options = msgspec.structs.replace(SMALL, schema=version)
            factory.kind = lambda path, _, options=options: SqliteStore(path, options, log=factory.log)  # type: ignore[assignment]
            stage = Stage(factory)
            jobs = stage.create(f"jobs-{version}")
            for number in range(5):
                stage.send(jobs, str(number))
            stage.store.close()
        return factory.log

    def test_followers_of_both_releases_go_on(self, tmp_path: Path, factory: LoggedFactory, log: MemoryLog) -> None:
        with closing(SqliteFollower(tmp_path / "follower", SMALL)) as follower:
            for lsn, (epoch, record) in enumerate(log.records, 1):
                follower.apply([Entry(lsn, epoch, record)])
                decoded = msgspec.msgpack.decode(record, type=Record)
                assert follower.format == decoded.schema
            assert follower.format == schema.VERSION
            store = factory.open()
            log.bring(follower)
            equal(store, follower)
            store.close()

    def test_who_does_not_know_it_keeps_its_copy(
        self, tmp_path: Path, log: MemoryLog, later: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(schema, "VERSION", later - 1)
        with closing(SqliteFollower(tmp_path / "follower", SMALL)) as follower:
            with pytest.raises(FormatUnknown, match=f"state format {later}, and this release knows {later - 1}"):
                log.bring(follower)
            assert 5 < follower.position.lsn < len(log.records)

    def test_who_needs_it_reads_what_was_before(
        self, tmp_path: Path, log: MemoryLog, later: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It serves no older tables, but the log begins with them."""
        monkeypatch.setattr(schema, "OLDEST_SERVED", later)
        with closing(SqliteFollower(tmp_path / "follower", SMALL)) as follower:
            log.bring(follower)
            assert follower.format == later
            assert follower.position.lsn == len(log.records)

    def test_a_copy_of_older_tables_is_checked_as_such(self, tmp_path: Path, log: MemoryLog, later: int) -> None:
        with closing(SqliteFollower(tmp_path / "follower", SMALL)) as follower:
            follower.apply([Entry(1, 1, log.records[0][1])])
            assert follower.format == later - 1
            assert follower.copy(tmp_path / "copy.db").position.lsn == 1


def test_a_follower_says_that_what_all_share_was_changed(
    stage: Stage, factory: LoggedFactory, follower: SqliteFollower
) -> None:
    factory.log.bring(follower)
    assert follower.shared() == {}
    stage.do(Share(name="token", value=b"secret"))
    lsn = follower.position.lsn + 1
    assert follower.apply([Entry(lsn, *factory.log.records[lsn - 1])]) == Changed(set(), shared=True)
    assert follower.shared() == {"token": b"secret"}


def test_a_backup_leaves_out_what_is_the_clusters(stage: Stage, tmp_path: Path) -> None:
    stage.do(Share(name="token", value=b"a secret of the cluster"))
    copy = tmp_path / "copy.db"
    backup(store_of(stage).directory.database, copy, is_owner=True)
    assert b"a secret of the cluster" not in copy.read_bytes()
    replica = tmp_path / "replica.db"
    backup(store_of(stage).directory.database, replica, is_owner=True, replica=True)
    assert b"a secret of the cluster" in replica.read_bytes()
