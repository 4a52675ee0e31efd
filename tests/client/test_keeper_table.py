"""The keeper's decisions, with the clock as an argument: no thread, no queue, no wait."""

import gc
import itertools
import math
import weakref
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from veilmq.client.adapters.embedded import translation
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper.decisions import LeaseDecisions, Parameters, Schedule
from veilmq.client.keeper.lease import LOOKS, STEPS, Hold, Look, Reason, State
from veilmq.client.messages import Received
from veilmq.model.errors import (
    LeaseExpired,
    LeaseTaken,
    MessageGone,
    ParameterInvalid,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.testing.client_contract import for_each

PARAMETERS = Parameters(minimal_life=5, interval=10, visibility_timeout=30)
UNREACHABLE = TransportError(reason="connection refused", may_have_happened=False)
LOST_ANSWER = TransportError(reason="timed out", may_have_happened=True)
FORBIDDEN = ServiceError(code="AccessDenied", status=403, request_id="1", message="revoked")


class Table(LeaseDecisions[Hold]):
    """With what a keeper does around it."""

    def __init__(self, parameters: Parameters = PARAMETERS, plan: "Growing | None" = None, **abilities: object) -> None:
        capabilities = msgspec.structs.replace(translation.CAPABILITIES, **abilities)
        super().__init__(parameters, capabilities, plan, jitter=0.0)
        self.ids = 0

    def hold(
        self, now: float, left: float = 30, fixed: float | None = None, wanted: float | None = None,
        asked: float | None = None,
    ) -> Hold:  # fmt: skip
        self.ids += 1
        handle = f"handle {self.ids}.0"
        message = Received(f"id {self.ids}", "body", handle=handle, lease_end=now + left, asked=asked)
        lead = self.lead_for(self.parameters.visibility_timeout if fixed is None else fixed)
        end = self.hold_end(self.parameters.max_hold, now, message)
        hold = Hold(message, lead=lead, fixed=fixed, hold_end=end, now=now)
        hold.wanted = fixed if wanted is None else wanted
        self.admit(hold, now)
        return hold

    def extends(self, now: float) -> list[Hold]:
        return self.due(now, 1_000)

    def next_extension(self, now: float, until: float = math.inf) -> float:
        """When something is due again; infinite if never."""
        while (at := self.next_look()) <= min(until, 1e9):
            now = max(now, at)
            if self.extends(now):
                return now
        return math.inf

    def extend(self, hold: Hold, now: float, answer: str | VeilError | None = None) -> float:
        """Its extension leaves and is answered at once; what it asked for."""
        assert self.begin(hold, now)
        seconds = self.length(hold, now)
        self.extended(hold, hold.newest + "'" if answer is None else answer, seconds, now, now)
        return seconds


class Growing:
    """A plan: 8 s first, then as long again as it was held."""

    margin = 2.0

    def first_lease(self, message: Received) -> float:
        return 8.0

    def next_lease(self, message: Received, held: float) -> float:
        return 4.0 + held


def test_an_extension_is_due_when_interval_and_minimal_life_are_left() -> None:
    table = Table()
    hold = table.hold(1_000)
    assert table.extends(1_000) == []
    at = table.next_extension(1_000)
    assert 15 - table.schedule.width <= at - 1_000 <= 15
    assert hold.queued


def test_a_message_with_less_is_due_at_once() -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    assert table.next_look() <= 1_000
    assert table.extends(1_000) == [hold]


def test_what_ends_first_is_sent_first() -> None:
    table = Table()
    holds = [table.hold(1_000, left=left) for left in (9, 6, 12, 7)]
    assert table.extends(1_000) == [holds[1], holds[3], holds[0], holds[2]]


def test_the_lease_counts_from_before_the_call() -> None:
    table = Table()
    hold = table.hold(1_000, left=6)
    assert table.extends(1_000) == [hold]
    assert table.begin(hold, 1_000)
    table.extended(hold, "next", 30, before=1_000.5, now=1_004)
    assert hold.deadline == 1_030.5
    assert hold.newest == "next"
    assert hold.status is State.HELD


def test_what_is_queued_is_not_queued_again() -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    assert table.extends(1_000) == [hold]
    assert table.next_extension(1_000, until=1_013) == math.inf


def test_what_was_deleted_while_it_was_queued_is_not_extended() -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    assert table.extends(1_000) == [hold]
    table.claim(hold, "end")
    assert not table.begin(hold, 1_000)
    table.ended(hold, True, None, 1_000)
    assert hold.status is State.DONE
    assert not table.begin(hold, 1_000)
    assert table.next_look() == math.inf


def test_a_users_extension_while_it_was_queued_is_not_cut_short() -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    assert table.extends(1_000) == [hold]
    table.claim(hold, "extend")
    table.extended(hold, "mine", 300, before=1_001, now=1_001, own=False)
    assert not table.begin(hold, 1_001)
    assert hold.deadline == 1_301
    assert 284 <= table.next_extension(1_001) - 1_001 <= 285


def test_a_users_own_extension_is_not_overwritten() -> None:
    table = Table()
    hold = table.hold(1_000)
    table.claim(hold, "extend")
    table.extended(hold, "mine", 300, before=1_001, now=1_001, own=False)
    assert hold.deadline == 1_301
    at = table.next_extension(1_001)
    assert 284 <= at - 1_001 <= 285
    assert table.extensions == 0


def test_a_users_short_extension_lives_to_its_second_half() -> None:
    table = Table()
    hold = table.hold(1_000)
    table.claim(hold, "extend")
    table.extended(hold, "mine", 4, before=1_000, now=1_000, own=False)
    at = table.next_extension(1_000)
    assert 2 - table.schedule.width <= at - 1_000 <= 2
    assert table.extend(hold, at) == 30


@for_each("error", [UNREACHABLE, FORBIDDEN, LOST_ANSWER])
def test_a_failure_on_the_way_is_tried_again_until_the_end(error: VeilError) -> None:
    table = Table()
    hold = table.hold(1_000)
    now, tries = 1_000.0, []
    while (now := table.next_extension(now)) < math.inf:
        tries.append(now - 1_000)
        table.extend(hold, now, error)
    assert tries[0] <= 15
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses[0] <= 0.5
    assert max(pauses) > 1, "they must grow"
    assert tries[-1] > 28.5, "and go on to the end"
    assert len(tries) < 60
    assert hold.status is State.LOST
    assert hold.reason is Reason.EXPIRED
    assert hold.error is error
    assert table.losses == [hold]


@for_each("own", [True, False])
@for_each("answer", [LOST_ANSWER, None])
@for_each("seconds, deadline", [(4, 1_004), (300, 1_030)])
def test_a_lease_that_may_have_been_shortened_counts_as_shortened(
    seconds: float, deadline: float, answer: VeilError | None, own: bool
) -> None:
    table = Table()
    hold = table.hold(1_000)
    if own:
        assert table.begin(hold, hold.renew_at)
    else:
        table.claim(hold, "extend")
    table.extended(hold, answer, seconds, before=1_000, now=1_000, own=own)
    assert hold.deadline == deadline
    assert table.next_extension(1_000) < (deadline if own else max(deadline - 14, 1_000.5))
    assert table.failures == own


def test_a_failure_that_passes_costs_nothing() -> None:
    table = Table()
    hold = table.hold(1_000)
    now = table.next_extension(1_000)
    table.extend(hold, now, UNREACHABLE)
    now = table.next_extension(now)
    table.extend(hold, now)
    assert hold.deadline == now + 30
    assert hold.error is None
    assert table.failures == 1
    assert table.losses == []


@for_each(
    "error, reason",
    [
        (LeaseExpired(sequence=1, attempt=1), Reason.EXPIRED),
        (LeaseTaken(sequence=1, attempt=1), Reason.TAKEN),
        (MessageGone(sequence=1, attempt=1), Reason.GONE),
        (ReceiptInvalid(reason="forged"), Reason.INVALID),
        (QueueMissing(queue="q"), Reason.INVALID),
    ],
)
def test_a_refusal_is_a_lost_lease(error: VeilError, reason: Reason) -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    table.extends(1_000)
    table.extend(hold, 1_000, error)
    assert (hold.status, hold.reason, hold.error) == (State.LOST, reason, error)
    assert table.losses == [hold]
    assert table.lost == {reason.name: 1}
    assert table.next_look() == math.inf


@for_each(("extends_late", "grace"), [(False, 0), (True, 5)])
def test_a_call_that_never_returns_does_not_keep_the_loss_from_being_told(extends_late: bool, grace: float) -> None:
    table = Table(extends_late=extends_late)
    hold = table.hold(1_000, left=14)
    table.extends(1_000)
    assert table.begin(hold, 1_000)
    now = 1_000.0
    while not table.losses:
        now = table.next_look()
        assert table.extends(now) == []
    assert hold.deadline + grace - table.schedule.width <= now <= hold.deadline + grace
    assert table.losses == [hold]
    assert table.next_look() == math.inf
    table.extended(hold, "late", 30, before=1_000, now=1_100)
    assert (hold.status, hold.newest, hold.busy) == (State.LOST, "late", False)


def test_an_extension_that_is_answered_after_the_lease_holds_it_again() -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    table.extends(1_000)
    assert table.begin(hold, 1_000)
    assert table.extends(1_014) == []
    table.extended(hold, "late", 30, before=1_000, now=1_016)
    assert (hold.status, hold.deadline, hold.newest) == (State.HELD, 1_030, "late")
    assert table.losses == []
    assert abs(table.next_extension(1_016) - 1_015) <= 1, "and it is kept from there on"


@for_each("answer", ["kept", UNREACHABLE, LeaseTaken(sequence=1, attempt=1)])
def test_what_a_machine_slept_through_is_asked_of_the_queue_once(answer: str | VeilError) -> None:
    table = Table()
    hold = table.hold(1_000)
    now = 4_600.0
    assert table.extends(now) == [hold]
    assert table.losses == [], "nobody knows yet"
    table.extend(hold, now, answer)
    assert table.next_extension(now, until=now + 5) == math.inf
    assert (hold.status is State.HELD) == (answer == "kept")
    assert table.losses == ([] if answer == "kept" else [hold])


def test_what_may_not_be_extended_late_is_lost_after_a_sleep() -> None:
    table = Table(extends_late=False)
    hold = table.hold(1_000)
    assert table.extends(4_600) == []
    assert (table.losses, hold.reason) == ([hold], Reason.EXPIRED)


def test_a_loss_is_told_before_the_lease_ends_and_not_long_before() -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    table.extends(1_000)
    table.extend(hold, 1_000, UNREACHABLE)
    now = 1_000.0
    while not table.losses:
        now = table.next_look()
        for each in table.extends(now):
            table.extend(each, now, UNREACHABLE)
    assert hold.deadline - table.schedule.width <= now <= hold.deadline


def test_after_max_hold_the_message_is_free_at_that_very_time() -> None:
    table = Table(Parameters(minimal_life=5, interval=10, visibility_timeout=30, max_hold=100))
    hold = table.hold(1_000)
    now = 1_000.0
    while (at := table.next_extension(now)) < math.inf:
        now = at
        table.extend(hold, now)
    assert hold.deadline == pytest.approx(1_100)
    assert hold.reason is Reason.MAX_HOLD
    assert 75 <= now - 1_000 <= 100


@for_each("waited", [0, 3_000])
def test_the_cap_of_the_protocol_cancels_before_it(waited: int) -> None:
    """It counts from the receive, not from when the keeper was told."""
    table = Table(
        Parameters(minimal_life=60, interval=600, visibility_timeout=3_600, max_hold=90_000), lease_total_max=43_200
    )
    hold = table.hold(waited, left=3_600 - waited, asked=0)
    now = float(waited)
    while (at := table.next_extension(now)) < math.inf:
        now = at
        assert now + table.extend(hold, now) <= 43_200 - 60
    assert hold.reason is Reason.TOTAL_CAP
    assert hold.deadline == pytest.approx(43_140)


def test_a_plan_says_how_long_and_how_early() -> None:
    table = Table(plan=Growing())
    hold = table.hold(1_000, left=300, wanted=8.0)
    assert table.extends(1_000) == [hold], "300 s are not what the plan wants"
    assert table.extend(hold, 1_000) == 8
    at = table.next_extension(1_000)
    assert 1_006 - table.schedule.width <= at <= 1_006
    assert table.extend(hold, at) == pytest.approx(4 + at - 1_000)


def test_a_plan_that_got_what_it_wants_changes_nothing() -> None:
    table = Table(plan=Growing())
    hold = table.hold(1_000, left=8, wanted=8.0)
    assert table.extends(1_000) == []
    assert hold.wanted is None


def test_leases_are_clamped_to_what_the_queue_can_do() -> None:
    table = Table(plan=Growing(), lease_max=10, lease_min=1)
    hold = table.hold(1_000, left=9)
    assert table.length(hold, 1_090) == 10
    assert table.clamped(0.01, 50) == 1
    assert table.clamped(7.2, 50) == 8, "in whole seconds where the shortest lease is one"


@for_each(
    ("error", "status"),
    [(MessageGone(sequence=1, attempt=1), State.DONE), (LeaseTaken(sequence=1, attempt=1), State.LOST)],
)
def test_a_delete_whose_answer_was_lost_is_no_lost_lease_unless_somebody_has_it(
    error: VeilError, status: State
) -> None:
    table = Table()
    hold = table.hold(1_000, left=14)
    table.claim(hold, "end")
    hold.maybe_deleted = True
    table.ended(hold, False, LOST_ANSWER, 1_000)
    assert hold.status is State.HELD
    table.extends(1_000)
    table.extend(hold, 1_000, error)
    assert hold.status is status
    assert table.losses == [hold] * (status is State.LOST)


def test_a_refused_delete_is_a_lost_lease() -> None:
    table = Table()
    hold = table.hold(1_000)
    table.claim(hold, "end")
    table.ended(hold, False, LeaseTaken(sequence=1, attempt=1), 1_000)
    assert hold.reason is Reason.TAKEN


def test_one_look_asks_its_questions_in_their_order() -> None:
    """docs/images/keeper-flow.svg: each question is made true from the last to the first, and then decides."""
    table = Table()
    hold = table.hold(0)
    seen = [table.decide(hold, 1)]
    hold.renew_at = 1
    seen.append(table.decide(hold, 1))
    hold.queued = True
    seen.append(table.decide(hold, 1))
    hold.deadline = 1
    seen.append(table.decide(hold, 1))
    hold.hold_end = 1
    seen.append(table.decide(hold, 1))
    table.claim(hold, "end")
    seen.append(table.decide(hold, 1))
    assert seen == [Look.WAIT, *(decided for _, decided in reversed(LOOKS))]


def test_nothing_keeps_what_is_done_alive() -> None:
    table = Table()
    hold = table.hold(1_000, left=30_000)
    table.claim(hold, "end")
    table.ended(hold, True, None, 1_000)
    remembered = weakref.ref(hold)
    del hold
    gc.collect()
    assert remembered() is None


def test_the_same_receive_is_not_held_twice() -> None:
    table = Table()
    hold = table.hold(1_000)
    with pytest.raises(ParameterInvalid, match="registered already"):
        table.admit(hold, 1_000)
    assert table.registered == 1


def test_nothing_leads_out_of_done_and_lost() -> None:
    assert not {source for source, _ in STEPS} & {State.DONE, State.LOST}


@for_each(
    "values, named",
    [
        ({"visibility_timeout": 15}, "visibility_timeout"),
        ({"visibility_timeout": 10}, "visibility_timeout"),
        ({"visibility_timeout": 50_000}, "visibility_timeout"),
        ({"visibility_timeout": math.nan}, "visibility_timeout"),
        ({"interval": 0}, "interval"),
        ({"interval": -1}, "interval"),
        ({"minimal_life": 0}, "minimal_life"),
        ({"max_hold": math.inf}, "max_hold"),
        ({"senders": 0}, "senders"),
    ],
)
def test_parameters_that_cannot_work_are_refused(values: dict[str, float], named: str) -> None:
    parameters = msgspec.structs.replace(PARAMETERS, **values)
    capabilities = msgspec.structs.replace(translation.CAPABILITIES, lease_max=43_200)
    with pytest.raises(ParameterInvalid) as refused:
        parameters.check(capabilities, None)
    assert refused.value.parameter == named


def test_the_schedule_looks_in_time_at_every_distance() -> None:
    schedule: Schedule[Hold] = Schedule(0.25)
    message = Received("id", "", handle="h", lease_end=0)
    distances = [0, 0.1, 0.25, 3, 4.1, 17, 100, 1_234.5, 43_200, 604_800]
    for distance in distances:
        hold = Hold(message, lead=1, fixed=None, hold_end=math.inf, now=0)
        now, end, looks = 777.7, 777.7 + distance, 0
        schedule.put(hold, end, now)
        while end - now > schedule.width:
            now = schedule.next()
            assert now <= end, "never late"
            assert schedule.take(now, 10) == [hold]
            schedule.put(hold, end, now)
            looks += 1
        assert looks <= 8
        schedule.drop(hold)
        assert schedule.next() == math.inf


def test_the_schedule_holds_few_instants_for_many_leases() -> None:
    schedule: Schedule[Hold] = Schedule(0.01)
    message = Received("id", "", handle="h", lease_end=0)
    now = 0.0
    for number in range(20_000):
        now += 0.01
        hold = Hold(message, lead=1, fixed=None, hold_end=math.inf, now=now)
        schedule.put(hold, now + number % 43_200, now)
        schedule.drop(hold)
    assert len(schedule._heap) < 2_000


class Keeping(RuleBasedStateMachine):
    """Any order of extensions, failures, user calls and time: the table never believes in more than the queue gave."""

    extends_late = False

    def __init__(self) -> None:
        super().__init__()
        parameters = Parameters(minimal_life=1, interval=2, visibility_timeout=8, max_hold=60)
        self.table = Table(parameters, extends_late=self.extends_late)
        self.now = 1_000.0
        self.queue_ends: dict[Hold, float] = {}
        self.ended: set[Hold] = set()
        self.queued: list[Hold] = []
        self.sent: list[tuple[Hold, float, float]] = []

    def live(self) -> Iterator[Hold]:
        return (hold for hold in self.queue_ends if hold.status in (State.HELD, State.EXTENDING))

    def chosen(self, index: int) -> Hold | None:
        free = [hold for hold in self.live() if not hold.busy]
        return free[index % len(free)] if free else None

    @rule(left=st.floats(1.1, 20))
    def receive(self, left: float) -> None:
        hold = self.table.hold(self.now, left=left)
        self.queue_ends[hold] = self.now + left

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.queued += self.table.extends(self.now)

    @precondition(lambda self: self.queued)
    @rule()
    def leave(self) -> None:
        hold = self.queued.pop(0)
        is_free = hold.status is State.HELD and not hold.busy
        is_due = hold.late_until is not None or hold.renew_at <= self.now + self.table.schedule.width
        assert self.table.begin(hold, self.now) == (is_free and is_due)
        if is_free and is_due:
            assert hold not in self.ended, "nothing is extended after a delete or release"
            self.sent.append((hold, self.table.length(hold, self.now), self.now))

    @precondition(lambda self: self.sent)
    @rule(
        took=st.floats(0, 2),
        arrived=st.floats(0, 1),
        answer=st.sampled_from(
            ["kept", "kept", "kept", "unreachable", "answer lost", "answer lost, not done", "taken"]
        ),
    )
    def answer(self, took: float, arrived: float, answer: str) -> None:
        hold, seconds, before = self.sent.pop(0)
        self.now += took
        if answer in ("kept", "answer lost"):
            self.queue_ends[hold] = before + (self.now - before) * arrived + seconds
        errors: dict[str, VeilError] = {
            "unreachable": UNREACHABLE, "answer lost": LOST_ANSWER, "answer lost, not done": LOST_ANSWER,
            "taken": LeaseTaken(sequence=1, attempt=1),
        }  # fmt: skip
        self.table.extended(hold, errors.get(answer, "next"), seconds, before, self.now)

    @rule(index=st.integers(0, 9), seconds=st.floats(0.5, 40), lost=st.booleans())
    def extend_myself(self, index: int, seconds: float, lost: bool) -> None:
        hold = self.chosen(index)
        if hold is not None:
            self.table.claim(hold, "extend")
            self.queue_ends[hold] = self.now + seconds
            self.table.extended(hold, LOST_ANSWER if lost else "mine", seconds, self.now, self.now, own=False)

    @rule(index=st.integers(0, 9), fails=st.booleans())
    def delete(self, index: int, fails: bool) -> None:
        hold = self.chosen(index)
        if hold is not None:
            self.table.claim(hold, "end")
            self.table.ended(hold, not fails, UNREACHABLE if fails else None, self.now)
            if not fails:
                self.ended.add(hold)

    @invariant()
    def believes_no_more_than_the_queue_gave(self) -> None:
        for hold in self.live():
            assert hold.deadline <= self.queue_ends[hold] + 1e-6

    @invariant()
    def forgets_nobody(self) -> None:
        for hold in self.live():
            if not hold.busy:
                assert hold.slot is not None
                assert hold.slot <= max(_told_by(hold), self.now) + 1e-6

    @invariant()
    def tells_in_time(self) -> None:
        self.queued += self.table.extends(self.now)
        for hold in self.live():
            assert self.now <= _told_by(hold)
            assert self.now <= hold.hold_end


def _told_by(hold: Hold) -> float:
    return hold.deadline if hold.late_until is None else hold.late_until


class KeepingLate(Keeping):
    """The same where the queue takes an ended lease up again."""

    extends_late = True


Keeping.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestKeeping = Keeping.TestCase
KeepingLate.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestKeepingLate = KeepingLate.TestCase
