"""The servers that a cluster has, in a real PostgreSQL: who is counted when the state format changes."""

from functools import partial
from uuid import uuid4

import pytest
from tests.cluster.conftest import Clock, Cluster, begin
from tests.support.postgres import until

from veilmq.cluster.postgres import Unfit, Unreachable
from veilmq.cluster.postgres.ownership import Server
from veilmq.cluster.postgres.schema import LEASE_US, Formats, Outdated, look
from veilmq.cluster.registry import (
    NameTaken,
    Registry,
    ServerState,
    ask_to_hand_over,
    drain,
    finalize,
    forget,
    servers,
    status,
    within,
)


def server(cluster: Cluster, name: str, newest: int, oldest: int = 1) -> Registry:
    formats = Formats(oldest, newest)
    mine = Server(name, f"{name}:9327", uuid4(), formats)
    return cluster.kept(Registry(cluster.postgres(), cluster.shard.incarnation, mine, "1.0", formats))


def test_the_format_changes_once_every_server_knows_the_new_one(cluster: Cluster) -> None:
    one, two = server(cluster, "one", 2), server(cluster, "two", 1)
    for each in (one, two):
        each.register()
    with pytest.raises(Unfit, match=r"state format 2 is not known to two \(release 1.0\): upgrade them"):
        within(cluster.postgres(), finalize)
    two.leave()
    with pytest.raises(Unfit, match="not known to two"):  # it is to come back
        within(cluster.postgres(), finalize)
    within(cluster.postgres(), lambda session: forget(session, "two"))
    assert within(cluster.postgres(), finalize) == within(cluster.postgres(), finalize) == 2
    assert within(cluster.postgres(), look).format == 2


def test_who_does_not_know_the_format_neither_registers_nor_takes_over(cluster: Cluster) -> None:
    clock = Clock()
    candidate, old = cluster.candidate("one", clock), server(cluster, "one", 1)
    candidate.look()
    cluster.pair.primary.query("update veilmq.shard set format = 2")
    clock.advance(10 * LEASE_US)
    with pytest.raises(Outdated, match="has state format 2, this release knows 1: upgrade this server"):
        candidate.take_over()
    with pytest.raises(Outdated):
        old.register()
    with pytest.raises(Outdated, match="has state format 2, this release needs 3: upgrade release by release"):
        server(cluster, "one", 4, oldest=3).register()
    assert within(cluster.postgres(), servers) == []
    assert within(cluster.postgres(), look).epoch == 0


def test_a_server_registers_before_or_after_a_change_but_not_amid_it(cluster: Cluster) -> None:
    """Before: it is counted. After: it is refused."""
    old = server(cluster, "two", 1)
    server(cluster, "one", 2).register()
    with cluster.postgres().connect() as session, session.transaction():
        look(session, lock="for update")  # as a change does first
        registering = begin(old.register)
        until(lambda: cluster.pair.primary.query("select 1 from pg_stat_activity where wait_event_type = 'Lock'"))
        session.execute("update veilmq.shard set format = 2")
    assert isinstance(registering.exception(10), Outdated)


def test_a_forgotten_server_that_lives_registers_again(cluster: Cluster) -> None:
    one = server(cluster, "one", 1)
    one.register()
    with pytest.raises(Unfit, match="server one is running"):
        within(cluster.postgres(), lambda session: forget(session, "one"))
    cluster.pair.primary.query("update veilmq.server set seen = seen - interval '1 min'")
    within(cluster.postgres(), lambda session: forget(session, "one"))
    one.report(ServerState("follower", 1, 7))
    (found,) = within(cluster.postgres(), servers)
    assert (found.name, found.is_running, found.role, found.record) == ("one", True, "follower", 7)


def test_who_was_seen_before_the_clock_was_set_back_is_not_running(cluster: Cluster) -> None:
    """It would be for as long as the clock was set back."""
    one, two = server(cluster, "one", 1), server(cluster, "two", 1)
    one.register()
    two.register()
    cluster.pair.primary.query("update veilmq.server set seen = seen + interval '1 hour'")
    two.leave()
    assert [each.absence for each in within(cluster.postgres(), servers)] == ["silent", "not running"]
    within(cluster.postgres(), lambda session: forget(session, "two"))
    server(cluster, "one", 1).register()


