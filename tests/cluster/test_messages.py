"""Messages in a shard whose log is in PostgreSQL: they stay when it goes from server to server."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.cluster.conftest import Clock, Cluster, begin, make_trouble
from tests.support.contract.stage import Stage, bodies
from tests.support.following import compare
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.cluster.postgres import Unreachable
from veilmq.cluster.postgres.ownership import StillOwned
from veilmq.model.errors import StoreFailed, StoreUnknown
from veilmq.model.outcomes import Deleted
from veilmq.store.log import AppendUnknown, NotAppended, Position, checksum
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.slow

UNKNOWN = "finding out whether it is in the log"  # what the owner logs


class Servers(SqliteFactory):
    """Two servers with a directory each. Whenever the store is opened, the other one takes over."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        super().__init__(path / "one")
        self.cluster = cluster
        self.other = path / "two"
        self.reader = cluster.reader()

    def open(self, **bounds: int | None) -> SqliteStore:
        self.path, self.other = self.other, self.path
        while True:
            try:
                log = self.cluster.log(self.cluster.owner(self.path.name, Clock()))
                self.follow(self.path, log.end)
                return SqliteStore(self.path, SMALL, log=log)
            except (Unreachable, StillOwned, NotAppended, AppendUnknown):
                continue  # somebody makes trouble

    def follow(self, path: Path, end: Position) -> None:
        """Bring a directory to the end of the log."""
        with closing(SqliteFollower(path, SMALL)) as follower:
            while follower.position != end:
                entries = self.reader.read(follower.position, limit=7)
                follower.apply(entries)
                lsn, epoch, record = entries[-1]
                assert follower.position == Position(lsn, epoch, checksum(record))


@pytest.fixture
def stage(cluster: Cluster, tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(Servers(cluster, tmp_path))
    yield playing
    playing.store.close()


def servers_of(stage: Stage) -> Servers:
    assert isinstance(stage.factory, Servers)
    return stage.factory


def test_go_with_the_shard_and_handles_stay_good(stage: Stage) -> None:
    jobs = stage.create()
    for number in range(6):
        stage.send(jobs, f"in flight {number}")
        taken = stage.take(jobs)
        stage.send(jobs, f"waiting {number}")
        old = stage.store
        stage.open()
        assert isinstance(stage.delete(jobs, taken.handle), Deleted)
        assert bodies(stage.receive(jobs, 10)) == [f"waiting {number}"]
        # The owner before does not know yet; it finds out with its next batch.
        stage.store, current = old, stage.store
        with pytest.raises(StoreFailed, match="owns the shard"):
            stage.send(jobs, "stale")
        with pytest.raises(StoreUnknown):
            stage.send(jobs, "stale")
        old.close()
        stage.store = current
    servers = servers_of(stage)
    servers.follow(servers.other, servers.reader.end())
    with closing(SqliteFollower(servers.other, SMALL)) as follower:
        compare(store_of(stage)._writer.connection, follower._connection)


def test_that_were_acknowledged_are_there_and_those_that_failed_are_not(
    stage: Stage, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = stage.create()
    acknowledged, failed, unknown = set(), set(), 0
    over = threading.Event()
    trouble = begin(lambda: make_trouble(cluster, over.is_set))
    try:
        for number in range(5000):
            if number >= 300 and UNKNOWN in caplog.text:
                break  # chance has met an append whose end nobody knew
            try:
                stage.send(jobs, str(number))
                acknowledged.add(str(number))
            except StoreFailed:
                failed.add(str(number))
            except StoreUnknown:
                unknown += 1
                stage.reopen()
            if number % 50 == 49:
                stage.reopen()
    finally:
        over.set()
        trouble.result(10)
    stage.reopen()
    received: list[str] = []
    while found := bodies(stage.receive(jobs, 10)):
        received += found
    assert len(received) == len(set(received))
    assert acknowledged <= set(received)
    assert failed.isdisjoint(received)
    assert len(set(received) - acknowledged) <= unknown
    assert UNKNOWN in caplog.text
