"""The log of a shard in a real PostgreSQL: appends, what is unknown of one, reading, segments."""

import os
from concurrent.futures import Future
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.numeric import Int8
from tests.cluster.conftest import Clock, Cluster, begin, empty_cluster
from tests.support.postgres import until

from veilmq.cluster.postgres import Unreachable
from veilmq.cluster.postgres.log import LogLost, PostgresLog, insertion
from veilmq.cluster.postgres.log.reading import LogDiverged, LogTrimmed
from veilmq.cluster.postgres.schema import log_bytes
from veilmq.model.instant import Instant
from veilmq.store.log import AppendUnknown, NotAppended, NotOwner, Position, checksum
from veilmq.testing.for_each import for_each

START = Position(0, 0, 0)
WAITED_FOR = pytest.mark.parametrize("before", [0, 1], ids=["in a thread", "on the loop"])
"""Records before: the first append of a connection runs in a thread."""


def fill(log: PostgresLog, last: int) -> None:
    for lsn in range(log.end.lsn + 1, last + 1):
        log.append(lsn, b"record %d" % lsn)


def waits_for_the_standby(cluster: Cluster, append: "Future[object]") -> int:
    """The process that runs the append, which waits for the stopped standby."""
    until(lambda: cluster.pair.waiting() or append.done())
    [pid] = cluster.pair.waiting()
    return pid


class TestAppend:
    def test_continues_where_the_owner_before_ended(self, cluster: Cluster) -> None:
        fill(cluster.log(), 3)
        log = cluster.log()
        assert log.end == Position(3, 1, checksum(b"record 3"))
        fill(log, 4)
        assert [(lsn, epoch) for lsn, epoch, _ in cluster.rows()] == [(1, 1), (2, 1), (3, 1), (4, 2)]

    def test_needs_no_thread_that_waits_but_for_the_first_of_a_segment(self, cluster: Cluster) -> None:
        log = cluster.log()
        fill(log, 130)
        assert log.confirmed_at_once == 130 - 3
        assert [(lsn, record) for lsn, _, record in cluster.rows()] == [(n, b"record %d" % n) for n in range(1, 131)]

    def test_that_was_sent_ends_at_the_next_owner_or_here(self, cluster: Cluster) -> None:
        """Whoever lost the shard while its record was under way has to find out, and is not told that it failed."""
        owner = cluster.owner("one", Clock())
        log = cluster.log(owner)
        fill(log, 1)
        assert PostgresLog.send(log, 2, b"second") is not None
        owner.lose(NotOwner("asleep for too long"))
        PostgresLog.append(log, 2, b"second")
        with pytest.raises(NotOwner):
            log.append(3, b"third")
        assert [lsn for lsn, _, _ in cluster.rows()] == [1, 2]

    def test_leaves_no_gap_where_records_are_lost(self, cluster: Cluster) -> None:
        log = cluster.log()
        fill(log, 5)
        cluster.pair.primary.query("delete from veilmq.log_0_0 where lsn > 3")  # as on a standby that lacked them
        with pytest.raises(LogLost, match="does not end with record 5 of epoch 1"):
            PostgresLog.append(log, 6, b"after the gap")
        with pytest.raises(NotOwner):
            log.append(6, b"again")
        assert [lsn for lsn, _, _ in cluster.rows()] == [1, 2, 3]

    def test_leaves_no_branch(self, cluster: Cluster) -> None:
        log = cluster.log()
        fill(log, 2)
        cluster.pair.primary.query("update veilmq.log_0_0 set epoch = 9 where lsn = 2")  # another history
        with pytest.raises(LogLost):
            log.append(3, b"third")

    def test_where_somebody_else_wrote_is_refused(self, cluster: Cluster) -> None:
        log = cluster.log()
        cluster.pair.primary.query("insert into veilmq.log_0_0 values (1, 1, 'x')")
        with pytest.raises(LogLost):
            log.append(1, b"first")

    def test_of_one_that_lost_the_shard_without_knowing_is_refused(self, cluster: Cluster) -> None:
        log = cluster.log()
        fill(log, 1)
        cluster.owner("two", Clock())
        with pytest.raises(NotOwner, match="two owns the shard, in epoch 2"):
            log.append(2, b"stale")

    def test_survives_a_connection_that_was_lost_while_idle(self, cluster: Cluster) -> None:
        log = cluster.log()
        fill(log, 1)
        terminate_all(cluster)
        log.append(2, b"second")
        assert log.epoch == 1

    def test_that_postgresql_refuses_can_be_tried_again(self, cluster: Cluster) -> None:
        log = cluster.log(lock_ms=100)
        fill(log, 1)
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("select from veilmq.shard for update")
            # Without the lines that PostgreSQL adds, such as CONTEXT.
            with pytest.raises(NotAppended, match=r"record 2: canceling statement due to lock timeout$"):
                log.append(2, b"second")
        log.append(2, b"second, again")
        assert cluster.rows()[-1] == (2, 1, b"second, again")

    def test_takes_one_at_a_time_and_a_take_over_waits_for_it(self, cluster: Cluster) -> None:
        log = cluster.log()
        with cluster.pair.standby_stopped():
            append = begin(lambda: log.append(1, b"first"))
            waits_for_the_standby(cluster, append)
            with pytest.raises(AssertionError):
                log.append(2, b"second")
            with psycopg.connect(cluster.pair.primary.dsn) as other, pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute("select from veilmq.shard for update nowait")
        append.result(10)


