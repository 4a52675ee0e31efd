"""Recovery: committed data survives any end of the process, however often the store is reopened."""

from tests.support.contract.stage import Stage, bodies, expect

from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.outcomes import Deleted
from veilmq.model.settings.queue import QueueKey, RedrivePolicy


def _populate(stage: Stage) -> list[QueueKey]:
    """Queues with messages in every place."""
    dead = stage.create("dead")
    queue = stage.create("jobs", redrive=RedrivePolicy(dead, 2), visibility_timeout_us=MINUTE_US)
    for number in range(30):
        stage.send(queue, str(number), priority=1 + number % 3)
    for message in stage.receive(queue, 12):
        if message.sequence % 3 == 0:
            stage.delete(queue, message.handle)
        elif message.sequence % 3 == 1:
            stage.extend(queue, message.handle, 0)
    for _ in range(2):
        for message in stage.receive(queue, 3, lease_us=SECOND_US):
            stage.extend(queue, message.handle, 0)
    stage.receive(queue, 2)
    stage.send(queue, "delayed", delay_us=HOUR_US)
    handle = stage.send(queue, "moved back", wants_handle=True).handle
    stage.extend(queue, handle, HOUR_US)
    purged = stage.create("purged")
    stage.send(purged, "gone")
    stage.purge(purged)
    stage.send(purged, "stays")
    return [dead, queue, purged]


class TestRecovery:
    """Recovery."""

    def test_everything_is_as_it_was_and_again_the_second_time(self, stage: Stage) -> None:
        queues = _populate(stage)
        before = [(stage.describe(queue), bodies(stage.peek(queue, 100))) for queue in queues]
        events = stage.events()
        mark = stage.store.mark
        for kill in (True, True, False, False, True):
            stage.reopen(kill=kill)
            assert [(stage.describe(queue), bodies(stage.peek(queue, 100))) for queue in queues] == before
            assert stage.events() == events
            assert stage.store.mark == mark

    def test_a_reopened_store_gives_what_the_other_would_have_given(self, stage: Stage) -> None:
        queues = _populate(stage)
        stage.reopen(kill=True)
        stage.later(2 * HOUR_US)
        for queue in queues:
            expected = bodies(stage.peek(queue, 100))
            got: list[str] = []
            while messages := stage.receive(queue, 7):
                got += bodies(messages)
                for message in messages:
                    expect(stage.delete(queue, message.handle), Deleted)
                stage.reopen(kill=len(got) % 2 == 0)
            if queue.name != "jobs":
                assert got == expected
        stage.sweep()
        assert [stage.counts(queue)[1:] for queue in queues] == [(0, 0)] * 3

    def test_the_mark_is_the_last_instant_committed(self, stage: Stage) -> None:
        queue = stage.create()
        stage.later(HOUR_US)
        stage.send(queue)
        stage.later(HOUR_US)
        stage.receive(stage.create("other"))
        stage.reopen(kill=True)
        assert stage.store.mark == stage.now
