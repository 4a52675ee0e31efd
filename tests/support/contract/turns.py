"""Turns: a message that comes back queues behind those already waiting, so that none waits for ever.

Strategy: messages that come back each time (a worker cannot process them, a client is gone, a lease ends) stand beside
good ones, and the fewest possible receives must reach every good one. Where possible the clock stands still: then only
the order of giving back distinguishes the messages.
"""

from collections.abc import Callable

import pytest
from tests.support.contract.fifo import clear, fifo, put
from tests.support.contract.stage import TESTER, Stage, bodies, expect, sending

from veilmq.model.commands import AnyCommand, Receive, Undeliver
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Deleted, Extended
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each

GiveBack = Callable[[Stage, QueueKey, list[Delivery]], None]


def release(stage: Stage, queue: QueueKey, messages: list[Delivery]) -> None:
    """Extend to 0."""
    for message in messages:
        expect(stage.extend(queue, message.handle, 0), Extended)


def undeliver(stage: Stage, queue: QueueKey, messages: list[Delivery]) -> None:
    """As after an answer that could not be written."""
    stage.do(Undeliver(queue=queue, origin=TESTER, handles=tuple(message.handle for message in messages)))


def outlast(stage: Stage, queue: QueueKey, messages: list[Delivery]) -> None:
    """Let the leases end."""
    stage.later(SECOND_US)


def release_in_one_batch(stage: Stage, queue: QueueKey, messages: list[Delivery]) -> None:
    """The same as `release`, as a wire batch does it."""
    stage.batch([stage.releasing(queue, message.handle) for message in messages])


WAYS = pytest.mark.parametrize("give_back", [release, release_in_one_batch, undeliver, outlast])


class TestTurns:
    """Turns on standard queues."""

    @WAYS
    @for_each("group", [None, "a"], fresh="stage")
    def test_ten_that_come_back_at_once_do_not_keep_a_good_one_waiting(
        self, stage: Stage, give_back: GiveBack, group: str | None
    ) -> None:
        queue = stage.create()
        extras = Extras(group=group)
        stage.batch([sending(queue, f"poison {number}", extras=extras) for number in range(10)])
        stage.send(queue, "good", extras=extras)
        give_back(stage, queue, stage.receive(queue, 10, lease_us=SECOND_US))
        assert "good" in bodies(stage.receive(queue, 1, lease_us=SECOND_US))

    @WAYS
    @for_each("sweep", [False, True], fresh="stage")
    def test_those_that_come_back_take_turns_and_what_is_sent_meanwhile_too(
        self, stage: Stage, give_back: GiveBack, sweep: bool
    ) -> None:
        queue = stage.create()
        stage.batch([sending(queue, str(number)) for number in range(5)])
        got = []
        for number in range(5, 15):
            taken = stage.receive(queue, 2, lease_us=SECOND_US)
            got += bodies(taken)
            give_back(stage, queue, taken)
            stage.send(queue, str(number))
            if sweep:
                stage.sweep()
        assert set(map(str, range(8))) <= set(got)

    def test_a_timeout_of_nothing_gives_every_message_its_turn(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, str(number)) for number in range(5)])
        assert [stage.take(queue, lease_us=0).body for _ in range(12)] == [str(number % 5) for number in range(12)]

    def test_a_queue_whose_visibility_timeout_is_nothing_does_too(self, stage: Stage) -> None:
        queue = stage.create(visibility_timeout_us=0)
        for number in range(3):
            stage.send(queue, str(number))
        assert bodies([*stage.receive(queue, 2), *stage.receive(queue, 2)]) == ["0", "1", "2", "0"]

    def test_in_one_batch_every_receive_gets_another(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, str(number)) for number in range(3)])
        receives: list[AnyCommand] = [Receive(queue=queue, origin=TESTER, lease_us=0) for _ in range(6)]
        got = [bodies(outcome.messages) for outcome in stage.batch(receives).outcomes]  # type: ignore[union-attr]
        assert got == [["0"], ["1"], ["2"], ["0"], ["1"], ["2"]]

    def test_what_comes_back_stays_within_its_priority(self, stage: Stage) -> None:
        queue = stage.create()
        for body, priority in (("low", 9), ("high 1", 2), ("high 2", 2)):
            stage.send(queue, body, priority=priority)
        release(stage, queue, [stage.take(queue)])
        assert bodies(stage.peek(queue)) == ["high 2", "high 1", "low"]
        assert bodies(stage.receive(queue, 10)) == ["high 2", "high 1", "low"]

    @for_each("kill", [False, True], fresh="stage")
    def test_turns_are_as_they_were_after_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = stage.create()
        for number in range(4):
            stage.send(queue, str(number))
        first, second = stage.receive(queue, 2)
        release(stage, queue, [second, first])
        stage.send(queue, "4")
        stage.reopen(kill=kill)
        shown = bodies(stage.peek(queue))
        assert bodies(stage.receive(queue, 10)) == shown
        assert shown.index("1") < shown.index("0")

    def test_a_dead_letter_waits_behind_what_waited_in_its_new_queue(self, stage: Stage) -> None:
        dead = stage.create("dead")
        queue = stage.create(redrive=RedrivePolicy(dead, 1))
        stage.send(queue, "old")
        stage.later(SECOND_US)
        stage.send(dead, "waits")
        release(stage, dead, [stage.take(dead)])
        release(stage, queue, [stage.take(queue)])
        stage.later(SECOND_US)
        assert stage.receive(queue) == []
        assert bodies(stage.receive(dead, 10)) == ["waits", "old"], "though it was sent before the other"

    def test_no_tenant_starves_beside_one_that_gives_everything_back(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, "poison", extras=Extras(group="a")) for _ in range(10)])
        stage.send(queue, "good", extras=Extras(group="b"))
        stage.send(queue, "alone")
        got = []
        for _ in range(4):
            taken = stage.receive(queue, 3)
            got += bodies(taken)
            release(stage, queue, taken)
        assert {"good", "alone"} <= set(got)

    @for_each(("poison", "good"), [("a", "b"), ("a", None), (None, "b")], fresh="stage")
    def test_what_is_given_back_at_once_does_not_starve_a_tenant_with_more_in_flight(
        self, stage: Stage, poison: str | None, good: str | None
    ) -> None:
        queue = stage.create()
        stage.batch([sending(queue, "good", extras=Extras(group=good)) for _ in range(12)])
        stage.take(queue, lease_us=HOUR_US)
        stage.send(queue, "poison", extras=Extras(group=poison))
        for _ in range(10):
            got = []
            for _ in range(8):
                stage.later(SECOND_US)
                taken = [stage.take(queue)]
                got += bodies(taken)
                release(stage, queue, [message for message in taken if message.body == "poison"])
            assert "good" in got

    def test_new_tenants_do_not_starve_one_with_more_in_flight(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, text, extras=Extras(group="busy")) for text in ("held", "waits")])
        stage.take(queue, lease_us=HOUR_US)
        got = []
        for number in range(8):
            stage.later(SECOND_US)
            stage.send(queue, "new", extras=Extras(group=f"tenant {number}"))
            taken = stage.take(queue)
            got.append(taken.body)
            expect(stage.delete(queue, taken.handle), Deleted)
        assert got == ["new"] * 7 + ["waits"]

    def test_a_peek_shows_when_the_one_that_has_waited_longest_comes(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, text, extras=Extras(group=text[0])) for text in ("a1", "a2", "a3")])
        stage.receive(queue, 2, lease_us=HOUR_US)
        stage.send(queue, "b1", extras=Extras(group="b"))
        for _ in range(6):
            release(stage, queue, [stage.take(queue)])
        stage.batch([sending(queue, text, extras=Extras(group=text[0])) for text in ("c1", "c2", "c3", "c4")])
        shown = ["c1", "a3", "b1", "c2", "c3", "c4"]
        assert bodies(stage.peek(queue)) == shown
        assert bodies(stage.receive(queue, 10)) == shown

    def test_a_receive_that_is_rolled_back_passes_nobody_over(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, text, extras=Extras(group=text[0])) for text in ("a1", "a2")])
        stage.take(queue, lease_us=HOUR_US)
        stage.batch([sending(queue, f"b{number}", extras=Extras(group="b")) for number in range(9)])
        for _ in range(7):
            stage.later(SECOND_US)
            release(stage, queue, [stage.take(queue)])
            stage.store.apply([Receive(queue=queue, origin=TESTER)], stage.now)
            stage.factory.abandon(stage.store)
        assert stage.take(queue).body == "a2"


