"""The lease clock: later of mark and wall, slewed by at most 500 ppm, never backwards, whatever the wall clock does."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.engine.lease_clock import SLEW_PPM_MAX, piece
from veilmq.model.instant import HOUR_US, SECOND_US, Instant
from veilmq.server.clock import LeaseClock, boot_ns, wall
from veilmq.testing.for_each import for_each

START = Instant(1_700_000_000 * SECOND_US)
SECOND_NS = 1_000_000_000


class Clocks:
    """A wall clock and a boot clock that are set by hand."""

    def __init__(self) -> None:
        self.wall = START
        self.boot_ns = 5 * SECOND_NS

    def pass_us(self, us: int, *, wall_us: int | None = None) -> None:
        self.boot_ns += us * 1_000
        self.wall = Instant(self.wall + (us if wall_us is None else wall_us))

    def lease_clock(self) -> LeaseClock:
        return LeaseClock(lambda: self.wall, lambda: self.boot_ns)


def test_it_starts_from_wall_time() -> None:
    assert Clocks().lease_clock().now() == START


def test_it_starts_from_a_mark_that_is_later() -> None:
    clock = Clocks().lease_clock()
    clock.start(Instant(START + 10 * SECOND_US))
    assert clock.now() == START + 10 * SECOND_US
    assert not clock.ahead


def test_an_earlier_mark_changes_nothing() -> None:
    clock = Clocks().lease_clock()
    clock.start(Instant(START - HOUR_US))
    assert clock.now() == START


def test_a_mark_far_ahead_is_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clocks().lease_clock()
    with caplog.at_level(logging.WARNING):
        clock.start(Instant(START + 61 * SECOND_US))
    assert clock.ahead
    assert clock.ahead_us == 61 * SECOND_US
    assert "61 s ahead" in caplog.text


@for_each("apart_us", [HOUR_US, -HOUR_US])
def test_another_machines_clock_goes_on_whatever_wall_time_is_here(apart_us: int) -> None:
    clocks = Clocks()
    clock = clocks.lease_clock()
    clock.take_over(Instant(START + apart_us))
    assert clock.now() == START + apart_us
    clocks.pass_us(10 * SECOND_US)
    assert abs(clock.now() - (START + apart_us + 10 * SECOND_US)) <= 10 * SLEW_PPM_MAX


def test_it_runs_with_the_boot_clock() -> None:
    clocks = Clocks()
    clock = clocks.lease_clock()
    clocks.pass_us(300_000)
    assert clock.now() == START + 300_000
    clocks.pass_us(HOUR_US)
    assert clock.now() == START + 300_000 + HOUR_US


@for_each("jump_us", [HOUR_US, -HOUR_US])
def test_a_wall_clock_that_jumps_bends_it_by_500_ppm(jump_us: int) -> None:
    clocks = Clocks()
    clock = clocks.lease_clock()
    clocks.wall = Instant(START + jump_us)
    for _ in range(100):
        clocks.pass_us(1_000_001)
        clock.now()
    moved = clock.now() - START - 100 * 1_000_001
    assert 0 < moved * (1 if jump_us > 0 else -1) <= 100 * SLEW_PPM_MAX


def test_it_meets_wall_time_and_stays_there() -> None:
    clocks = Clocks()
    clock = clocks.lease_clock()
    clock.start(Instant(START + 2_000))
    for _ in range(10):
        clocks.pass_us(1_000_001)
        clock.now()
    assert abs(clock.now() - clocks.wall) <= 2


def test_after_an_idle_hour_it_does_not_pass_wall_time() -> None:
    clocks = Clocks()
    clock = clocks.lease_clock()
    clocks.pass_us(1_000_001, wall_us=1_000_301)
    clock.now()
    clocks.pass_us(HOUR_US)
    assert clock.now() - clocks.wall == pytest.approx(0, abs=2)


steps = st.lists(
    st.tuples(st.integers(0, 3 * SECOND_NS) | st.integers(0, 10**14), st.integers(-HOUR_US, HOUR_US)), max_size=60
)


@given(steps, st.integers(-HOUR_US, HOUR_US))
def test_it_never_goes_back_nor_faster_than_allowed(steps: list[tuple[int, int]], mark: int) -> None:
    clocks = Clocks()
    clock = clocks.lease_clock()
    clock.start(Instant(START + mark))
    before, before_ns = clock.now(), clocks.boot_ns
    for passed_ns, wall_jump_us in steps:
        clocks.boot_ns += passed_ns
        clocks.wall = Instant(clocks.wall + passed_ns // 1_000 + wall_jump_us)
        now = clock.now()
        passed_us = (clocks.boot_ns - before_ns) / 1_000
        slack = passed_us * SLEW_PPM_MAX / 1_000_000 + 2
        assert now >= before
        assert passed_us - slack <= now - before <= passed_us + slack
        before, before_ns = now, clocks.boot_ns


@given(st.integers(-HOUR_US, HOUR_US), st.integers(0, 10**13))
def test_a_piece_and_the_next_meet(behind_us: int, elapsed_ns: int) -> None:
    line = piece(START, 0, Instant(START + behind_us))
    assert line.next(elapsed_ns, START).at(elapsed_ns) == line.at(elapsed_ns)


def test_the_real_clocks() -> None:
    clock = LeaseClock()
    assert abs(clock.now() - wall()) < SECOND_US
    assert boot_ns() <= boot_ns()
