"""Each rule at its edge: what is just excused, and what is not."""

from collections.abc import Callable

import pytest
from tests.checking.script import EXACT, SECOND, Script, grant

from veilmq.checking.lives import with_highest_before
from veilmq.checking.log import Kind, LogInvalid, Outcome
from veilmq.checking.report import Promises
from veilmq.testing.for_each import for_each

INFO, FAIL = Outcome.INFO, Outcome.FAIL
QUIET = Promises(tolerance_us=0, stale_deletes_refused=False)
MOVES = Promises(tolerance_us=0, dead_letters={"jobs": "dead"})
CHAIN = Promises(tolerance_us=0, dead_letters={"jobs": "dead", "dead": "last"})


def received(end: float = 1) -> Script:
    """Message m, sent at 0 and granted as lease 1 for 30 s between 0.5 and `end`."""
    script = Script()
    script.send("m", 0, 0.1)
    script.receive(0.5, end, grant("m", 1, count=1))
    return script


class TestLost:
    def test_only_a_drain_can_tell(self) -> None:
        script = Script()
        script.send("m", 0, 1)
        report = script.report()
        assert (report.clean, report.not_yet_seen) == (True, 1)
        script.drain(2, 3)
        assert script.found() == ["LOST"]

    @for_each(("outcome", "found"), [(INFO, []), (FAIL, ["LOST"]), (Outcome.OK, [])])
    def test_a_delete_that_may_have_happened_explains_it(self, outcome: Outcome, found: list[str]) -> None:
        script = received()
        script.delete(1, 2, 3, outcome)
        script.drain(40, 41)
        assert script.found() == found

    def test_a_send_that_ended_during_the_drain_may_have_come_too_late(self) -> None:
        script = Script()
        script.send("m", 0, 2.5)
        script.drain(2, 3)
        assert script.found() == []

    def test_a_send_without_an_answer_is_no_promise(self) -> None:
        script = Script()
        script.send("m", 0, 1, INFO)
        script.drain(2, 3)
        assert script.found() == []

    def test_a_silent_stale_delete_explains_nothing(self) -> None:
        script = received()
        script.receive(40, 41, grant("m", 2, count=2))
        script.delete(1, 42, 43)
        script.drain(100, 101)
        assert script.found(QUIET) == ["LOST"]
        assert script.found() == ["LOST", "STALE"]

    def test_a_drain_that_failed_says_nothing_and_takes_nothing_back(self) -> None:
        script = Script()
        script.send("m", 0, 1)
        script.drain(2, 3, INFO)
        assert script.found() == []
        script.drain(4, 5)
        script.drain(6, None, INFO)
        assert script.found() == ["LOST"]

    @for_each(("begin", "found"), [(37, []), (40.5, []), (42, ["LOST"])])
    def test_the_drain_of_a_queue_may_move_messages_to_its_dead_letters(self, begin: float, found: list[str]) -> None:
        script = received()
        script.drain(40, 41)
        script.drain(begin, begin + 2, queue="dead")
        assert script.found(MOVES) == found

    def test_a_message_that_nobody_received_is_in_its_queue_alone(self) -> None:
        """So it does not matter when the dead-letter queue was drained."""
        script = Script()
        script.send("m", 0, 1)
        script.drain(40, 41)
        script.drain(40, 41, queue="dead")
        assert script.found(MOVES) == ["LOST"]

    @for_each(("queue", "begin", "found"), [("dead", 5, []), ("dead", 0.2, ["LOST"]), ("x", 5, ["LOST"])])
    def test_a_purge_of_the_dead_letters_explains_it_once_it_may_have_been_there(
        self, queue: str, begin: float, found: list[str]
    ) -> None:
        script = received()
        script.purge(begin, begin + 0.1, queue=queue)
        script.drain(40, 41)
        script.drain(42, 43, queue="dead")
        assert script.found(MOVES) == found

    def test_a_purge_explains_it_and_one_before_does_not(self) -> None:
        script = Script()
        script.purge(0, 1)
        script.send("m", 2, 3)
        script.drain(10, 11)
        assert script.found() == ["LOST"]
        script.purge(4, 5, INFO)
        assert script.found() == []


