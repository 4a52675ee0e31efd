"""PostgreSQL for these tests: a primary with a synchronous standby that all share, and pairs of one's own to break."""

import itertools
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from time import sleep
from typing import Any, Protocol, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.support.postgres import Pair, Programs, programs
from tests.support.sqlite import SqliteFactory

from veilmq.cluster.lease_clock import Memory
from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.log import PostgresLog
from veilmq.cluster.postgres.log.reading import LogReader
from veilmq.cluster.postgres.ownership import MARGIN_US, Candidate, Ownership, Server
from veilmq.cluster.postgres.schema import LEASE_US, Formats, Shard, init
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing import Random

_NUMBERS = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make cluster` gives it."""
    parser.addoption("--takeovers", metavar="N", type=int, help="Let servers race for so many take-overs.")
    parser.addoption("--restarts", metavar="MINUTES", type=float, default=0, help="Restart servers in turn that long.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What only `make cluster` runs."""
    return (
        True
        if collection_path.name in {"test_contract.py", "test_runbooks.py"}
        and config.getoption("--takeovers", None) is None
        else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all that need PostgreSQL, so that one pair is enough, but for those that are alone."""
    for item in items:
        needs_pair = "tests/cluster/" in item.nodeid and "/test_peer_" not in item.nodeid
        if needs_pair and not item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("cluster"))


class Clock:
    """A boot clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns

    def advance(self, us: int) -> None:
        self.ns += us * 1_000


class Closable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closable)


class SteppedLog(PostgresLog):
    """Appends as a server's loop does: sends, waits for an answer at the descriptor, and ends what is confirmed."""

    confirmed_at_once = 0
    """Appends that did not have to wait."""

    def append(self, lsn: int, record: bytes) -> None:
        descriptor = self.send(lsn, record)
        if descriptor is not None:
            answer = None
            while answer is None and select.select([descriptor], [], [], 1.0)[0]:
                answer = self.confirmed()
            self.confirmed_at_once += answer is True
        super().append(lsn, record)


class LoggedFactory(SqliteFactory):
    """Opens the owner's store with the cluster's log."""

    def __init__(self, path: Path, log: PostgresLog) -> None:
        super().__init__(path)
        self.log = log
        self.kind = lambda path, options: SqliteStore(path, options, log=log)  # type: ignore[assignment]


class Cluster:
    """A cluster in a pair's primary, and servers of it."""

    def __init__(self, pair: Pair, shard: Shard, **options: Any) -> None:
        self.pair = pair
        self.shard = shard
        self.options = {"seconds_max": 5.0, "lock_ms": 500} | options
        self._opened: list[Closable] = []

    def postgres(self, **options: Any) -> Postgres:
        return Postgres(self.pair.dsn, **(self.options | options))

    def candidate(
        self, name: str, clock: Clock, *, holder: UUID | None = None, memory: Memory | None = None, **options: Any
    ) -> Candidate:
        server = Server(name, f"{name}:9400", holder or uuid4(), Formats(1, self.shard.format))
        return self.kept(Candidate(self.postgres(**options), server, self.shard.incarnation, clock, memory=memory))

    def owner(self, name: str, clock: Clock, **options: Any) -> Ownership:
        """A server that became the owner, after the lease of the one before."""
        candidate = self.candidate(name, clock, **options)
        candidate.look()
        clock.advance(LEASE_US + MARGIN_US)
        return self.kept(candidate.take_over())

    def log(self, owner: Ownership | None = None, *, resolve_seconds: float = 10.0, **options: Any) -> SteppedLog:
        """The log of an owner, or of a new one."""
        if owner is None:
            owner = self.owner("one", Clock(), **options)
        return self.kept(SteppedLog(owner, resolve_seconds=resolve_seconds))

    def reader(self, **options: Any) -> LogReader:
        return self.kept(LogReader(self.postgres(**options), self.shard.incarnation))

    def kept(self, opened: Kept) -> Kept:
        """It is closed after the test."""
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for opened in self._opened:
            opened.close()

    def rows(self) -> list[tuple[int, int, bytes]]:
        """(lsn, epoch, record) of the whole log, as the first server that is a primary has it."""
        names = self.pair.primary.query("select relname from pg_class where relname ~ '^log_0_[0-9]+$'")
        union = " union all ".join(f"select lsn, epoch, record from veilmq.{name}" for (name,) in names)
        return self.pair.primary.query(f"{union} order by lsn")


def begin(call: Callable[[], object]) -> "Future[object]":
    """Run it in a thread."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def make_trouble(cluster: Cluster, over: Callable[[], bool]) -> None:
    """End connections of the servers, and cancel their waits for the standby, until it is over."""
    choose = Random(7)
    with psycopg.connect(cluster.pair.primary.dsn, autocommit=True) as connection:
        while not over():
            # Whoever waits for the standby, or for the shard's row, and now and then anybody.
            kind = choose.choice(("wait_event = 'SyncRep'", "wait_event_type = 'Lock'", "random() < 0.2"))
            end = choose.choice(("pg_cancel_backend", "pg_terminate_backend"))
            connection.execute(f"select {end}(pid) from pg_stat_activity where application_name = 'veilmq' and {kind}")
            sleep(0.002)


@pytest.fixture(scope="session")
def postgres_programs() -> Iterator[Programs]:
    with programs() as found:
        yield found


@pytest.fixture(scope="session")
def shared_pair(postgres_programs: Programs) -> Iterator[Pair]:
    pair = Pair(postgres_programs)
    yield pair
    pair.stop()


@pytest.fixture
def cluster(shared_pair: Pair) -> Iterator[Cluster]:
    """An empty cluster, in a pair that stays as it is. Segments are short."""
    cluster = empty_cluster(shared_pair)
    yield cluster
    cluster.close()


def empty_cluster(pair: Pair, segment: int = 64) -> Cluster:
    """A new one in place of what was there."""
    pair.primary.query("drop schema if exists veilmq cascade")
    return Cluster(pair, init(Postgres(pair.dsn), state_format=1, segment=segment))


@pytest.fixture
def own_pair(postgres_programs: Programs) -> Iterator[Pair]:
    pair = Pair(postgres_programs, next(_NUMBERS))
    yield pair
    pair.stop()


@pytest.fixture
def breakable(own_pair: Pair) -> Iterator[Cluster]:
    """An empty cluster in a pair of its own. A promoted standby has no standby: so one copy is enough."""
    shard = init(Postgres(own_pair.dsn), state_format=1, segment=64)
    cluster = Cluster(own_pair, shard, single_copy=True)
    yield cluster
    cluster.close()
