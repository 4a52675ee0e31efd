"""Where a new owner's lease clock begins, and when a follower takes over."""

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.cluster.conftest import Clock, Cluster, LoggedFactory, begin
from tests.support.contract.stage import Stage
from tests.support.postgres import Pair, until
from tests.support.small_disk import fill_up, small_disk
from tests.support.sqlite import SMALL

from veilmq.cluster import snapshotting
from veilmq.cluster.member import Member, membership
from veilmq.cluster.member.copy import Copy
from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.ownership import MARGIN_US, Before, Ownership, Server, begins_at
from veilmq.cluster.postgres.schema import LEASE_US, Formats, init
from veilmq.cluster.postgres.snapshots import Snapshots
from veilmq.cluster.registry import NameTaken, Registry, ServerState
from veilmq.cluster.snapshotting import Stopped
from veilmq.engine.directory import STATE_FORMAT
from veilmq.engine.engine import Engine
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US, Instant
from veilmq.server.clock import LeaseClock, wall
from veilmq.server.cluster.member import ClusterServer
from veilmq.server.config.settings import Address, Settings
from veilmq.server.shell import Shell
from veilmq.store import Store
from veilmq.store.directory import DATABASE
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.testing.for_each import for_each

RENEWED = Instant(1_700_000_000 * SECOND_US)
"""The owner's lease clock at its last renewal."""
LOOKED = 4 * SECOND_US
"""For how long the new owner saw no renewal."""


@for_each(
    ("away_us", "wall_us", "went_us"),
    [
        pytest.param(4 * SECOND_US, 4 * SECOND_US, LOOKED, id="warm"),
        pytest.param(4 * SECOND_US, 4 * SECOND_US + HOUR_US, LOOKED, id="own wall time an hour ahead"),
        pytest.param(4 * SECOND_US, 4 * SECOND_US - HOUR_US, LOOKED, id="own wall time an hour behind"),
        pytest.param(4 * SECOND_US + HOUR_US, 4 * SECOND_US, LOOKED, id="PostgreSQL's clock set forward"),
        pytest.param(0, 4 * SECOND_US, LOOKED, id="PostgreSQL's clock set back"),
        pytest.param(DAY_US, DAY_US, DAY_US, id="all servers were off for a day"),
    ],
)
def test_the_lease_clock_goes_on_by_what_two_clocks_agree_on(away_us: int, wall_us: int, went_us: int) -> None:
    before = Before("one", RENEWED, LOOKED, away_us)
    assert begins_at(before, Instant(0), Instant(RENEWED + wall_us), 0) == RENEWED + went_us


def test_the_opening_of_the_store_counts_and_its_mark_is_not_undercut() -> None:
    before = Before("one", RENEWED, LOOKED, LOOKED)
    wall = Instant(RENEWED + LOOKED + SECOND_US)
    assert begins_at(before, Instant(0), wall, SECOND_US) == wall
    assert begins_at(before, Instant(wall + HOUR_US), wall, SECOND_US) == wall + HOUR_US


def test_a_new_cluster_begins_at_wall_time() -> None:
    assert begins_at(Before("", Instant(0), LOOKED, LOOKED), Instant(0), RENEWED, SECOND_US) == RENEWED


class CountingClock(Clock):
    """Counts how often it is read: some times a look."""

    reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return super().__call__()


class CountingFollower(SqliteFollower):
    """Counts how often it is to look whether a long read has ended."""

    looks = 0

    def look_again(self) -> None:
        self.looks += 1
        super().look_again()


def opened(path: Path) -> SqliteFollower:
    return SqliteFollower(path, SMALL)


def member_of(cluster: Cluster, copy: Path, clock: Clock, dsn: str = "", **options: Any) -> Member:
    options = {"name": "one"} | options
    return Member(dsn or cluster.pair.dsn, copy, opened, clock, formats=Formats(1, 1), **options)