class TestGroupTurns:
    """Turns of the groups of FIFO queues."""

    @WAYS
    def test_a_group_that_is_given_back_goes_behind_those_that_wait(self, stage: Stage, give_back: GiveBack) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1", "c1")
        got = []
        for _ in range(7):
            taken = [stage.take(queue, lease_us=SECOND_US)]
            got += bodies(taken)
            give_back(stage, queue, taken)
        assert got == ["a1", "b1", "c1", "a1", "b1", "c1", "a1"]

    def test_a_group_that_began_to_wait_meanwhile_goes_before_one_that_is_given_back(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        held = stage.take(queue)
        put(stage, queue, "b1")
        release(stage, queue, [held])
        assert bodies(stage.peek(queue)) == ["b1", "a1", "a2"]
        assert bodies(stage.receive(queue, 10)) == ["b1", "a1", "a2"]

    def test_a_timeout_of_nothing_gives_every_group_its_turn(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1", "c1")
        assert [stage.take(queue, lease_us=0).body for _ in range(7)] == ["a1", "b1", "c1"] * 2 + ["a1"]

    def test_a_long_group_does_not_keep_a_short_one_waiting(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, *(f"a{number}" for number in range(20)), "b1")
        got = []
        for _ in range(4):
            taken = stage.receive(queue, 2)
            got += bodies(taken)
            clear(stage, queue, taken)
        assert got == ["a0", "a1", "b1", "a2", "a3", "a4", "a5", "a6"]

    def test_a_group_that_is_blocked_at_its_first_message_waits_for_its_turn(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1", "c1")
        first, second = stage.receive(queue, 2)
        release(stage, queue, [second])
        assert stage.take(queue).body == "b1"
        clear(stage, queue, [first])
        assert [stage.take(queue, lease_us=HOUR_US).body for _ in range(2)] == ["c1", "a2"]

    def test_a_group_that_was_empty_waits_behind_the_others(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1")
        expect(stage.delete(queue, stage.take(queue).handle), Deleted)
        put(stage, queue, "a2")
        assert [stage.take(queue).body for _ in range(2)] == ["b1", "a2"]

    @for_each("kill", [False, True], fresh="stage")
    def test_groups_keep_their_turns_after_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1", "c1")
        release(stage, queue, [stage.take(queue)])
        stage.reopen(kill=kill)
        assert bodies(stage.peek(queue)) == ["b1", "c1", "a1"]
        assert bodies(stage.receive(queue, 10)) == ["b1", "c1", "a1"]

    def test_a_claim_of_a_few_messages_goes_through_the_groups_to_the_end(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, *(f"{group}{number}" for group in "abcde" for number in range(4)))
        held = stage.receive(queue, 20, lease_us=HOUR_US)
        release(stage, queue, [message for message in held if message.body[1] == "0"])
        assert bodies(stage.receive(queue, 3)) == ["a0", "b0", "c0"]
        assert bodies(stage.receive(queue, 10)) == ["d0", "e0"]
