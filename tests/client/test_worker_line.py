"""The parts of a worker that need no queue: the line with its lanes, the token, the alarm."""

import logging
import threading
from collections import deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.client.shared.threads import Alarm
from veilmq.client.worker import Cancelled, Cause
from veilmq.client.worker.job import Cancellation
from veilmq.client.worker.runners.flow import Ready
from veilmq.testing.client_contract.stage import MovableClock

WAIT_S = 30.0


class Item(NamedTuple):
    number: int
    lane: str | None


class TestReady:
    @given(
        st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=40),
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=60, max_size=60),
    )
    def test_a_lane_is_served_in_order_and_by_one_at_a_time(
        self, lanes: list[str | None], steps: list[tuple[int, int]]
    ) -> None:
        ready: Ready[Item] = Ready(100)
        items = [Item(number, lane) for number, lane in enumerate(lanes)]
        coming, working, out = iter(items), [], []
        for most, which in steps:
            if which == 0 and (item := next(coming, None)) is not None:
                assert ready.reserve(1) == 1
                assert ready.put([item])
            elif which == 1 and working:
                ready.done(working.pop(most % len(working)))
            elif ready._line:
                taken = ready.take(most)
                assert 1 <= len(taken) <= most
                busy = {each.lane for unit in working for each in unit} - {None}
                assert not busy & {each.lane for each in taken}
                working.append(taken)
                out += taken
            for lane in "abc":
                served = [each.number for each in out if each.lane == lane]
                assert served == sorted(served)
        for unit in working:
            ready.done(unit)
        rest = ready.close()
        for lane in "abc":
            left = [each.number for each in rest if each.lane == lane]
            assert left == sorted(left)
        assert sorted([*out, *rest]) == items[: len(out) + len(rest)]
        assert ready.in_hand == 0

    def test_one_item_wakes_one_taker(self) -> None:
        looks: list[None] = []

        class Line(deque[Any]):
            def __len__(self) -> int:
                looks.append(None)
                return super().__len__()

        ready: Ready[Item] = Ready(100)
        ready._line = Line()
        takers = [threading.Thread(target=lambda: ready.done(ready.take(1)), daemon=True) for _ in range(40)]
        for taker in takers:
            taker.start()
        while len(looks) < len(takers):
            threading.Event().wait(0.001)
        for number in range(len(takers)):
            assert ready.reserve(1) == 1
            ready.put([Item(number, None)])
            assert ready.wait_until_free(WAIT_S)
        for taker in takers:
            taker.join(WAIT_S)
        # Each looked when it came, when it was woken, and while it took: with all woken each time it were hundreds.
        assert len(looks) <= 4 * len(takers)

    def test_places_are_bounded(self) -> None:
        ready: Ready[Item] = Ready(3)
        assert ready.reserve(2) == 2
        assert ready.reserve(5) == 1
        reserved: list[int] = []
        waiting = threading.Thread(target=lambda: reserved.append(ready.reserve(5)), daemon=True)
        waiting.start()
        while waiting.is_alive() and not ready._less._waiters:
            threading.Event().wait(0.001)
        assert reserved == []
        ready.unreserve(1)
        waiting.join(WAIT_S)
        assert reserved == [1]
        assert ready.put([Item(1, None)])
        assert ready.in_hand == 1
        ready.done(ready.take(1))
        assert ready.reserve(5) == 1

    def test_a_quota_ends_when_nothing_is_reserved(self) -> None:
        ready: Ready[Item] = Ready(10, quota=3)
        assert ready.reserve(10) == 3
        ready.put([Item(1, None)])
        ready.unreserve(2)
        assert ready.reserve(10) == 2
        ready.put([Item(2, None)])
        ready.put([Item(3, None)])
        assert ready.reserve(10) == 0

    def test_the_rest_of_a_lane_can_be_withdrawn(self) -> None:
        ready: Ready[Item] = Ready(10)
        ready.reserve(10)
        for number in range(4):
            ready.put([Item(number, "a")])
        ready.put([Item(4, "b")])
        first = ready.take(1)
        assert [each.number for each in ready.withdraw("a")] == [1, 2, 3]
        ready.done(first)
        assert ready.take(5) == [Item(4, "b")]
        assert ready.withdraw("a") == []

    def test_a_lane_that_nobody_works_can_be_withdrawn(self) -> None:
        ready: Ready[Item] = Ready(10)
        ready.reserve(2)
        ready.put([Item(0, "a")])
        ready.put([Item(1, "b")])
        assert ready.withdraw("a") == [Item(0, "a")]
        assert ready.take(5) == [Item(1, "b")]

    def test_closing_wakes_who_waits(self) -> None:
        ready: Ready[Item] = Ready(1)
        taken: list[Any] = []
        threads = [threading.Thread(target=lambda: taken.append(ready.take(1)))]
        ready.reserve(1)
        threads.append(threading.Thread(target=lambda: taken.append(ready.reserve(1))))
        for thread in threads:
            thread.start()
        assert ready.close() == []
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(map(str, taken)) == ["0", "[]"]
        assert not ready.put([Item(1, None)])


class TestCancellation:
    def test_the_first_cause_stays(self) -> None:
        token, told = Cancellation(), []
        token.on_set(lambda: told.append("first"))
        token.check()
        assert not token
        assert not token.wait(0)
        assert token.set(Cause.LOST, "taken")
        assert not token.set(Cause.SHUTDOWN)
        token.on_set(lambda: told.append("late"))
        assert (told, bool(token), token.wait(0)) == (["first", "late"], True, True)
        with pytest.raises(Cancelled, match="the lease was lost: taken"):
            token.check()

    def test_a_callback_that_fails_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        token, told = Cancellation(), []

        def broken() -> None:
            raise RuntimeError("broken callback")

        token.on_set(broken)
        token.on_set(lambda: told.append("second"))
        assert token.set(Cause.SHUTDOWN)
        assert told == ["second"]
        assert "broken callback" in caplog.text


class TestAlarm:
    def test_calls_come_in_order_and_none_breaks_it(self, caplog: pytest.LogCaptureFixture) -> None:
        order: list[str] = []
        done = threading.Event()
        clock = MovableClock()
        alarm = Alarm(clock, "test alarm")
        now = clock.monotonic()

        def broken() -> None:
            order.append("broken")
            raise RuntimeError("broken call")

        alarm.at(now + 300, done.set)
        alarm.at(now + 200, lambda: order.append("second"))
        alarm.at(now + 100, broken)
        alarm.at(now + 3_000, lambda: order.append("never"))
        assert order == [], "none before its time"
        clock.advance(301)
        assert done.wait(WAIT_S)
        assert order == ["broken", "second"]
        alarm.close()
        alarm.at(now, lambda: order.append("closed"))
        assert "broken call" in caplog.text
        assert logging.getLogger("veilmq.worker").name in caplog.text
