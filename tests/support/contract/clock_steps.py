"""A start with the clock far ahead of the data: what would expire by that step alone is kept until it is accepted."""

import pytest
from tests.support.contract.stage import Stage, bodies, expect

from veilmq.model.commands import CheckClock, Sweep
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.outcomes import ClockChecked, Deleted
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

STEP_US = 10 * DAY_US


def restart(stage: Stage, step_us: int, *, kill: bool = False) -> None:
    """Start again with the clock `step_us` ahead of the mark."""
    stage.do(Sweep())
    stage.reopen(kill=kill, clock_step_us_max=HOUR_US)
    stage.later(step_us)
    stage.do(Sweep())


def held(stage: Stage) -> int:
    """How far the expiry clock is held back."""
    return expect(stage.do(CheckClock()), ClockChecked).held_us


def accept(stage: Stage, ahead_us: int = 0) -> int:
    """Accept the step; returns how much of it was accepted."""
    return expect(stage.do(CheckClock(accept=True, ahead_us=ahead_us)), ClockChecked).accepted_us


def fill(stage: Stage, name: str = "jobs") -> QueueKey:
    """A queue with messages that live for four days, for two hours, and in flight."""
    queue = stage.create(name)
    stage.send(queue, "in flight")
    stage.take(queue, lease_us=HOUR_US)
    stage.send(queue, "by retention")
    stage.send(queue, "by its own", ttl_us=2 * HOUR_US)
    return queue


class TestClockSteps:
    """Steps of the clock at a start."""

    @for_each("kill", [False, True], fresh="stage")
    def test_a_step_expires_nothing_until_it_is_accepted(self, stage: Stage, kill: bool) -> None:
        queue = fill(stage)
        restart(stage, STEP_US, kill=kill)
        for _ in range(3):
            stage.sweep_expired()
            restart(stage, MINUTE_US, kill=kill)
        assert held(stage) == STEP_US
        assert sorted(bodies(stage.peek(queue))) == ["by its own", "by retention", "in flight"]
        assert sorted(bodies(stage.receive(queue, 10, lease_us=0))) == ["by its own", "by retention", "in flight"]
        assert accept(stage) == STEP_US
        assert stage.peek(queue) == []
        assert stage.receive(queue, 10) == []
        stage.sweep_expired()
        assert stage.counts(queue) == (0, 0, 0)
        restart(stage, MINUTE_US)
        assert held(stage) == 0

    def test_messages_in_the_memtable_are_kept_too(self, stage: Stage) -> None:
        queue = stage.create()
        restart(stage, STEP_US)
        stage.send(queue, "new", ttl_us=HOUR_US)
        restart(stage, STEP_US)
        assert held(stage) == 2 * STEP_US
        message = stage.take(queue)
        expect(stage.delete(queue, message.handle), Deleted)

    def test_expiry_goes_on_at_its_pace(self, stage: Stage) -> None:
        queue = fill(stage)
        restart(stage, STEP_US)
        stage.later(2 * HOUR_US)
        stage.sweep_expired()
        assert sorted(bodies(stage.peek(queue))) == ["by retention", "in flight"]
        (event,) = [event for event in stage.events() if event.kind == "expired"]
        assert stage.now - HOUR_US < event.at <= stage.now

    def test_leases_and_delays_end_by_the_step(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "leased")
        stage.take(queue, lease_us=DAY_US)
        stage.send(queue, "delayed", delay_us=DAY_US)
        restart(stage, STEP_US)
        assert sorted(bodies(stage.receive(queue, 10))) == ["delayed", "leased"]

    @for_each("step_us", [SECOND_US, HOUR_US], fresh="stage")
    def test_a_settable_step_is_taken_at_once(self, stage: Stage, step_us: int) -> None:
        queue = stage.create()
        stage.send(queue, "short", ttl_us=step_us)
        restart(stage, step_us)
        assert held(stage) == 0
        assert stage.receive(queue) == []

    def test_a_batch_that_is_rolled_back_takes_no_step(self, stage: Stage) -> None:
        queue = fill(stage)
        stage.do(Sweep())
        stage.reopen(clock_step_us_max=HOUR_US)
        stage.later(STEP_US)
        assert stage.store.apply([Sweep()], stage.now).wrote
        stage.factory.abandon(stage.store)
        stage.reopen(kill=True, clock_step_us_max=HOUR_US)
        assert held(stage) >= STEP_US
        assert len(stage.peek(queue)) == 3

    def test_an_acceptance_that_is_rolled_back_is_none(self, stage: Stage) -> None:
        queue = fill(stage)
        restart(stage, STEP_US)
        assert stage.store.apply([CheckClock(accept=True)], stage.now).wrote
        stage.factory.abandon(stage.store)
        assert held(stage) == STEP_US
        assert len(stage.peek(queue)) == 3

    def test_what_wall_time_was_set_back_by_stays_held(self, stage: Stage) -> None:
        """The lease clock cannot go back; the expiry clock then follows wall time."""
        queue = fill(stage)
        restart(stage, STEP_US)
        assert accept(stage, STEP_US + HOUR_US) == 0
        assert accept(stage, STEP_US - DAY_US) == DAY_US
        assert held(stage) == STEP_US - DAY_US
        stage.sweep_expired()
        assert sorted(bodies(stage.peek(queue))) == ["by retention", "in flight"]

    def test_the_history_is_kept(self, stage: Stage) -> None:
        fill(stage)
        before = len(stage.events())
        restart(stage, STEP_US)
        stage.sweep_snapshot()
        stage.sweep_expired()
        assert len(stage.events()) >= before
        accept(stage)
        for _ in range(5):
            stage.later(8 * DAY_US)
            stage.sweep_snapshot()
        with pytest.raises(HistoryTrimmed):
            stage.events()

    def test_a_new_directory_has_taken_no_step(self, stage: Stage) -> None:
        assert held(stage) == 0
