"""Purges and deletions of queues: all messages disappear at once, and space is reclaimed in bounded steps."""

from tests.support.contract.stage import ACCOUNT, REGION, Stage, bodies, expect, refused, sending

from veilmq.model.commands import Sweep
from veilmq.model.errors import MessageGone, PurgeInProgress, QueueMissing
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.outcomes import Purged, QueueDeleted, Swept
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each


def _fill(stage: Stage, queue: QueueKey) -> str:
    """One message in every place; returns a handle of the one in flight."""
    stage.send(queue, "returned")
    stage.extend(queue, stage.take(queue).handle, 0)
    taken = stage.take(queue)
    stage.send(queue, "returned")
    stage.extend(queue, stage.take(queue).handle, 0)
    stage.send(queue, "delayed", delay_us=SECOND_US)
    stage.send(queue, "ready", priority=2)
    stage.send(queue, "dying", ttl_us=MINUTE_US)
    return taken.handle


class TestPurge:
    """Purges."""

    @for_each("kill", [None, True], fresh="stage")
    def test_a_purge_takes_messages_in_every_place(self, stage: Stage, kill: bool | None) -> None:
        queue, other = stage.create(), stage.create("other")
        handle = _fill(stage, queue)
        stage.send(other, "untouched")
        assert expect(stage.purge(queue), Purged).count == 5
        if kill is not None:
            stage.reopen(kill=kill)
        assert stage.counts(queue) == (0, 0, 0)
        refused(stage.delete(queue, handle), MessageGone)
        stage.later(MINUTE_US)
        assert stage.receive(queue, 10) == []
        assert stage.peek(queue) == []
        stage.sweep()
        assert stage.factory.rows(stage.store) == 1
        assert bodies(stage.receive(other)) == ["untouched"]

    def test_what_is_sent_after_a_purge_stays(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "before")
        stage.purge(queue)
        stage.send(queue, "after")
        stage.sweep()
        assert bodies(stage.receive(queue, 10)) == ["after"]

    def test_a_purge_is_one_event_with_its_watermark_and_count(self, stage: Stage) -> None:
        queue = stage.create()
        _fill(stage, queue)
        last = stage.send(queue).sequence
        start = stage.following()
        stage.purge(queue)
        stage.sweep_expired()
        assert stage.kinds(start) == ["purged"]
        assert stage.events(start)[0].detail == {"count": 6, "watermark": last}

    @for_each("reopened", [False, True], fresh="stage")
    def test_a_second_purge_waits_out_the_cool_down(self, stage: Stage, reopened: bool) -> None:
        queue = stage.create()
        stage.purge(queue, cooldown_us=MINUTE_US)
        stage.later(MINUTE_US - 1)
        if reopened:
            stage.reopen()
        error = refused(stage.purge(queue, cooldown_us=MINUTE_US), PurgeInProgress)
        assert error.wait_us == 1  # type: ignore[attr-defined]
        assert str(error).endswith("recently: purge it again in 1 s")
        expect(stage.purge(queue), Purged)
        stage.later(MINUTE_US)
        expect(stage.purge(queue, cooldown_us=MINUTE_US), Purged)

    @for_each("drop", [False, True], fresh="stage")
    def test_a_big_queue_is_swept_in_bounded_steps(self, stage: Stage, drop: bool) -> None:
        queue = stage.create()
        for start in range(0, 2_000, 250):
            stage.batch([sending(queue, str(number)) for number in range(start, start + 250)])
        stage.receive(queue, 300)
        if drop:
            assert expect(stage.drop(queue), QueueDeleted).count == 2_000
        else:
            assert expect(stage.purge(queue), Purged).count == 2_000
        left = stage.factory.rows(stage.store)
        assert left == 2_000
        while left:
            outcome = expect(stage.do(Sweep(steps_max=100)), Swept)
            assert outcome.steps <= 100
            now_left = stage.factory.rows(stage.store)
            assert left - 100 <= now_left < left
            left = now_left
        stage.sweep()

    def test_the_sweeper_says_that_there_is_more_until_all_is_gone(self, stage: Stage) -> None:
        queue = stage.create()
        for _ in range(9):
            stage.send(queue, "x" * 400_000)
        stage.send(queue, "y")
        stage.purge(queue)
        stage.sweep()
        assert stage.factory.rows(stage.store) == 0

    def test_a_purge_of_no_queue_is_refused(self, stage: Stage) -> None:
        refused(stage.purge(QueueKey(ACCOUNT, REGION, "nowhere")), QueueMissing)
