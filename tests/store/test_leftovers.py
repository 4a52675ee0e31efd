"""What must not be left behind: rows of a queue that is deleted, groups of a batch that is rolled back."""

from typing import Any

from tests.support.contract.stage import TESTER, Stage, sending

from veilmq.model.commands import StartMove, SuggestPlan
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.settings.queue import LeasePlan, RedrivePolicy
from veilmq.store.sqlite.messages.sends import send_all
from veilmq.testing.for_each import for_each

FIXED = {"mark": 1, "last_number": 4, "secret": 1, "snapshot": 1, "redo_log": 1, "expiry_hold": 1}
"""Tables with a fixed number of rows."""
KEPT = {"mark", "secret", "redo_log", "queue", "origin", "history", "last_number", "expiry_hold"}
KEPT |= {"rollup_mark", "rollup_period"}
"""What may have rows though no queue exists: the names of deleted queues stay as long as the history names them."""


def rows(stage: Stage) -> dict[str, int]:
    """By table."""
    with stage.store.readers.lend() as connection:  # type: ignore[attr-defined]
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {name: connection.execute(f"SELECT count(*) FROM {name}").get for name in names}


@for_each("fifo", [False, True], fresh="stage")
def test_nothing_is_left_of_a_deleted_queue(stage: Stage, fifo: bool) -> None:
    suffix = ".fifo" if fifo else ""
    own = {"content_deduplication": True} if fifo else {}
    dead = stage.create("dead" + suffix, **own)
    queue = stage.create("jobs" + suffix, redrive=RedrivePolicy(dead, 1), **own)
    for number, group in enumerate("abcdef"):
        stage.send(queue, str(number), extras=Extras(group=group), ttl_us=HOUR_US)
    damaged = stage.send(queue, "damaged", extras=Extras(group="g"))
    if not fifo:
        stage.send(queue, "delayed", delay_us=HOUR_US)
        stage.send(queue, "urgent", priority=1)
    stage.store.close()
    stage.factory.damage(damaged.sequence)
    stage.store = stage.factory.open()
    stage.receive(queue, 10, lease_us=SECOND_US, **({"attempt_id": "x"} if fifo else {}))
    stage.later(SECOND_US)
    stage.receive(queue, 10)
    stage.send(queue, "flies", extras=Extras(group="h"))
    stage.receive(queue, 1, lease_us=HOUR_US)
    stage.do(StartMove(queue=dead, origin=TESTER, rate_max=1))
    stage.do(SuggestPlan(queue=queue, origin=TESTER, plan=LeasePlan(lease_us=MINUTE_US)))
    filled = {name for name, count in rows(stage).items() if count}
    assert {"message", "lease", "message_group", "quarantine", "move_task", "plan"} <= filled
    for key in (queue, dead):
        stage.drop(key)
    stage.later(5 * MINUTE_US)
    stage.sweep(3)
    left = rows(stage)
    assert {name for name, count in left.items() if count} <= KEPT
    assert {name: left[name] for name in FIXED if left[name] > FIXED[name]} == {}


def test_a_batch_that_is_rolled_back_leaves_no_groups_to_settle(stage: Stage) -> None:
    queue = stage.create()
    store: Any = stage.store
    store._writer.begin(stage.now)
    send_all(store._writer, [sending(queue, extras=Extras(group="a"), delay_us=SECOND_US)])
    assert store._writer.queues.stale_groups
    stage.factory.abandon(store)
    assert store._writer.queues.stale_groups == {}
