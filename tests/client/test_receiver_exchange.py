"""Who waits, what is asked of the queue, who gets what: with the clock as an argument, no thread and no queue."""

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from veilmq.client.errors import ForkRefused, ServiceError, TransportError, Undecryptable
from veilmq.client.messages import Received
from veilmq.client.receiver.exchange import Call, Exchange, Limits, Seat, Wish, joint
from veilmq.model.errors import Overloaded, QueueMissing, VeilError
from veilmq.testing.client_contract import for_each

LIMITS = Limits(polls=2, fetches=4, count_max=10, wait=20, grace=1, backoff_max=5)
UNREACHABLE = TransportError(reason="connection refused", may_have_happened=False)


class Place(Seat):
    """A seat whose queue object is but a name that can be closed."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        queue: Any = SimpleNamespace(name="q", closed=False)
        super().__init__(queue, limits)

    def close(self) -> None:
        self.queue.closed = True  # type: ignore[attr-defined]


class WithReceiver(Exchange):
    """With one receiver."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, jitter=0.0)
        self.seat = Place(limits)


def exchange(**limits: float) -> WithReceiver:
    return WithReceiver(msgspec.structs.replace(LIMITS, **limits))


def wishes(
    at: WithReceiver, count: int, now: float = 0, until: float | None = math.inf, seat: Seat | None = None
) -> list[Wish]:
    made = [Wish(seat or at.seat, 1, now, until) for _ in range(count)]
    for wish in made:
        at.ask(wish, now)
    return made


def taken(at: Exchange, now: float) -> list[Call]:
    """All requests to make now."""
    return list(iter(lambda: at.take(now), None))


def messages(count: int, first: int = 0, lease_end: float = math.inf) -> list[Received]:
    return [Received(f"id {n}", "", handle=f"handle {n}", lease_end=lease_end) for n in range(first, first + count)]


@for_each("polls", [1, 2, 7])
def test_two_hundred_callers_hold_exactly_so_many_polls(polls: int) -> None:
    at = exchange(polls=polls)
    wishes(at, 200)
    calls = taken(at, 0)
    assert [call.wait for call in calls] == [20] * polls
    wishes(at, 200)
    assert taken(at, 1) == []


def test_nobody_waits_and_nothing_is_asked() -> None:
    assert taken(exchange(), 0) == []


def test_a_poll_asks_for_no_more_than_is_wanted() -> None:
    at = exchange()
    wishes(at, 3)
    assert [call.count for call in taken(at, 0)] == [3]


def test_a_poll_waits_no_longer_than_its_callers() -> None:
    at = exchange()
    wishes(at, 2, until=3)
    assert [call.wait for call in taken(at, 1)] == [2]


def test_a_message_wakes_the_one_who_waits_longest_and_nobody_else() -> None:
    at = exchange(polls=1)
    waiting = wishes(at, 200)
    (call,) = taken(at, 0)
    (message,) = messages(1)
    assert at.ended(call, [message], 5) == []
    assert [wish.outcome for wish in waiting] == [[message]] + [None] * 199


def test_a_full_answer_starts_requests_side_by_side() -> None:
    at = exchange(polls=1)
    wishes(at, 200)
    (call,) = taken(at, 0)
    at.ended(call, messages(10), 1)
    calls = taken(at, 1)
    assert [(call.wait, call.count) for call in calls] == [(0, 10)] * 5
    for number, call in enumerate(calls[:4]):
        at.ended(call, messages(10, 10 + 10 * number), 2)
    at.ended(calls[4], messages(3, 50), 2)
    assert [call.wait for call in taken(at, 2)] == [20], "a short answer: the queue is empty, and one waits again"


def test_a_fetch_that_comes_back_empty_is_no_fault() -> None:
    at = exchange(polls=1)
    wishes(at, 3)
    (call,) = taken(at, 0)
    at.ended(call, messages(3), 1)
    wishes(at, 3)
    (call,) = taken(at, 1)
    assert call.wait == 0
    at.ended(call, [], 1)
    assert [call.wait for call in taken(at, 1)] == [20]


def requests_of_a_minute(at: Exchange, answer: Sequence[Received] | VeilError, took: float = 0) -> int:
    """How many requests leave while the queue answers every one like that."""
    now, count = 0.0, 0
    while now < 60:
        for call in taken(at, now):
            count += 1
            assert count < 1_000, "a request storm"
            at.ended(call, answer, now + took)
        if not at.waiting:
            wishes(at, 200, now)
        now += took
        now = now if at.more(now) else at.next_time(now)
    return count


