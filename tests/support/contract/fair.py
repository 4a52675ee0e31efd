"""Fair queues: on a standard queue, no tenant's messages block another's for long."""

from collections import Counter

from tests.support.contract.stage import TESTER, Stage, bodies, expect, sending

from veilmq.model.commands import AnyCommand, Receive
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Deleted, Extended, Sent
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each

LEASE_US = 30 * SECOND_US


def put(stage: Stage, queue: QueueKey, *texts: str, delay_us: int | None = None) -> list[Sent]:
    """Send messages; the first character of each is its tenant, `-` is none."""
    return [
        stage.send(queue, text, delay_us=delay_us, extras=Extras(group=None if text[0] == "-" else text[0]))
        for text in texts
    ]


def clear(stage: Stage, queue: QueueKey, messages: list[Delivery]) -> None:
    """Delete them all."""
    for message in messages:
        expect(stage.delete(queue, message.handle), Deleted)


class TestFair:
    """Fair queues."""

    def test_the_tenant_with_the_fewest_in_flight_goes_first(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "a3", "b1", "b2", "c1")
        assert bodies(stage.receive(queue, 10)) == ["a1", "b1", "c1", "a2", "b2", "a3"]

    def test_of_equals_the_oldest_goes_first(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "b1", "a1", "a2", "b2")
        assert bodies([stage.take(queue) for _ in range(4)]) == ["b1", "a1", "a2", "b2"]

    def test_messages_without_a_group_are_one_tenant(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "-1", "-2", "-3", "a1", "a2", "b1")
        assert bodies(stage.receive(queue, 10)) == ["-1", "a1", "b1", "-2", "a2", "-3"]

    def test_what_was_there_before_the_first_group_is_of_that_tenant(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "-1", "-2", "-3")
        stage.receive(queue, 2)
        put(stage, queue, "a1", "a2")
        assert bodies(stage.receive(queue, 10)) == ["a1", "a2", "-3"]

    def test_ten_thousand_do_not_starve_ten(self, stage: Stage) -> None:
        queue = stage.create()
        for _ in range(100):
            stage.batch([sending(queue, "noisy", extras=Extras(group="noisy"))] * 100)
        put(stage, queue, *(f"q{number}" for number in range(10)))
        got: Counter[str] = Counter()
        for _ in range(2):
            got.update(body[0] for body in bodies(stage.receive(queue, 10)))
        assert got == {"n": 10, "q": 10}

    def test_a_delete_makes_room_for_its_tenant(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "b1", "b2", "b3", "a3", "a4")
        held = stage.receive(queue, 4)
        assert bodies(held) == ["a1", "b1", "a2", "b2"]
        clear(stage, queue, [message for message in held if message.body[0] == "a"])
        assert bodies(stage.receive(queue, 2)) == ["a3", "a4"]

    def test_a_group_does_not_wait_for_its_own(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "a3")
        assert bodies([stage.take(queue) for _ in range(3)]) == ["a1", "a2", "a3"]

    def test_released_and_expired_messages_come_again_in_turn(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "b1", "b2")
        first = stage.receive(queue, 2, lease_us=LEASE_US)
        expect(stage.extend(queue, first[0].handle, 0), Extended)
        assert stage.take(queue, lease_us=HOUR_US).body == "a2"
        stage.later(LEASE_US)
        assert bodies(stage.receive(queue, 10)) == ["b2", "a1", "b1"]

    def test_delays_are_the_messages_own(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", delay_us=SECOND_US)
        put(stage, queue, "a2", "b1")
        assert stage.counts(queue) == (2, 1, 0)
        assert bodies(stage.receive(queue, 10)) == ["a2", "b1"]
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a1"]

    def test_only_a_delayed_message_keeps_its_tenant_known(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", delay_us=SECOND_US)
        put(stage, queue, "a2")
        clear(stage, queue, [stage.take(queue)])
        put(stage, queue, "a3")
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a3", "a1"]

    @for_each("number", [1, 3], fresh="stage")
    def test_a_tenant_whose_first_message_is_delayed_is_known_in_the_same_batch(
        self, stage: Stage, number: int
    ) -> None:
        queue = stage.create()
        extras = Extras(group="a")
        later = [sending(queue, f"later {each}", delay_us=SECOND_US, extras=extras) for each in range(number)]
        stage.batch([*later, sending(queue, "now", extras=extras)])
        assert bodies(stage.receive(queue, 10)) == ["now"]
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == [f"later {each}" for each in range(number)]

    def test_a_message_that_is_put_off_before_anybody_had_it_comes_later(self, stage: Stage) -> None:
        queue = stage.create()
        sent = stage.send(queue, "a1", extras=Extras(group="a"), wants_handle=True)
        put(stage, queue, "a2")
        expect(stage.extend(queue, sent.handle, SECOND_US), Extended)
        assert bodies(stage.receive(queue, 10)) == ["a2"]
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["a1"]

    def test_priorities_stand_above_tenants(self, stage: Stage) -> None:
        queue = stage.create()
        for priority in (16, 8, 1):
            for group in (None, "a"):
                stage.send(queue, f"{priority}{group or ''}", priority=priority, extras=Extras(group=group))
        assert bodies(stage.receive(queue, 10)) == ["1", "1a", "8a", "8", "16", "16a"]

    @for_each("kill", [False, True], fresh="stage")
    def test_tenants_are_as_they_were_after_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "a3", "b1", "-1", "-2")
        put(stage, queue, "c1", delay_us=LEASE_US)
        stage.receive(queue, 2, lease_us=LEASE_US)
        stage.receive(queue, 1, lease_us=HOUR_US)
        counts = stage.counts(queue)
        stage.reopen(kill=kill)
        assert stage.counts(queue) == counts == (3, 1, 3)
        stage.later(LEASE_US)
        assert bodies(stage.receive(queue, 10)) == ["a2", "b1", "c1", "a3", "-2", "a1"]

    def test_a_batch_that_is_rolled_back_leaves_tenants_as_they_were(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "-1")
        commands: list[AnyCommand] = [
            sending(queue, "a1", extras=Extras(group="a")),
            Receive(queue=queue, origin=TESTER, count_max=10),
        ]
        stage.store.apply(commands, stage.now)
        stage.factory.abandon(stage.store)
        assert stage.counts(queue) == (1, 0, 0)
        put(stage, queue, "a2")
        assert bodies(stage.receive(queue, 10)) == ["-1", "a2"]

    def test_dead_messages_go_on_the_way(self, stage: Stage) -> None:
        queue = stage.create(retention_us=MINUTE_US)
        put(stage, queue, "a1", "b1", "-1")
        stage.later(MINUTE_US // 2)
        put(stage, queue, "a2", "-2")
        stage.later(MINUTE_US // 2)
        assert bodies(stage.receive(queue, 10)) == ["a2", "-2"]
        assert stage.counts(queue) == (0, 0, 2)

    def test_dead_messages_are_swept(self, stage: Stage) -> None:
        queue = stage.create(retention_us=MINUTE_US)
        put(stage, queue, *(f"{tenant}{number}" for number in range(20) for tenant in "abc"))
        stage.later(MINUTE_US)
        stage.sweep_expired()
        assert stage.counts(queue) == (0, 0, 0)

    def test_dead_letters_keep_their_tenant(self, stage: Stage) -> None:
        dead = stage.create("dead")
        queue = stage.create(redrive=RedrivePolicy(dead, 1))
        put(stage, queue, "a1", "a2", "b1", "-1")
        stage.receive(queue, 10, lease_us=LEASE_US)
        stage.later(LEASE_US)
        put(stage, queue, "a3")
        assert bodies(stage.receive(queue, 10)) == ["a3"]
        assert bodies(stage.receive(dead, 10)) == ["a1", "b1", "-1", "a2"]

    def test_a_damaged_message_does_not_hold_its_tenant(self, stage: Stage) -> None:
        queue = stage.create()
        sent, _ = put(stage, queue, "a1", "a2")
        stage.store.close()
        stage.factory.damage(sent.sequence)
        stage.store = stage.factory.open()
        assert bodies(stage.receive(queue, 10)) == ["a2"]

    def test_a_purge_forgets_the_tenants(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "b1", "-1")
        stage.receive(queue, 2)
        stage.purge(queue)
        put(stage, queue, "b2", "-2")
        assert bodies(stage.receive(queue, 10)) == ["b2", "-2"]
        stage.sweep()
        assert stage.factory.rows(stage.store) == 2

    def test_a_peek_shows_whose_turn_it_is(self, stage: Stage) -> None:
        queue = stage.create()
        put(stage, queue, "a1", "a2", "a3", "b1", "-1")
        put(stage, queue, "c1", delay_us=SECOND_US)
        stage.take(queue, lease_us=SECOND_US)
        assert bodies(stage.peek(queue)) == ["b1", "-1", "a2", "a3"]
        stage.later(SECOND_US)
        assert bodies(stage.peek(queue)) == ["a2", "b1", "-1", "c1", "a3", "a1"]
        assert bodies(stage.peek(queue, 3)) == ["a2", "b1", "-1"]
        assert bodies(stage.receive(queue, 10)) == ["a2", "b1", "-1", "c1", "a3", "a1"]

    def test_every_message_wakes_as_on_any_standard_queue(self, stage: Stage) -> None:
        queue = stage.create()
        commands = [sending(queue, text, extras=Extras(group=text[0])) for text in ("a1", "a2", "b1")]
        assert stage.batch(commands).visible == {queue: 3}
