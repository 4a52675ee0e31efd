"""Receive attempts: the same id gets the same messages again, or a refusal if one of them changed."""

from tests.support.contract.fifo import clear, fifo, put
from tests.support.contract.stage import TESTER, Stage, bodies, expect, refused

from veilmq.model.commands import Receive, SuggestPlan, Undeliver
from veilmq.model.errors import AttemptNotRetryable
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Deleted, Extended
from veilmq.model.settings.queue import Adaptive, LeasePlan, QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each

LEASE_US = 30 * SECOND_US
WINDOW_US = 5 * MINUTE_US


def ask(stage: Stage, queue: QueueKey, attempt: str = "x", lease_us: int = LEASE_US) -> list[Delivery]:
    """Receive up to two messages under an attempt id."""
    return stage.receive(queue, 2, attempt_id=attempt, lease_us=lease_us)


def handles(messages: list[Delivery]) -> list[str]:
    """Their handles."""
    return [message.handle for message in messages]


class TestFifoAttempts:
    """Receive attempts."""

    @for_each("kill", [None, False, True], fresh="stage")
    def test_the_same_messages_come_again_under_the_same_handles(self, stage: Stage, kill: bool | None) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3", "b1")
        first = ask(stage, queue)
        stage.later(SECOND_US)
        if kill is not None:
            stage.reopen(kill=kill)
        again = ask(stage, queue)
        assert bodies(again) == bodies(first) == ["a1", "a2"]
        assert handles(again) == handles(first)
        assert [message.receive_count for message in again] == [1, 1]
        assert [message.first_received for message in again] == [message.first_received for message in first]
        assert stage.counts(queue) == (2, 0, 2)
        clear(stage, queue, again)
        assert sorted(bodies(stage.receive(queue, 2))) == ["a3", "b1"]

    def test_a_new_receive_that_finds_nothing_forgets_the_one_before(self, stage: Stage) -> None:
        """As with a parked poll whose first look dead-letters the message and whose second look finds another."""
        dead = fifo(stage, "dead.fifo")
        queue = fifo(stage, redrive=RedrivePolicy(dead, 1))
        put(stage, queue, "a1")
        assert bodies(ask(stage, queue)) == ["a1"]
        stage.later(LEASE_US)
        assert ask(stage, queue) == []
        put(stage, queue, "a2")
        assert bodies(ask(stage, queue)) == ["a2"]

    def test_the_visibility_timeout_starts_again(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        ask(stage, queue)
        stage.later(LEASE_US - 1)
        (again,) = ask(stage, queue, lease_us=LEASE_US)
        assert again.due == stage.now + LEASE_US
        stage.later(LEASE_US - 1)
        assert stage.receive(queue) == []
        clear(stage, queue, [again])

    @for_each("hint_us", [None, MINUTE_US], fresh="stage")
    def test_a_replay_that_names_none_has_the_planned_lease_again(self, stage: Stage, hint_us: int | None) -> None:
        queue = fifo(stage, adaptive=Adaptive.APPLY)
        plan = LeasePlan(lease_us=10 * MINUTE_US, by_type={"film": HOUR_US})
        stage.do(SuggestPlan(queue=queue, origin=TESTER, plan=plan))
        stage.send(queue, extras=Extras(group="a", type="film", lease_hint_us=hint_us))
        for _ in range(2):
            stage.later(SECOND_US)
            (message,) = stage.receive(queue, attempt_id="x")
            assert message.lease_us == (hint_us or HOUR_US)
            assert message.due == stage.now + message.lease_us

    def test_a_replay_has_the_visibility_timeout_that_it_asks_for(self, stage: Stage) -> None:
        queue = fifo(stage, visibility_timeout_us=7 * SECOND_US)
        put(stage, queue, "a1")
        ask(stage, queue)
        (again,) = stage.receive(queue, attempt_id="x")
        assert again.due == stage.now + 7 * SECOND_US
        assert [message.due for message in ask(stage, queue, lease_us=HOUR_US)] == [stage.now + HOUR_US]
        ask(stage, queue, lease_us=SECOND_US)
        stage.later(SECOND_US)
        assert stage.take(queue).receive_count == 2, "one that is shorter than the first ends then"

    def test_it_is_an_event_of_the_lease_and_no_receive(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        ask(stage, queue)
        start = stage.following()
        ask(stage, queue)
        (event,) = stage.events(start)
        assert (event.kind, event.attempt, event.lease_us) == ("extended", 1, LEASE_US)
        assert event.detail == {"attempt_id": True}

    def test_another_id_gets_other_messages(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1")
        assert bodies(ask(stage, queue, "x")) == ["a1", "a2"]
        assert bodies(ask(stage, queue, "y")) == ["b1"]
        assert bodies(ask(stage, queue, "x")) == ["a1", "a2"]
        assert ask(stage, queue, "z") == []

    @for_each("change", ["delete", "extend", "release", "undeliver"], fresh="stage")
    def test_once_one_has_changed_it_is_refused_for_five_minutes(self, stage: Stage, change: str) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1")
        first, second = ask(stage, queue)
        stage.later(SECOND_US)
        if change == "delete":
            expect(stage.delete(queue, second.handle), Deleted)
        elif change == "undeliver":
            stage.do(Undeliver(queue=queue, origin=TESTER, handles=(first.handle, second.handle)))
        else:
            expect(stage.extend(queue, second.handle, 0 if change == "release" else HOUR_US), Extended)
        receive = Receive(queue=queue, origin=TESTER, count_max=2, attempt_id="x", lease_us=LEASE_US)
        for _ in range(2):
            applied = stage.batch([receive])
            assert refused(applied.outcomes[0], AttemptNotRetryable) == AttemptNotRetryable(attempt_id="x")
            assert not applied.wrote
        assert (
            bodies(ask(stage, queue, "y"))
            == {"delete": ["b1"], "extend": ["b1"], "release": ["b1"], "undeliver": ["b1", "a1"]}[change]
        )
        stage.later(WINDOW_US - SECOND_US - 1)
        refused(stage.do(receive), AttemptNotRetryable)
        stage.later(1)
        assert ask(stage, queue) != [], "after five minutes the id stands for nothing"

    def test_a_message_that_somebody_received_after_a_release_has_changed(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        (first,) = ask(stage, queue)
        expect(stage.extend(queue, first.handle, 0), Extended)
        stage.take(queue, lease_us=HOUR_US)
        receive = Receive(queue=queue, origin=TESTER, attempt_id="x")
        refused(stage.do(receive), AttemptNotRetryable)
        stage.later(LEASE_US)
        assert stage.receive(queue, attempt_id="x") == [], "the lease that the id stood for has ended in any case"

    def test_after_the_lease_it_is_a_receive_like_any(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        (first,) = ask(stage, queue)
        stage.later(LEASE_US)
        (again,) = ask(stage, queue)
        assert again.handle != first.handle
        assert again.receive_count == 2

    @for_each("sweep", [False, True], fresh="stage")
    def test_an_id_is_good_for_five_minutes(self, stage: Stage, sweep: bool) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1")
        first = stage.receive(queue, attempt_id="x", lease_us=HOUR_US)
        stage.later(WINDOW_US - 1)
        if sweep:
            stage.sweep()
        assert handles(stage.receive(queue, attempt_id="x", lease_us=HOUR_US)) == handles(first)
        stage.later(1)
        if sweep:
            stage.sweep()
        assert bodies(stage.receive(queue, attempt_id="x")) == ["b1"]

    def test_an_id_that_got_nothing_stands_for_nothing(self, stage: Stage) -> None:
        queue = fifo(stage)
        assert ask(stage, queue) == []
        put(stage, queue, "a1")
        assert bodies(ask(stage, queue)) == ["a1"]

    def test_a_purge_ends_what_the_id_stood_for(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        ask(stage, queue)
        stage.purge(queue)
        put(stage, queue, "a2")
        assert bodies(ask(stage, queue)) == ["a2"]

    def test_a_message_that_was_damaged_since_is_not_given_again(self, stage: Stage) -> None:
        queue = fifo(stage)
        (sent,) = put(stage, queue, "a1")
        assert bodies(ask(stage, queue)) == ["a1"]
        stage.store.close()
        stage.factory.damage(sent.sequence)
        stage.store = stage.factory.open()
        assert ask(stage, queue) == []

    def test_ids_of_two_queues_are_two(self, stage: Stage) -> None:
        queue, other = fifo(stage), fifo(stage, "other.fifo")
        put(stage, queue, "a1")
        put(stage, other, "a2")
        assert bodies(ask(stage, queue)) == ["a1"]
        assert bodies(ask(stage, other)) == ["a2"]

    def test_at_the_cap_in_flight_a_replay_still_answers(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        first = stage.receive(queue, attempt_id="x", in_flight_max=1)
        assert handles(stage.receive(queue, attempt_id="x", in_flight_max=1)) == handles(first)