@for_each(
    "answer",
    [
        [],
        UNREACHABLE,
        Overloaded(limit=1),
        QueueMissing(queue="q"),
        ServiceError(code="InternalError", status=500, request_id="", message=""),
        ServiceError(code="AccessDenied", status=403, request_id="", message=""),
    ],
)
@for_each("polls", [1, 8])
def test_a_queue_that_answers_so_at_once_is_asked_ever_more_rarely(
    polls: int, answer: Sequence[Received] | VeilError
) -> None:
    at = exchange(polls=polls)
    wishes(at, 200)
    assert 12 <= requests_of_a_minute(at, answer) <= 25 + polls


def test_an_empty_answer_after_its_whole_wait_is_no_fault() -> None:
    at = exchange(polls=1)
    wishes(at, 200)
    for now in itertools.accumulate([0] + [20] * 5):
        (call,) = taken(at, now)
        assert at.ended(call, [], now + 20) == []


def test_after_a_fault_one_asks_first_and_then_all() -> None:
    at = exchange(polls=2)
    wishes(at, 200)
    for call in taken(at, 0):
        at.ended(call, UNREACHABLE, 0)
    assert taken(at, 0) == []
    again = at.next_time(0)
    (call,) = taken(at, again)
    at.ended(call, messages(1), again)
    assert len(taken(at, again)) == 2


def test_time_alone_changes_nothing_beside_a_parked_poll() -> None:
    at = exchange(polls=1)
    wishes(at, 2)
    (call,) = taken(at, 3)
    assert at.next_time(3) == math.inf
    at.ended(call, UNREACHABLE, 4)
    assert 4 < at.next_time(4) < math.inf
    assert at.next_time(at.next_time(4)) == math.inf


@for_each("error", [UNREACHABLE, Overloaded(limit=1)])
def test_a_fault_that_may_pass_wakes_nobody(error: VeilError) -> None:
    at = exchange()
    waiting = wishes(at, 200)
    (first, *_) = taken(at, 0)
    at.ended(first, error, 1)
    assert not any(wish.outcome for wish in waiting)
    assert at.waiting == 200


def test_a_caller_who_met_nothing_but_faults_is_told_so() -> None:
    at = exchange(polls=1)
    (early,) = wishes(at, 1)
    (call,) = taken(at, 0)
    at.ended(call, UNREACHABLE, 1)
    assert at.withdraw(early) == UNREACHABLE
    (other,) = wishes(at, 1, now=2)
    (call,) = taken(at, 2)
    at.ended(call, [], 22)
    assert at.withdraw(other) == []
    (answered,) = wishes(at, 1, now=22)
    (call,) = taken(at, 22)
    at.ended(call, [], 42)
    (call,) = taken(at, 42)
    at.ended(call, UNREACHABLE, 43)
    (newcomer,) = wishes(at, 1, now=44)
    assert at.withdraw(answered) == at.withdraw(newcomer) == []


def test_a_queue_that_is_gone_is_told_to_everyone() -> None:
    at = exchange(polls=1)
    waiting = wishes(at, 3)
    (call,) = taken(at, 0)
    at.ended(call, QueueMissing(queue="q"), 1)
    assert [wish.outcome for wish in waiting] == [QueueMissing(queue="q")] * 3


def test_an_error_about_one_message_is_told_to_one() -> None:
    at = exchange(polls=1)
    waiting = wishes(at, 3)
    (call,) = taken(at, 0)
    error = Undecryptable(**dict.fromkeys(Undecryptable.fields, ""))
    at.ended(call, error, 1)
    assert [wish.outcome for wish in waiting] == [error, None, None]


def test_what_comes_too_late_is_for_the_next_caller_or_released() -> None:
    at = exchange(polls=1)
    (wish,) = wishes(at, 1, until=5)
    (call,) = taken(at, 0)
    assert at.withdraw(wish) == []
    first, second = messages(2)
    assert at.ended(call, [first, second], 6) == []
    (next_one,) = wishes(at, 1, now=6.5)
    assert next_one.outcome == [first]
    assert at.next_time(6.5) == 7
    (call,) = taken(at, 7)
    assert call.release == [second]
    at.ended(call, [], 7)
    assert at.next_time(7) == math.inf


