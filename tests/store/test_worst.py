"""The rankings of queues: the first few are what a walk through all queues finds, after any life and restart."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.test_rollups import DEAD, JOBS, over
from tests.support.contract.stage import TESTER, Stage, sending
from tests.support.sqlite import SqliteFactory, store_of

from veilmq import testing
from veilmq.model.commands import StartMove, Sweep
from veilmq.model.instant import FOREVER, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, Report, Reported, failure_of
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.reader import MEASURES, Ranking
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.rollups import worst as module

RAISED = Report(Reported.RETRY, failure_of("raised", "ValueError", "no"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    yield stage
    stage.store.close()


def ranking(stage: Stage, by: str) -> Ranking:
    return stage.store.reader.worst.ranking("000000000000", by)


def top(stage: Stage, by: str, count: int) -> list[int]:
    """The first values; all queues are walked if the ranking has too few."""
    found, is_all = ranking(stage, by).top()
    if len(found) < count and not is_all:
        renew(stage, by)
        found, _ = ranking(stage, by).top()
    return [value for value, _ in found[:count]]


def renew(stage: Stage, by: str) -> None:
    of = ranking(stage, by)
    of.begin_renewal()
    of.end_renewal(of.walk(queue.incarnation for queue in stage.store.reader.queues.values()))


def walked(stage: Stage, value_of: Callable[[LiveQueue], int], count: int) -> list[int]:
    values = sorted((value_of(queue) for queue in store_of(stage).reader.queues.values()), reverse=True)
    return [value for value in values[:count] if value]


VALUES: dict[str, Callable[[LiveQueue], int]] = {
    "depth": lambda queue: queue.visible + queue.delayed + queue.in_flight,
    "in_flight": lambda queue: queue.in_flight,
}


def test_depths_and_leases_are_ranked_as_a_walk_finds_them(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a ranking has only a few members: queues fill, drain, are made and deleted."""
    monkeypatch.setattr(module, "MEMBERS_MAX", 12)
    monkeypatch.setattr(module, "MEMBERS_KEPT", 6)
    chance = testing.chance(7)
    queues = [stage.create(f"q{number}") for number in range(40)]
    walks = 0
    for step in range(300):
        queue = chance.choice(queues)
        act = chance.choice(["send", "send", "receive", "delete", "purge", "drop", "reopen", "sweep"])
        if act == "send":
            stage.batch([sending(queue)] * chance.randrange(1, 9))
        elif act in {"receive", "delete"}:
            for each in stage.receive(queue, 8, lease_us=HOUR_US):
                if act == "delete":
                    stage.delete(queue, each.handle)
        elif act == "purge":
            stage.purge(max(store_of(stage).reader.queues.values(), key=VALUES["depth"]).key)
        elif act == "drop" and step % 7 == 0:
            stage.drop(queue)
            stage.later(2 * MINUTE_US)
            stage.create(queue.name)
        elif act == "reopen" and step % 9 == 0:
            stage.reopen(kill=chance.random() < 0.5)
        else:
            stage.do(Sweep())
        for by, value_of in VALUES.items():
            found, is_all = ranking(stage, by).top()
            assert len(found) <= 12
            walks += len(found) < 3 and not is_all
            assert top(stage, by, 3) == walked(stage, value_of, 3), (by, step)
    assert 0 < walks < 60, "most of the time nothing is walked"


def test_members_that_drained_make_room_and_the_others_are_not_forgotten(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 12)
    monkeypatch.setattr(module, "MEMBERS_KEPT", 6)
    middling = [stage.create(f"middling{number}") for number in range(13)]
    for queue in middling:
        stage.batch([sending(queue)] * 3)
    found, _ = ranking(stage, "depth").top()
    deep = [stage.create(f"deep{number}") for number in range(7)]
    names = {incarnation for _, incarnation in found}
    members = [queue for queue in middling if stage.describe(queue).incarnation in names]
    for queue in deep[:6]:
        stage.batch([sending(queue)] * 5)
        ranking(stage, "depth").top()
    for queue in (*deep[:6], *members):
        stage.purge(queue)
    stage.batch([sending(deep[6])] * 5)
    assert top(stage, "depth", 3) == [5, 3, 3]


