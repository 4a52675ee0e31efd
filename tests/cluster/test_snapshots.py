"""Snapshots in a real PostgreSQL: what is uploaded, kept and read, and copies that are filled from one."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from tests.cluster.conftest import Cluster
from tests.support.contract.stage import Stage
from tests.support.following import compare
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.cluster.member import Copy, Snapshotting
from veilmq.cluster.postgres import Unfit
from veilmq.cluster.postgres.log import PostgresLog
from veilmq.cluster.postgres.snapshots import PART_BYTES, Snapshots
from veilmq.model.instant import Instant
from veilmq.store.log import Follower, Position
from veilmq.store.log.restoring import SnapshotBad
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore

CLOCK = Instant(5)


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
        snapshots.write(file, Position(7, 2, 99), CLOCK)
        (found,) = snapshots.list()
        assert (found.position, found.clock) == (Position(7, 2, 99), CLOCK)
        snapshots.read(found, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == file.read_bytes()

    def test_half_an_upload_is_none(self, cluster: Cluster, snapshots: Snapshots, file: Path) -> None:
        cluster.pair.primary.query("insert into veilmq.snapshot_part values (7, 0, 'left by a kill')")
        assert snapshots.list() == []
        snapshots.write(file, Position(7, 2, 99), CLOCK)
        assert [found.position.lsn for found in snapshots.list()] == [7]

    def test_two_are_kept(self, cluster: Cluster, snapshots: Snapshots, file: Path) -> None:
        for lsn in (3, 5, 9):
            snapshots.write(file, Position(lsn, 1, 0), CLOCK)
        assert [found.position.lsn for found in snapshots.list()] == [9, 5]
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
        snapshots.write(file, Position(7, 2, 99), CLOCK)
        cluster.pair.primary.query(damage)
        with pytest.raises(SnapshotBad):
            snapshots.read(snapshots.list()[0], tmp_path / "back")


class LoggedFactory(SqliteFactory):
    """Opens the owner's store with the cluster's log."""

    def __init__(self, path: Path, log: PostgresLog) -> None:
        super().__init__(path)
        self.kind = lambda path, options: SqliteStore(path, options, log=log)  # type: ignore[assignment]


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
        jobs = next(iter(store_of(stage).queues.by_key))
        for _ in range(records):
            stage.send(jobs, "more")

    def snapshot(self, cluster: Cluster, snapshots: Snapshots, copy: Copy, tmp_path: Path) -> None:
        copy.catch_up(cluster.reader())
        Snapshotting(tmp_path / "copy", snapshots, cluster.reader(), 0).write(copy.follower)

    def test_a_copy_that_has_diverged_is_filled_again(self, cluster: Cluster, stage: Stage, copy: Copy) -> None:
        copy.follower._connection.execute("UPDATE mark SET sequence = sequence + 1")  # type: ignore[attr-defined]
        self.work(stage, 1)
        copy.catch_up(cluster.reader())
        equal(stage, copy)

    def test_a_new_server_reads_the_snapshot_and_what_came_since(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, copy: Copy, tmp_path: Path
    ) -> None:
        """The log before the older snapshot is gone; a damaged newer snapshot is no harm."""
        for _ in range(2):
            self.work(stage, 100)
            self.snapshot(cluster, snapshots, copy, tmp_path)
        self.work(stage, 3)
        assert cluster.rows()[0][0] == 64
        cluster.pair.primary.query(
            "delete from veilmq.snapshot_part where lsn = (select max(lsn) from veilmq.snapshot)"
        )
        with closing(Copy(tmp_path / "new", follower, snapshots)) as new:
            new.catch_up(cluster.reader())
            equal(stage, new)

    def test_nothing_is_left_to_fill_it_from(
        self, cluster: Cluster, snapshots: Snapshots, stage: Stage, copy: Copy, tmp_path: Path
    ) -> None:
        for _ in range(2):
            self.work(stage, 100)
            self.snapshot(cluster, snapshots, copy, tmp_path)
        cluster.pair.primary.query("delete from veilmq.snapshot_part")
        with closing(Copy(tmp_path / "new", follower, snapshots)) as new, pytest.raises(Unfit, match="no snapshot"):
            new.catch_up(cluster.reader())

    def test_a_rotten_copy_is_not_published(
        self, cluster: Cluster, snapshots: Snapshots, copy: Copy, tmp_path: Path
    ) -> None:
        copy.follower._connection.execute("UPDATE memtable SET messages = x'90'")  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="a check of the copy found"):
            self.snapshot(cluster, snapshots, copy, tmp_path)
        assert snapshots.list() == []


def follower(path: Path) -> Follower:
    return SqliteFollower(path, SMALL)


def equal(stage: Stage, copy: Copy) -> None:
    owner = store_of(stage)._writer.connection
    connection: apsw.Connection = copy.follower._connection  # type: ignore[attr-defined]
    compare(owner, connection)
