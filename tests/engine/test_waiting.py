"""The waiting room: who is woken, in which order, and who is answered without a message."""

from collections.abc import Callable

import pytest
from tests.engine.conftest import QUEUE, Shell
from tests.support.contract.stage import TESTER, sending

from veilmq.engine import Limits
from veilmq.engine.long_polls import WaitingRoom
from veilmq.model.commands import (
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    Receive,
)
from veilmq.model.errors import QueueMissing, RateExceeded
from veilmq.model.instant import MINUTE_US, SECOND_US, Instant
from veilmq.model.outcomes import QueueDescribed, Received
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

OTHER = QueueKey("000000000000", "us-east-1", "other")
WAIT_US = 20 * SECOND_US
HANGING_UP = 2_000
"""Receives that park and leave again, more than the heap of deadlines keeps entries for."""


def _receive(count_max: int = 1, wait_us: int = WAIT_US, queue: QueueKey = QUEUE) -> Receive:
    return Receive(queue=queue, origin=TESTER, count_max=count_max, wait_us=wait_us)


class TestOrder:
    def test_who_waited_longest_is_woken_first(self, shell: Shell) -> None:
        for ticket in "abc":
            shell.wait(ticket, WAIT_US)
        assert shell.answers.keys().isdisjoint("abc")
        shell.send("1")
        shell.send("2")
        assert [shell.got(ticket) for ticket in "abc"] == [["1"], ["2"], None]

    def test_a_receive_says_for_how_long_it_waited(self, shell: Shell) -> None:
        """From when it came, which may be long before it is carried out; a server of a cluster has another clock."""
        shell.engine.submit("late", [_receive(wait_us=0)], Instant(shell.clock.now - 7))
        shell.send("1")
        shell.wait("parked", WAIT_US)
        shell.later(5 * SECOND_US)
        shell.send("2")
        ((late,), (parked,)) = (shell.answers[ticket] for ticket in ("late", "parked"))
        assert isinstance(late, Received)
        assert isinstance(parked, Received)
        assert (len(late.messages), late.waited_us) == (1, 7)
        assert (len(parked.messages), parked.waited_us) == (1, 5 * SECOND_US)

    def test_one_send_of_many_wakes_as_many_as_it_can_fill(self, shell: Shell) -> None:
        shell.wait("a", WAIT_US, count_max=2)
        shell.wait("b", WAIT_US, count_max=2)
        shell.wait("c", WAIT_US, count_max=2)
        shell.send("1", "2", "3")
        assert [shell.got(ticket) for ticket in "abc"] == [["1", "2"], ["3"], None]

    def test_one_message_lets_one_try_again(self, shell: Shell) -> None:
        for ticket in "abc":
            shell.wait(ticket, WAIT_US)
        shell.submit(sending(QUEUE, "1"))
        shell.give_back(shell.engine.take_batch(shell.clock.now))
        woken = shell.engine.take_batch(shell.clock.now)
        assert [call.ticket for call in woken.calls if type(call.commands[0]) is Receive] == ["a"]

    @for_each("wait_us", [WAIT_US, None])
    def test_a_newcomer_stands_behind_those_who_wait(self, shell: Shell, wait_us: int | None) -> None:
        """Also where the wait is the queue's own."""
        shell.call(ChangeQueue(queue=QUEUE, origin=TESTER, change={"wait_us": WAIT_US}))
        old, new = (f"{age}, {wait_us}" for age in ("old", "new"))
        shell.wait(old, wait_us)
        shell.submit(sending(QUEUE, "1"))
        shell.submit(Receive(queue=QUEUE, origin=TESTER, wait_us=wait_us), ticket=new)
        shell.run()
        assert (shell.got(old), shell.got(new)) == (["1"], None)
        shell.engine.cancel(new)
        assert not shell.engine.waiting._own_waits, "nobody waits there any more"

    @for_each("wait_us", [0, None])
    def test_a_newcomer_comes_after_those_who_are_woken(self, shell: Shell, wait_us: int | None) -> None:
        old, new = (f"{age}, {wait_us}" for age in ("old", "new"))
        shell.wait(old, WAIT_US)
        shell.submit(sending(QUEUE, "1"))
        batch = shell.engine.take_batch(shell.clock.now)
        shell.give_back(batch)
        shell.submit(Receive(queue=QUEUE, origin=TESTER, wait_us=wait_us), ticket=new)
        shell.run()
        assert (shell.got(old), shell.got(new)) == (["1"], [])

    def test_a_claim_that_found_nothing_goes_back_to_its_place(self, shell: Shell) -> None:
        for ticket in "abc":
            shell.wait(ticket, WAIT_US)
        shell.submit(sending(QUEUE, "1"))
        shell.submit(_receive(wait_us=0), ticket="thief")
        shell.run()
        assert shell.got("thief") == ["1"]
        shell.send("2")
        shell.send("3")
        assert [shell.got(ticket) for ticket in "abc"] == [["2"], ["3"], None]

    def test_queues_do_not_wake_each_other(self, shell: Shell) -> None:
        shell.call(CreateQueue(queue=OTHER, origin=TESTER))
        shell.wait("a", WAIT_US)
        shell.wait("b", WAIT_US, queue=OTHER)
        shell.send("1", queue=OTHER)
        assert (shell.got("a"), shell.got("b")) == (None, ["1"])

    def test_more_messages_than_the_first_can_take_wake_the_next(self, shell: Shell) -> None:
        for number in range(10):
            shell.wait(f"w{number}", WAIT_US)
        shell.send(*[str(number) for number in range(10)])
        assert [shell.got(f"w{number}") for number in range(10)] == [[str(number)] for number in range(10)]