class TestUnknown:
    @for_each(
        "fails, said",
        [
            ("raise 'no'", "did not take record 2: no"),
            ("perform pg_terminate_backend(pg_backend_pid())", "record 2 is not in the log, and never will be"),
        ],
    )
    def test_a_commit_that_fails_after_the_insertion_was_told_is_no_append(
        self, cluster: Cluster, fails: str, said: str
    ) -> None:
        """PostgreSQL says INSERT 0 1 first, and commits at the end of the exchange. A cancel may come in between."""
        cluster = empty_cluster(cluster.pair)
        log = cluster.log()
        fill(log, 1)
        query = cluster.pair.primary.query
        body = f"$$ begin {fails}; return null; end $$"
        query(f"create function veilmq.fail() returns trigger language plpgsql as {body}")
        query("grant execute on function veilmq.fail to public")
        query(
            "create constraint trigger fail after insert on veilmq.log_0_0 deferrable initially deferred"
            " for each row execute function veilmq.fail()"
        )
        with pytest.raises(NotAppended, match=said):
            log.append(2, b"second")
        query("drop trigger fail on veilmq.log_0_0")
        log.append(2, b"second, again")
        assert [record for _, _, record in cluster.rows()] == [b"record 1", b"second, again"]
        cluster.close()

    @WAITED_FOR
    def test_a_cancelled_wait_for_the_standby_is_resolved_as_appended(self, cluster: Cluster, before: int) -> None:
        """PostgreSQL says INSERT 0 1 with a warning, which a role may have hidden."""
        cluster.pair.primary.query("alter role veilmq set client_min_messages = 'error'")
        try:
            log = cluster.log()
        finally:
            cluster.pair.primary.query("alter role veilmq reset client_min_messages")
        fill(log, before)
        with cluster.pair.standby_stopped():
            append = begin(lambda: log.append(before + 1, b"waits"))
            cluster.pair.primary.query("select pg_cancel_backend(%s)", waits_for_the_standby(cluster, append))
            until(lambda: len(cluster.rows()) > before)
            assert not append.done()  # visible here, and no standby has it
        append.result(10)
        assert log.epoch == 2
        log.append(before + 2, b"next")
        assert [row[:2] for row in cluster.rows()][before:] == [(before + 1, 1), (before + 2, 2)]

    @WAITED_FOR
    def test_a_terminated_wait_for_the_standby_is_resolved_as_appended(self, cluster: Cluster, before: int) -> None:
        owner = cluster.owner("one", Clock())
        log = cluster.log(owner)
        fill(log, before)
        with cluster.pair.standby_stopped():
            append = begin(lambda: log.append(before + 1, b"waits"))
            cluster.pair.primary.query("select pg_terminate_backend(%s)", waits_for_the_standby(cluster, append))
            until(lambda: len(cluster.rows()) > before)
            assert not append.done()
        append.result(10)
        owner.renew(Instant(1))  # under the new epoch
        assert owner.epoch == 2

    def test_one_that_never_ran_is_resolved_as_not_appended(self, cluster: Cluster) -> None:
        log = cluster.log(lock_ms=5_000)
        fill(log, 1)
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("select from veilmq.shard for update")
            append = begin(lambda: log.append(2, b"second"))
            until(lambda: locked(cluster))
            terminate_all(cluster, but=other.info.backend_pid)
        with pytest.raises(NotAppended, match="never will be"):
            append.result(10)
        # The statement comes only now: it may have been on its way.
        late = [Int8(2), Int8(1), b"second", Int8(1), Int8(1), Int8(1)]
        with psycopg.connect(cluster.pair.primary.dsn, autocommit=True) as other:
            assert other.execute(insertion(0, 0, True), late).rowcount == 0
        assert log.epoch == 2
        log.append(2, b"second, again")
        assert cluster.rows()[-1] == (2, 2, b"second, again")

    def test_an_append_that_still_runs_when_its_connection_is_lost_never_comes_later(self, cluster: Cluster) -> None:
        """The server waits for a lock, and does not see that its client is gone."""
        log = cluster.log(lock_ms=5_000, seconds_max=0.3)
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("select from veilmq.shard for update")
            append = begin(lambda: log.append(1, b"first"))
            until(lambda: locked(cluster) > 1)  # the append and, after it, the fence
        try:
            append.result(10)
            expected = [(1, 1, b"first")]
        except NotAppended:
            expected = []
        until(lambda: not locked(cluster))
        assert cluster.rows() == expected

    def test_stays_unknown_while_no_standby_confirms_the_fence(self, cluster: Cluster) -> None:
        owner = cluster.owner("one", Clock(), seconds_max=0.3)
        log = cluster.log(owner, resolve_seconds=0.2)
        with cluster.pair.standby_stopped():
            with pytest.raises(AppendUnknown):
                log.append(1, b"first")
            with pytest.raises(AppendUnknown):
                log.append(1, b"again")
            assert not owner.holds()
            until(lambda: cluster.pair.waiting() == [] or cluster.rows() == [])

    def test_ends_when_the_log_is_closed(self, cluster: Cluster) -> None:
        log = cluster.log(seconds_max=0.3, resolve_seconds=60)
        with cluster.pair.standby_stopped():
            append = begin(lambda: log.append(1, b"first"))
            waits_for_the_standby(cluster, append)
            log.close()
            with pytest.raises(AppendUnknown):
                append.result(10)

    def test_is_resolved_also_where_another_server_took_over(self, cluster: Cluster) -> None:
        """What was committed before that take-over is in the log, and may be answered."""
        holder = uuid4()
        log = cluster.log(cluster.owner("one", Clock(), holder=holder))
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            with cluster.pair.standby_stopped():
                append = begin(lambda: log.append(1, b"first"))
                pid = waits_for_the_standby(cluster, append)
                # The next server waits before the fence does: it is first.
                taken = begin(lambda: cluster.owner("two", Clock(), lock_ms=5_000))
                until(lambda: locked(cluster))
                other.execute("select pg_terminate_backend(%s)", (pid,))
            cluster.kept(taken.result(10))  # type: ignore[type-var]
        append.result(10)
        with pytest.raises(NotOwner):
            log.append(2, b"stale")
        assert [row[:2] for row in cluster.rows()] == [(1, 1)]