def test_queues_with_equal_values_are_no_reason_to_walk(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 12)
    monkeypatch.setattr(module, "MEMBERS_KEPT", 6)
    stage.batch([sending(stage.create(f"q{number}")) for number in range(40)])
    found, _ = ranking(stage, "depth").top()
    assert [value for value, _ in found] == [1] * 6


def test_the_oldest_messages_are_ranked_by_a_bound_that_is_exact_when_minutes_are_stored(stage: Stage) -> None:
    queues = [stage.create(f"q{number}") for number in range(5)]
    for queue in queues:
        stage.send(queue, "old")
        stage.later(SECOND_US)
    sent = {queue: stage.now - (5 - number) * SECOND_US for number, queue in enumerate(queues)}

    def instants() -> list[int]:
        return [FOREVER - value for value in top(stage, "oldest", 10)]

    assert instants() == [sent[queue] for queue in queues]
    stage.delete(queues[0], stage.take(queues[0]).handle)
    sent[queues[0]] = stage.now
    stage.send(queues[0], "new")
    over(stage)
    assert instants() == [sent[queue] for queue in (*queues[1:], queues[0])]
    stage.reopen(kill=True)
    over(stage)
    assert instants() == [sent[queue] for queue in (*queues[1:], queues[0])], "looked up after a start"
    stage.purge(queues[2])
    over(stage)
    assert sent[queues[2]] not in instants()


def test_blocked_groups_are_ranked_by_a_bound_that_is_never_too_late(stage: Stage) -> None:
    """So a queue that stands still is found, whatever it lived through; and those that move make no noise for long."""
    chance = testing.chance(5)
    queues = [stage.create(f"q{number}.fifo", content_deduplication=True) for number in range(6)]
    handles: list[tuple[QueueKey, str]] = []
    ranked = exact = 0
    for step in range(300):
        queue = chance.choice(queues)
        act = chance.choice(["send", "send", "receive", "receive", "delete", "release", "purge", "reopen", "over"])
        if act == "send":
            fields = {"extras": Extras(group=f"g{chance.randrange(3)}")}
            stage.batch([sending(queue, f"{step}-{each}", **fields) for each in range(chance.randrange(1, 4))])
        elif act == "receive":
            handles += [(queue, each.handle) for each in stage.receive(queue, 2, lease_us=chance.choice([10, HOUR_US]))]
        elif act in {"delete", "release"} and handles:
            of, handle = handles.pop(chance.randrange(len(handles)))
            stage.delete(of, handle) if act == "delete" else stage.extend(of, handle, 0)
        elif act == "purge" and step % 5 == 0:
            stage.purge(queue)
        elif act == "reopen" and step % 9 == 0:
            stage.reopen(kill=chance.random() < 0.5)
        elif act == "over" and step % 3 == 0:
            over(stage)
        else:
            stage.later(chance.randrange(20 * SECOND_US))
        bounds = {incarnation: FOREVER - value for value, incarnation in ranking(stage, "blocked").top()[0]}
        for each in queues:
            with stage.store.reader.look() as view:
                found = view.blocked(stage.store.reader.queues[each], stage.now, 1).shown
            if found:
                ranked += 1
                bound = bounds[stage.describe(each).incarnation]
                assert bound <= found[0].since, (step, each)
                exact += bound == found[0].since
    assert ranked > 200
    assert exact > ranked // 4


