"""FIFO queues: the order within a group, and the lock that keeps it."""

from typing import Any

import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, expect, refused, sending

from veilmq.model.commands import AfterExpiry, AnyCommand, CreateQueue, Delete, Receive, Sweep, Undeliver
from veilmq.model.errors import LeaseExpired, LeaseTaken, MessageGone, ParameterInvalid
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Deleted, Extended, Sent
from veilmq.model.settings.queue import DeduplicationScope, QueueKey
from veilmq.testing.for_each import for_each

LEASE_US = 30 * SECOND_US


def fifo(stage: Stage, name: str = "jobs.fifo", **change: Any) -> QueueKey:
    """A FIFO queue that deduplicates by content, unless `change` says otherwise."""
    return stage.create(name, **({"content_deduplication": True} | change))


def put(stage: Stage, queue: QueueKey, *texts: str) -> list[Sent]:
    """Send messages; the first character of each is its group."""
    return [stage.send(queue, text, extras=Extras(group=text[0])) for text in texts]


def clear(stage: Stage, queue: QueueKey, messages: list[Delivery]) -> None:
    """Delete them all."""
    for message in messages:
        expect(stage.delete(queue, message.handle), Deleted)


class TestFifo:
    """FIFO queues."""

    def test_a_group_comes_in_its_order_one_by_one(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3")
        for body in ("a1", "a2", "a3"):
            message = stage.take(queue)
            assert message.body == body
            assert stage.receive(queue, 10) == []
            clear(stage, queue, [message])
        assert stage.receive(queue, 10) == []

    def test_one_receive_takes_consecutive_messages_of_a_group_then_of_the_next(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1", "a2", "c1", "b2", "a3")
        assert bodies(stage.receive(queue, 4)) == ["a1", "a2", "a3", "b1"]
        assert bodies(stage.receive(queue, 10)) == ["c1"]

    def test_a_group_is_locked_until_its_whole_batch_has_left(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3", "a4")
        first, second = stage.receive(queue, 2)
        clear(stage, queue, [second])
        assert stage.receive(queue, 10) == []
        clear(stage, queue, [first])
        assert bodies(stage.receive(queue, 10)) == ["a3", "a4"]

    @for_each("per_group", [False, True], fresh="stage")
    def test_one_that_is_released_comes_at_once_and_alone_while_later_ones_are_in_flight(
        self, stage: Stage, per_group: bool
    ) -> None:
        """Recorded on AWS: messages behind the first one in flight are blocked, none before it."""
        change: dict[str, Any] = {}
        if per_group:
            change = {"deduplication_scope": DeduplicationScope.GROUP, "throughput_per_group": True}
        queue = fifo(stage, **change)
        put(stage, queue, "a1", "a2", "a3")
        first, second = stage.receive(queue, 2, lease_us=LEASE_US)
        expect(stage.extend(queue, first.handle, 0), Extended)
        again = stage.receive(queue, 10)
        assert [(message.body, message.receive_count) for message in again] == [("a1", 2)]
        assert stage.receive(queue, 10) == []
        clear(stage, queue, again)
        assert stage.receive(queue, 10) == [], "now the second one is the first in flight"
        expect(stage.extend(queue, second.handle, 0), Extended)
        assert bodies(stage.receive(queue, 10)) == ["a2", "a3"]

    def test_one_in_the_middle_that_is_released_waits_for_what_is_before_it(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3", "a4", "a5")
        first, second, third, _ = stage.receive(queue, 4, lease_us=LEASE_US)
        expect(stage.extend(queue, second.handle, 0), Extended)
        assert stage.receive(queue, 10) == []
        clear(stage, queue, [first])
        assert bodies(stage.receive(queue, 10)) == ["a2"], "a3 and a4 are in flight"
        expect(stage.extend(queue, third.handle, 0), Extended)
        assert stage.receive(queue, 10) == [], "a2 is in flight again"

    @for_each("sweep", [False, True], fresh="stage")
    def test_a_lease_that_ends_waits_behind_one_that_was_extended(self, stage: Stage, sweep: bool) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3", "a4")
        _, second, *_ = stage.receive(queue, 4, lease_us=LEASE_US)
        expect(stage.extend(queue, second.handle, 2 * LEASE_US), Extended)
        stage.later(LEASE_US)
        if sweep:
            stage.sweep()
        assert bodies(stage.peek(queue)) == ["a1"]
        (first,) = stage.receive(queue, 10, lease_us=HOUR_US)
        assert first.body == "a1"
        clear(stage, queue, [first])
        assert stage.receive(queue, 10) == []
        stage.later(LEASE_US)
        assert bodies(stage.receive(queue, 10)) == ["a2", "a3", "a4"]

    def test_a_group_with_messages_in_flight_behind_its_first_is_as_it_was_after_a_kill(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3")
        first, *_ = stage.receive(queue, 2, lease_us=LEASE_US)
        expect(stage.extend(queue, first.handle, 0), Extended)
        stage.reopen(kill=True)
        assert stage.counts(queue) == (2, 0, 1)
        assert bodies(stage.receive(queue, 10)) == ["a1"]

    def test_a_lease_that_ends_frees_the_group_when_it_is_the_last(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3")
        first, _ = stage.receive(queue, 2, lease_us=LEASE_US)
        expect(stage.extend(queue, first.handle, 2 * LEASE_US), Extended)
        stage.later(LEASE_US)
        assert stage.receive(queue, 10) == []
        stage.later(LEASE_US)
        assert bodies(stage.receive(queue, 10)) == ["a1", "a2", "a3"]

    def test_an_extended_lease_keeps_its_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        held = stage.take(queue, lease_us=LEASE_US)
        for _ in range(3):
            stage.later(LEASE_US - 1)
            expect(stage.extend(queue, held.handle, LEASE_US), Extended)
            assert stage.receive(queue) == []
        clear(stage, queue, [held])
        assert stage.take(queue).body == "a2"

    def test_groups_do_not_wait_for_each_other(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, *(f"{group}{number}" for number in range(3) for group in "abcdefgh"))
        for number in range(3):
            taken = [stage.take(queue) for _ in range(8)]
            assert bodies(taken) == [f"{group}{number}" for group in "abcdefgh"]
            assert stage.receive(queue, 10) == []
            clear(stage, queue, list(reversed(taken)))

    def test_a_group_that_was_served_goes_behind_those_that_wait(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1", "a2", "c1")
        clear(stage, queue, [stage.take(queue)])
        assert [stage.take(queue).body for _ in range(3)] == ["b1", "c1", "a2"]

    def test_a_group_that_was_empty_begins_anew(self, stage: Stage) -> None:
        queue = fifo(stage)
        for number in range(3):
            put(stage, queue, f"a{number}")
            clear(stage, queue, [stage.take(queue)])
        assert stage.counts(queue) == (0, 0, 0)

    def test_what_is_sent_to_a_locked_group_waits(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        held = stage.take(queue)
        put(stage, queue, "a2")
        assert stage.counts(queue) == (1, 0, 1)
        assert stage.receive(queue) == []
        clear(stage, queue, [held])
        assert stage.take(queue).body == "a2"

    def test_a_handle_whose_lease_has_ended_is_refused_whatever_it_asks_for(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        old = stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US + 1)
        for sweep in (False, True):
            if sweep:
                stage.sweep()
            for rule in AfterExpiry:
                refused(stage.delete(queue, old.handle, after_expiry=rule), LeaseExpired)
                refused(stage.extend(queue, old.handle, LEASE_US, after_expiry=rule), LeaseExpired)
        new = stage.take(queue)
        refused(stage.delete(queue, old.handle), LeaseTaken)
        clear(stage, queue, [new])

    def test_a_delete_that_arrived_in_time_counts_though_the_lease_was_ended(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        old = stage.take(queue, lease_us=LEASE_US)
        arrived = stage.now
        stage.later(LEASE_US + 1)
        stage.sweep()
        expect(stage.delete(queue, old.handle, arrived=arrived), Deleted)
        assert stage.take(queue).body == "a2"

    def test_a_whole_batch_that_was_extended_in_time_is_leased_again(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3")
        held = stage.receive(queue, 2, lease_us=LEASE_US)
        arrived = stage.now
        stage.later(LEASE_US + 1)
        stage.sweep()
        for message in held:
            expect(stage.extend(queue, message.handle, LEASE_US, arrived=arrived), Extended)
        assert stage.counts(queue) == (1, 0, 2)
        assert stage.receive(queue, 10) == []
        clear(stage, queue, held)
        assert stage.take(queue).body == "a3"

    def test_no_lease_goes_on_while_another_batch_has_the_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        _, second = stage.receive(queue, 2, lease_us=LEASE_US)
        arrived = stage.now
        stage.later(LEASE_US + 1)
        assert stage.take(queue).body == "a1"
        refused(stage.extend(queue, second.handle, LEASE_US, arrived=arrived), LeaseExpired)
        assert stage.counts(queue) == (1, 0, 1)

    def test_a_lease_that_ended_goes_on_once_the_other_batch_has_left(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3")
        _, second = stage.receive(queue, 2, lease_us=LEASE_US)
        arrived = stage.now
        stage.later(LEASE_US + 1)
        clear(stage, queue, [stage.take(queue)])
        expect(stage.extend(queue, second.handle, LEASE_US, arrived=arrived), Extended)
        assert stage.receive(queue, 10) == []
        clear(stage, queue, [second])
        assert stage.take(queue).body == "a3"

    def test_an_answer_that_reached_nobody_frees_the_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "a3")
        handles = tuple(message.handle for message in stage.receive(queue, 2))
        stage.do(Undeliver(queue=queue, origin=TESTER, handles=handles))
        assert bodies(stage.receive(queue, 10)) == ["a1", "a2", "a3"]

    def test_a_message_that_dies_lets_the_next_one_go(self, stage: Stage) -> None:
        queue = fifo(stage, retention_us=MINUTE_US)
        put(stage, queue, "a1")
        stage.later(MINUTE_US // 2)
        put(stage, queue, "a2", "b1")
        stage.later(MINUTE_US // 2)
        assert bodies(stage.receive(queue, 10)) == ["a2", "b1"]

    def test_a_message_that_dies_in_flight_frees_its_group(self, stage: Stage) -> None:
        queue = fifo(stage, retention_us=MINUTE_US)
        put(stage, queue, "a1")
        stage.later(MINUTE_US - 1)
        put(stage, queue, "a2")
        held = stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US)
        assert type(stage.delete(queue, held.handle)) is not Deleted
        assert stage.take(queue, lease_us=1).body == "a2"

    @for_each("groups", [1, 300], fresh="stage")
    def test_dead_messages_are_swept_from_groups(self, stage: Stage, groups: int) -> None:
        queue = fifo(stage, retention_us=MINUTE_US)
        for number in range(300):
            stage.send(queue, str(number), extras=Extras(group=str(number % groups)))
        held = stage.take(queue, lease_us=HOUR_US)
        stage.later(MINUTE_US)
        stage.sweep()
        assert stage.counts(queue) == (0, 0, 0), "the one in flight held back its group, and is dead itself"
        refused(stage.delete(queue, held.handle), MessageGone)

    def test_a_damaged_message_does_not_hold_its_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        sent, _ = put(stage, queue, "a1", "a2")
        stage.store.close()
        stage.factory.damage(sent.sequence)
        stage.store = stage.factory.open()
        assert bodies(stage.receive(queue, 10)) == ["a2"]

    def test_two_receives_of_one_batch_get_different_groups(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1")
        receive = Receive(queue=queue, origin=TESTER)
        got = [outcome.messages for outcome in stage.batch([receive] * 3).outcomes]  # type: ignore[union-attr]
        assert [bodies(messages) for messages in got] == [["a1"], ["b1"], []]

    def test_a_delete_and_the_next_receive_fit_into_one_batch(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1")
        held = stage.take(queue)
        delete = Delete(queue=queue, origin=TESTER, handle=held.handle, arrived=stage.now)
        sends = [sending(queue, text, extras=Extras(group="a")) for text in ("a2", "a3")]
        outcomes = stage.batch([Receive(queue=queue, origin=TESTER), delete, *sends]).outcomes
        assert bodies(outcomes[0].messages) == ["a2"]  # type: ignore[union-attr]

    def test_a_receive_with_no_lease_at_all_takes_nothing_away(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        assert bodies(stage.receive(queue, 1, lease_us=0)) == ["a1"]
        assert bodies(stage.receive(queue, 2, lease_us=0)) == ["a1", "a2"]

    def test_at_the_cap_on_messages_in_flight_nothing_comes_and_nothing_is_said(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "b1", "c1")
        assert bodies(stage.receive(queue, 10, in_flight_max=2)) == ["a1", "b1"]
        assert stage.receive(queue, 10, in_flight_max=2) == []
        assert bodies(stage.receive(queue, 10, in_flight_max=3)) == ["c1"]

    def test_a_purge_empties_all_groups_and_ends_their_locks(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1")
        stage.take(queue)
        stage.purge(queue)
        put(stage, queue, "a3")
        assert bodies(stage.receive(queue, 10)) == ["a3"]
        stage.sweep()
        assert stage.factory.rows(stage.store) == 1

    @for_each("kill", [False, True], fresh="stage")
    def test_everything_is_there_after_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1", "c1", "c2")
        first, _ = stage.receive(queue, 2, lease_us=LEASE_US)
        released = stage.take(queue)
        expect(stage.extend(queue, released.handle, 0), Extended)
        counts = stage.counts(queue)
        assert counts == (3, 0, 2)
        stage.reopen(kill=kill)
        assert stage.counts(queue) == counts
        assert bodies(stage.receive(queue, 10, lease_us=HOUR_US)) == ["c1", "c2", "b1"]
        clear(stage, queue, [first])
        stage.later(LEASE_US)
        assert bodies(stage.receive(queue, 10)) == ["a2"]

    def test_a_batch_that_is_rolled_back_leaves_groups_as_they_were(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1")
        held = stage.take(queue)
        commands: list[AnyCommand] = [
            sending(queue, "c1", extras=Extras(group="c")),
            Delete(queue=queue, origin=TESTER, handle=held.handle, arrived=stage.now),
            Receive(queue=queue, origin=TESTER, count_max=10),
        ]
        stage.store.apply(commands, stage.now)
        stage.factory.abandon(stage.store)
        assert stage.counts(queue) == (2, 0, 1)
        assert bodies(stage.receive(queue, 10)) == ["b1"]
        clear(stage, queue, [held])
        put(stage, queue, "c1")
        assert bodies(stage.receive(queue, 10)) == ["c1", "a2"]

    def test_a_peek_shows_what_a_receive_would_take(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "b1", "a1", "b2", "a2", "c1")
        held = stage.take(queue, lease_us=LEASE_US)
        assert bodies(stage.peek(queue)) == ["a1", "a2", "c1"]
        assert bodies(stage.peek(queue, 2)) == ["a1", "a2"]
        stage.later(LEASE_US)
        assert bodies(stage.peek(queue)) == ["a1", "a2", "c1", "b1", "b2"]
        refused(stage.delete(queue, held.handle, arrived=stage.now + 1), LeaseExpired)

    def test_sequences_grow_in_the_order_of_the_sends(self, stage: Stage) -> None:
        queue = fifo(stage)
        commands = [sending(queue, str(number), extras=Extras(group=str(number % 3))) for number in range(20)]
        sent = [expect(outcome, Sent).sequence for outcome in stage.batch(commands).outcomes]
        assert sent == sorted(set(sent))
        for group in range(3):
            mine = [message.sequence for message in stage.receive(queue, 10) if message.extras.group == str(group)]
            assert mine == sorted(mine)

    @pytest.mark.parametrize(
        ("fields", "parameter"),
        [
            ({}, "group"),
            ({"extras": Extras(deduplication_id="1")}, "group"),
            ({"extras": Extras(group="a"), "delay_us": 1}, "delay_us"),
        ],
    )
    def test_a_send_that_is_not_fit_for_fifo_is_refused(
        self, stage: Stage, fields: dict[str, Any], parameter: str
    ) -> None:
        queue = fifo(stage)
        error = refused(stage.do(sending(queue, **fields)), ParameterInvalid)
        assert error.parameter == parameter  # type: ignore[attr-defined]
        assert (stage.counts(queue), stage.kinds()) == ((0, 0, 0), ["queue_created"])

    def test_the_name_tells_the_kind(self, stage: Stage) -> None:
        for name, change in (("jobs.fifo", {}), ("jobs", {"fifo": True})):
            queue = QueueKey(ACCOUNT, REGION, name)
            error = refused(stage.do(CreateQueue(queue=queue, origin=TESTER, change=change)), ParameterInvalid)
            assert error.parameter == "fifo"  # type: ignore[attr-defined]
        assert stage.kinds() == []

    def test_a_queue_stays_of_its_kind(self, stage: Stage) -> None:
        queue, standard = fifo(stage), stage.create("standard")
        for key, change in (
            (queue, {"fifo": False}),
            (standard, {"fifo": True}),
            (standard, {"content_deduplication": True}),
            (standard, {"deduplication_scope": DeduplicationScope.GROUP}),
            (queue, {"throughput_per_group": True}),
        ):
            before = stage.describe(key)
            refused(stage.change(key, **change), ParameterInvalid)
            assert stage.describe(key) == before
        stage.change(queue, deduplication_scope=DeduplicationScope.GROUP, throughput_per_group=True)
        refused(stage.change(queue, deduplication_scope=DeduplicationScope.QUEUE), ParameterInvalid)
        assert stage.describe(queue).settings.throughput_per_group


class TestFifoWaking:
    """Whom a change wakes: as many receivers as groups became free."""

    def test_a_send_wakes_one_receiver_a_free_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        commands = [sending(queue, text, extras=Extras(group=text[0])) for text in ("a1", "a2", "b1", "a3")]
        assert stage.batch(commands).visible == {queue: 2}

    def test_a_locked_group_wakes_nobody(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        first, second = stage.receive(queue, 2)
        assert stage.batch([sending(queue, "a3", extras=Extras(group="a"))]).visible == {}
        delete = Delete(queue=queue, origin=TESTER, handle=first.handle, arrived=stage.now)
        assert stage.batch([delete]).visible == {}
        last = Delete(queue=queue, origin=TESTER, handle=second.handle, arrived=stage.now)
        assert stage.batch([last]).visible == {queue: 1}

    def test_leases_and_delays_that_end_wake_one_receiver_a_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2", "b1")
        stage.receive(queue, 3, lease_us=LEASE_US)
        stage.change(queue, delay_us=LEASE_US)
        put(stage, queue, "c1", "c2", "a3")
        stage.later(LEASE_US)
        assert stage.batch([Sweep()]).visible == {queue: 3}

    def test_a_release_wakes_when_the_group_is_free(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        first, second = stage.receive(queue, 2)
        assert stage.batch([stage.releasing(queue, second.handle)]).visible == {}
        assert stage.batch([stage.releasing(queue, first.handle)]).visible == {queue: 1}

    def test_a_release_wakes_though_later_messages_are_in_flight(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(stage, queue, "a1", "a2")
        first, _ = stage.receive(queue, 2)
        assert stage.batch([stage.releasing(queue, first.handle)]).visible == {queue: 1}