class TestInvented:
    def test_a_send_without_an_answer_explains_one_message_of_its_body(self) -> None:
        script = Script()
        script.send("b", 0, 1, INFO)
        script.receive(2, 3, grant("m1", 1, body="b"))
        assert script.found() == []
        script.receive(4, 5, grant("m2", 2, body="b"))
        assert script.found() == ["INVENTED"]

    def test_a_refused_send_explains_none(self) -> None:
        script = Script()
        script.send("b", 0, 1, FAIL)
        script.receive(2, 3, grant("m", 1, body="b"))
        assert script.found() == ["INVENTED"]

    def test_a_send_that_began_later_explains_none(self) -> None:
        script = Script()
        script.receive(2, 3, grant("m", 1, body="b"))
        script.send("b", 4, 5, INFO)
        assert script.found() == ["INVENTED"]


class TestOneLease:
    def test_it_runs_from_the_begin_of_the_receive_at_least(self) -> None:
        script = received()  # from 0.5 at the earliest: at least until 30.47, a thousandth less
        script.receive(30, 30.469, grant("m", 2, count=2))
        assert script.found() == ["OVERLAP"]
        script = received()
        script.receive(30, 30.47, grant("m", 2, count=2))
        assert script.found() == []

    @for_each(
        ("call", "found"),
        [
            (lambda script: script.release(1, 2, 3), []),
            (lambda script: script.release(1, 2, 3, INFO), []),
            (lambda script: script.release(1, 2, 3, FAIL), ["OVERLAP"]),
            (lambda script: script.release(1, 2, 3, seconds=10), ["OVERLAP"]),
            (lambda script: script.extend(1, 2, 3, seconds=1), []),
            (lambda script: script.extend(1, 2, 3, seconds=5), ["OVERLAP"]),
        ],
        ids=[
            "released",
            "release unknown",
            "release failed",
            "released for 10 s",
            "extended by 1 s",
            "extended by 5 s",
        ],
    )
    def test_what_the_holder_did_changes_its_end(self, call: Callable[[Script], None], found: list[str]) -> None:
        script = received()
        call(script)
        script.receive(5, 6, grant("m", 2, count=2))
        assert script.found() == found

    def test_a_call_without_an_answer_may_still_happen_later(self) -> None:
        script = received()
        script.release(1, 2, 3, INFO)
        script.extend(1, 4, 5, seconds=30)
        script.receive(6, 7, grant("m", 2, count=2))
        assert script.found() == []

    def test_of_two_extends_at_once_the_shorter_may_be_the_last(self) -> None:
        script = received()
        script.extend(1, 2, 4, seconds=30)
        script.extend(1, 2, 4, seconds=0)
        script.receive(5, 6, grant("m", 2, count=2))
        assert script.found() == []

    def test_two_receives_at_once_overlap_in_either_order(self) -> None:
        script = received(10)
        script.receive(0.6, 9, grant("m", 2))
        assert script.found() == ["OVERLAP"]
        script = Script()
        script.send("m", 0, 0.1)
        script.receive(0.5, 10, grant("m", 1))
        script.receive(0.6, 9, grant("m", 2, seconds=5))  # may have been the first, and over
        assert script.found() == []


class TestHandles:
    def test_a_handle_is_void_once_a_later_grant_was_answered(self) -> None:
        script = received()
        script.receive(40, 41, grant("m", 2, count=2))
        script.delete(1, 40.5, 42)
        assert script.found() == []  # it may have come before the grant

        script = received()
        script.receive(40, 41, grant("m", 2, count=2))
        script.delete(1, 41, 42)
        assert script.found() == ["STALE"]
        assert script.found(QUIET) == []

    def test_a_replaced_handle_is_void(self) -> None:
        script = received()
        script.extend(1, 2, 3, seconds=30, rotates=True)
        script.delete(1, 4, 5, rotation=1)
        assert script.found() == []
        script.extend(1, 4, 5, seconds=30, rotation=0)
        assert script.found() == ["STALE"]

    def test_deleted_twice_is_no_fault(self) -> None:
        script = received()
        script.receive(40, 41, grant("m", 2, count=2))
        script.delete(2, 42, 43)
        script.delete(1, 44, 45)
        assert script.found() == []
        script.extend(2, 44, 45, seconds=1)
        assert script.found() == ["STALE"]