class TestWakes:
    def test_a_release_wakes(self, shell: Shell) -> None:
        shell.send("1")
        shell.wait("holder", 0)
        shell.wait("a", WAIT_US)
        handle = shell.answers["holder"][0].messages[0].handle
        shell.call(Extend(queue=QUEUE, origin=TESTER, handle=handle, lease_us=0, arrived=shell.clock.now))
        assert shell.got("a") == ["1"]

    def test_the_end_of_a_lease_wakes(self, shell: Shell) -> None:
        shell.send("1")
        shell.wait("holder", 0, lease_us=5 * SECOND_US)
        shell.wait("a", WAIT_US)
        due = shell.engine.next_due(shell.clock.now)
        assert due is not None
        assert due <= shell.clock.now + 5 * SECOND_US
        shell.later(5 * SECOND_US - 1)
        assert shell.got("a") is None
        assert shell.engine.next_due(shell.clock.now) <= shell.clock.now + 1
        shell.later(1)
        assert shell.got("a") == ["1"]

    def test_the_end_of_a_delay_wakes(self, shell: Shell) -> None:
        shell.wait("a", WAIT_US)
        shell.send("1", delay_us=3 * SECOND_US)
        shell.later(3 * SECOND_US - 1)
        assert shell.got("a") is None
        shell.later(1)
        assert shell.got("a") == ["1"]

    @pytest.mark.parametrize("together", [True, False])
    def test_who_waits_at_the_cap_on_messages_in_flight_is_woken_by_deletes(self, shell: Shell, together: bool) -> None:
        shell.send(*"12345")
        shell.wait("holder", 0, count_max=3)
        for ticket in "ab":
            shell.wait(ticket, WAIT_US, in_flight_max=3)
            assert shell.got(ticket) is None
        deletes = [
            Delete(queue=QUEUE, origin=TESTER, handle=message.handle, arrived=shell.clock.now)
            for message in shell.answers["holder"][0].messages[:2]
        ]
        if together:
            shell.call(*deletes)
        else:
            shell.call(deletes[0])
            assert (shell.got("a"), shell.got("b")) == (["4"], None)
            shell.call(deletes[1])
        assert (shell.got("a"), shell.got("b")) == (["4"], ["5"])

    def test_who_waits_behind_one_that_was_cut_short_by_the_cap_is_woken_by_a_delete(self, shell: Shell) -> None:
        for ticket in "ab":
            shell.wait(ticket, WAIT_US, count_max=10, in_flight_max=3)
        shell.send(*"12345")
        assert (shell.got("a"), shell.got("b")) == (["1", "2", "3"], None)
        (message, *_) = shell.answers["a"][0].messages
        shell.call(Delete(queue=QUEUE, origin=TESTER, handle=message.handle, arrived=shell.clock.now))
        assert shell.got("b") == ["4"]

    def test_what_is_left_by_one_that_was_cut_short_by_the_cap_wakes_who_has_none(self, shell: Shell) -> None:
        shell.wait("a", WAIT_US, count_max=2, in_flight_max=1)
        shell.wait("b", WAIT_US)
        shell.send("1", "2")
        assert (shell.got("a"), shell.got("b")) == (["1"], ["2"])

    @pytest.mark.parametrize("cut_short", [False, True])
    def test_whom_no_cap_holds_up_waits_behind_nobody_whom_one_does(self, shell: Shell, cut_short: bool) -> None:
        """As MNS and SQS wait for one queue."""
        shell.send(*"123")
        shell.wait("holder", 0, count_max=2 if cut_short else 3)
        shell.wait("a", WAIT_US, count_max=10, in_flight_max=3)
        if cut_short:
            assert shell.got("a") == ["3"]
        shell.wait("b", WAIT_US, count_max=10, in_flight_max=3)
        shell.send("4")
        assert (shell.got("b")) is None
        shell.wait("c", WAIT_US)
        assert (shell.got("b"), shell.got("c")) == (None, ["4"])

    def test_what_a_cap_left_to_one_who_is_gone_wakes_who_has_none(self, shell: Shell) -> None:
        shell.send("0")
        shell.wait("holder", 0)
        shell.wait("gone", WAIT_US, in_flight_max=1)
        shell.wait("next", WAIT_US)
        shell.submit(sending(QUEUE, "1"))
        for _ in range(2):
            batch = shell.engine.take_batch(shell.clock.now)
            assert batch is not None
            if any(call.ticket == "gone" for call in batch.calls):
                shell.engine.cancel("gone")
            shell.give_back(batch)
        shell.run()
        assert (shell.got("gone"), shell.got("next")) == (None, ["1"])

    def test_what_a_cap_leaves_goes_to_the_next_who_has_none(self, shell: Shell) -> None:
        shell.send("0")
        shell.wait("holder", 0)
        for ticket, cap in zip("abcd", (2, None, 2, None), strict=True):
            shell.wait(ticket, WAIT_US, count_max=2, in_flight_max=cap)
        shell.send(*"1234")
        assert (shell.got("a"), shell.got("b")) == (["1"], ["2", "3"])
        assert (shell.got("c"), shell.got("d")) == (None, ["4"])
        shell.send("5")
        assert shell.got("c") is None
        for ticket in ("holder", "a", "b", "d"):
            handles = [message.handle for message in shell.answers[ticket][0].messages]
            now = shell.clock.now
            shell.call(*[Delete(queue=QUEUE, origin=TESTER, handle=handle, arrived=now) for handle in handles])
        assert shell.got("c") == ["5"]
        assert len(shell.engine.waiting) == 0
        assert shell.engine.waiting._free == {}

    def test_a_deleted_queue_tells_all_who_wait(self, shell: Shell) -> None:
        shell.wait("a", WAIT_US)
        shell.wait("b", WAIT_US)
        shell.call(DeleteQueue(queue=QUEUE, origin=TESTER))
        for ticket in "ab":
            (outcome,) = shell.answers[ticket]
            assert type(outcome) is QueueMissing

    @pytest.mark.parametrize("first", ["delete", "receive"])
    def test_nobody_begins_to_wait_in_the_batch_that_deletes_the_queue(self, shell: Shell, first: str) -> None:
        calls = {"delete": DeleteQueue(queue=QUEUE, origin=TESTER), "receive": _receive()}
        for ticket in sorted(calls, key=lambda ticket: ticket != first):
            shell.submit(calls[ticket], ticket=ticket)
        shell.run()
        assert type(shell.answers["receive"][0]) is QueueMissing


