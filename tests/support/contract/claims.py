"""Receives: one lease at a time, in order, at most as many messages as requested."""

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, expect, refused, sending

from veilmq.model.commands import Delete, Extend, Receive, Sweep
from veilmq.model.errors import InFlightFull, QueueMissing
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import NO_EXTRAS, Extras
from veilmq.model.outcomes import Deleted, Received
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each


class TestClaims:
    """Receives."""

    def test_a_received_message_is_veiled_from_everyone_else(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        stage.take(queue)
        for _ in range(3):
            stage.later(9 * SECOND_US)
            assert stage.receive(queue, 10) == []

    def test_two_receives_of_one_batch_never_share_a_message(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(6):
            stage.send(queue, str(number))
        receive = Receive(queue=queue, origin=TESTER, count_max=2)
        outcomes = stage.batch([receive] * 4).outcomes
        got = [bodies(outcome.messages) for outcome in outcomes]  # type: ignore[union-attr]
        assert sorted(body for texts in got for body in texts) == list("012345")
        assert got[3] == []

    @for_each(("there", "asked", "got"), [(0, 1, 0), (3, 1, 1), (3, 3, 3), (3, 10, 3), (40, 32, 32)], fresh="stage")
    def test_a_receive_takes_up_to_what_it_asked_for(self, stage: Stage, there: int, asked: int, got: int) -> None:
        queue = stage.create()
        for number in range(there):
            stage.send(queue, str(number))
        assert bodies(stage.receive(queue, asked)) == [str(number) for number in range(got)]
        assert stage.counts(queue) == (there - got, 0, got)

    def test_the_lease_is_the_receives_or_the_senders_hint_or_the_queues(self, stage: Stage) -> None:
        queue = stage.create(visibility_timeout_us=7 * SECOND_US)
        stage.send(queue, extras=Extras(lease_hint_us=3 * SECOND_US))
        stage.send(queue)
        stage.send(queue, extras=Extras(lease_hint_us=3 * SECOND_US))
        hinted, plain = stage.receive(queue, 2)
        asked = stage.take(queue, lease_us=11 * SECOND_US)
        assert [message.due for message in (hinted, plain, asked)] == [
            stage.now + 3 * SECOND_US, stage.now + 7 * SECOND_US, stage.now + 11 * SECOND_US
        ]  # fmt: skip
        sources = [event.source for event in stage.events() if event.kind == "received"]
        assert sources == ["plan", "queue", "receive"]

    @for_each("size", [2, 9, 60], fresh="stage")
    def test_each_of_many_leases_of_one_receive_is_its_own(self, stage: Stage, size: int) -> None:
        queue = stage.create(visibility_timeout_us=7 * SECOND_US)
        hints = [Extras(lease_hint_us=3 * SECOND_US) if number % 3 == 1 else NO_EXTRAS for number in range(size)]
        stage.batch([sending(queue, priority=8 - number % 5 // 4, extras=hint) for number, hint in enumerate(hints)])
        granted = stage.now
        held = stage.receive(queue, size)
        stage.reopen(kill=True)
        assert stage.counts(queue) == (0, 0, size)
        hinted = [message for message in held if message.lease_us == 3 * SECOND_US]
        stage.later(3 * SECOND_US)
        start = stage.following()
        back = stage.receive(queue, 1) + stage.receive(queue, size)
        assert [(message.id, message.priority) for message in back] == [(each.id, each.priority) for each in hinted]
        assert {(message.receive_count, message.first_received) for message in back} == {(2, granted)}
        ended = [event for event in stage.events(start) if event.kind == "lease_expired"]
        assert {(event.held_us, event.principal) for event in ended} == {(3 * SECOND_US, TESTER.principal)}
        for message in held:
            if message.lease_us == 7 * SECOND_US:
                expect(stage.delete(queue, message.handle), Deleted)
        assert stage.counts(queue) == (0, 0, len(hinted))

    def test_a_message_comes_back_exactly_when_its_lease_ends(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=5)
        stage.later(4)
        assert stage.receive(queue) == []
        stage.later(1)
        assert stage.take(queue).id == message.id

    def test_a_lease_of_nothing_grants_and_ends_at_once(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        first = stage.take(queue, lease_us=0)
        assert first.due == stage.now
        assert stage.take(queue).receive_count == 2

    def test_the_receive_count_grows_with_each_grant_and_the_first_grant_is_kept(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        start = stage.now
        for count in range(1, 5):
            message = stage.take(queue, lease_us=SECOND_US)
            assert (message.receive_count, message.first_received) == (count, start)
            stage.later(SECOND_US)

    @for_each("kill", [False, True], fresh="stage")
    def test_the_receive_count_survives_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = stage.create()
        stage.send(queue)
        first = stage.take(queue, lease_us=SECOND_US)
        stage.reopen(kill=kill)
        assert stage.receive(queue) == []
        stage.later(SECOND_US)
        again = stage.take(queue)
        assert (again.id, again.receive_count, again.first_received) == (first.id, 2, first.first_received)

    def test_what_was_given_back_goes_behind_what_waits_in_the_order_of_giving_back(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(4):
            stage.send(queue, str(number))
        first, second = stage.receive(queue, 2)
        stage.extend(queue, second.handle, 0)
        stage.extend(queue, first.handle, 0)
        assert bodies(stage.receive(queue, 10)) == ["2", "3", "1", "0"]

    def test_the_protocols_cap_on_messages_in_flight_cuts_and_then_refuses(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(5):
            stage.send(queue, str(number))
        assert len(stage.receive(queue, 10, in_flight_max=3)) == 3
        capped = Receive(queue=queue, origin=TESTER, in_flight_max=3)
        error = refused(stage.do(capped), InFlightFull)
        assert error.limit == 3  # type: ignore[attr-defined]
        assert len(stage.receive(queue, 10)) == 2, "the cap acts on the commands that name it alone"
        stage.later(30 * SECOND_US)
        assert len(stage.receive(queue, 10, in_flight_max=3)) == 3, "leases that ended take no room"

    @for_each("end", ["delete", "release", "expire"], fresh="stage")
    def test_who_waits_at_the_cap_gets_nothing_and_is_told_when_one_in_flight_ends(
        self, stage: Stage, end: str
    ) -> None:
        """Developer Guide, "Amazon SQS standard queue quotas": "if you use long polling, ... no error messages"."""
        queue = stage.create()
        for number in range(4):
            stage.send(queue, str(number))
        (first, *_) = stage.receive(queue, 2, in_flight_max=2)
        waiting = Receive(queue=queue, origin=TESTER, wait_us=SECOND_US, in_flight_max=2)
        for _ in range(2):
            assert stage.do(waiting) == Received([], SECOND_US, capped=True)
        assert not stage.batch([waiting]).wrote
        if end == "delete":
            applied = stage.batch([Delete(queue=queue, origin=TESTER, handle=first.handle, arrived=stage.now)])
        elif end == "release":
            applied = stage.batch(
                [Extend(queue=queue, origin=TESTER, handle=first.handle, lease_us=0, arrived=stage.now)]
            )
        else:
            stage.later(30 * SECOND_US)
            applied = stage.batch([Sweep()])
        assert applied.visible[queue] >= 1
        assert len(stage.receive(queue, 1, wait_us=SECOND_US, in_flight_max=2)) == 1

    def test_the_queues_own_wait_counts_at_the_cap_too(self, stage: Stage) -> None:
        queue = stage.create(wait_us=SECOND_US)
        stage.send(queue)
        stage.send(queue)
        stage.take(queue)
        assert stage.receive(queue, in_flight_max=1) == []
        refused(stage.do(Receive(queue=queue, origin=TESTER, wait_us=0, in_flight_max=1)), InFlightFull)

    def test_delayed_messages_take_no_room_in_flight(self, stage: Stage) -> None:
        queue = stage.create()
        for _ in range(3):
            stage.send(queue, delay_us=SECOND_US)
        stage.send(queue)
        assert len(stage.receive(queue, 10, in_flight_max=2)) == 1

    def test_a_receive_from_no_queue_is_refused(self, stage: Stage) -> None:
        refused(stage.do(Receive(queue=QueueKey(ACCOUNT, REGION, "nowhere"), origin=TESTER)), QueueMissing)

    def test_a_receive_that_finds_nothing_writes_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        assert not stage.batch([Receive(queue=queue, origin=TESTER)]).wrote

    def test_more_leases_than_one_look_returns_all_come_back(self, stage: Stage) -> None:
        queue = stage.create()
        for start in range(0, 600, 100):
            stage.batch([sending(queue, str(number)) for number in range(start, start + 100)])
        assert len(stage.receive(queue, 600, lease_us=SECOND_US)) == 600
        stage.later(SECOND_US)
        got: list[str] = []
        for _ in range(100):
            got += bodies(stage.receive(queue, 10))
        assert sorted(got, key=int) == [str(number) for number in range(600)]
