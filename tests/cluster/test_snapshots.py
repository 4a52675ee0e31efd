"""Snapshots in a real PostgreSQL: what is uploaded, kept and read, and copies that are filled from one."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.cluster.conftest import Cluster, LoggedFactory, begin
from tests.support.contract.stage import TESTER, Stage
from tests.support.following import compare
from tests.support.postgres import until
from tests.support.sqlite import SMALL, store_of

from veilmq.cluster import snapshotting
from veilmq.cluster.member.copy import Copy, Watch
from veilmq.cluster.postgres import Unfit, Unreachable
from veilmq.cluster.postgres.log import reading
from veilmq.cluster.postgres.snapshots import Proof, Proofs, Snapshot, Snapshots, needed
from veilmq.cluster.snapshotting import Snapshotting, Stopped, Unproven
from veilmq.model.commands import Send, Sweep
from veilmq.model.errors import StoreUnknown
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.queue import QueueInfo
from veilmq.store.archive import PART_BYTES
from veilmq.store.directory import DATABASE, DatabaseUnusable
from veilmq.store.log import Diverged, Entry, Follower, Point, Position, SnapshotBad
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.tools import check
from veilmq.testing import chance

CLOCK = Instant(5)
POINT = Point(Position(7, 2, 99), CLOCK)


class Flaky(Snapshots):
    """Loses its connection amid the next snapshot that is read."""

    fails = False

    def read(self, snapshot: Snapshot, file: Path, between: Callable[[], None] = lambda: None) -> None:
        if self.fails:
            self.fails = False
            raise Unreachable("the connection was lost")
        super().read(snapshot, file, between)


def at_once(size: int) -> None:
    """Upload without a pause."""


@pytest.fixture
def snapshots(cluster: Cluster) -> Snapshots:
    return Snapshots(cluster.postgres(), cluster.shard.incarnation)


class TestUpload:
    """Any file, as it was."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "file"
        path.write_bytes(b"first" * (PART_BYTES // 5 + 1) + b"later" * (PART_BYTES // 5) + b"the last part is short")
        return path

    def test_it_comes_back(self, snapshots: Snapshots, file: Path, tmp_path: Path) -> None:
        snapshots.write(file, POINT, "two", at_once)
        (found,) = snapshots.list()
        assert (found.point, found.verified_by) == (POINT, "two")
        snapshots.read(found, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == file.read_bytes()

    def test_half_an_upload_is_none(self, cluster: Cluster, snapshots: Snapshots, file: Path) -> None:
        cluster.pair.primary.query("insert into veilmq.snapshot_part values (7, 0, 'left by a kill')")
        assert snapshots.list() == []
        snapshots.write(file, POINT, "two", at_once)
        assert [found.lsn for found in snapshots.list()] == [7]

    def test_two_are_kept(self, cluster: Cluster, snapshots: Snapshots, file: Path) -> None:
        for lsn in (3, 5, 9):
            snapshots.write(file, Point(Position(lsn, 1, 0), CLOCK), "two", at_once)
        assert [found.lsn for found in snapshots.list()] == [9, 5]
        rows = cluster.pair.primary.query("select distinct lsn from veilmq.snapshot_part order by lsn")
        assert rows == [(5,), (9,)]

    @pytest.mark.parametrize(
        "damage",
        [
            "update veilmq.snapshot_part set content = overlay(content placing '\\x00' from 60) where number = 0",
            "update veilmq.snapshot_part set content = (select content from veilmq.snapshot_part where number = 0)"
            " where number = 1",
            "delete from veilmq.snapshot_part where number = 1",
            "update veilmq.snapshot set size = size + 1",
        ],
        ids=["flipped", "exchanged", "missing", "size"],
    )
    def test_damage_is_told(
        self, cluster: Cluster, snapshots: Snapshots, file: Path, tmp_path: Path, damage: str
    ) -> None:
        snapshots.write(file, POINT, "two", at_once)
        cluster.pair.primary.query(damage)
        with pytest.raises(SnapshotBad):
            snapshots.read(snapshots.list()[0], tmp_path / "back")


class TestCopy:
    """A server's directory, and what fills it."""

    @pytest.fixture
    def stage(self, cluster: Cluster, tmp_path: Path) -> Iterator[Stage]:
        playing = Stage(LoggedFactory(tmp_path / "owner", cluster.log()))
        yield playing
        playing.store.close()

    @pytest.fixture
    def copy(self, cluster: Cluster, snapshots: Snapshots, stage: Stage, tmp_path: Path) -> Iterator[Copy]:
        """It has all that the owner had."""
        jobs = stage.create()
        for number in range(5):
            stage.send(jobs, str(number))
        with closing(Copy(tmp_path / "copy", follower, snapshots)) as copy:
            copy.catch_up(cluster.reader())
            equal(stage, copy)
            yield copy

    def work(self, stage: Stage, records: int) -> None:
        jobs = next(iter(store_of(stage).reader.queues))
        for _ in range(records):
            stage.send(jobs, "more")
        store_of(stage).apply_log()  # as the next sweep would

    def snapshotting(self, cluster: Cluster, directory: Path, name: str, **options: Any) -> Snapshotting:
        """One server's part, ready to write at once."""
        found = Snapshotting(
            cluster.postgres(), cluster.shard.incarnation, name, directory, **{"owns": False, "bytes_min": 0} | options
        )
        return cluster.kept(found)

    def snapshot(self, cluster: Cluster, copy: Copy, tmp_path: Path, asker: Snapshotting | None = None) -> None:
        """The copy's, which the owner verifies at once. Raises as `Snapshotting.write`."""
        copy.catch_up(cluster.reader())
        writing = begin((asker or self.snapshotting(cluster, tmp_path / "copy", "copy")).write)
        owner = self.snapshotting(cluster, tmp_path / "owner", "owner")
        while not writing.done():
            owner.answer()
        writing.result()

    def test_pages_are_read_ahead(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the one before is applied; also where the copy begins anew amid them, or PostgreSQL is away."""
        monkeypatch.setattr(reading, "PAGE_BYTES_MAX", 2_000)
        stage.create()
        self.work(stage, 100)
        reader = cluster.reader()
        threads: list[int] = []
        read = reader._read

        def reads(after: Position) -> tuple[list[Entry], bool]:
            threads.append(threading.get_ident())
            return read(after)

        monkeypatch.setattr(reader, "_read", reads)
        with closing(Copy(tmp_path / "new", follower, snapshots)) as new:
            assert new.read_on(reader)
            new.throw_away("it begins anew")
            assert new.read_on(reader)
            cluster.pair.primary.query(
                "select pg_terminate_backend(pid, 1000) from pg_stat_activity where application_name = 'veilmq'"
            )
            with suppress(Unreachable):
                new.catch_up(reader)
            new.catch_up(reader)
            equal(stage, new)
        assert len(threads) > 10
        assert len(set(threads)) == 2

    def test_a_follower_goes_on_with_its_other_work_amid_load(self, cluster: Cluster, stage: Stage, copy: Copy) -> None:
        """Each time it reads, another record has come. A new owner reads on until none has."""
        reader = cluster.reader()
        read_on, pages = reader.read_on, list[int]()

        def busy(after: Position) -> list[Entry]:
            if len(pages) < 10:
                self.work(stage, 3)
            entries = read_on(after)
            pages.append(len(entries))
            return entries

        reader.read_on = busy  # type: ignore[method-assign]
        copy.catch_up(reader)
        assert pages == [3]
        copy.catch_up(reader, stage.factory.log._ownership)  # type: ignore[attr-defined]
        assert pages == [3] * 10 + [0]

    def test_a_copy_that_has_diverged_is_filled_again(self, cluster: Cluster, stage: Stage, copy: Copy) -> None:
        before = copy.follower
        before._connection.execute("DELETE FROM memtable")  # type: ignore[attr-defined]
        stage.do(Sweep())  # it deletes what is not there
        copy.catch_up(cluster.reader())
        assert copy.follower is not before
        equal(stage, copy)

    def test_a_copy_that_is_filled_again_tells_nobody_how_queues_were(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, tmp_path: Path
    ) -> None:
        """A server judges its clients by what it hears: a policy that was taken away must not come back for a while."""
        heard: list[int] = []

        def learnt(queues: dict[int, QueueInfo | None]) -> None:
            heard.extend(info.settings.retention_us for info in queues.values() if info is not None)

        jobs = stage.create()
        stage.change(jobs, retention_us=61 * SECOND_US)
        stage.change(jobs, retention_us=62 * SECOND_US)
        with closing(Copy(tmp_path / "new", follower, snapshots, Watch(learnt=learnt))) as new:
            new.catch_up(cluster.reader())
            assert heard[-1] == 62 * SECOND_US
            heard.clear()
            new.throw_away("a bit flipped")
            new.catch_up(cluster.reader())
            assert heard == [62 * SECOND_US]
            stage.change(jobs, retention_us=63 * SECOND_US)
            new.catch_up(cluster.reader())
            assert heard == [62 * SECOND_US, 63 * SECOND_US]

    def test_a_message_in_quarantine_is_in_the_snapshot(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, copy: Copy, tmp_path: Path
    ) -> None:
        """That it is there is in the log, so no other copy is without it, and none need be filled again."""
        jobs = next(iter(store_of(stage).reader.queues))
        stage.do(Send(queue=jobs, origin=TESTER, body="damaged", md5=bytes(16), size_bytes=7, delay_us=SECOND_US))
        stage.later(SECOND_US)
        assert len(stage.receive(jobs, 10)) == 5
        self.work(stage, 1)
        self.snapshot(cluster, copy, tmp_path)
        (found,) = snapshots.list()
        snapshots.read(found, tmp_path / "back")
        with closing(connect(tmp_path / "back")) as back:
            assert back.execute("SELECT count(*) FROM quarantine").get == 1

    def test_a_new_server_reads_the_snapshot_and_what_came_since(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, copy: Copy, tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        """The log before the older snapshot is gone; a damaged newer snapshot is no harm. The log says what it reads,
        for that may take long."""
        caplog.set_level("INFO", "veilmq.cluster")
        for _ in range(2):
            self.work(stage, 100)
            self.snapshot(cluster, copy, tmp_path)
        self.work(stage, 3)
        assert cluster.rows()[0][0] == 64
        cluster.pair.primary.query(
            "delete from veilmq.snapshot_part where lsn = (select max(lsn) from veilmq.snapshot)"
        )
        with closing(Copy(tmp_path / "new", follower, snapshots)) as new:
            new.catch_up(cluster.reader())
            equal(stage, new)
        read = [each.partition(" record ")[2] for each in caplog.messages if each.startswith("filling from")]
        assert read == [f"{each.lsn}: {each.size} bytes" for each in snapshots.list()]

        # A connection that is lost amid it says nothing about the snapshot.
        flaky = Flaky(cluster.postgres(), cluster.shard.incarnation)
        with closing(Copy(tmp_path / "new", follower, flaky)) as new:
            for _ in range(2):
                new.throw_away("a bit flipped")
                flaky.fails = True
                with pytest.raises(Unreachable):
                    new.catch_up(cluster.reader())
                new.catch_up(cluster.reader())
                equal(stage, new)

    def test_nothing_is_left_to_fill_it_from(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, copy: Copy, tmp_path: Path
    ) -> None:
        for _ in range(2):
            self.work(stage, 100)
            self.snapshot(cluster, copy, tmp_path)
        # 0.1.0 wrote a snapshot that names later records than it has, and dropped the log between.
        (newest, _), end = snapshots.list(), cluster.reader().end().lsn
        for table in ("snapshot", "snapshot_part"):
            cluster.pair.primary.query(f"update veilmq.{table} set lsn = {end + 64} where lsn = {newest.lsn}")
        self.work(stage, 100)
        cluster.reader().drop_below(end + 64)
        with closing(Copy(tmp_path / "old", follower, snapshots)) as old, pytest.raises(Unfit, match="no snapshot"):
            old.catch_up(cluster.reader())
        cluster.pair.primary.query("delete from veilmq.snapshot_part")
        with closing(Copy(tmp_path / "new", follower, snapshots)) as new, pytest.raises(Unfit, match="no snapshot"):
            new.catch_up(cluster.reader())

    def test_a_damaged_schema_is_thrown_away(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, copy: Copy, tmp_path: Path
    ) -> None:
        """A bit flips in the file's header, or in what the tables are, while the server is down, and it starts."""
        copy.close()
        file = tmp_path / "copy" / DATABASE
        with closing(connect(file)) as connection:
            connection.pragma("journal_mode", "delete")
        content, drawn = file.read_bytes(), chance(35)
        places = [*range(60), *range(64, 100)]  # all of the header but the schema's number
        places += [at for found in re.finditer(rb"CREATE TABLE \w+", content) for at in range(*found.span())]
        healed = 0
        for at in drawn.sample(places, 25):
            damaged = bytearray(content)
            damaged[at] ^= 1 << drawn.randrange(8)
            for each in file.parent.glob(f"{DATABASE}*"):
                each.unlink()
            file.write_bytes(damaged)
            with closing(Copy(tmp_path / "copy", follower, snapshots)) as started:
                healed += started.lsn == 0
                self.work(stage, 1)
                started.catch_up(cluster.reader())
                equal(stage, started)
        assert healed > 5

    def test_a_rotten_copy_is_not_published(
        self, cluster: Cluster, snapshots: Snapshots, copy: Copy, tmp_path: Path
    ) -> None:
        copy.follower._connection.execute("UPDATE memtable SET messages = x'90'")  # type: ignore[attr-defined]
        with pytest.raises(Diverged, match="a check of the copy found"):
            self.snapshot(cluster, copy, tmp_path)
        assert snapshots.list() == []

    def test_what_rotted_unseen_is_not_published(
        self, cluster: Cluster, snapshots: Snapshots, copy: Copy, stage: Stage, tmp_path: Path
    ) -> None:
        """A check finds nothing, but the owner's tables are others. The copy is filled again, and then published with
        what was written meanwhile."""
        asker = self.snapshotting(cluster, tmp_path / "copy", "copy")
        copy.follower._connection.execute("UPDATE origin SET client = 'contrakt'")  # type: ignore[attr-defined]
        with pytest.raises(Diverged, match="the tables of owner are not as here"):
            self.snapshot(cluster, copy, tmp_path, asker)
        assert snapshots.list() == []
        copy.throw_away("it differs")
        self.snapshot(cluster, copy, tmp_path, asker)
        (found,) = snapshots.list()
        assert found.verified_by == "owner"
        assert found.point.clock == stage.now

    def test_who_ends_amid_an_answer_leaves_it_to_others(
        self, cluster: Cluster, copy: Copy, stage: Stage, tmp_path: Path
    ) -> None:
        """As before a take-over. The asker would wait for a quarter of an hour."""
        asking, other = (Proofs(cluster.postgres(), cluster.shard.incarnation, name) for name in ("copy", "other"))
        with closing(asking), closing(other):
            asking.ask(copy.lsn)
            owner = self.snapshotting(cluster, tmp_path / "owner", "owner")
            owner._ended.set()
            with pytest.raises(Stopped):
                owner.answer()
            assert asking.look().by == ""
            assert other.claim(copy.lsn, owns=False) == copy.lsn

    def test_who_waits_for_one_that_ended_waits_for_another(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is not alone: the others look once a second whether there is something to answer."""
        said = [Proof("gone", 0, b"")] * 30 + [Proof("", 0, b"")] * 15 + [Proof("third", 7, b"digest")]
        asker = self.snapshotting(cluster, tmp_path / "owner", "owner", owns=True, alone_s=2.0)
        monkeypatch.setattr(asker._proofs, "look", iter(said).__next__)
        monkeypatch.setattr(asker, "_go_on", lambda seconds: None)
        assert asker._answered() == said[-1]

    def test_a_server_that_differs_twice_is_named(
        self, cluster: Cluster, snapshots: Snapshots, copy: Copy, stage: Stage, tmp_path: Path
    ) -> None:
        """The owner has rotted: the follower does not throw its copy away again and again."""
        asker = self.snapshotting(cluster, tmp_path / "copy", "copy")
        store_of(stage)._writer.connection.execute("UPDATE origin SET client = 'contrakt'")
        for error in (Diverged, Unproven):
            with pytest.raises(error, match="the tables of owner are not as here"):
                self.snapshot(cluster, copy, tmp_path, asker)
        assert snapshots.list() == []

    def test_the_copy_is_brought_to_the_record_that_was_verified(
        self, cluster: Cluster, snapshots: Snapshots, copy: Copy, stage: Stage, tmp_path: Path
    ) -> None:
        """The owner is ahead when it answers."""
        copy.catch_up(cluster.reader())
        behind = copy.follower.position.lsn
        self.work(stage, 3)
        writing = begin(self.snapshotting(cluster, tmp_path / "copy", "copy").write)
        owner = self.snapshotting(cluster, tmp_path / "owner", "owner")
        while not writing.done():
            owner.answer()
        writing.result()
        (found,) = snapshots.list()
        assert found.lsn == behind + 3
        (tmp_path / "new").mkdir(mode=0o700)
        snapshots.read(found, tmp_path / "new" / DATABASE)
        with closing(follower(tmp_path / "new")) as new:
            assert new.position == found.point.position, "a new server would begin before it, where the log may end"
        assert check(tmp_path / "new" / DATABASE).problems_count == 0

    def test_a_follower_that_nobody_verifies_publishes_nothing_and_an_owner_alone_does(
        self, cluster: Cluster, snapshots: Snapshots, copy: Copy, stage: Stage, tmp_path: Path
    ) -> None:
        copy.catch_up(cluster.reader())
        with pytest.raises(Unproven, match="no other server"):
            self.snapshotting(cluster, tmp_path / "copy", "copy", alone_s=0.2).write()
        assert snapshots.list() == []
        alone = self.snapshotting(cluster, tmp_path / "owner", "owner", owns=True, alone_s=0.2)
        while len(snapshots.list()) < 2 and cluster.reader().end().lsn < 2_000:
            self.work(stage, 100)
            alone.write()
        assert [found.verified_by for found in snapshots.list()] == ["", ""]
        begins = snapshots.list()[-1].lsn // 64 * 64
        assert cluster.rows()[0][0] == begins > 0  # its log is bounded

    def test_a_log_that_is_not_long_is_kept(self, cluster: Cluster, snapshots: Snapshots, copy: Copy) -> None:
        copy.catch_up(cluster.reader())
        self.snapshotting(cluster, copy._directory, "copy", bytes_min=1 << 30).write()
        assert snapshots.list() == []

    def test_at_a_url(self, cluster: Cluster, snapshots: Snapshots, copy: Copy, stage: Stage, tmp_path: Path) -> None:
        """What is not needed is removed there, and half an upload; a part that is missing there is no harm."""
        place = tmp_path / "place"
        cluster.pair.primary.query(f"update veilmq.shard set snapshots = '{place}'")
        folder = place / str(cluster.shard.incarnation) / "snapshots"
        (folder / "0000000000000001-half").mkdir(parents=True)
        for _ in range(3):
            self.work(stage, 70)
            self.snapshot(cluster, copy, tmp_path)
        newest, older = snapshots.list()
        assert [each.name for each in sorted(folder.iterdir(), reverse=True)] == [
            Path(each.folder).name for each in (newest, older)
        ]
        assert cluster.pair.primary.query("select count(*) from veilmq.snapshot_part") == [(0,)]
        (place / newest.folder / "00000").unlink()
        with closing(Copy(tmp_path / "new", follower, snapshots)) as new:
            new.catch_up(cluster.reader())
            equal(stage, new)


def test_what_fails_is_tried_again_ever_more_seldom(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on a full disk, which the copy's store calls by names of its own. What was said is not said again, although
    one thing fails now and another thing then."""
    monkeypatch.setattr(snapshotting, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(snapshotting, "LOOKS_BETWEEN", 1)
    errors = [
        StoreUnknown(reason="database or disk is full"), DatabaseUnusable("disk is full"), Unproven("nobody answers"),
        None, Diverged("a check of the copy found something"),
    ]  # fmt: skip
    at: list[int] = []

    class Failing(Snapshotting):
        looks = 0

        def answer(self) -> None:
            self.looks += 1
            if self.looks in {5, 7}:
                raise Unreachable("permission denied")
            if self.looks == 6:
                raise Unproven("too many connections")

        def write(self) -> None:
            at.append(self.looks)
            if len(at) <= len(errors) and (error := errors[len(at) - 1]) is not None:
                raise error

    failing = cluster.kept(
        Failing(cluster.postgres(), cluster.shard.incarnation, "one", tmp_path, owns=False, bytes_min=0)
    )
    failing.start()
    until(lambda: len(at) > 6)
    assert at[:7] == [1, 2, 4, 8, 9, 10, 11]
    assert failing.damage_found == "a check of the copy found something"
    assert caplog.text.count("permission denied") == caplog.text.count("too many connections") == 1


def test_so_many_are_kept_that_any_instant_of_late_can_be_restored() -> None:
    every = [Snapshot(Point(Position(9 - at, 1, 0), Instant(90 - 10 * at)), 0, [], "two", "", "") for at in range(9)]
    assert [each.lsn for each in needed(every, 0)] == [9, 8]
    assert [each.lsn for each in needed(every, 25)] == [9, 8, 7, 6]
    assert needed(every, 1_000) == every
    alone = [each._replace(verified_by="") if each.lsn in {9, 7} else each for each in every]
    assert [each.lsn for each in needed(alone, 0)] == [9, 8]
    assert [each.lsn for each in needed(alone[1:], 0)] == [8, 6]  # what nobody verified does not count


def test_what_nobody_verified_is_kept_until_enough_is_verified() -> None:
    """As after an import, or where there was one server for a while."""
    every = [Snapshot(Point(Position(9 - at, 1, 0), Instant(90 - 10 * at)), 0, [], "", "", "") for at in range(9)]
    every[0] = every[0]._replace(verified_by="two")
    assert [each.lsn for each in needed(every, 0)] == [9, 8]
    assert [each.lsn for each in needed(every, 25)] == [9, 8, 7, 6]
    every[2] = every[2]._replace(verified_by="two")
    assert [each.lsn for each in needed(every, 0)] == [9, 7]
    assert [each.lsn for each in needed(every, 15)] == [9, 7]
    assert [each.lsn for each in needed(every, 25)] == [9, 8, 7, 6], "the verified ones reach back for 20"


def follower(path: Path) -> Follower:
    return SqliteFollower(path, SMALL)


def equal(stage: Stage, copy: Copy) -> None:
    store_of(stage).apply_log()
    connection: apsw.Connection = copy.follower._connection  # type: ignore[attr-defined]
    compare(store_of(stage)._writer.connection, connection)