def test_without_a_snapshot_there_is_no_age(cluster: Cluster) -> None:
    assert status(cluster.postgres()).snapshot_age_s is None
    cluster.pair.primary.query("insert into veilmq.snapshot values (1, 1, 0, 4096, '{}')")
    age_s = status(cluster.postgres()).snapshot_age_s
    assert age_s is not None
    assert 0 <= age_s < 60


def test_a_name_belongs_to_one_server_at_a_time(cluster: Cluster) -> None:
    one, other = server(cluster, "one", 1), server(cluster, "one", 1)
    one.register()
    with pytest.raises(NameTaken):
        other.register()
    one.leave()
    other.register()
    with pytest.raises(NameTaken):  # it was asleep meanwhile
        one.report(ServerState("follower", 1, 7))


def test_a_drained_server_is_told_and_a_start_ends_it(cluster: Cluster) -> None:
    one, two = server(cluster, "one", 1), server(cluster, "two", 1)
    one.register()
    two.register()
    two.report(ServerState("follower", 1, 7))
    within(cluster.postgres(), lambda session: drain(session, "one"))
    one.report(ServerState("owner", 1, 7))
    assert one.drained
    with pytest.raises(Unfit, match="start one, or undrain one, before you drain two"):
        within(cluster.postgres(), lambda session: drain(session, "two"))
    for role in ("filling", "follower"):
        one.report(ServerState(role, 1, 7))
        assert [each.role for each in within(cluster.postgres(), servers)] == ["drained", "follower"]
    one.register()
    assert not one.drained


def test_a_server_that_starts_or_fills_its_copy_is_given_nothing(cluster: Cluster) -> None:
    """It could not own the queues before its copy has all of the log, and nobody would meanwhile."""
    one, two = server(cluster, "one", 1), server(cluster, "two", 1)
    one.register()
    two.register()
    cluster.pair.primary.query("update veilmq.shard set owner = 'one'")
    for role, until_it in (("starting", "has caught up with the log"), ("filling", "has filled its copy")):
        two.report(ServerState(role, 1, 0))
        nobody = f"no other server could own the queues: wait until two {until_it}"
        for act, refusal in (
            (partial(drain, name="one"), f"^{nobody}, before you drain one$"),
            (partial(ask_to_hand_over, to=""), f"^{nobody}$"),
            (
                partial(ask_to_hand_over, to="two"),
                f"^server two is {role}: wait until it {until_it}, or name another one$",
            ),
        ):
            with pytest.raises(Unfit, match=refusal):
                within(cluster.postgres(), act)
    with cluster.postgres().connect() as session, session.transaction():
        session.execute("select 1 from veilmq.server for update")
        with pytest.raises(Unreachable, match="did not store that this server is alive"):
            two.report(ServerState("follower", 1, 7))
    assert two.reported.role == "filling", "so a follower reports again at its next look"
    two.report(ServerState("follower", 1, 7))
    within(cluster.postgres(), partial(ask_to_hand_over, to="two"))


def test_of_two_drains_at_once_one_leaves_a_server(cluster: Cluster) -> None:
    for name in ("one", "two"):
        mine = server(cluster, name, 1)
        mine.register()
        mine.report(ServerState("follower", 1, 7))
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
    with cluster.postgres().connect() as session, session.transaction():
        session.execute("select 1 from veilmq.server for update")
        draining = [begin(partial(within, cluster.postgres(), partial(drain, name=name))) for name in ("one", "two")]
        until(lambda: cluster.pair.primary.query(waiting) == [(2,)])
    errors = [each.exception(10) for each in draining]
    assert sorted(map(type, errors), key=str) == sorted([type(None), Unfit], key=str), errors


def test_it_waits_for_no_standby_to_say_that_it_is_there(cluster: Cluster) -> None:
    one = server(cluster, "one", 1)
    one.register()
    until(lambda: not stands_still(cluster))
    with cluster.pair.standby_stopped():
        one.report(ServerState("follower", 1, 7))
        until(lambda: stands_still(cluster))
    until(lambda: not stands_still(cluster))
    assert one.reported.record == 7


def stands_still(cluster: Cluster) -> bool:
    """Whether the status says so of the standby."""
    (standby,) = status(cluster.postgres()).standbys
    assert standby.lag_s >= 0
    return standby.stands_still