class TestDeleted:
    @for_each(("begin", "found"), [(39, []), (41, ["RESURRECTED"])])
    def test_a_receive_that_began_after_the_answer(self, begin: float, found: list[str]) -> None:
        script = received()
        script.delete(1, 38, 40)
        script.receive(begin, 50, grant("m", 2, count=2))
        assert script.found() == found

    def test_where_stale_deletes_are_silent_only_a_running_lease_is_sure(self) -> None:
        script = received()
        script.delete(1, 38, 40)
        script.receive(41, 50, grant("m", 2, count=2))
        assert script.found(QUIET) == []
        script = received()
        script.delete(1, 2, 3)
        script.receive(41, 50, grant("m", 2, count=2))
        assert script.found(QUIET) == ["RESURRECTED"]

    def test_a_purge_takes_what_was_sent_before_it(self) -> None:
        script = Script()
        script.send("m", 0, 3)
        script.purge(2, 4)
        script.receive(5, 6, grant("m", 1))
        assert script.found() == []
        script.purge(7, 8)
        script.receive(60, 61, grant("m", 2))
        assert script.found() == ["RESURRECTED"]
        assert script.found(Promises(purge_us=60 * SECOND)) == []


class TestTimes:
    @for_each(("end", "found"), [(9.9, ["EARLY"]), (10, [])])
    def test_delay(self, end: float, found: list[str]) -> None:
        script = Script()
        script.send("m", 0, 1, delay_us=10 * SECOND)
        script.receive(9, end, grant("m", 1))
        assert script.found() == found

    @for_each(("begin", "found"), [(11, []), (11.2, ["LATE"])])
    def test_expiry(self, begin: float, found: list[str]) -> None:
        script = Script()
        script.send("m", 0, 1, ttl_us=10 * SECOND)
        script.receive(begin, 12, grant("m", 1))
        assert script.found() == found

    @for_each(("begin", "found"), [(41, []), (41.2, ["LATE"])])
    def test_expiry_by_a_clock_that_loses_time(self, begin: float, found: list[str]) -> None:
        script = Script()
        script.send("m", 0, 1, ttl_us=10 * SECOND)
        script.receive(begin, 42, grant("m", 1))
        assert script.found(Promises(behind_us=30 * SECOND)) == found

    def test_an_expired_message_is_not_lost(self) -> None:
        script = Script()
        script.send("m", 0, 1)
        script.drain(20, 21)
        assert script.found(Promises(tolerance_us=0, retention_us=10 * SECOND)) == []
        assert script.found() == ["LOST"]


class TestGroups:
    @staticmethod
    def _two(numbered: bool = True, second: float = 1) -> Script:
        script = Script("jobs.fifo")
        one, two = (1, 2) if numbered else (None, None)
        script.send("m1", 0, 0.9, group="a", sequence=one)
        script.send("m2", second, 2, group="a", sequence=two)
        return script

    @for_each("numbered", [True, False])
    def test_the_later_waits_for_the_earlier(self, numbered: bool) -> None:
        script = self._two(numbered)
        script.receive(3, 4, grant("m2", 1, group="a"))
        assert script.found() == ["GROUP_ORDER"]

    def test_sends_at_once_have_no_order_without_numbers(self) -> None:
        script = self._two(numbered=False, second=0.5)
        script.receive(3, 4, grant("m2", 1, group="a"))
        assert script.found() == []

    def test_together_in_order_is_allowed(self) -> None:
        script = self._two()
        script.receive(3, 4, grant("m1", 1, group="a"), grant("m2", 2, group="a"))
        script.release(1, 5, 6)
        script.receive(7, 8, grant("m1", 3, group="a"))  # though m2 is in flight
        assert script.found() == []
        script.release(2, 9, 10)
        script.receive(11, 12, grant("m2", 4, group="a"))  # while m1 is in flight
        assert script.found() == ["GROUP_ORDER"]

    @for_each(("begin", "found"), [(6, []), (9, ["GROUP_ORDER"])])
    def test_a_delete_that_may_have_happened_lets_the_next_one_go(self, begin: float, found: list[str]) -> None:
        script = self._two()
        script.receive(3, 4, grant("m1", 1, group="a"))
        script.delete(1, begin, begin + 1, INFO)
        script.receive(7, 8, grant("m2", 2, group="a"))
        assert script.found() == found

    def test_another_group_does_not_wait(self) -> None:
        script = Script("jobs.fifo")
        script.send("m1", 0, 1, group="a", sequence=1)
        script.send("m2", 2, 3, group="b", sequence=2)
        script.receive(4, 5, grant("m2", 1, group="b"))
        assert script.found() == []

    def test_numbers_grow(self) -> None:
        script = Script("jobs.fifo")
        script.send("m1", 0, 1, group="a", sequence=2)
        script.send("m2", 0.9, 3, group="b", sequence=1)
        assert script.found() == []
        script.send("m3", 4, 5, group="c", sequence=2)
        assert script.found() == ["SEQUENCE"]