class TestRead:
    def test_goes_on_from_the_reader_s_last_record(self, cluster: Cluster) -> None:
        log, reader = cluster.log(), cluster.reader()
        assert reader.read(START) == []
        fill(log, 200)  # four segments
        at, found = START, []
        while entries := reader.read(at, limit=50):
            found += entries
            at = Position(entries[-1].lsn, entries[-1].epoch, checksum(entries[-1].record))
        assert [(entry.lsn, entry.record) for entry in found] == [(n, b"record %d" % n) for n in range(1, 201)]
        assert at == reader.end()
        fill_from = cluster.log()
        fill_from.append(201, b"next")
        assert [(entry.lsn, entry.epoch) for entry in reader.read(at)] == [(201, 2)]

    def test_is_bounded_in_bytes(self, cluster: Cluster) -> None:
        log, reader = cluster.log(), cluster.reader()
        for lsn in range(1, 5):
            log.append(lsn, bytes(9 * 1024 * 1024))
        assert [entry.lsn for entry in reader.read(START)] == [1, 2]
        assert [entry.lsn for entry in reader.read(Position(2, 1, checksum(bytes(9 * 1024 * 1024))))] == [3]

    @pytest.mark.parametrize("last", [Position(2, 1, 7), Position(2, 3, checksum(b"record 2")), Position(9, 1, 7)])
    def test_of_another_history_is_noticed(self, cluster: Cluster, last: Position) -> None:
        fill(cluster.log(), 3)
        with pytest.raises(LogDiverged):
            cluster.reader().read(last)

    def test_from_what_was_dropped_is_noticed(self, cluster: Cluster) -> None:
        fill(cluster.log(), 200)
        reader = cluster.reader()
        assert reader.drop_below(130) == [0, 1]
        for after in (START, Position(63, 1, 7), Position(127, 1, checksum(b"record 127"))):
            with pytest.raises(LogTrimmed):
                reader.read(after)
        assert reader.read(Position(128, 1, checksum(b"record 128")), limit=1)[0].lsn == 129

    def test_connects_again(self, cluster: Cluster) -> None:
        reader = cluster.reader()
        fill(cluster.log(), 1)
        reader.read(START)
        terminate_all(cluster)
        assert len(reader.read(START)) == 1


