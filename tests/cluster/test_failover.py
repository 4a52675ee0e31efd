"""PostgreSQL's primary dies and its standby is promoted, with and without what was acknowledged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from uuid import uuid4

import pytest
from tests.cluster.conftest import Clock, Cluster, begin
from tests.cluster.test_member import CountingClock, following, member_of
from tests.support.postgres import until

from veilmq.cluster.member import membership
from veilmq.cluster.postgres import Postgres, Seen, Unfit
from veilmq.cluster.postgres.log import LogLost
from veilmq.cluster.postgres.log.reading import LogDiverged
from veilmq.cluster.postgres.ownership import Candidate, Server
from veilmq.cluster.postgres.schema import Formats
from veilmq.store.log import NotAppended, NotOwner, Position, checksum

pytestmark = pytest.mark.slow


@contextmanager
def promoted(cluster: Cluster) -> Iterator[None]:
    """In the block the former standby is the primary of the pair, and the former primary is dead."""
    pair = cluster.pair
    pair.standby.promote()
    pair.primary, pair.standby = pair.standby, pair.primary
    yield


def test_what_the_standby_has_not_is_not_appended_and_the_owner_goes_on(breakable: Cluster) -> None:
    """The append waits for the standby when the primary dies. It is visible there when it comes back, and nobody
    listens to it any more."""
    pair = breakable.pair
    log = breakable.log()
    log.append(1, b"first")
    pair.standby.stop()
    append = begin(lambda: log.append(2, b"second"))
    until(pair.waiting)
    pair.primary.kill()
    pair.standby.start()
    pair.standby.promote()
    with pytest.raises(NotAppended, match="never will be"):
        append.result(20)
    log.append(2, b"second, again")
    assert log.epoch == 2
    old = pair.primary
    pair.primary, pair.standby = pair.standby, pair.primary
    assert breakable.rows() == [(1, 1, b"first"), (2, 2, b"second, again")]
    old.start()
    assert old.query("select record from veilmq.log_0_0 where lsn = 2") == [(b"second",)]
    log.append(3, b"third")
    # It comes first in the connection string, and claims to be a primary.
    both = Postgres(f"host={old.home},{pair.primary.home} user=veilmq dbname=postgres", single_copy=True)
    with both.connect() as session:
        assert session.info.host == str(pair.primary.home)
    with pytest.raises(Unfit, match="a former primary"):
        Postgres(old.dsn, single_copy=True, seen=both.seen).connect()
    # Nor is it taken by a process that was not there when the other one was promoted.
    system, _ = both.seen
    hosts = f"host={old.home},{pair.primary.home} user=veilmq dbname=postgres"
    with Postgres(hosts, single_copy=True, seen=Seen(system, 1)).connect() as session:
        assert session.info.host == str(pair.primary.home)


def test_a_candidate_leaves_a_former_primary_that_still_answers(breakable: Cluster) -> None:
    pair = breakable.pair
    postgres = Postgres(f"host={pair.primary.home},{pair.standby.home} user=veilmq dbname=postgres", single_copy=True)
    server = Server("two", "two:9400", uuid4(), Formats(1, 1))
    candidate = breakable.kept(Candidate(postgres, server, breakable.shard.incarnation, Clock()))
    candidate.look()
    pair.standby.promote()
    postgres.connect(widely=True).close()  # as another connection of this server finds out
    with pytest.raises(Unfit, match="a former primary"):
        candidate.look()
    candidate.look()


def test_a_follower_writes_down_that_a_standby_was_promoted(breakable: Cluster, tmp_path: Path) -> None:
    """After a restart it would take the former primary for the primary, if that is back first."""
    pair, clock, copy = breakable.pair, CountingClock(), tmp_path / "copy"
    hosts = f"host={pair.primary.home},{pair.standby.home} user=veilmq dbname=postgres"
    member = member_of(breakable, copy, clock, hosts, single_copy=True)

    def timeline() -> int:
        kept = membership(copy)
        return 0 if kept is None else kept.timeline

    with following(member, clock, 60):
        assert timeline() == 1
        pair.primary.kill()
        with promoted(breakable):
            until(lambda: timeline() == 2)


def test_what_was_acknowledged_survives(breakable: Cluster) -> None:
    """Killed amid appends, at no chosen point."""
    log = breakable.log(resolve_seconds=30)
    acknowledged: dict[int, bytes] = {}

    def append_on() -> None:
        lsn = 1
        for number in range(100_000):
            if len(acknowledged) >= 500:
                return
            record = b"record %d" % number
            try:
                log.append(lsn, record)
            except NotOwner:
                raise
            except NotAppended:
                sleep(0.001)  # it is refused at once while nobody is the primary
                continue
            acknowledged[lsn] = record
            lsn += 1

    appending = begin(append_on)
    until(lambda: len(acknowledged) > 100)
    breakable.pair.primary.kill()
    with promoted(breakable):
        appending.result(60)
        rows = breakable.rows()
    assert {lsn: record for lsn, _, record in rows} == acknowledged
    assert list(acknowledged) == list(range(1, 501))


def test_an_owner_appends_nothing_after_what_a_standby_lost(breakable: Cluster) -> None:
    """Somebody turned the standby off, and then promoted it."""
    pair = breakable.pair
    log = breakable.log()
    for lsn in (1, 2, 3):
        log.append(lsn, b"record %d" % lsn)
    pair.standby.stop()
    pair.primary.set("synchronous_standby_names", "")
    for lsn in (4, 5):
        log.append(lsn, b"record %d" % lsn)
    pair.primary.kill()
    pair.standby.start()
    with promoted(breakable):
        with pytest.raises(LogLost):
            log.append(6, b"after the gap")
        reader = breakable.reader()
        with pytest.raises(LogDiverged):
            reader.read(Position(5, 1, checksum(b"record 5")))
        heir = breakable.log(breakable.owner("two", Clock()))
        assert heir.end.lsn == 3
        heir.append(4, b"another")
        with pytest.raises(LogDiverged):
            reader.read(Position(4, 1, checksum(b"record 4")))
        assert [row[:2] for row in breakable.rows()] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_a_promoted_standby_that_no_standby_follows_is_refused_until_one_does(breakable: Cluster) -> None:
    log = breakable.log(single_copy=False)
    log.append(1, b"first")
    breakable.pair.primary.kill()
    with promoted(breakable):
        with pytest.raises(NotAppended, match="set synchronous_standby_names"):
            log.append(2, b"second")


def test_an_owner_goes_on_when_the_primary_is_back(breakable: Cluster) -> None:
    primary = breakable.pair.primary
    log = breakable.log()
    log.append(1, b"first")
    primary.kill()
    with pytest.raises(NotAppended, match="cannot be reached"):
        log.append(2, b"second")
    primary.start()

    def appended() -> bool:
        try:
            log.append(2, b"second")
        except NotAppended:
            return False
        return True

    until(appended)
    assert [row[:2] for row in breakable.rows()] == [(1, 1), (2, 1)]
