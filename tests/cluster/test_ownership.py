"""Who owns the shard, on a real PostgreSQL: leases by manual clocks, take-overs, hand-overs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from tests.cluster.conftest import Clock, Cluster, begin
from tests.support.postgres import until

from veilmq.cluster.lease_clock import Memory
from veilmq.cluster.postgres import Uncertain, Unreachable
from veilmq.cluster.postgres.ownership import MARGIN_US, StillOwned
from veilmq.cluster.postgres.schema import LEASE_US
from veilmq.model.instant import HOUR_US, Instant
from veilmq.store.log import NotOwner, Position

WAIT_US = LEASE_US + MARGIN_US
START = Position(0, 0, 0)
REMEMBERS = """
import sys
from pathlib import Path
from uuid import UUID
from veilmq.cluster.lease_clock import Memory
memory = Memory(UUID(int=1), Path(sys.argv[1]) / "lease-clock.json")
memory.looked(5, 1)
"""


class TestLease:
    def test_runs_from_before_the_renewal_was_sent(self, cluster: Cluster) -> None:
        clock = Clock()
        owner = cluster.owner("one", clock)
        clock.advance(LEASE_US)
        assert not owner.holds()
        sent = clock.ns
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("select from veilmq.lease for update")
            renewal = begin(lambda: owner.renew(Instant(7)))
            until(lambda: blocked(cluster))
            clock.advance(1_000_000)
        renewal.result(10)
        assert owner._until_ns == sent + LEASE_US * 1_000
        assert owner.holds()
        clock.advance(LEASE_US - 1_000_000)
        assert not owner.holds()

    def test_of_a_take_over_runs_from_before_it(self, cluster: Cluster) -> None:
        clock = Clock()
        candidate = cluster.candidate("one", clock)
        candidate.look()
        sent = clock.ns
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("select from veilmq.shard for update")
            taken = begin(lambda: cluster.kept(candidate.take_over()))
            until(lambda: blocked(cluster))
            clock.advance(200_000)
        owner = taken.result(10)
        assert owner._until_ns == sent + LEASE_US * 1_000

    def test_is_waited_for_from_after_it_was_seen(self, cluster: Cluster) -> None:
        cluster.owner("one", Clock())
        clock = Clock()
        candidate = cluster.candidate("two", clock)
        with psycopg.connect(cluster.pair.primary.dsn) as other:
            other.execute("lock table veilmq.lease")
            look = begin(candidate.look)
            until(lambda: blocked(cluster))
            clock.advance(1_000_000)
        look.result(10)
        clock.advance(WAIT_US - 1)
        candidate.look()
        assert not candidate.is_due()
        clock.advance(1)
        assert candidate.is_due()

    def test_starts_again_with_each_renewal_and_with_each_epoch(self, cluster: Cluster) -> None:
        here, there = Clock(), Clock()
        owner = cluster.owner("one", here)
        candidate = cluster.candidate("two", there)
        candidate.look()
        for again in (lambda: owner.renew(Instant(1)), lambda: owner.fence(cluster.kept(owner.postgres.connect()))):
            there.advance(WAIT_US)
            again()
            candidate.look()
            assert not candidate.is_due()
        with pytest.raises(StillOwned):
            candidate.take_over()

    def test_a_renewal_that_comes_before_the_take_over_stops_it(self, cluster: Cluster) -> None:
        here, there = Clock(), Clock()
        owner = cluster.owner("one", here)
        candidate = cluster.candidate("two", there)
        candidate.look()
        there.advance(WAIT_US)
        owner.renew(Instant(1))
        with pytest.raises(StillOwned):
            candidate.take_over()
        owner.renew(Instant(2))
        assert owner.holds()

    def test_a_hand_over_that_was_asked_for_is_still_to_come_after_a_fence(self, cluster: Cluster) -> None:
        owner = cluster.owner("one", Clock())
        cluster.pair.primary.query("update veilmq.lease set wanted = 'two'")
        owner.fence(cluster.kept(owner.postgres.connect()))
        assert owner.renew(Instant(1)) == "two"

    @pytest.mark.parametrize("saw_it_before", [True, False], ids=["saw the renewal before", "has just come"])
    def test_how_long_ago_a_renewal_was_whoever_saw_the_one_before_knows_by_its_own_clock(
        self, cluster: Cluster, saw_it_before: bool
    ) -> None:
        """PostgreSQL's clock was set an hour ahead: that counts for one alone who cannot know better, and who waits for
        those who can."""
        here, there = Clock(), Clock()
        owner = cluster.owner("one", here)
        candidate = cluster.candidate("two", there)
        for number in (1, 2):
            if saw_it_before:
                candidate.look()
            there.advance(15_000)
            owner.renew(Instant(number))
        if saw_it_before:
            candidate.look()
        there.advance(10_000)
        owner.fence(cluster.kept(owner.postgres.connect()))  # a new epoch of the same clock
        candidate.look()
        cluster.pair.primary.query("update veilmq.lease set renewed = renewed - interval '1 hour'")
        there.advance(WAIT_US)
        candidate.look()
        waited_us = WAIT_US
        if not saw_it_before:
            assert not candidate.is_due()
            there.advance(LEASE_US)
            waited_us += LEASE_US
        second = cluster.kept(candidate.take_over())
        before = second.before
        assert before.seen_us == waited_us + (10_000 if saw_it_before else 0)
        if saw_it_before:
            assert before.away_us == 40_000 + WAIT_US
        else:
            assert before.away_us >= HOUR_US

    def test_a_renewal_that_waited_for_a_lost_standby_is_as_old_as_the_wait(self, cluster: Cluster) -> None:
        """Nobody sees it before. Who watched meanwhile takes its own shard back at once."""
        clock, holder = Clock(), uuid4()
        owner = cluster.owner("one", Clock(), holder=holder)
        watching = [cluster.candidate("two", clock), cluster.candidate("one", clock, holder=holder)]
        for number in (1, 2):
            owner.renew(Instant(number))
            for candidate in watching:
                candidate.look()
        with cluster.pair.standby_stopped():
            renewal = begin(lambda: owner.renew(Instant(3)))
            until(cluster.pair.waiting)
            watching.append(cluster.candidate("three", clock))
            for _ in range(2):
                clock.advance(HOUR_US // 2)
                for candidate in watching:
                    candidate.look()
        renewal.result(10)
        cluster.pair.primary.query("update veilmq.lease set renewed = renewed - interval '1 hour'")
        sights = [candidate.look() for candidate in watching]
        assert [candidate.is_due() for candidate in watching] == [False, True, False]
        clock.advance(WAIT_US)
        assert all(candidate.is_due() for candidate in watching)
        assert all(sight.clock == 3 and sight.gone_us(clock.ns) >= HOUR_US for sight in sights)
        # A standby without this renewal was promoted: nobody knows when the one before was written.
        cluster.pair.primary.query("update veilmq.lease set clock = 2")
        seen = watching[0].look().seen
        assert (seen.after_ns, seen.before_ns) == (None, None)

    @pytest.mark.parametrize("is_its_own", [True, False], ids=["its own before", "handed to anybody"])
    def test_who_has_just_come_leaves_also_what_is_free_to_who_saw_the_last_renewal(
        self, cluster: Cluster, is_its_own: bool
    ) -> None:
        """PostgreSQL's clock was set an hour ahead: to a killed owner that starts again its own lease looks old."""
        here, there, holder = Clock(), Clock(), uuid4()
        owner = cluster.owner("one", here, holder=holder)
        watching = cluster.candidate("two", there)
        for number in (1, 2):
            watching.look()
            owner.renew(Instant(number))
        if not is_its_own:
            owner.hand_over("", Instant(3))
        cluster.pair.primary.query("update veilmq.lease set renewed = renewed - interval '1 hour'")
        again = cluster.candidate("one", here, holder=holder)
        for candidate in (watching, again):
            candidate.look()
        here.advance(WAIT_US - 1)
        again.look()
        assert not again.is_due()
        there.advance(WAIT_US if is_its_own else 0)
        assert watching.is_due()
        here.advance(1)
        assert again.is_due()
        before = cluster.kept(watching.take_over()).before
        assert before.away_us < HOUR_US

    def test_who_watched_through_a_take_over_that_came_to_nothing_does_not_wait_again(self, cluster: Cluster) -> None:
        """Everybody saw the last renewal, an hour ago. The new owner could not read on, and gave the shard back, or was
        cut off before it could."""
        clocks = here, there = Clock(), Clock()
        owner = cluster.owner("one", here)
        taker, watching = cluster.candidate("two", here), cluster.candidate("three", there)
        for number in (1, 2):
            owner.renew(Instant(number))
            for candidate in (taker, watching):
                candidate.look()
        cluster.pair.primary.query("update veilmq.lease set renewed = renewed - interval '1 hour'")
        for clock in clocks:
            clock.advance(HOUR_US)
        cut_off = cluster.kept(taker.take_over())
        for candidate in (taker, watching):
            candidate.look()
        assert (taker.due_in_us(), watching.due_in_us()) == (0, WAIT_US)
        there.advance(WAIT_US)
        cut_off.hand_over("", None)
        watching.look()
        assert watching.is_due()
        before = cluster.kept(watching.take_over()).before
        assert (before.clock, before.seen_us) == (Instant(2), HOUR_US + WAIT_US)

    def test_who_missed_the_last_renewal_has_not_watched_since_the_one_before(self, cluster: Cluster) -> None:
        """The new owner renewed once, and gave the shard back before anybody looked."""
        clocks = here, there = Clock(), Clock()
        owner = cluster.owner("one", here)
        taker, watching = cluster.candidate("two", here), cluster.candidate("three", there)
        owner.renew(Instant(1))
        for candidate in (taker, watching):
            candidate.look()
        for clock in clocks:
            clock.advance(WAIT_US)
        second = cluster.kept(taker.take_over())
        second.renew(Instant(HOUR_US))
        second.hand_over("", None)
        watching.look()
        before = cluster.kept(watching.take_over()).before
        assert (before.clock, before.seen_us) == (Instant(HOUR_US), 0)

    def test_a_renewal_counts_though_the_lease_clock_stood(self, cluster: Cluster) -> None:
        here, there = Clock(), Clock()
        owner = cluster.owner("one", here)
        watching = cluster.candidate("two", there)
        for _ in range(2):
            owner.renew(Instant(7))
            there.advance(WAIT_US)
            watching.look()
        there.advance(WAIT_US)
        assert cluster.kept(watching.take_over()).before.seen_us == WAIT_US

    @pytest.mark.parametrize("owned", [True, False], ids=["owned it", "watched"])
    def test_a_process_that_starts_again_on_its_machine_knows_what_the_one_before_saw(
        self, cluster: Cluster, tmp_path: Path, owned: bool
    ) -> None:
        """PostgreSQL's clock was set an hour ahead: nobody who knew the lease clock lately goes by it."""
        here, there, incarnation = Clock(), Clock(), cluster.shard.incarnation
        files = tmp_path / "one", tmp_path / "two"
        owner = cluster.owner("one", here, memory=Memory(incarnation, files[0]))
        watching = cluster.candidate("two", there, memory=Memory(incarnation, files[1]))
        for number in (1, 2):
            owner.renew(Instant(number))
            watching.look()
        for clock in (here, there):
            clock.advance(30_000)
        owner.renew(Instant(3))
        if not owned:
            watching.look()
        cluster.pair.primary.query("update veilmq.lease set renewed = renewed - interval '1 hour'")
        boots = [json.loads(file.read_bytes()) for file in files]
        for clock in (here, there):
            clock.advance(20_000)
        for memory, knows in (
            (Memory(incarnation, files[not owned]), True),
            (Memory(uuid4(), files[not owned]), False),
        ):
            name, holder, clock = ("one", owner.server.holder, here) if owned else ("two", uuid4(), there)
            again = cluster.candidate(name, clock, holder=holder, memory=memory)
            again.look()
            clock.advance(WAIT_US if not owned else 0)
            assert again.is_due() == knows
            if knows:
                # Who only watched knows it to within the time since it last read the lease clock two before.
                assert again.look().gone_us(clock.ns) == 20_000 + (0 if owned else 30_000 + WAIT_US)
        restarted = boots[not owned] | {"boot": "another start of the machine"}
        files[0].write_text(json.dumps(restarted))
        assert Memory(incarnation, files[0]).last is None

    def test_a_machine_that_hides_its_boot_id_is_warned_about(self, tmp_path: Path) -> None:
        """As `ProcSubset=pid` of systemd does: nothing is kept then."""
        own = [] if os.geteuid() == 0 else ["--map-root-user"]
        script = 'mount -t tmpfs none /proc/sys && exec "$@"'
        command = ["unshare", "--mount", *own, "sh", "-c", script, "hidden", sys.executable, "-c", REMEMBERS, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("no lease-clock.json, so clocks set ahead may end leases early after a restart:")
        assert not list(tmp_path.iterdir())

    def test_an_owner_that_was_asleep_answers_nothing_and_appends_nothing(self, cluster: Cluster) -> None:
        here, there = Clock(), Clock()
        asleep = cluster.owner("one", here)
        log = cluster.log(asleep)
        log.append(1, b"first")
        here.advance(WAIT_US)  # no call of ours runs meanwhile
        cluster.log(cluster.owner("two", there)).append(2, b"by the other")
        assert not asleep.holds()
        with pytest.raises(NotOwner):
            log.append(2, b"stale")
        with pytest.raises(NotOwner):
            asleep.renew(Instant(1))
        here.ns = 0
        assert not asleep.holds()
        assert [record for _, _, record in cluster.rows()] == [b"first", b"by the other"]

    def test_a_renewal_after_the_shard_was_lost_says_so(self, cluster: Cluster) -> None:
        here = Clock()
        owner = cluster.owner("one", here)
        cluster.owner("two", Clock())
        assert owner.holds()
        with pytest.raises(NotOwner, match="two owns the shard"):
            owner.renew(Instant(1))
        assert not owner.holds()

    def test_is_not_extended_by_a_renewal_that_no_standby_confirmed(self, cluster: Cluster) -> None:
        clock = Clock()
        owner = cluster.owner("one", clock)
        until_ns = owner._until_ns
        clock.advance(1_000_000)
        with cluster.pair.standby_stopped():
            renewal = begin(lambda: owner.renew(Instant(1)))
            until(cluster.pair.waiting)
            [pid] = cluster.pair.waiting()
            cluster.pair.primary.query("select pg_cancel_backend(%s)", pid)
            with pytest.raises(Uncertain):
                renewal.result(10)
        assert owner._until_ns == until_ns
        owner.renew(Instant(2))
        assert owner._until_ns == until_ns + 1_000_000_000


class TestTakeOver:
    def test_tells_the_clock_of_the_owner_before_and_how_long_ago_that_was(self, cluster: Cluster) -> None:
        here, there = Clock(), Clock()
        cluster.owner("one", here).renew(Instant(1_700_000_000_000_000))
        owner = cluster.owner("two", there)
        assert owner.before.owner == "one"
        assert owner.before.clock == 1_700_000_000_000_000
        assert owner.before.seen_us == WAIT_US
        assert 0 <= owner.before.away_us < 60_000_000

    def test_one_server_takes_over_from_itself_at_once(self, cluster: Cluster) -> None:
        holder = uuid4()
        cluster.owner("one", Clock(), holder=holder)
        again = cluster.candidate("one", Clock(), holder=holder)
        another = cluster.candidate("one", Clock())
        again.look()
        another.look()
        assert not another.is_due()
        assert cluster.kept(again.take_over()).epoch == 2

    def test_waits_for_the_append_that_is_under_way_and_sees_it(self, cluster: Cluster) -> None:
        log = cluster.log()
        log.append(1, b"first")
        clock = Clock()
        candidate = cluster.candidate("two", clock, lock_ms=10_000)
        candidate.look()
        clock.advance(WAIT_US)
        with cluster.pair.standby_stopped():
            append = begin(lambda: log.append(2, b"second"))
            until(cluster.pair.waiting)
            taken = begin(lambda: cluster.kept(candidate.take_over()))
            until(lambda: blocked(cluster))
        append.result(10)
        owner = taken.result(10)
        assert cluster.log(owner).end.lsn == 2  # type: ignore[arg-type]

    def test_gives_up_when_the_append_before_takes_long(self, cluster: Cluster) -> None:
        log = cluster.log()
        clock = Clock()
        candidate = cluster.candidate("two", clock, lock_ms=50)
        candidate.look()
        clock.advance(WAIT_US)
        with cluster.pair.standby_stopped():
            append = begin(lambda: log.append(1, b"first"))
            until(cluster.pair.waiting)
            with pytest.raises(StillOwned):
                candidate.take_over()
        append.result(10)
        log.append(2, b"second")

    def test_that_no_standby_confirmed_makes_no_owner(self, cluster: Cluster) -> None:
        clock = Clock()
        candidate = cluster.candidate("one", clock)
        candidate.look()
        with cluster.pair.standby_stopped():
            taken = begin(lambda: cluster.kept(candidate.take_over()))
            until(cluster.pair.waiting)
            [pid] = cluster.pair.waiting()
            cluster.pair.primary.query("select pg_cancel_backend(%s)", pid)
            with pytest.raises(Uncertain):
                taken.result(10)
        candidate.look()
        assert cluster.kept(candidate.take_over()).epoch == 2

    def test_without_an_answer_is_uncertain(self, cluster: Cluster) -> None:
        clock = Clock()
        candidate = cluster.candidate("one", clock, seconds_max=0.3)
        candidate.look()
        with cluster.pair.standby_stopped(), pytest.raises(Uncertain, match=r"no answer within 0\.3 s"):
            candidate.take_over()


class TestHandOver:
    def test_gives_the_shard_to_one_server_at_once(self, cluster: Cluster) -> None:
        here = Clock()
        owner = cluster.owner("one", here)
        log = cluster.log(owner)
        log.append(1, b"first")
        owner.hand_over("two", Instant(42))
        assert not owner.holds()
        with pytest.raises(NotOwner):
            log.append(2, b"after")
        named, other = cluster.candidate("two", Clock()), cluster.candidate("three", Clock())
        other.look()
        assert not other.is_due()
        named.look()
        now = named.take_over()
        assert now.before.clock == 42
        cluster.log(now).append(2, b"second")
        assert cluster.reader().read(START)[-1].record == b"second"

    def test_to_a_server_that_is_gone_ends_as_any_lease(self, cluster: Cluster) -> None:
        cluster.owner("one", Clock()).hand_over("gone", Instant(0))
        assert cluster.owner("two", Clock()).epoch == 3

    def test_ends_the_ownership_even_if_it_cannot_be_said(self, cluster: Cluster) -> None:
        owner = cluster.owner("one", Clock(), seconds_max=0.3)
        with cluster.pair.standby_stopped(), pytest.raises(Unreachable):
            owner.hand_over("two", Instant(0))
        assert not owner.holds()

    def test_of_what_another_owns_is_refused(self, cluster: Cluster) -> None:
        owner = cluster.owner("one", Clock())
        second = cluster.owner("two", Clock())
        with pytest.raises(NotOwner):
            owner.hand_over("three", Instant(0))
        cluster.log(second).append(1, b"first")


def blocked(cluster: Cluster) -> bool:
    """Whether somebody waits for a lock."""
    return cluster.pair.primary.query("select 1 from pg_stat_activity where wait_event_type = 'Lock'") != []