class TestSegments:
    def test_hold_so_many_records_each(self, cluster: Cluster) -> None:
        fill(cluster.log(), 130)
        counts = [cluster.pair.primary.query(f"select count(*) from veilmq.log_0_{k}")[0][0] for k in range(3)]
        assert counts == [63, 64, 3]
        with pytest.raises(psycopg.errors.CheckViolation):
            cluster.pair.primary.query("insert into veilmq.log_0_1 values (1, 1, '')")

    def test_the_next_is_made_ahead_of_need(self, cluster: Cluster) -> None:
        log = cluster.log()
        exists = "select to_regclass('veilmq.log_0_1') is not null"
        fill(log, 31)
        log.prepare()
        assert cluster.pair.primary.query(exists) == [(False,)]
        log.append(32, b"half of it")
        log.prepare()
        assert cluster.pair.primary.query(exists) == [(True,)]

    def test_the_next_is_asked_for_once(self, cluster: Cluster) -> None:
        """Each renewal of the lease asks, and each time a new connection would be made."""
        log = cluster.log()
        fill(log, 32)
        log.prepare()
        cluster.pair.primary.query("drop table veilmq.log_0_1")
        log.prepare()
        assert cluster.pair.primary.query("select to_regclass('veilmq.log_0_1')") == [(None,)]
        for lsn in range(33, 70):
            log.append(lsn, b"")

    def test_the_last_record_is_never_dropped(self, cluster: Cluster) -> None:
        log, reader = cluster.log(), cluster.reader()
        fill(log, 127)
        assert reader.drop_below(1_000_000) == [0]
        log.append(128, b"in the next segment")
        assert cluster.log().end.lsn == 128

    def test_of_the_one_with_the_snapshot_only_what_came_since_counts(self, cluster: Cluster) -> None:
        """Else one snapshot after the other is written until the segment ends."""
        log = cluster.log()
        for lsn in range(1, 101):
            log.append(lsn, os.urandom(10_000))
        with cluster.postgres().connect() as session:
            whole, second, none = (log_bytes(session, lsn, 64) for lsn in (0, 64, 100))
            assert (whole, none) == (log_bytes(session), 0)
            for lsn in (20, 63, 70):
                assert log_bytes(session, lsn, 64) == pytest.approx((100 - lsn) * whole / 100, rel=0.1)
            assert second < whole

    def test_a_statement_that_is_gone_is_prepared_anew(self, cluster: Cluster) -> None:
        log = cluster.log()
        fill(log, 2)
        assert log._session is not None
        log._session.execute("deallocate all")
        with pytest.raises(NotAppended, match="does not exist"):
            log.append(3, b"third")
        log.append(3, b"third")
        log.append(4, b"fourth")
        assert log.confirmed_at_once == 2

    def test_leave_no_prepared_statements_behind(self, cluster: Cluster) -> None:
        """A connection lives for months."""
        log = cluster.log()
        for lsn in range(1, 201):
            log.append(lsn, b"x")
            log.prepare()
        assert log._session is not None
        named = "select count(*) from pg_prepared_statements where name like 'veilmq%'"
        assert log._session.execute(named).fetchall() == [(1,)]

    def test_are_not_dropped_under_a_reader(self, cluster: Cluster) -> None:
        fill(cluster.log(), 128)
        reader = cluster.reader(lock_ms=50)
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("select from veilmq.log_0_0")
            with pytest.raises(Unreachable, match="did not drop"):
                reader.drop_below(128)
        assert reader.drop_below(128) == [0, 1]


def terminate_all(cluster: Cluster, but: int = 0) -> None:
    """End the connections of all servers, as a restart of PostgreSQL does."""
    cluster.pair.primary.query(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'veilmq' and pid <> %s",
        but,
    )


def locked(cluster: Cluster) -> int:
    """How many processes wait for a lock."""
    return len(cluster.pair.primary.query("select 1 from pg_stat_activity where wait_event_type = 'Lock'"))
