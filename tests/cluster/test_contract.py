"""The store's contract with its batches in a real PostgreSQL: every rule holds as on a directory of its own.

It takes a minute or two, so only `make cluster` collects it (conftest.py). In `make test` a log in memory stands for
PostgreSQL (tests/store/test_following.py).
"""

from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from tests.cluster.conftest import Clock, Cluster
from tests.support import contract
from tests.support.contract import stage  # noqa: F401 - a fixture
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.cluster.postgres.log import PostgresLog
from veilmq.store import Options, Store
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore


class ClusterFactory(SqliteFactory):
    """Opens one directory again and again, each time as the owner of the shard in the next epoch."""

    def __init__(self, path: Path, cluster: Cluster) -> None:
        super().__init__(path)
        self._cluster = cluster
        self._clock, self._holder = Clock(), uuid4()
        self.kind = self._opened  # type: ignore[assignment]

    def _opened(self, path: Path, options: Options) -> SqliteStore:
        candidate = self._cluster.candidate("one", self._clock, holder=self._holder)
        candidate.look()
        self._clock.advance(10_000_000)
        log = self._cluster.kept(PostgresLog(self._cluster.kept(candidate.take_over()), resolve_seconds=10))
        return SqliteStore(path, options, log=log)

    def kill(self, store: Store) -> None:
        """See `SqliteFactory.kill`: there is no redo log. Then the file gets what only PostgreSQL has, as a server does
        when it starts."""
        (self.path / "redo").touch()
        super().kill(store)
        (self.path / "redo").unlink()
        with closing(SqliteFollower(self.path, SMALL)) as owner:
            owner.apply(self._cluster.reader().read(owner.position))

    def damage(self, sequence: int) -> None:
        """See `StoreFactory.damage`. A store whose batches are in a log flushes when it is opened."""
        self.open().close()
        super().damage(sequence)


@pytest.fixture
def store_factory(cluster: Cluster, tmp_path: Path) -> ClusterFactory:
    return ClusterFactory(tmp_path / "data", cluster)


for cases in contract.SUITE:
    globals()[cases.__name__] = cases