@contextmanager
def following(member: Member, clock: "CountingClock", patience_s: float) -> Iterator[Future[Ownership | None]]:
    """The member follows during the block, and has looked at the owner some times. It ends with what the future has."""
    stopping = Event()
    found = begin(lambda: member.follow(stopping, patience_s=patience_s))
    try:
        until(lambda: clock.reads > 20)
        yield found
    finally:
        stopping.set()
        ownership = found.result(20)
        if ownership is not None:
            ownership.close()
        assert member.registry is not None
        member.registry.leave()


def test_a_copied_directory_does_not_pass_for_the_server_that_it_was_copied_from(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As where a machine is cloned. The copy would take the shard over from the other one while that serves."""

    def holder(copy: str, name: str) -> UUID:
        joined = member_of(cluster, tmp_path / copy, Clock(), name=name)
        joined.join(Event())
        assert joined.registry is not None
        joined.registry.leave()
        kept = membership(tmp_path / copy)
        assert kept is not None
        return kept.holder

    first = holder("copy", "one")
    shutil.copytree(tmp_path / "copy", tmp_path / "twin")
    second = holder("twin", "two")
    assert second != first
    assert (holder("copy", "one"), holder("twin", "two")) == (first, second)


def test_of_two_servers_on_copies_of_one_directory_the_first_goes_on(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def member(copy: str, address: str) -> Member:
        return member_of(cluster, tmp_path / copy, Clock(), address=address)

    caplog.set_level(logging.INFO, "veilmq.cluster")
    first = member("copy", "10.0.0.1:9327")
    first.join(Event())
    assert first.registry is not None
    shutil.copytree(tmp_path / "copy", tmp_path / "twin")
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(member("twin", "10.0.0.2:9327").join, Event())
        while not joined.done():
            first.registry.report(ServerState("follower", 1, 0))
            wait([joined], timeout=0.05)
    with pytest.raises(NameTaken):
        joined.result()
    first.registry.report(ServerState("follower", 1, 0))
    first.registry.close()  # as when it is killed
    caplog.clear()
    again = member("copy", "10.0.0.1:9327")
    again.join(Event())
    assert again.registry is not None
    again.registry.close()
    assert "another server" not in caplog.text, "it waits for itself"
    cluster.pair.primary.query("update veilmq.server set seen = seen - interval '4 s'")
    moved = member("copy", "10.0.0.3:9327")
    moved.join(Event())
    assert moved.registry is not None
    moved.registry.leave()
    assert caplog.messages[-1] == "the name one is free"


@pytest.mark.parametrize("to", ["", "one"], ids=["to any", "back"])
def test_who_was_asked_to_hand_over_leaves_the_shard_to_others_for_a_while(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, to: str
) -> None:
    """Nobody owns it, so anybody may take over at once. Unless it is handed back to that very server. While a commit
    waits it cannot take over, and says why: once, however often it tries, and also
    after it has lost its connection."""
    caplog.set_level("INFO", "veilmq.cluster")
    clock = CountingClock()
    member = member_of(cluster, tmp_path / "copy", clock)
    with following(member, clock, 2) as found:
        assert (found.done(), member.unowned) == (False, "nobody owns the queues at present")
        if to == "one":
            cluster.owner("two", Clock()).hand_over("one", RENEWED)
        else:
            with psycopg.connect(cluster.pair.primary.dsn) as connection:
                connection.execute("select from veilmq.shard for update")
                clock.advance(2 * SECOND_US)
                until(lambda: "and this server cannot take over: an append of the owner is under way" in member.unowned)
                reads = clock.reads
                until(lambda: clock.reads > reads + 20)
                lose_connection(cluster, member)
                until(lambda: "and this server cannot take over: an append of the owner is under way" in member.unowned)
                told = [each for each in caplog.messages if "not taken over" in each]
                assert len(told) == 1, told
                lose_connection(cluster, member)
        assert isinstance(found.result(20), Ownership)
    assert member.unowned == "nobody owns the queues at present"


def lose_connection(cluster: Cluster, member: Member) -> None:
    """End the session that waits for a lock, also if it gave up just before the signal came: the member says so."""
    lose = "select pg_terminate_backend(pid) from pg_stat_activity where wait_event_type = 'Lock'"

    def is_lost() -> bool:
        cluster.pair.primary.query(lose)
        return "was lost" in member.unowned

    until(is_lost)


def test_an_owner_that_cannot_read_on_gives_the_shard_back_with_the_lease_clock_as_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The next owner must still count for how long the one before was away."""
    cluster.owner("one", Clock()).renew(RENEWED)
    cluster.pair.primary.query("update veilmq.lease set renewed = renewed - interval '1 hour'")

    def stop() -> None:
        raise Stopped

    snapshots = Snapshots(cluster.postgres(), cluster.shard.incarnation)
    with closing(Copy(tmp_path / "copy", opened, snapshots, between=stop)) as copy:
        for name in ("two", "three"):
            clock = Clock()
            candidate = cluster.candidate(name, clock)
            candidate.look()
            clock.advance(2 * LEASE_US + MARGIN_US)
            owner = cluster.kept(candidate.take_over())
            assert (owner.before.clock, owner.before.away_us >= HOUR_US) == (RENEWED, True)
            with pytest.raises(Stopped):
                copy.catch_up(cluster.reader(), owner)
            assert owner.lost is not None


def test_a_drained_server_does_not_take_over(cluster: Cluster, tmp_path: Path) -> None:
    """Nor when nobody else owns the shard."""
    clock = CountingClock()
    member = member_of(cluster, tmp_path / "copy", clock)
    with following(member, clock, 2) as found:
        cluster.pair.primary.query("update veilmq.server set drained = true")
        until(lambda: member.drained)
        clock.advance(2 * SECOND_US)
        reads = clock.reads
        until(lambda: clock.reads > reads + 20)
        assert not found.done()
        cluster.pair.primary.query("update veilmq.server set drained = false")
        assert isinstance(found.result(20), Ownership)


def test_a_follower_that_cannot_read_the_log_says_for_how_long(cluster: Cluster, tmp_path: Path) -> None:
    clock, primary = CountingClock(), cluster.pair.primary
    member = member_of(cluster, tmp_path / "copy", clock)
    with following(member, clock, 60):
        assert member.behind_s == 0
        with psycopg.connect(primary.dsn) as connection:
            connection.execute("lock table veilmq.log_0_0 in access exclusive mode")
            waiting = (
                "select count(*) from pg_stat_activity where application_name = 'veilmq' and wait_event_type = 'Lock'"
            )
            until(lambda: primary.query(waiting) == [(1,)])
            clock.advance(5 * SECOND_US)
            assert member.behind_s == 5
        until(lambda: member.behind_s == 0)


def test_the_lease_of_a_dead_owner_runs_out_while_a_copy_is_filled(cluster: Cluster, tmp_path: Path) -> None:
    """A server that starts from nothing may need as long as a lease for the log, and need not wait for both."""
    cluster.owner("two", Clock())
    clock = Clock()

    def opened(path: Path) -> SqliteFollower:
        clock.advance(LEASE_US + MARGIN_US)
        return SqliteFollower(path, SMALL)

    member = Member(cluster.pair.dsn, tmp_path / "copy", opened, clock, formats=Formats(1, 1), name="one")
    stopping = Event()
    found = begin(lambda: member.follow(stopping))
    try:
        ownership = found.result(20)
        assert isinstance(ownership, Ownership)
        ownership.close()
    finally:
        stopping.set()
        assert member.registry is not None
        member.registry.leave()


def test_a_copy_is_filled_while_the_own_name_is_taken(cluster: Cluster, tmp_path: Path) -> None:
    """A killed server's name stays taken for some seconds, also for itself if it lost its directory. Meanwhile its copy
    is filled, and the dead owner's lease runs out."""
    stage = Stage(LoggedFactory(tmp_path / "owner", cluster.log()))
    stage.send(stage.create(), "x")
    stage.store.close()
    killed = Server("one", "one:9400", uuid4(), Formats(1, 1))
    cluster.kept(Registry(cluster.postgres(), cluster.shard.incarnation, killed, "", Formats(1, 1))).register()
    cluster.pair.primary.query("update veilmq.server set seen = seen - interval '2 s'")
    clock, stopping = Clock(), Event()
    found: list[tuple[int, CountingFollower]] = []

    def opened(path: Path) -> SqliteFollower:
        follower = CountingFollower(path, SMALL)
        found.append((follower.position.lsn, follower))
        return follower

    member = Member(cluster.pair.dsn, tmp_path / "copy", opened, clock, formats=Formats(1, 1), name="one")
    joining = begin(lambda: member.join(stopping))
    try:
        last = cluster.rows()[-1][0]
        until(lambda: bool(found) and found[0][1].position.lsn == last)
        assert not joining.done()
        cluster.pair.primary.query("update veilmq.server set seen = seen - interval '1 min'")
        assert joining.result(20) is not None
        clock.advance(LEASE_US + MARGIN_US)
        ownership = begin(lambda: member.follow(stopping)).result(20)
        assert isinstance(ownership, Ownership)
        ownership.close()
        assert [(lsn, follower.looks) for lsn, follower in found] == [(0, 0), (last, 1)]
    finally:
        stopping.set()
        if member.registry is not None:
            member.registry.leave()


class Enough(Exception):
    """What the test waited for has happened."""


def test_a_new_owner_renews_its_lease_while_it_opens_its_store(shared_pair: Pair, tmp_path: Path) -> None:
    """A large store takes longer to open than a lease lasts. Without renewals the next server would take over."""
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    init(Postgres(shared_pair.dsn), state_format=STATE_FORMAT, lease_us=SECOND_US)
    place = Address("127.0.0.1", 0)
    settings = Settings(data=tmp_path / "data", cluster=shared_pair.dsn, cluster_name="one", peer=place)
    server = ClusterServer(settings, LeaseClock(), "1.0")

    async def lead(term: AsyncExitStack, engine: Engine, store: Store) -> Shell:
        await asyncio.to_thread(until, lambda: shared_pair.primary.query("select beat from veilmq.lease") > [(3,)], 60)
        raise Enough

    async def play() -> None:
        async with AsyncExitStack() as undo:
            assert await server.join(undo, None)
            await server.run(lead)

    with pytest.raises(Enough):
        asyncio.run(play())


def test_an_owner_whose_copy_has_rotted_hands_over_and_fills_it_again(
    shared_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has read the damage yet but the check before a snapshot."""
    monkeypatch.setattr(snapshotting, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(snapshotting, "LOOKS_BETWEEN", 1)
    caplog.set_level(logging.INFO, "veilmq.cluster")
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    init(Postgres(shared_pair.dsn), state_format=STATE_FORMAT, lease_us=SECOND_US)
    place = Address("127.0.0.1", 0)
    settings = Settings(data=tmp_path / "data", cluster=shared_pair.dsn, cluster_name="one", peer=place)
    clock = LeaseClock()
    server = ClusterServer(settings, clock, "1.0")
    server.member._snapshot_bytes = 0
    terms: list[Shell] = []

    async def lead(term: AsyncExitStack, engine: Engine, store: Store) -> Shell:
        if terms:
            raise Enough
        terms.append(Shell(engine, store, clock, holds=server.holds))
        term.push_async_callback(terms[0].stop, 5.0)
        terms[0].start()
        with closing(connect(settings.data / DATABASE)) as connection:
            connection.execute("CREATE TABLE rotten (bit)")
        return terms[0]

    async def play() -> None:
        async with AsyncExitStack() as undo:
            assert await server.join(undo, None)
            async with asyncio.timeout(20):
                await server.run(lead)

    with pytest.raises(Enough):
        asyncio.run(play())
    said = "\n".join(caplog.messages)
    assert re.search(
        "a check of the copy found(.|\n)*handed over to any server(.|\n)*thrown away and filled again", said
    )
    assert not terms[0].broken


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small") as mount:
        yield mount


@pytest.mark.parametrize("when", ["it starts", "it begins to follow", "it follows"])
def test_a_follower_whose_disk_is_full_waits_for_space(
    cluster: Cluster, tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    caplog.set_level(logging.INFO, "veilmq.cluster")
    log = cluster.log()
    stage = Stage(LoggedFactory(tmp_path / "owner", log))
    ballast = small / "none"
    with closing(stage.store):
        queue = stage.create()
        stage.send(queue, "before")
        clock = CountingClock()
        member = member_of(cluster, small / "copy", clock)
        if when != "it follows":
            if when == "it begins to follow":
                assert member.join(Event()) is not None
            ballast = fill_up(small / "ballast")
        stopping = Event()
        found = begin(lambda: member.follow(stopping, patience_s=60))
        try:
            if when == "it follows":
                until(lambda: member.lsn == log.last)
                ballast = fill_up(small / "ballast")
                for _ in range(5):
                    stage.send(queue, "x" * 10_000)
            until(lambda: "is full" in member.trouble)
            assert not found.done()
            ballast.unlink()
            until(lambda: member.lsn == log.last)
            until(lambda: not member.trouble)
        finally:
            stopping.set()
            assert found.result(20) is None
            assert member.registry is not None
            member.registry.leave()
    waits = f"the disk of {small / 'copy'} is full, and this server waits: free space"
    assert any(each.startswith(waits) for each in caplog.messages)
    assert "the disk has space again" in caplog.messages
    assert membership(small / "copy") is not None, "it could not start again"


def test_an_owner_whose_disk_is_full_leaves_the_shard_to_others(
    shared_pair: Pair, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens its store, for which it has no room, and serves once there is some. This machine's wall clock is an hour
    ahead of the lease clock, which nobody sets forward."""
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    init(Postgres(shared_pair.dsn), state_format=STATE_FORMAT, lease_us=SECOND_US)
    began = Instant(wall() - HOUR_US)
    shared_pair.primary.query(f"update veilmq.lease set clock = {began}, renewed = clock_timestamp()")
    place = Address("127.0.0.1", 0)
    settings = Settings(data=small / "data", cluster=shared_pair.dsn, cluster_name="one", peer=place)
    server = ClusterServer(settings, LeaseClock(), "1.0")
    saw = server.member.follow
    ballast: list[Path] = []

    def follow(*arguments: Any, **options: Any) -> Ownership | None:
        for each in ballast:
            each.unlink()
        ownership = saw(*arguments, **options)
        if not ballast:
            ballast.append(fill_up(small / "ballast"))
        return ownership

    server.member.follow = follow  # type: ignore[method-assign]

    async def lead(term: AsyncExitStack, engine: Engine, store: Store) -> Shell:
        raise Enough

    async def play() -> None:
        async with AsyncExitStack() as undo:
            assert await server.join(undo, None)
            await server.run(lead)

    with pytest.raises(Enough):
        asyncio.run(play())
    assert f"not the owner: the disk of {small / 'data'} is full: free space" in caplog.messages
    [(clock,)] = shared_pair.primary.query("select clock from veilmq.lease")
    assert began < clock < began + HOUR_US // 2


if os.geteuid() != 0:  # only root mounts a small disk
    del test_a_follower_whose_disk_is_full_waits_for_space, test_an_owner_whose_disk_is_full_leaves_the_shard_to_others
