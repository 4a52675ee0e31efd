"""A FIFO queue's delay is changed while it is full: steps that do not grow with it, and the same end in all orders."""

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.contract.stage import TESTER, Stage, bodies, sending
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import Delete, Receive, Sweep
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.settings import fifo_delays
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.for_each import for_each

COUNT = 3_000
STEPS = 256
DELAY_US = 15 * MINUTE_US


def fill(stage: Stage, queue: QueueKey, groups: int, count: int = COUNT) -> None:
    extras = [Extras(group=f"g{number % groups}", deduplication_id=str(number)) for number in range(count)]
    for at in range(0, count, 250):
        stage.batch([sending(queue, str(at + place), extras=each) for place, each in enumerate(extras[at : at + 250])])


def changed_rows(stage: Stage) -> int:
    return int(cast(SqliteStore, stage.store)._writer.connection.total_changes())


@pytest.mark.parametrize("groups", [1, COUNT])
def test_no_step_touches_more_messages_than_its_bound(stage: Stage, groups: int) -> None:
    queue = stage.create("line.fifo")
    fill(stage, queue, groups)
    for delay_us, end in ((DELAY_US, (0, COUNT, 0)), (0, (COUNT, 0, 0))):
        before = changed_rows(stage)
        stage.change(queue, delay_us=delay_us)
        assert changed_rows(stage) - before <= 2 * fifo_delays.AT_ONCE + 10
        steps = 0
        while True:
            before = changed_rows(stage)
            (outcome,) = stage.batch([Sweep(steps_max=STEPS)]).outcomes
            assert changed_rows(stage) - before <= 2 * STEPS + 50
            steps += 1
            if not outcome.more:  # type: ignore[union-attr]
                break
        assert steps >= (COUNT - fifo_delays.AT_ONCE) // STEPS
        assert stage.counts(queue) == end
    assert len(stage.receive(queue, 10)) == 10


def test_leases_that_are_over_do_not_make_the_change_longer(stage: Stage) -> None:
    queue = stage.create("line.fifo")
    fill(stage, queue, COUNT)
    take = Receive(queue=queue, origin=TESTER, count_max=10, lease_us=SECOND_US)
    stage.batch([take] * (COUNT // 10))
    stage.later(SECOND_US)
    before = changed_rows(stage)
    stage.change(queue, delay_us=DELAY_US)
    assert changed_rows(stage) - before <= 10
    stage.sweep()
    assert stage.counts(queue) == (COUNT, 0, 0), "what was received has no delay"


@for_each("kill", [False, True], fresh="stage")
def test_a_walk_goes_on_after_a_restart(stage: Stage, kill: bool) -> None:
    queue = stage.create("line.fifo")
    fill(stage, queue, 50)
    stage.change(queue, delay_us=DELAY_US)
    visible, delayed, _ = stage.counts(queue)
    assert visible
    assert delayed
    stage.reopen(kill=kill)
    assert stage.counts(queue) == (visible, delayed, 0)
    stage.sweep()
    assert stage.counts(queue) == (0, COUNT, 0)
    stage.reopen()
    stage.later(DELAY_US)
    assert len(stage.receive(queue, 10)) == 10


def test_what_is_sent_amid_a_walk_has_the_new_delay(stage: Stage) -> None:
    queue = stage.create("line.fifo", delay_us=DELAY_US)
    fill(stage, queue, 50)
    stage.change(queue, delay_us=0)
    sent = stage.send(queue, "late", extras=Extras(group="late", deduplication_id="late"), wants_handle=True)
    stage.extend(queue, sent.handle, DELAY_US)
    stage.sweep()
    assert stage.counts(queue) == (COUNT, 1, 0), "its own delay was set by its handle"


@for_each("drop", [False, True], fresh="stage")
def test_a_walk_ends_with_the_messages(stage: Stage, drop: bool) -> None:
    queue = stage.create("line.fifo")
    fill(stage, queue, 50)
    stage.change(queue, delay_us=DELAY_US)
    if drop:
        stage.drop(queue)
        queue = stage.create("line.fifo")
    else:
        stage.purge(queue)
        stage.change(queue, delay_us=0)
    stage.send(queue, "new", extras=Extras(group="g0", deduplication_id="new"))
    stage.sweep()
    assert stage.counts(queue) == (1, 0, 0)
    connection = cast(SqliteStore, stage.store)._writer.connection
    assert connection.execute("SELECT count(*) FROM retiming").get == 0


def test_a_walk_that_is_rolled_back_is_taken_up_again(stage: Stage) -> None:
    queue = stage.create("line.fifo")
    fill(stage, queue, 50)
    stage.change(queue, delay_us=DELAY_US)
    counts = stage.counts(queue)
    stage.store.apply([Sweep()], stage.now)
    stage.factory.abandon(stage.store)
    assert stage.counts(queue) == counts
    stage.sweep()
    assert stage.counts(queue) == (0, COUNT, 0)


def test_a_group_keeps_its_order_amid_a_walk(stage: Stage) -> None:
    queue = stage.create("line.fifo", delay_us=DELAY_US)
    count = fifo_delays.AT_ONCE + 2 * STEPS
    fill(stage, queue, 1, count)
    stage.change(queue, delay_us=0)
    taken: list[str] = []
    while len(taken) < count:
        found = stage.receive(queue, 10)
        taken += bodies(found)
        stage.batch([Delete(queue=queue, origin=TESTER, handle=each.handle, arrived=stage.now) for each in found])
        if not found:
            stage.sweep_once(STEPS)
    assert taken == [str(number) for number in range(count)]


SENDS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=8)
CHANGES = st.lists(st.tuples(st.sampled_from([0, 1, 3, 5, 9]), st.integers(0, 3)), min_size=1, max_size=5)


def by_group(stage: Stage, queue: QueueKey) -> dict[str, list[str]]:
    """The visible messages of each group in order. Which group comes first is no promise of a delay's change."""
    groups: dict[str, list[str]] = {}
    for each in stage.peek(queue, 100):
        groups.setdefault(str(each.extras.group), []).append(each.body)
    return groups


@settings(max_examples=30)
@given(st.sampled_from([0, 30]), SENDS, CHANGES)
@example(0, [(0, 0), (1, 1)], [(3, 0), (1, 0)])
def test_changes_amid_walks_end_as_if_each_had_been_done_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    first_s: int,
    sends: Sequence[tuple[int, int]],
    changes: Sequence[tuple[int, int]],
) -> None:
    """Sends: (group, seconds that pass then); changes: (delay in seconds, steps of one message before the next)."""
    seen = []
    for at_once in (1_000, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fifo_delays, "AT_ONCE", at_once)
            stage = Stage(SqliteFactory(tmp_path_factory.mktemp("delays") / "data"))
            queue = stage.create("line.fifo", delay_us=first_s * SECOND_US)
            for number, (group, pause_s) in enumerate(sends):
                stage.send(queue, str(number), extras=Extras(group=f"g{group}", deduplication_id=str(number)))
                stage.later(pause_s * SECOND_US)
            for number, (delay_s, steps) in enumerate(changes):
                stage.change(queue, delay_us=delay_s * SECOND_US)
                for _ in range(steps):
                    stage.sweep_once(1)
                stage.send(queue, "amid", extras=Extras(group="g0", deduplication_id=f"amid-{number}"))
            stage.sweep(1)
            shown = []
            for _ in range(12):
                shown.append((stage.counts(queue), by_group(stage, queue)))
                stage.later(SECOND_US)
            seen.append(shown)
            stage.store.close()
    assert seen[0] == seen[1]