def test_a_message_whose_lease_is_over_is_not_handed_out() -> None:
    at = exchange(polls=1)
    (wish,) = wishes(at, 1)
    (call,) = taken(at, 0)
    at.withdraw(wish)
    at.ended(call, messages(1, lease_end=6.2), 6)
    (late,) = wishes(at, 1, now=6.5)
    assert late.outcome is None


def test_a_look_is_one_request_without_a_wait() -> None:
    at = exchange()
    looking = wishes(at, 3, until=None)
    (call,) = taken(at, 0)
    assert (call.wait, call.count) == (0, 3)
    (message,) = messages(1)
    at.ended(call, [message], 1)
    assert [wish.outcome for wish in looking] == [[message], [], []]


def test_a_look_beside_a_parked_poll_is_made_at_once() -> None:
    at = exchange(polls=1)
    wishes(at, 200)
    taken(at, 0)
    wishes(at, 1, until=None)
    assert [call.wait for call in taken(at, 0)] == [0]


def test_a_look_meets_the_error_and_never_waits_for_a_pause() -> None:
    at = exchange(polls=1)
    (look,) = wishes(at, 1, until=None)
    (call,) = taken(at, 0)
    at.ended(call, UNREACHABLE, 0)
    assert look.outcome == UNREACHABLE
    (again,) = wishes(at, 1, until=None)
    assert again.outcome == []


def test_a_look_that_cannot_be_made_again_at_once_does_not_wait_for_a_parked_poll() -> None:
    at, other = exchange(polls=1), Place()
    wishes(at, 1)
    (poll,) = taken(at, 0)
    (own,) = wishes(at, 1, until=None)
    (foreign,) = wishes(at, 1, until=None, seat=other)
    (call,) = taken(at, 0)
    at.ended(call, UNREACHABLE, 1)
    assert (own.outcome, foreign.outcome) == (UNREACHABLE, [])
    assert list(at.calls) == [poll]


def test_what_a_look_brings_after_its_caller_has_gone_is_for_others() -> None:
    at = exchange()
    (look,) = wishes(at, 1, until=None)
    (call,) = taken(at, 0)
    assert at.withdraw(look) == []
    (waiting,) = wishes(at, 1)
    (message,) = messages(1)
    at.ended(call, [message], 1)
    assert (look.outcome, waiting.outcome) == ([], [message])


def test_close_wakes_everyone_and_releases_what_still_comes() -> None:
    at = exchange(polls=1)
    waiting = wishes(at, 200)
    (call,) = taken(at, 0)
    assert at.close() == []
    assert [wish.outcome for wish in waiting] == [[]] * 200
    late = messages(2)
    assert at.ended(call, late, 1) == late
    assert wishes(at, 1)[0].outcome == []
    assert taken(at, 30) == []


class Receiving(RuleBasedStateMachine):
    """Any order of callers, answers and time: every message goes to one caller or back, and the limits hold."""

    def __init__(self) -> None:
        super().__init__()
        self.at = exchange()
        self.seats: list[Place] = [self.at.seat, Place(), Place()]
        self.now = 0.0
        self.number = 0
        self.calls: list[Call] = []
        self.wishes: list[Wish] = []
        self.brought: list[str] = []
        self.got: list[str] = []
        self.released: list[str] = []

    @rule(count=st.integers(1, 3), wait=st.sampled_from([None, 0.5, 3, 1_000.0]), seat=st.integers(0, 2))
    def ask(self, count: int, wait: float | None, seat: int) -> None:
        wish = Wish(self.seats[seat], count, self.now, None if wait is None else self.now + wait)
        self.at.ask(wish, self.now)
        self.wishes.append(wish)

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        self.calls += taken(self.at, self.now)
        polls = [call for call in self.calls if call.wait > 0]
        requests = [call for call in self.calls if not call.release]
        assert len(polls) <= LIMITS.polls
        assert len(requests) <= LIMITS.polls + LIMITS.fetches
        assert all(1 <= call.count <= LIMITS.count_max for call in requests)

    @precondition(lambda self: self.calls)
    @rule(index=st.integers(0, 9), share=st.floats(0, 1), fails=st.booleans())
    def answer(self, index: int, share: float, fails: bool) -> None:
        call = self.calls.pop(index % len(self.calls))
        if call.release:
            self.released += [message.id for message in call.release]
            self.at.ended(call, [], self.now)
            return
        brought = [] if fails else messages(round(call.count * share), self.number)
        self.number += len(brought)
        self.brought += [message.id for message in brought]
        late = self.at.ended(call, UNREACHABLE if fails else brought, self.now)
        self.released += [message.id for message in late]

    @rule(seat=st.integers(0, 2), leaves=st.booleans())
    def end(self, seat: int, leaves: bool) -> None:
        """A receiver closes, or its queue object is closed; another one takes its place."""
        ended, self.seats[seat] = self.seats[seat], Place()
        if leaves:
            self.at.leave(ended)
        else:
            ended.close()

    @rule(index=st.integers(0, 30))
    def give_up(self, index: int) -> None:
        if self.wishes:
            wish = self.wishes[index % len(self.wishes)]
            if wish.outcome is None:
                wish.outcome = self.at.withdraw(wish)

    @invariant()
    def collect(self) -> None:
        for wish in [wish for wish in self.wishes if wish.outcome is not None]:
            self.wishes.remove(wish)
            if not isinstance(wish.outcome, VeilError):
                assert len(wish.outcome) <= wish.count
                self.got += [message.id for message in wish.outcome]

    def teardown(self) -> None:
        self.released += [message.id for message in self.at.close()]
        while self.calls:
            self.answer(0, 1.0, False)
        self.collect()
        assert sorted(self.got + self.released) == sorted(self.brought)
        assert not [wish for wish in self.wishes if wish.outcome is None]


