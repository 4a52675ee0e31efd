"""Dead letters: the move is one step, keeps the message unchanged, and loses nothing."""

from typing import Any

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, refused

from veilmq.model.commands import ChangeQueue, Receive
from veilmq.model.errors import MessageGone, RedriveRefused
from veilmq.model.instant import HOUR_US, SECOND_US
from veilmq.model.messages import Extras, id_text
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey, RedriveAllowPolicy, RedrivePermission, RedrivePolicy
from veilmq.testing.for_each import for_each

LEASE_US = SECOND_US


def _pair(stage: Stage, receive_count_max: int = 2, **target: Any) -> tuple[QueueKey, QueueKey]:
    dead = stage.create("dead", **target)
    return stage.create("jobs", redrive=RedrivePolicy(dead, receive_count_max)), dead


class TestDeadLetters:
    """Dead letters."""

    @for_each("kill", [False, True], fresh="stage")
    def test_the_receive_that_would_be_one_too_many_moves_the_message(self, stage: Stage, kill: bool) -> None:
        queue, dead = _pair(stage)
        sent = stage.send(queue, "poison", priority=5)
        handles = []
        for _ in range(2):
            handles.append(stage.take(queue, lease_us=LEASE_US).handle)
            stage.later(LEASE_US)
            assert stage.counts(dead) == (0, 0, 0)
        assert stage.receive(queue, lease_us=LEASE_US) == []
        if kill:
            stage.reopen(kill=True)
        assert (stage.counts(queue), stage.counts(dead)) == ((0, 0, 0), (1, 0, 0))
        for handle in handles:
            refused(stage.delete(queue, handle), MessageGone)
        moved = stage.take(dead)
        assert (moved.id, moved.body, moved.sent, moved.priority) == (sent.id, "poison", sent.sent, 5)
        assert (moved.receive_count, moved.extras.dead_letter_source) == (1, queue)
        assert moved.extras.dead_receives == 2
        assert moved.sequence > sent.sequence

    def test_the_order_is_kept_and_the_next_messages_are_received(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1)
        for number in range(5):
            stage.send(queue, str(number))
        assert len(stage.receive(queue, 3, lease_us=LEASE_US)) == 3
        stage.later(LEASE_US)
        assert bodies(stage.receive(queue, 3)) == ["3", "4"]
        assert bodies(stage.receive(dead, 10)) == ["0", "1", "2"]

    @for_each("group", [None, "a"], fresh="stage")
    def test_a_queue_may_be_its_own_dead_letter_queue(self, stage: Stage, group: str | None) -> None:
        queue = stage.create()
        stage.change(queue, redrive=RedrivePolicy(queue, 1))
        sent = [stage.send(queue, body, extras=Extras(group=group)) for body in ("poison", "good")]
        poison = stage.take(queue)
        stage.extend(queue, poison.handle, 0)
        assert bodies(stage.receive(queue, 1, lease_us=HOUR_US)) == ["good"]
        (moved,) = stage.receive(queue, 10)
        assert (moved.body, moved.id, moved.receive_count) == ("poison", sent[0].id, 1)
        assert moved.sequence > sent[1].sequence
        assert moved.extras.dead_letter_source == queue
        stage.reopen(kill=True)
        assert stage.counts(queue) == (0, 0, 2)
        stage.extend(queue, moved.handle, 0)
        assert bodies(stage.receive(queue, 10)) == ["poison"], "and so on"

    def test_a_dead_letter_of_the_queue_itself_goes_before_less_urgent_ones(self, stage: Stage) -> None:
        queue = stage.create()
        stage.change(queue, redrive=RedrivePolicy(queue, 1))
        stage.send(queue, "urgent", priority=1)
        stage.send(queue, "other", priority=16)
        assert stage.take(queue, lease_us=SECOND_US).body == "urgent"
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 2)) == ["urgent", "other"]

    def test_a_move_is_one_event_that_names_both_ends(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1)
        sent = stage.send(queue)
        stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US)
        start = stage.following()
        stage.receive(queue)
        assert stage.kinds(start) == ["lease_expired", "dead_lettered"]
        event = stage.events(start)[1]
        moved = stage.take(dead)
        assert (event.sequence, event.message, event.attempt) == (sent.sequence, id_text(sent.id), 1)
        target = {"target": stage.describe(dead).incarnation, "target_sequence": moved.sequence}
        assert event.detail == {**target, "receives": 1}

    def test_a_waiting_receiver_of_the_dead_letter_queue_is_told(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1)
        stage.send(queue)
        stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US)
        assert stage.batch([Receive(queue=queue, origin=TESTER)]).visible[dead] == 1

    def test_who_waits_behind_more_than_one_receive_moves_is_told_that_there_are_others(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1)
        for number in range(200):
            stage.send(queue, str(number))
        stage.receive(queue, 200, lease_us=LEASE_US)
        stage.later(LEASE_US)
        stage.sweep()
        applied = stage.batch([Receive(queue=queue, origin=TESTER)])
        left = stage.counts(queue)[0]
        assert applied.outcomes == [Received([])]
        assert 0 < left < 200
        assert applied.visible == {queue: 1, dead: 200 - left}

    def test_more_than_one_receive_moves_on_its_way_are_all_moved_in_the_end(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1)
        for number in range(200):
            stage.send(queue, str(number))
        stage.receive(queue, 200, lease_us=LEASE_US)
        stage.send(queue, "good")
        stage.later(LEASE_US)
        got: list[str] = []
        for _ in range(20):
            got += bodies(stage.receive(queue, 1))
        assert got == ["good"]
        assert bodies(stage.receive(dead, 200)) == [str(number) for number in range(200)]

    def test_if_the_target_is_gone_the_message_stays_and_goes_on(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1)
        stage.send(queue)
        stage.take(queue, lease_us=LEASE_US)
        stage.drop(dead)
        stage.later(LEASE_US)
        assert stage.take(queue, lease_us=LEASE_US).receive_count == 2
        stage.create("dead")
        stage.later(LEASE_US)
        assert stage.receive(queue) == []
        assert stage.counts(dead) == (1, 0, 0)

    def test_a_dead_letter_dies_by_its_own_sending_in_its_new_queue(self, stage: Stage) -> None:
        queue, dead = _pair(stage, 1, retention_us=3 * HOUR_US)
        stage.send(queue)
        stage.take(queue, lease_us=LEASE_US)
        stage.later(HOUR_US)
        assert stage.receive(queue) == []
        stage.later(2 * HOUR_US - 1)
        assert len(stage.peek(dead)) == 1
        stage.later(1)
        assert stage.receive(dead) == []

    def test_a_message_moves_on_from_queue_to_queue(self, stage: Stage) -> None:
        last = stage.create("last")
        middle = stage.create("middle", redrive=RedrivePolicy(last, 1))
        first = stage.create("first", redrive=RedrivePolicy(middle, 1))
        sent = stage.send(first)
        for queue in (first, middle):
            stage.take(queue, lease_us=LEASE_US)
            stage.later(LEASE_US)
            assert stage.receive(queue) == []
        message = stage.take(last)
        assert (message.id, message.extras.dead_letter_source) == (sent.id, middle)

    def test_a_target_that_is_not_there_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        policy = RedrivePolicy(QueueKey(ACCOUNT, REGION, "nowhere"), 3)
        refused(stage.change(queue, redrive=policy), RedriveRefused)
        assert stage.describe(queue).settings.redrive is None

    def test_a_dead_letter_of_its_own_queue_begins_anew(self, stage: Stage) -> None:
        """AWS takes it: a message that was received too often begins anew, at the end of its own queue."""
        queue = stage.create()
        policy = RedrivePolicy(queue, 1)
        of_mns = ChangeQueue(queue=queue, origin=TESTER, change={"redrive": policy}, own_dead_letters=False)
        refused(stage.do(of_mns), RedriveRefused)
        stage.change(queue, redrive=policy)
        sent = stage.send(queue)
        first = stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US)
        again = stage.take(queue, lease_us=LEASE_US)
        assert (again.id, again.receive_count, again.extras.dead_receives) == (sent.id, 1, 1)
        assert (again.extras.dead_letter_source, again.sequence > first.sequence) == (queue, True)
        refused(stage.delete(queue, first.handle), MessageGone)
        stage.delete(queue, again.handle)
        stage.later(LEASE_US)
        assert stage.receive(queue) == []

    @for_each(
        ("permission", "listed", "taken"),
        [
            (RedrivePermission.ALLOW_ALL, False, True),
            (RedrivePermission.DENY_ALL, False, False),
            (RedrivePermission.BY_QUEUE, False, False),
            (RedrivePermission.BY_QUEUE, True, True),
        ],
        fresh="stage",
    )
    def test_a_target_says_whose_dead_letters_it_takes(
        self, stage: Stage, permission: RedrivePermission, listed: bool, taken: bool
    ) -> None:
        queue = stage.create()
        allow = RedriveAllowPolicy(permission, (queue,) if listed else ())
        dead = stage.create("dead", redrive_allow=allow)
        outcome = stage.change(queue, redrive=RedrivePolicy(dead, 3))
        assert (type(outcome) is not RedriveRefused) is taken, outcome
        assert (stage.describe(queue).settings.redrive is not None) is taken