class TestDuplicates:
    @staticmethod
    def _sent(second: str, begin: float) -> Script:
        script = Script("jobs.fifo")
        script.send("m1", 0, 10, group="a", deduplication="d", sequence=1, body="b")
        script.send(second, begin, begin + 1, group="a", deduplication="d", sequence=int(second[1]), body="b")
        return script

    def test_within_the_window_there_is_one(self) -> None:
        assert self._sent("m2", 200).found() == ["DEDUPLICATION"]
        assert self._sent("m1", 200).found() == []

    def test_after_it_there_are_two(self) -> None:
        assert self._sent("m1", 311).found() == ["DEDUPLICATION"]
        assert self._sent("m2", 311).found() == []
        assert self._sent("m1", 305).found() == []  # the first may have been taken at 10
        assert self._sent("m2", 305).found() == []  # and may have been taken at 0

    def test_a_send_without_an_answer_may_have_been_the_first(self) -> None:
        script = Script("jobs.fifo")
        script.send("m1", 0, 1, INFO, group="a", deduplication="d", body="first")
        script.send("m1", 2, 3, group="a", deduplication="d", body="second", sequence=1)
        script.receive(4, 5, grant("m1", 1, group="a", body="first", deduplication="d"))
        assert script.found() == []
        script.receive(40, 41, grant("m9", 2, group="a", body="first", deduplication="d", sequence=9))
        assert "DEDUPLICATION" in script.found()

    def test_a_purge_forgets_the_ids(self) -> None:
        script = self._sent("m2", 200)
        script.purge(100, 101)
        assert script.found() == []


def test_dead_letters_keep_their_id() -> None:
    script = received()
    script.receive(40, 41, grant("m", 2, count=2), queue="dead")
    assert script.found() == ["INVENTED"]
    assert script.found(Promises(tolerance_us=0, dead_letters={"jobs": "dead"})) == []


def test_a_dead_letter_has_a_sequence_number_of_its_own_and_void_handles_find_nothing_to_delete() -> None:
    dead = "dead.fifo"
    promises = Promises(tolerance_us=0, dead_letters={"jobs.fifo": dead})
    script = Script("jobs.fifo")
    script.send("m", 0, 1, group="a", sequence=7)
    script.receive(2, 3, grant("m", 1, seconds=1, group="a", count=1, sequence=7))
    script.receive(5, 6, grant("m", 2, seconds=1, group="a", count=2, sequence=7))
    script.delete(1, 8, 9)
    assert script.found(promises) == []  # it may have moved by then
    script.receive(10, 11, grant("m", 3, group="a", count=1, sequence=1), queue=dead)
    assert script.found(promises) == []
    script.receive(8.5, 9.5, grant("m", 4, seconds=0, group="a", count=3, sequence=7))
    assert script.found(promises) == []
    script.receive(9.2, 9.5, grant("m", 5, seconds=0, group="a", count=4, sequence=1))
    assert script.found(promises) == ["CHANGED", "STALE"]  # at 9 it had not moved yet


