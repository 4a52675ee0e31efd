"""What one batch does to large bodies on its own account: it is bounded by their bytes, not by their number alone."""

from tests.support.contract.stage import TESTER, Stage, expect, sending

from veilmq.model.commands import Receive, Sweep
from veilmq.model.instant import DAY_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.sqlite import upkeep
from veilmq.store.sqlite.leases.claims import DETOUR_BYTES, DETOURS_MAX, DETOURS_MIN, DETOURS_OF_BATCH
from veilmq.store.sqlite.upkeep import trimming
from veilmq.testing.for_each import for_each

LARGE = 256 * 1024
TEXT = "x" * LARGE
COUNT = 60
COST = 1 + LARGE // DETOUR_BYTES
SHAPES = ["plain", "line.fifo", "fair"]


def fill(stage: Stage, queue: QueueKey, **fields: object) -> None:
    groups = 7 if queue.name == "fair" else COUNT
    for number in range(COUNT):
        group = None if queue.name == "plain" else f"g{number % groups}"
        extras = Extras(group=group, deduplication_id=str(number)) if group else Extras()
        stage.batch([sending(queue, TEXT, extras=extras, **fields)])


def left(stage: Stage, start: int, kind: str) -> int:
    return stage.kinds(start).count(kind)


@for_each("shape", SHAPES, fresh="stage")
def test_receives_move_large_bodies_to_the_dead_letters_a_few_at_a_time(stage: Stage, shape: str) -> None:
    dead = stage.create("dead.fifo" if shape.endswith(".fifo") else "dead")
    queue = stage.create(shape, redrive=RedrivePolicy(dead, 1))
    fill(stage, queue)
    while stage.receive(queue, 10, lease_us=SECOND_US):
        pass
    stage.later(SECOND_US)
    stage.sweep()
    start = stage.following()
    assert stage.receive(queue, 10) == []
    assert 0 < left(stage, start, "dead_lettered") <= DETOURS_MAX // COST + 1
    start, receives = stage.following(), 10
    applied = stage.batch([Receive(queue=queue, origin=TESTER, count_max=10)] * receives)
    assert left(stage, start, "dead_lettered") <= DETOURS_OF_BATCH // COST + 1 + receives * -(-DETOURS_MIN // COST)
    assert applied.visible[queue], "who waits is woken to go on"
    for _ in range(COUNT):
        assert stage.receive(queue, 10) == []
    assert stage.counts(queue) == (0, 0, 0)
    assert stage.counts(dead) == (COUNT, 0, 0)


@for_each("shape", SHAPES, fresh="stage")
def test_receives_pass_large_dead_bodies_a_few_at_a_time(stage: Stage, shape: str) -> None:
    queue = stage.create(shape)
    fill(stage, queue, ttl_us=SECOND_US)
    stage.later(SECOND_US)
    start = stage.following()
    assert stage.receive(queue, 10) == []
    assert 0 < left(stage, start, "expired") <= DETOURS_MAX // COST + 1
    group = None if shape == "plain" else "g0"
    alive = stage.send(queue, "alive", extras=Extras(group=group, deduplication_id="alive"))
    for _ in range(COUNT):
        (outcome,) = stage.batch([Receive(queue=queue, origin=TESTER, count_max=10)]).outcomes
        if expect(outcome, Received).messages:
            break
    assert [message.id for message in expect(outcome, Received).messages] == [alive.id]


def test_a_sweep_drops_large_dead_bodies_a_few_at_a_time(stage: Stage) -> None:
    queue = stage.create("plain")
    fill(stage, queue, ttl_us=SECOND_US)
    stage.later(SECOND_US)
    start, steps = stage.following(), 0
    while stage.counts(queue) != (0, 0, 0):
        before = left(stage, start, "expired")
        stage.batch([Sweep()])
        assert left(stage, start, "expired") - before <= upkeep.EXPIRED_BYTES_MAX // LARGE
        steps += 1
    assert steps >= COUNT * LARGE // upkeep.EXPIRED_BYTES_MAX


def test_a_sweep_frees_what_was_purged_a_few_at_a_time(stage: Stage) -> None:
    queue = stage.create("plain")
    fill(stage, queue)
    stage.purge(queue)
    left_rows = stage.factory.rows(stage.store)
    while left_rows:
        stage.batch([Sweep()])
        now_left = stage.factory.rows(stage.store)
        assert 0 < left_rows - now_left <= upkeep.GARBAGE_BYTES_MAX // LARGE
        left_rows = now_left


def test_deleted_queues_go_with_a_history_that_is_trimmed_by_its_size(stage: Stage) -> None:
    """Long before the history's time is over: clients may make and delete queues all day."""
    stage.reopen(history_bytes_max=4_096, history_us_max=7 * DAY_US)
    connection = stage.store._writer.connection  # type: ignore[attr-defined]
    known = []
    for _ in range(12):
        for number in range(50):
            stage.drop(stage.create(f"queue-{number}"))
        stage.later(5 * MINUTE_US)
        for _ in range(5):
            stage.sweep_snapshot()
            stage.batch([Sweep()])
        known.append(connection.execute("SELECT count(*) FROM queue WHERE deleted IS NOT NULL").get)
    assert known[-1] <= known[4] <= 200


def test_deleted_queues_are_forgotten_a_few_at_a_time(stage: Stage) -> None:
    """As after a long stop, when all of them are old at once."""
    count = 2 * trimming.FORGOTTEN_MAX + 10
    for number in range(count):
        stage.drop(stage.create(f"queue-{number}"))
    stage.reopen(history_us_max=DAY_US)
    stage.sweep_snapshot()
    stage.later(2 * DAY_US)
    stage.create("new")
    stage.sweep_snapshot()
    connection = stage.store._writer.connection  # type: ignore[attr-defined]
    known, steps = [count], 0
    while known[-1]:
        stage.batch([Sweep()])
        known.append(connection.execute("SELECT count(*) FROM queue WHERE deleted IS NOT NULL").get)
        steps += 1
        assert known[-2] - known[-1] <= trimming.FORGOTTEN_MAX
        assert steps < 1_000
