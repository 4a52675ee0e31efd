"""Two servers race for the shard, take-over after take-over: no stale append, no gap, nothing acknowledged is lost.

Each believes that it owns the shard until PostgreSQL tells it otherwise, and appends as fast as it can: no lease holds
it back, because the clocks are manual and each candidate's has always run long enough.
"""

import itertools
import threading
from contextlib import suppress

import pytest
from tests.cluster.conftest import Clock, Cluster, begin, empty_cluster, make_trouble
from tests.support.postgres import Pair, until

from veilmq.cluster.postgres import Unreachable
from veilmq.cluster.postgres.log import LogLost, PostgresLog
from veilmq.cluster.postgres.ownership import MARGIN_US, StillOwned
from veilmq.cluster.postgres.schema import LEASE_US
from veilmq.store.log import AppendUnknown, NotAppended, NotOwner
from veilmq.testing import Random

pytestmark = pytest.mark.slow

Acknowledged = dict[int, tuple[int, bytes]]


class Racer:
    """A server that takes the shard, appends until it has lost it, and takes it again."""

    def __init__(self, cluster: Cluster, name: str, seed: int) -> None:
        self.cluster = cluster
        self.name = name
        self.random = Random(seed)
        self.numbers = itertools.count()
        self.acknowledged: Acknowledged = {}
        self.refused: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.takeovers = 0
        self.stop = threading.Event()

    def run(self) -> None:
        clock = Clock()
        candidate = self.cluster.candidate(self.name, clock)
        while not self.stop.is_set():
            with suppress(StillOwned, Unreachable, NotOwner):
                candidate.look()
                clock.advance(LEASE_US + MARGIN_US)
                ownership = candidate.take_over()
                self.takeovers += 1
                log = PostgresLog(ownership, resolve_seconds=10)
                try:
                    self.append(log)
                finally:
                    log.close()
                    ownership.close()

    def append(self, log: PostgresLog) -> None:
        """Until it is no owner any more, or has had enough."""
        lsn = log.end.lsn + 1
        for _ in range(self.random.randrange(1, 60)):
            record = f"{self.name} {next(self.numbers)}".encode()
            epoch = log.epoch
            try:
                log.append(lsn, record)
            except LogLost as error:
                raise AssertionError("an append of another owner came later") from error
            except NotAppended as error:
                self.refused.add(record)
                if isinstance(error, NotOwner):
                    return
            except AppendUnknown:
                self.unknown.add(record)
                return
            else:
                self.acknowledged[lsn] = (epoch, record)
                lsn += 1


def race(cluster: Cluster, takeovers: int, trouble: bool) -> list[Racer]:
    """Until there were so many take-overs. trouble: connections end, and waits for the standby are cancelled."""
    racers = [Racer(cluster, name, seed) for seed, name in enumerate(("one", "two"))]
    running = [begin(racer.run) for racer in racers]

    def over() -> bool:
        return sum(racer.takeovers for racer in racers) >= takeovers or any(each.done() for each in running)

    make_trouble(cluster, over) if trouble else until(over, seconds=600)
    for racer in racers:
        racer.stop.set()
    for each in running:
        each.result(60)
    return racers


def check(cluster: Cluster, racers: list[Racer]) -> None:
    rows = cluster.rows()
    assert [lsn for lsn, _, _ in rows] == list(range(1, len(rows) + 1)), "a gap"
    epochs = [epoch for _, epoch, _ in rows]
    assert epochs == sorted(epochs), "a stale append"
    there = {lsn: (epoch, record) for lsn, epoch, record in rows}
    acknowledged = {lsn: found for racer in racers for lsn, found in racer.acknowledged.items()}
    assert sum(len(racer.acknowledged) for racer in racers) == len(acknowledged), "two were told of the same place"
    assert {lsn: there.get(lsn) for lsn in acknowledged} == acknowledged, "lost"
    records = {record for _, record in there.values()}
    unknown = set().union(*(racer.unknown for racer in racers))
    assert records.isdisjoint(set().union(*(racer.refused for racer in racers))), "refused, and yet there"
    assert records - unknown == {record for _, record in acknowledged.values()}


_SLOW = """
    create function veilmq.slow() returns trigger language plpgsql as
    'begin perform pg_sleep(0.01 * random()); return new; end';
    create trigger slow before insert on veilmq.log_0_0 for each row execute function veilmq.slow()
"""


@pytest.mark.parametrize("trouble", [False, True], ids=["", "amid lost connections and cancelled waits"])
def test_many_takeovers(shared_pair: Pair, trouble: bool, request: pytest.FixtureRequest) -> None:
    takeovers = request.config.getoption("--takeovers", None) or 400
    cluster = empty_cluster(shared_pair, segment=64 if trouble else 1_000_000)
    if not trouble:
        # An append takes its time between its look at the epoch and its commit.
        cluster.pair.primary.query(_SLOW)
    racers = race(cluster, takeovers // 2 if trouble else takeovers, trouble)
    check(cluster, racers)
    assert all(racer.acknowledged for racer in racers)
    assert any(racer.refused for racer in racers)
    cluster.close()