Receiving.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestReceiving = Receiving.TestCase


def test_a_refusal_that_lasts_is_told_to_all_and_to_those_who_come_later() -> None:
    at = exchange()
    waiting = wishes(at, 5)
    refusal = ForkRefused(reason="not here", may_have_happened=False)
    (call, *others) = taken(at, 0)
    at.ended(call, refusal, 0.01)
    assert [wish.outcome for wish in waiting] == [refusal] * 5
    for other in others:
        at.ended(other, refusal, 0.01)
    assert [wish.outcome for wish in wishes(at, 2, 0.02) + wishes(at, 1, 0.02, None)] == [refusal] * 3
    assert taken(at, 100) == []


class TestSeats:
    """Several receivers at one exchange."""

    def test_requests_go_over_the_object_of_who_waits_longest(self) -> None:
        at, other = exchange(polls=1), Place()
        wishes(at, 1, seat=other)
        wishes(at, 200)
        (call,) = taken(at, 0)
        assert call.seat is other

    def test_after_an_error_another_object_asks(self) -> None:
        at, other = exchange(polls=1), Place()
        wishes(at, 1)
        wishes(at, 1, seat=other)
        asked = []
        for _ in range(3):
            (call,) = taken(at, at.next_time(0) if asked else 0)
            at.ended(call, UNREACHABLE, call.started)
            asked.append(call.seat)
        assert asked == [at.seat, other, at.seat]
        (call,) = taken(at, at.next_time(0))
        at.ended(call, messages(1), call.started)
        assert call.seat is other
        (call,) = taken(at, call.started)
        assert call.seat is other, "it is known to work"

    def test_an_error_over_one_object_is_none_for_those_of_another(self) -> None:
        at, other, third = exchange(polls=1), Place(), Place()
        (own,) = wishes(at, 1)
        (foreign,) = wishes(at, 1, seat=other)
        (call,) = taken(at, 0)
        at.ended(call, UNREACHABLE, 1)
        assert (at.withdraw(own), at.withdraw(foreign)) == (UNREACHABLE, [])
        (late,) = wishes(at, 1, now=0.5, seat=third)
        wishes(at, 1, now=0.5, seat=other)
        (call,) = taken(at, at.next_time(0))
        at.ended(call, UNREACHABLE, 2)
        (call,) = taken(at, at.next_time(0))
        at.ended(call, UNREACHABLE, 3)
        assert at.withdraw(late) == UNREACHABLE

    def test_a_refusal_is_raised_to_all_once_two_objects_met_one(self) -> None:
        at, other, third = exchange(polls=1), Place(), Place()
        own = wishes(at, 2)
        foreign = wishes(at, 2, seat=other) + wishes(at, 2, seat=third)
        (call,) = taken(at, 0)
        gone = QueueMissing(queue="q")
        at.ended(call, gone, 1)
        assert [wish.outcome for wish in own + foreign] == [gone] * 2 + [None] * 4
        (call,) = taken(at, at.next_time(0))
        assert call.seat is other
        at.ended(call, gone, 2)
        assert [wish.outcome for wish in foreign] == [gone] * 4

    def test_an_error_about_one_message_is_told_at_the_object_that_met_it(self) -> None:
        at, other = exchange(polls=1), Place()
        (first,) = wishes(at, 1, seat=other)
        other.failed_at = 0
        own = wishes(at, 2)
        (call,) = taken(at, 0)
        assert call.seat is at.seat
        error = Undecryptable(**dict.fromkeys(Undecryptable.fields, ""))
        at.ended(call, error, 1)
        assert [wish.outcome for wish in [first, *own]] == [None, error, None]

    def test_a_look_that_failed_over_one_object_is_made_over_the_next(self) -> None:
        at, other = exchange(polls=1), Place()
        (own,) = wishes(at, 1, until=None)
        (foreign,) = wishes(at, 1, until=None, seat=other)
        (call,) = taken(at, 0)
        assert call.looks == [own, foreign]
        at.ended(call, UNREACHABLE, 1)
        assert (own.outcome, foreign.outcome) == (UNREACHABLE, None)
        (call,) = taken(at, at.next_time(0))
        assert (call.seat, call.looks) == (other, [foreign])
        (message,) = messages(1)
        at.ended(call, [message], 2)
        assert foreign.outcome == [message]

    @for_each("answer", [[], UNREACHABLE, None])
    @for_each("until", [None, math.inf], ids=["look", "wait"])
    def test_a_request_that_ends_with_its_object_is_made_over_another_at_once(
        self, answer: Sequence[Received] | VeilError | None, until: float | None
    ) -> None:
        at, other = exchange(polls=1), Place()
        (own,) = wishes(at, 1, until=until)
        (foreign,) = wishes(at, 1, until=until, seat=other)
        (call,) = taken(at, 0)
        at.seat.close()
        at.ended(call, answer, 0.01)
        assert isinstance(own.outcome, TransportError)
        assert foreign.outcome is None
        (call,) = taken(at, 0.01)
        assert call.seat is other
        (newcomer,) = wishes(at, 1, until=until)
        assert isinstance(newcomer.outcome, TransportError)

    def test_a_message_is_for_none_whose_object_is_closed(self) -> None:
        at, other = exchange(polls=1), Place()
        (closed,) = wishes(at, 1, seat=other)
        (call,) = taken(at, 0)
        (waiting,) = wishes(at, 1)
        other.close()
        (message,) = messages(1)
        at.ended(call, [message], 1)
        assert isinstance(closed.outcome, TransportError)
        assert waiting.outcome == [message]

    def test_a_receiver_that_leaves_takes_its_callers_and_no_request(self) -> None:
        at, other = exchange(polls=1), Place()
        waiting = wishes(at, 2)
        (look,) = wishes(at, 1, until=None)
        (foreign,) = wishes(at, 1, seat=other)
        calls = taken(at, 0)
        at.leave(at.seat)
        assert [wish.outcome for wish in [*waiting, look]] == [[]] * 3
        assert foreign.outcome is None
        assert taken(at, 0) == []
        (message,) = messages(1)
        at.ended(calls[1], [message], 1)
        assert foreign.outcome == [message]
        assert wishes(at, 1)[0].outcome == []

    def test_a_request_that_is_cut_off_with_its_receiver_holds_nobody_back(self) -> None:
        at, other = exchange(polls=1), Place()
        wishes(at, 1)
        (call,) = taken(at, 0)
        wishes(at, 1, seat=other)
        at.leave(at.seat)
        at.ended(call, [], 0.01)
        (call,) = taken(at, 0.01)
        assert call.seat is other

    def test_what_came_over_two_objects_is_released_over_each(self) -> None:
        at, other = exchange(), Place()
        first, second = messages(2)
        at.give([first], 0, at.seat)
        at.give([second], 0, other)
        calls = taken(at, 1)
        assert [(call.seat, call.release) for call in calls] == [(at.seat, [first]), (other, [second])]

    def test_joint_limits_are_what_each_allows(self) -> None:
        wide = Limits(polls=1, fetches=9, count_max=64, wait=20, grace=0.5, backoff_max=9)
        assert joint([LIMITS]) == LIMITS
        assert joint([LIMITS, wide]) == Limits(polls=2, fetches=9, count_max=10, wait=20, grace=0.5, backoff_max=9)
