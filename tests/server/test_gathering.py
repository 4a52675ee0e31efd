"""When a batch begins: after how many turns of the loop, and at what it stops waiting."""

from tests.support.clock import EPOCH

from veilmq.model.instant import Instant
from veilmq.server.shell import Gathering
from veilmq.testing.for_each import for_each


def turns(
    backlogs: list[int],
    turn_us: int = 10,
    full_from: int = 1_000_000,
    stalled: bool = False,
    expected: tuple[int, int] = (0, 0),
) -> int:
    """In which turn the batch begins if so many calls are there in each; the last number stays. expected: calls, and
    the time of the commit before."""
    gathering = Gathering()
    gathering.expect(*expected)
    for turn in range(1, 10_000):
        backlog = backlogs[min(turn, len(backlogs)) - 1]
        now = Instant(EPOCH + turn * turn_us)
        if not gathering.goes_on(now, backlog, full=backlog >= full_from, stalled=stalled):
            return turn
    raise AssertionError("it never begins")


def test_with_nothing_to_take_nothing_is_waited_for() -> None:
    assert turns([0]) == 1


def test_a_call_alone_waits_for_one_turn() -> None:
    assert turns([1]) == 2


def test_several_wait_until_three_turns_bring_nothing() -> None:
    assert turns([2]) == 4
    assert turns([2, 2, 2, 3, 3, 3, 4]) == 10


def test_those_that_may_follow_a_commit_to_a_log_are_waited_for_a_quarter_of_its_time() -> None:
    after_800_us = (32, 800)
    assert turns([9], expected=after_800_us) == 21
    assert turns([9, 9, 9, 9, 9, 9, 9, 20], expected=after_800_us) == 28
    assert turns([9, 9, 9, 9, 9, 9, 9, 32], expected=after_800_us) == 11  # all are here, and three turns bring no more
    assert turns([0], expected=after_800_us) == 1
    assert turns([2], turn_us=1_000, expected=(32, 1_000_000)) == 6  # nobody waits for long


def test_only_a_turn_for_calls_that_are_expected_is_slept_before() -> None:
    gathering = Gathering()
    gathering.expect(32, 800)
    rests = []
    for turn, backlog in enumerate([9, 9, 9, 9, 9, 20, 20, 20, 20, 20, 32]):
        assert gathering.goes_on(Instant(EPOCH + turn * 10), backlog, full=False, stalled=False)
        rests.append(gathering.rests)
    assert rests == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2 + [False]


def test_a_call_that_is_answered_meanwhile_brings_nothing() -> None:
    assert turns([4, 3, 3]) == 4


def test_many_calls_wait_for_no_more() -> None:
    assert turns(list(range(2, 1_000))) == 127  # then there are 128


def test_a_full_batch_waits_for_no_more() -> None:
    assert turns(list(range(2, 1_000)), full_from=10) == 9


def test_nobody_waits_for_long() -> None:
    assert turns(list(range(2, 1_000)), turn_us=1_000) == 6  # five milliseconds after the first look


def test_after_a_stall_what_arrived_in_it_is_read() -> None:
    calls = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 200]
    assert turns(calls, turn_us=1_000, full_from=100, stalled=True) == 19
    assert turns([0], stalled=True) == 8


def test_after_a_stall_a_stream_of_calls_does_not_keep_it_for_ever() -> None:
    assert turns(list(range(10_000)), stalled=True) == 2_000


@for_each("stalled", [False, True])
def test_each_wait_begins_anew(stalled: bool) -> None:
    gathering = Gathering()

    def until_taken(at_us: int) -> int:
        taken = (
            turn
            for turn in range(1, 100)
            if not gathering.goes_on(Instant(EPOCH + at_us + turn), 5, full=False, stalled=stalled)
        )
        return next(taken)

    assert until_taken(0) == until_taken(10_000_000) == (9 if stalled else 4)