def test_an_answer_that_got_lost_may_have_made_a_message_a_dead_letter() -> None:
    promises = Promises(tolerance_us=0, dead_letters={"jobs.fifo": "dead.fifo"})

    def group(lost: float, last: str) -> Script:
        script = Script("jobs.fifo")
        script.send("m1", 0, 1, group="a", sequence=1)
        script.send("m2", 1, 2, group="a", sequence=2)
        script.use(Kind.RECEIVE, 0, lost, lost, INFO)
        script.receive(5, 6, grant("m2", 1, group="a", count=1, sequence=2))
        script.receive(40, 41, grant("m1", 2, group="a", count=2), queue=last)
        return script

    assert group(3, "dead.fifo").found(promises) == []
    assert group(7, "dead.fifo").found(promises) == ["GROUP_ORDER"]
    assert group(3, "jobs.fifo").found(promises) == ["GROUP_ORDER"], "it had not moved"


def test_a_late_delete_finds_nothing_where_the_message_has_moved_to_the_dead_letters() -> None:
    promises = Promises(tolerance_us=0, dead_letters={"jobs": "dead"})
    for end, found in ((1.4, ["RESURRECTED"]), (3, [])):  # before the lease's end, and after
        script = Script()
        script.send("m", 0, 0.1)
        script.receive(0.5, 1, grant("m", 1, seconds=1, count=1))
        script.delete(1, end - 0.2, end)
        script.receive(4, 5, grant("m", 2, count=2), queue="dead")
        assert script.found(promises) == found
    script.use(Kind.DELETE, 2, 6, 7, queue="dead")
    script.receive(40, 41, grant("m", 3, seconds=1, count=3), queue="dead")
    assert script.found(promises) == ["RESURRECTED"]
    back = Script()
    back.send("m", 0, 0.1)
    back.receive(0.5, 1, grant("m", 1, seconds=1, count=1))
    back.delete(1, 2, 3)
    back.receive(4, 5, grant("m", 2, count=2))
    assert back.found(promises) == ["RESURRECTED"]  # wherever it was, it was not there any more


def test_a_void_handle_that_deletes_is_found_where_a_drain_of_the_dead_letters_finds_nothing() -> None:
    script = received()
    script.receive(40, 41, grant("m", 2, seconds=1, count=2))
    script.delete(1, 45, 46)
    promises = Promises(tolerance_us=0, dead_letters={"jobs": "dead"})
    assert script.found(promises) == []
    script.drain(50, 51)
    script.drain(52, 53, queue="dead")
    assert script.found(promises) == ["LOST", "STALE"]


class TestStaleDeletesOfWhatMayHaveMoved:
    """The second delete found nothing, if the message had moved by then."""

    @staticmethod
    def _deleted(**fields: int) -> Script:
        script = Script()
        script.send("m", 0, 0.1, **fields)
        script.receive(0.5, 1, grant("m", 1, seconds=1, count=1))
        script.receive(3, 4, grant("m", 2, seconds=1, count=2))
        script.delete(1, 6, 7)
        return script

    @for_each(
        ("begin", "outcome", "found"),
        [(8, Outcome.OK, ["STALE"]), (8, INFO, []), (5, Outcome.OK, []), (6.5, Outcome.OK, [])],
    )
    def test_only_a_drain_that_began_after_it_and_succeeded_shows_that_it_had_not(
        self, begin: float, outcome: Outcome, found: list[str]
    ) -> None:
        script = self._deleted()
        script.drain(begin, begin + 2, outcome, queue="dead")
        assert script.found(MOVES) == found

    @for_each(("begin", "found"), [(7.5, []), (0.6, ["STALE"])])
    def test_a_purge_may_have_taken_it_before_the_drain(self, begin: float, found: list[str]) -> None:
        script = self._deleted()
        script.purge(begin, begin + 0.1, queue="dead")
        script.drain(8, 9, queue="dead")
        assert script.found(MOVES) == found

    @for_each(("seconds", "found"), [(8.5, []), (10, ["STALE"])])
    def test_it_may_have_expired_before_the_drain_ended(self, seconds: float, found: list[str]) -> None:
        script = self._deleted(ttl_us=round(seconds * SECOND))
        script.drain(8, 9, queue="dead")
        assert script.found(MOVES) == found

    def test_an_answer_that_got_lost_may_have_moved_it(self) -> None:
        script = Script()
        script.send("m", 0, 0.1, lease=1)
        script.use(Kind.RECEIVE, 0, 1, 2, INFO)
        script.receive(3, 4, grant("m", 2, count=1), queue="dead")
        script.delete(1, 5, 6)
        assert script.found(MOVES) == []