class TestDeadlines:
    def test_nobody_waits_behind_a_queue_that_may_hand_out_no_more(self, shell: Shell) -> None:
        shell.call(ChangeQueue(queue=QUEUE, origin=TESTER, change={"receives_per_second_max": 1}))
        for ticket in "abc":
            shell.wait(ticket, WAIT_US)
        shell.send("1", "2")
        assert shell.got("a") == ["1"]
        assert [type(shell.answers[ticket][0]) for ticket in "bc"] == [RateExceeded] * 2
        shell.clock.advance(SECOND_US)
        shell.wait("d", WAIT_US)
        assert shell.got("d") == ["2"], "nobody stands in its way"

    def test_nor_where_the_first_got_less_than_it_asked_for(self, shell: Shell) -> None:
        shell.call(ChangeQueue(queue=QUEUE, origin=TESTER, change={"receives_per_second_max": 2}))
        for ticket in "ab":
            shell.wait(ticket, WAIT_US, count_max=10)
        shell.send("1", "2", "3")
        assert shell.got("a") == ["1", "2"]
        assert type(shell.answers["b"][0]) is RateExceeded
        shell.clock.advance(SECOND_US)
        shell.wait("c", WAIT_US, count_max=10)
        assert shell.got("c") == ["3"]
        shell.wait("d", WAIT_US)
        assert shell.got("d") is None, "there is nothing any more"

    def test_who_waited_long_enough_is_answered_empty(self, shell: Shell) -> None:
        shell.wait("a", 2 * SECOND_US)
        shell.wait("b", SECOND_US)
        assert shell.engine.next_due(shell.clock.now) <= shell.clock.now + SECOND_US
        shell.later(SECOND_US - 1)
        assert (shell.got("a"), shell.got("b")) == (None, None)
        shell.later(1)
        assert (shell.got("a"), shell.got("b")) == (None, [])
        shell.later(SECOND_US)
        assert shell.got("a") == []

    def test_a_retry_does_not_move_the_deadline(self, shell: Shell) -> None:
        shell.wait("a", 2 * SECOND_US)
        for _ in range(3):
            shell.clock.advance(SECOND_US // 2)
            shell.submit(sending(QUEUE, "1"))
            shell.submit(_receive(wait_us=0))
            shell.run()
        assert shell.got("a") is None
        shell.later(SECOND_US // 2)
        assert shell.got("a") == []

    def test_a_claim_under_way_while_others_hang_up_keeps_its_deadline(self) -> None:
        room = WaitingRoom(Limits())
        room.park(waiter := room.new("a", _receive(), Instant(0), Instant(1)))
        room.take_first(QUEUE)
        for _ in range(HANGING_UP):
            room.park(room.new("b", _receive(), Instant(0), Instant(2)))
            room.take("b")
        room.park(waiter)
        assert room.next_deadline() == 1
        assert room.take_expired(Instant(1)) == [waiter]

    @for_each(
        "look",
        [lambda room: room.take_expired(Instant(1)), lambda room: room.next_deadline()],
        ids=["take_expired", "next_deadline"],
    )
    def test_a_wait_that_ends_while_its_claim_is_under_way_ends_after_it(
        self, look: Callable[[WaitingRoom], object]
    ) -> None:
        room = WaitingRoom(Limits())
        room.park(waiter := room.new("a", _receive(), Instant(0), Instant(1)))
        room.take_first(QUEUE)
        assert not look(room)
        room.park(waiter)
        assert room.next_deadline() == 1
        assert room.take_expired(Instant(1)) == [waiter]

    def test_the_queues_own_wait_counts_for_who_names_none(self, shell: Shell) -> None:
        shell.wait("short", None)
        assert shell.got("short") == []
        shell.call(ChangeQueue(queue=QUEUE, origin=TESTER, change={"wait_us": 5 * SECOND_US}))
        shell.wait("long", None)
        assert shell.got("long") is None
        shell.send("1")
        assert shell.got("long") == ["1"]
        shell.wait("again", None)
        shell.later(SECOND_US)
        shell.wait("behind", None)
        shell.call(ChangeQueue(queue=QUEUE, origin=TESTER, change={"wait_us": 0}))
        shell.wait("short now", None)
        assert shell.got("short now") == []
        shell.later(4 * SECOND_US)
        assert (shell.got("again"), shell.got("behind")) == ([], None)
        shell.later(SECOND_US)
        assert shell.got("behind") == []

    def test_a_receive_that_may_not_wait_never_does(self, shell: Shell) -> None:
        shell.wait("a", 0)
        assert shell.got("a") == []

    def test_shut_down_answers_everybody_and_nobody_parks_any_more(self, shell: Shell) -> None:
        shell.wait("a", WAIT_US)
        shell.wait("b", WAIT_US)
        shell.submit(_receive(), ticket="c")
        shell.deliver(shell.engine.drain_waiters())
        shell.run()
        assert [shell.got(ticket) for ticket in "abc"] == [[], [], []]
        shell.wait("d", WAIT_US)
        assert shell.got("d") == []


class TestCaps:
    @pytest.mark.parametrize("bound", ["parked_max", "parked_per_account_max", "parked_per_queue_max"])
    def test_beyond_a_cap_nobody_waits(self, shell: Shell, bound: str) -> None:
        shell.limit(**{bound: 2})
        for ticket in "abc":
            shell.wait(ticket, WAIT_US)
        assert [shell.got(ticket) for ticket in "abc"] == [None, None, []]
        shell.send("1")
        shell.wait("d", WAIT_US)
        assert (shell.got("a"), shell.got("d")) == (["1"], None)

    def test_beyond_a_cap_the_brake_holds_the_empty_answer_back(self, shell: Shell) -> None:
        shell.limit(parked_max=1, brake_us=SECOND_US)
        for ticket in "abcd":
            shell.wait(ticket, WAIT_US)
        shell.engine.cancel("c")
        shell.wait("short", SECOND_US // 2)
        assert [shell.got(ticket) for ticket in ("a", "b", "c", "short")] == [None, None, None, None]
        assert shell.engine.next_due(shell.clock.now) == shell.clock.now + SECOND_US // 2
        shell.later(SECOND_US // 2)
        assert (shell.got("short"), shell.got("b")) == ([], None)
        shell.later(SECOND_US // 2 - 1)
        assert shell.got("b") is None
        shell.send("1")
        shell.later(1)
        assert [shell.got(ticket) for ticket in "abcd"] == [["1"], [], None, []]

    def test_the_brake_holds_back_no_more_answers_than_calls_may_wait(self, shell: Shell) -> None:
        shell.limit(parked_max=1, brake_us=SECOND_US, pending_max=2)
        for ticket in "abcd":
            shell.wait(ticket, WAIT_US)
        assert [shell.got(ticket) for ticket in "abcd"] == [None, None, None, []]

    def test_shut_down_lets_the_brake_go(self, shell: Shell) -> None:
        shell.limit(parked_max=1, brake_us=SECOND_US)
        for ticket in "abc":
            shell.wait(ticket, WAIT_US)
        shell.engine.cancel("b")
        shell.deliver(shell.engine.drain_waiters())
        assert [shell.got(ticket) for ticket in "abc"] == [[], None, []]

    def test_the_caps_per_queue_and_account_leave_others_alone(self, shell: Shell) -> None:
        third, foreign = QueueKey(QUEUE.account, "us-east-1", "third"), QueueKey("111111111111", "us-east-1", "jobs")
        shell.call(*[CreateQueue(queue=each, origin=TESTER) for each in (OTHER, third, foreign)])
        shell.limit(parked_per_queue_max=1, parked_per_account_max=2)
        shell.wait("a", WAIT_US)
        shell.wait("b", WAIT_US)
        shell.wait("c", WAIT_US, queue=OTHER)
        shell.wait("d", WAIT_US, queue=OTHER)
        shell.wait("e", WAIT_US, queue=foreign)
        shell.wait("f", WAIT_US, queue=third)
        assert [shell.got(ticket) for ticket in "abcdef"] == [None, [], None, [], None, []]


class TestHangingUp:
    def _in_flight(self, shell: Shell) -> tuple[int, int]:
        (outcome,) = shell.call(DescribeQueue(queue=QUEUE, origin=TESTER))
        assert isinstance(outcome, QueueDescribed)
        return outcome.info.counts.visible, outcome.info.counts.in_flight

    def test_who_hung_up_while_parked_is_passed_over(self, shell: Shell) -> None:
        for ticket in "ab":
            shell.wait(ticket, WAIT_US)
        shell.engine.cancel("a")
        shell.send("1")
        assert (shell.got("a"), shell.got("b")) == (None, ["1"])
        shell.later(MINUTE_US)
        assert shell.got("a") is None

    def test_who_hung_up_while_its_claim_was_committed_gives_the_lease_back(self, shell: Shell) -> None:
        shell.send("1")
        shell.submit(_receive(), ticket="a")
        batch = shell.engine.take_batch(shell.clock.now)
        shell.engine.cancel("a")
        shell.give_back(batch)
        shell.run()
        assert shell.got("a") is None
        assert self._in_flight(shell) == (1, 0)

    def test_who_hung_up_between_wake_and_claim_leaves_the_message_to_the_next(self, shell: Shell) -> None:
        shell.call(CreateQueue(queue=OTHER, origin=TESTER))
        shell.limit(batch_messages_max=1)
        shell.wait("first", WAIT_US, queue=OTHER)
        shell.wait("a", WAIT_US)
        shell.wait("b", WAIT_US)
        shell.submit(sending(OTHER, "0"), sending(QUEUE, "1"))
        shell.give_back(shell.engine.take_batch(shell.clock.now))
        batch = shell.engine.take_batch(shell.clock.now)  # wakes two; only the first one's claim is in it
        shell.engine.cancel("a")
        shell.give_back(batch)
        shell.run()
        assert [shell.got(ticket) for ticket in ("first", "a", "b")] == [["0"], None, ["1"]]

    def test_an_answer_that_could_not_be_written_gives_the_lease_to_the_next(self, shell: Shell) -> None:
        shell.send("1")
        shell.wait("gone", 0)
        shell.wait("a", WAIT_US)
        (outcome,) = shell.answers["gone"]
        assert isinstance(outcome, Received)
        shell.engine.undeliver(_receive(), outcome, shell.clock.now)
        shell.run()
        assert shell.got("a") == ["1"]
        assert self._in_flight(shell) == (0, 1)

    def test_hanging_up_on_a_delete_undoes_nothing(self, shell: Shell) -> None:
        shell.send("1")
        shell.wait("a", 0)
        handle = shell.answers["a"][0].messages[0].handle
        delete = Delete(queue=QUEUE, origin=TESTER, handle=handle, arrived=shell.clock.now)
        shell.submit(delete, ticket="d")
        shell.engine.cancel("d")
        shell.run()
        assert self._in_flight(shell) == (0, 0)


class TestAnsweringSoon:
    """The client ended its input: it may be dead, and it may still read."""

    def _ready(self, shell: Shell) -> None:
        shell.deliver(shell.engine.expire_waiters(shell.clock.now))
        shell.run()

    def test_a_parked_receive_is_answered_empty(self, shell: Shell) -> None:
        for ticket in "ab":
            shell.wait(ticket, WAIT_US)
        shell.engine.answer_soon("a")
        assert shell.engine.next_due(shell.clock.now) == shell.clock.now
        self._ready(shell)
        shell.send("1")
        assert (shell.got("a"), shell.got("b")) == ([], ["1"])

    def test_a_new_receive_gets_what_is_there_and_does_not_park(self, shell: Shell) -> None:
        shell.send("1")
        for ticket in "ab":
            shell.submit(_receive(), ticket=ticket)
        shell.engine.answer_soon("a")
        shell.engine.answer_soon("b")
        shell.run()
        assert (shell.got("a"), shell.got("b")) == (["1"], [])
        assert shell.engine._impatient == set()

    @pytest.mark.parametrize("claimed", [False, True])
    def test_a_woken_receive_leaves_the_message_to_the_next(self, shell: Shell, claimed: bool) -> None:
        for ticket in "ab":
            shell.wait(ticket, WAIT_US)
        shell.submit(sending(QUEUE, "1"))
        shell.give_back(shell.engine.take_batch(shell.clock.now))
        if claimed:
            batch = shell.engine.take_batch(shell.clock.now)
            shell.engine.answer_soon("a")
        else:
            shell.engine._wake()  # as if its claim waited for a batch with room
            shell.engine.answer_soon("a")
            batch = shell.engine.take_batch(shell.clock.now)
        assert batch is not None
        shell.give_back(batch)
        self._ready(shell)
        assert (shell.got("a"), shell.got("b")) == ([], ["1"])
        assert shell.engine._impatient == set()

    def test_one_that_goes_after_that_leaves_nothing_behind(self, shell: Shell) -> None:
        shell.submit(_receive(), ticket="a")
        shell.engine.answer_soon("a")
        shell.engine.cancel("a")
        shell.run()
        assert (shell.engine._impatient, shell.engine._gone) == (set(), set())

    def test_an_answer_that_the_brake_holds_back_is_let_go(self, shell: Shell) -> None:
        shell.limit(parked_max=1, brake_us=SECOND_US)
        for ticket in "ab":
            shell.wait(ticket, WAIT_US)
        shell.engine.answer_soon("b")
        self._ready(shell)
        assert (shell.got("a"), shell.got("b")) == (None, [])