def test_a_queue_that_stands_still_stays_ranked_and_one_that_moves_does_not(stage: Stage) -> None:
    still, moves = (stage.create(f"{name}.fifo", content_deduplication=True) for name in ("still", "moves"))
    for queue in (still, moves):
        stage.batch([sending(queue, str(number), extras=Extras(group="a")) for number in range(9)])
    stage.take(still, lease_us=HOUR_US)
    since = stage.now
    for _ in range(8):
        taken = stage.take(moves, lease_us=HOUR_US)
        over(stage)
        stage.delete(moves, taken.handle)
    bounds = {incarnation: FOREVER - value for value, incarnation in ranking(stage, "blocked").top()[0]}
    assert bounds[stage.describe(still).incarnation] == since
    assert bounds[stage.describe(moves).incarnation] > stage.now - 4 * MINUTE_US
    stage.purge(still)
    over(stage)
    assert stage.describe(still).incarnation not in {each for _, each in ranking(stage, "blocked").top()[0]}


def test_a_dead_letter_brings_its_age_along(stage: Stage) -> None:
    dead = stage.create("dead")
    jobs = stage.create("jobs", redrive=RedrivePolicy(dead, 1))
    stage.send(jobs)
    sent = stage.now
    stage.receive(jobs, lease_us=SECOND_US)
    stage.later(10 * SECOND_US)
    stage.send(dead, "younger")
    stage.receive(jobs)
    incarnation = stage.describe(dead).incarnation
    assert (FOREVER - sent, incarnation) in ranking(stage, "oldest").top()[0]
    assert (2, incarnation) in ranking(stage, "depth").top()[0]


def troubled(stage: Stage) -> QueueKey:
    """A queue with a dead letter, two leases that ended, and a failure."""
    dead = stage.create("dead")
    jobs = stage.create("jobs", redrive=RedrivePolicy(dead, 2))
    stage.send(jobs)
    for _ in range(2):
        stage.receive(jobs, lease_us=SECOND_US)
        stage.later(2 * SECOND_US)
        stage.do(Sweep())
    stage.receive(jobs)
    stage.send(jobs)
    stage.extend(jobs, stage.take(jobs).handle, 60 * SECOND_US, report=RAISED)
    return jobs


EXPECTED = {"dead_lettered": 1, "lease_expired": 2, "failed": 1}


def test_counts_are_those_of_this_hour_and_the_one_before(stage: Stage) -> None:
    stage.later(HOUR_US - stage.now % HOUR_US)
    incarnation = stage.describe(troubled(stage)).incarnation

    def found() -> dict[str, list[tuple[int, int]]]:
        stage.do(Sweep())
        return {by: ranking(stage, by).top()[0] for by in EXPECTED}

    there = {by: [(count, incarnation)] for by, count in EXPECTED.items()}
    assert found() == there
    stage.reopen(kill=True)
    assert found() == there, "read again, of the minute that no row has"
    over(stage)
    assert found() == there
    stage.reopen(kill=True)
    assert found() == there, "from the hour's row"
    stage.later(HOUR_US)
    assert found() == there, "of the hour before"
    stage.reopen()
    assert found() == there
    stage.later(HOUR_US)
    assert found() == {by: [] for by in EXPECTED}


def test_a_walk_that_failed_leaves_nothing_that_seems_complete(stage: Stage) -> None:
    stage.batch([sending(stage.create(f"q{number}")) for number in range(3)])
    of = ranking(stage, "depth")
    of.begin_renewal()
    assert of.top() == ([], False), "under way"
    of.end_renewal(None)
    assert of.top() == ([], False)
    renew(stage, "depth")
    assert len(of.top()[0]) == 3
    assert of.top()[1]


def test_all_measures_are_ranked_and_moved_messages_count_where_they_are(stage: Stage) -> None:
    jobs = troubled(stage)
    assert all(ranking(stage, by) for by in MEASURES)
    stage.do(StartMove(origin=TESTER, queue=DEAD))
    stage.do(Sweep())
    assert ranking(stage, "depth").top()[0][0] == (2, stage.describe(jobs).incarnation)
    assert jobs == JOBS