class TestDeadLettersOfDeadLetters:
    @staticmethod
    def _at_the_end() -> Script:
        """The delete came too late: the message had moved on."""
        script = received()
        script.receive(40, 41, grant("m", 2, seconds=1, count=1), queue="dead")
        script.delete(2, 43, 44, queue="dead")
        script.receive(45, 46, grant("m", 3, seconds=1, count=1), queue="last")
        return script

    def test_a_message_keeps_its_id_through_all_of_them(self) -> None:
        script = self._at_the_end()
        assert script.found(CHAIN) == []
        script.receive(50, 51, grant("m", 4, count=2), queue="dead")
        assert script.found(CHAIN) == ["RESURRECTED"], "it came back"

    def test_a_void_handle_may_be_used_once_the_message_may_have_moved_on(self) -> None:
        script = received()
        script.receive(40, 41, grant("m", 2, seconds=1, count=1), queue="dead")
        script.receive(43, 44, grant("m", 3, seconds=1, count=2), queue="dead")
        script.delete(2, 46, 47, queue="dead")
        assert script.found(CHAIN) == []
        script.drain(48, 49, queue="last")
        assert script.found(CHAIN) == ["STALE"]

    def test_a_send_without_an_answer_may_have_gone_to_the_end(self) -> None:
        script = Script()
        script.send("m", 0, 1, INFO)
        script.receive(40, 41, grant("m", 1, count=1), queue="last")
        assert script.found(CHAIN) == []

    def test_only_drains_of_all_of_them_tell_of_a_loss(self) -> None:
        script = received()
        script.drain(40, 41)
        script.drain(42, 43, queue="dead")
        assert script.found(CHAIN) == []
        script.drain(44, 45, queue="last")
        assert script.found(CHAIN) == ["LOST"]

    def test_a_circle_is_no_promise(self) -> None:
        with pytest.raises(LogInvalid, match="the dead letters of queue jobs go round in a circle"):
            received().report(Promises(dead_letters={"jobs": "dead", "dead": "jobs"}))


def test_receive_counts_grow() -> None:
    script = received()
    script.receive(40, 41, grant("m", 2, count=1))
    assert script.found() == ["COUNT"]


def test_a_lease_that_nobody_granted_is_no_history() -> None:
    script = received()
    script.use(Kind.DELETE, 7, 2, 3)
    with pytest.raises(LogInvalid, match="operation 3 uses a lease that no operation granted"):
        script.report()


def test_what_a_violation_says() -> None:
    script = received()
    script.receive(5, 6, grant("m", 2, count=2))
    assert str(script.report(EXACT)) == (
        "3 operations on 1 message: 1 violation (two leases at a time: 1)\n\n"
        "two leases at a time: message m of queue jobs was granted as lease 2 while lease 1 was still running\n"
        "    0.000000 s  c receives message m (lease 1 of 30 s, body m, receive count 1) from queue jobs: "
        "done at 0.500000 s\n"
        "    4.500000 s  c receives message m (lease 2 of 30 s, body m, receive count 2) from queue jobs: "
        "done at 5.500000 s"
    )


def test_a_rule_that_is_broken_often_has_ten_stories() -> None:
    script = Script()
    for number in range(50):
        script.send(f"m{number}", number, number + 1)
    script.drain(100, 101)
    report = script.report()
    assert (report.counts.total(), len(report.violations)) == (50, 10)


def test_the_highest_before_ended_at_the_begin_or_earlier_and_is_another_one() -> None:
    one, two, moment = (0, 1, 5), (1, 2, 3), (3, 3, 9)
    found = with_highest_before((one, two, moment), lambda each: each[0], lambda each: each[1], lambda each: each[2])
    assert list(found) == [(one, None), (two, one), (moment, one)]
