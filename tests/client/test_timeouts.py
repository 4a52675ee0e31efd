"""Survival curves, schedules and the plans that learn: against laws of which the truth is known."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from math import exp, log
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Received, Recommended
from veilmq.client.queue import Queue
from veilmq.client.timeouts import (
    AdaptiveTimeout,
    Costs,
    PublishedPlan,
    Survival,
    ThresholdTimeout,
    plan_of,
)
from veilmq.client.wrapping import Wrapping
from veilmq.estimate.survival import BUCKETS, GROWTH, bound_of, bucket_of
from veilmq.model.commands import SuggestPlan
from veilmq.model.errors import ParameterInvalid
from veilmq.model.instant import SECOND_US
from veilmq.model.settings.queue import LeasePlan
from veilmq.testing import chance
from veilmq.testing.client_contract import for_each


def message(kind: str | None = None) -> Received:
    return Received(id="1", body="", handle="h", lease_end=0.0, type=kind)


class TestSurvival:
    """Kaplan and Meier on buckets."""

    @given(st.floats(0, 1e6))
    def test_a_time_is_in_its_bucket(self, seconds: float) -> None:
        bucket = bucket_of(seconds)
        assert seconds <= bound_of(bucket) * (1 + 1e-9) or bucket == BUCKETS
        assert bucket == 0 or seconds >= bound_of(bucket - 1) * (1 - 1e-9)

    def test_the_curve_of_finished_attempts_is_their_share_that_takes_longer(self) -> None:
        survival = Survival(half_life=None, prior_weight=0)
        for seconds in (1.0, 1.0, 10.0, 100.0):
            survival.finished(seconds)
        curve = survival.curve()
        assert [round(curve[bucket_of(at)], 6) for at in (0.5, 1.0, 5.0, 10.0, 50.0)] == [1, 0.5, 0.5, 0.25, 0.25]
        assert curve[-1] < 1e-6

    def test_censored_attempts_are_neither_short_nor_long(self) -> None:
        # Of a law with median 20 s, all that take longer than a crash allows are censored: up to 70 % of them.
        for rate in (1 / 60, 1 / 15):
            random, survival = chance(7), Survival(half_life=None, prior_weight=0)
            censored = 0
            for _ in range(20_000):
                took, crash = random.lognormvariate(log(20), 0.8), random.expovariate(rate)
                if crash < took:
                    survival.censored(crash)
                    censored += 1
                else:
                    survival.finished(took)
            median = survival.quantile(0.5)
            assert median is not None
            assert 20 / GROWTH**1.5 < median < 20 * GROWTH**1.5
        assert censored > 10_000

    def test_beyond_what_was_seen_it_says_nothing(self) -> None:
        survival = Survival()
        assert survival.quantile(0.5) is None
        for _ in range(100):
            survival.censored(30)
        assert survival.quantile(0.5) is None
        assert bound_of(bucket_of(30)) == survival.reach

    def test_it_follows_a_drift(self) -> None:
        survival = Survival(half_life=100)
        for seconds in (5.0, 300.0):
            for _ in range(1_000):
                survival.finished(seconds)
        median = survival.quantile(0.5)
        assert median is not None
        assert median > 250
        assert survival.curve()[bucket_of(6)] > 0.99

    def test_it_never_overflows(self) -> None:
        survival = Survival(half_life=3)
        for _ in range(2_000):
            survival.finished(10)
        assert 9 < (survival.quantile(0.5) or 0) < 12


class TestSchedule:
    """The cheapest leases for a curve."""

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.floats(0.1, 40_000), max_size=60),
        st.lists(st.floats(0.1, 40_000), max_size=10),
        st.floats(2, 30),
        st.floats(60, 43_200),
    )
    def test_every_lease_keeps_its_bounds(
        self, finished: list[float], censored: list[float], shortest: float, longest: float
    ) -> None:
        survival = Survival()
        for seconds in finished:
            survival.finished(seconds)
        for seconds in censored:
            survival.censored(seconds)
        schedule = plan_of(survival.curve(), shortest=shortest, longest=longest)
        assert schedule.ages[0] == 0
        assert list(schedule.ages) == sorted(schedule.ages)
        assert all(shortest - 1e-6 <= lease <= longest + 1e-6 for lease in schedule.leases)
        assert all(lease > schedule.margin for lease in schedule.leases)
        assert schedule.first == schedule.lease_at(0)
        assert schedule.lease_at(1e9) == schedule.leases[-1]

    def test_work_of_one_length_gets_one_lease_that_just_covers_it(self) -> None:
        survival = Survival()
        for _ in range(500):
            survival.finished(10)
        schedule = plan_of(survival.curve())
        assert 10 < schedule.first < 10 * GROWTH**2 + schedule.margin

    def test_it_is_about_the_best_heartbeat_where_one_is_best(self) -> None:
        # Exponential times have no memory: the best schedule is a steady heartbeat, whose step is known.
        survival = Survival(half_life=None, prior_weight=0)
        random = chance(3)
        for _ in range(50_000):
            survival.finished(random.expovariate(1 / 600))
        costs = Costs()
        schedule = plan_of(survival.curve(), costs)
        late = costs.extend + costs.duplicate * costs.late_share * exp(-schedule.margin / costs.late_mean)
        step = (2 * late / costs.crashes_per_second) ** 0.5
        for age in (0, 60, 300, 900):
            assert step * 0.6 < schedule.lease_at(age) - schedule.margin < step * 1.7

    def test_dearer_duplicates_lengthen_the_margin(self) -> None:
        survival = Survival()
        random = chance(5)
        for _ in range(500):
            survival.finished(random.lognormvariate(log(200), 1))
        cheap, dear = (plan_of(survival.curve(), Costs(duplicate=price)) for price in (20, 5_000))
        assert cheap.margin < dear.margin
        assert dear.duplicates < cheap.duplicates

    def test_more_crashes_shorten_the_leases(self) -> None:
        survival = Survival()
        for _ in range(100):
            survival.finished(600)
        seldom, often = (plan_of(survival.curve(), Costs(crashes_per_second=rate)) for rate in (1 / 72_000, 1 / 720))
        assert often.lease_at(100) < seldom.lease_at(100)


class TestAdaptive:
    """A plan that learns."""

    def test_it_learns_what_a_type_takes_and_tells_types_apart(self) -> None:
        plan = AdaptiveTimeout()
        for _ in range(300):
            plan.finished(message("short"), 2)
            plan.finished(message("long"), 120)
        short, long = plan.schedule_of("short"), plan.schedule_of("long")
        assert 2 <= short.first - short.margin < 2 * GROWTH**2
        assert long.first - long.margin > 10
        assert plan.schedule_of("unknown") is plan.schedule_of(None)

    def test_the_keepers_one_margin_shortens_no_step(self) -> None:
        plan = AdaptiveTimeout()
        for _ in range(300):
            plan.finished(message("short"), 2)
            plan.finished(message("long"), 4_000)
        for kind in ("short", "long"):
            schedule = plan.schedule_of(kind)
            for age in (0.0, 50.0, 500.0):
                lease = plan.first_lease(message(kind)) if age == 0 else plan.next_lease(message(kind), age)
                assert lease - plan.margin == pytest.approx(schedule.lease_at(age) - schedule.margin)

    def test_crashes_and_late_calls_are_learnt(self) -> None:
        plan = AdaptiveTimeout()
        for _ in range(3_000):
            plan.finished(message(), 50)
            plan.vanished(message(), 50)
            plan.late(30)
            plan.late(0)
        assert plan.costs.crashes_per_second == pytest.approx(1 / 100, rel=0.1)
        assert plan.costs.late_share == pytest.approx(0.375, rel=0.05)
        assert plan.costs.late_mean == pytest.approx(30, rel=0.05)
        # Long work, of whose crashes only the redeliveries are seen.
        plan, random = AdaptiveTimeout(), chance(6)
        for _ in range(400):
            took = random.lognormvariate(log(600), 0.5)
            while random.expovariate(1 / 1_000) < took:
                plan.redelivered(message())
            plan.finished(message(), took)
        assert plan.costs.crashes_per_second == pytest.approx(1 / 1_000, rel=0.15)

    def test_duplicates_lengthen_the_margin(self) -> None:
        plan = AdaptiveTimeout()
        before = plan.margin
        for _ in range(100):
            plan.finished(message(), 60)
            plan.lost(message(), 60)
        assert plan.margin > before

    def test_it_may_be_asked_while_it_learns_of_new_types(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(3):
                plan, over = AdaptiveTimeout(), threading.Event()

                def ask(plan: AdaptiveTimeout = plan, over: threading.Event = over) -> float:
                    while not over.is_set():
                        plan.margin  # noqa: B018 a property
                    return plan.margin

                with ThreadPoolExecutor(2) as pool:
                    asked = [pool.submit(ask) for _ in range(2)]
                    for number in range(256):
                        plan.finished(message(str(number)), 1.0)
                    over.set()
                    assert all(each.result() > 0 for each in asked)
        finally:
            sys.setswitchinterval(interval)

    @for_each("bounds", [(0, 10), (10, 10), (-1, 5)])
    def test_bounds_that_cannot_be_are_refused(self, bounds: tuple[float, float]) -> None:
        with pytest.raises(ParameterInvalid, match="shortest"):
            AdaptiveTimeout(shortest=bounds[0], longest=bounds[1])


class TestThreshold:
    """Document 003's rule."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def wall(self) -> float:
            return self.now

    def test_enough_failed_deletes_within_the_window_raise_the_timeout(self) -> None:
        clock = self.Clock()
        rule = ThresholdTimeout(30, failures=3, window=100, factor=2, longest=100, clock=clock)
        for at in (0, 60, 120):  # never three within 100 s
            clock.now = at
            rule.lost(message(), 31)
        assert rule.first_lease(message()) == 30
        clock.now = 130
        rule.lost(message(), 31)
        assert rule.first_lease(message()) == rule.next_lease(message(), 5) == 60
        for _ in range(30):
            rule.lost(message(), 61)
        assert rule.timeout == 100

    def test_a_success_changes_nothing(self) -> None:
        rule = ThresholdTimeout(30, failures=1)
        rule.finished(message(), 500)
        rule.vanished(message(), 500)
        assert rule.timeout == 30
        assert rule.margin == 0

    @for_each(
        "wrong",
        [{"timeout": 0}, {"timeout": 99, "longest": 9}, {"failures": 0}, {"window": 0}, {"factor": 1}, {"margin": -1}],
    )
    def test_values_that_cannot_be_are_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ParameterInvalid) as refused:
            ThresholdTimeout(**{"timeout": 30} | wrong)  # type: ignore[arg-type]
        assert refused.value.parameter in wrong


class TestPublished:
    """Plans that the pipeline published, through the embedded adapter."""

    def test_it_follows_what_is_published(self, embedded: EmbeddedClient) -> None:
        embedded.account.create("jobs")
        queue = embedded.account.queue("jobs")
        assert queue.recommended() is None
        plan = PublishedPlan(queue, default=40, margin=10, every=60, clock=embedded.clock)
        assert plan.first_lease(message("film")) == 40
        publish(embedded, "jobs", lease_us=100 * SECOND_US, by_type={"film": 900 * SECOND_US})
        assert plan.first_lease(message("film")) == 40  # not asked again yet
        embedded.pass_time(61)
        plan.first_lease(message("film"))
        plan._reader.join()
        assert [plan.first_lease(message(kind)) for kind in ("film", "other", None)] == [900, 100, 100]
        assert plan.next_lease(message("film"), 30) == 900
        found = queue.recommended()
        assert found is not None
        assert (found.lease, found.by_type, found.applied) == (100, {"film": 900}, False)

    def test_a_read_that_hangs_holds_up_no_lease(self, embedded: EmbeddedClient) -> None:
        embedded.account.create("jobs")
        queue = SlowToRecommend(embedded.account.queue("jobs"))
        plan = PublishedPlan(queue, default=40, margin=10, every=60, clock=embedded.clock)
        publish(embedded, "jobs", lease_us=100 * SECOND_US)
        queue.go.clear()
        for _ in range(3):
            embedded.pass_time(61)
            assert plan.next_lease(message(), 0) == 40
        assert queue.readers == [threading.main_thread(), plan._reader]  # one at a time
        queue.go.set()
        plan._reader.join()
        assert plan.next_lease(message(), 0) == 100

    @for_each("wrong", [{"margin": 0}, {"margin": 40}, {"every": 0}])
    def test_what_cannot_work_is_refused(self, embedded: EmbeddedClient, wrong: dict[str, float]) -> None:
        embedded.account.create("jobs")
        with pytest.raises(ParameterInvalid):
            PublishedPlan(embedded.account.queue("jobs"), default=40, **wrong)  # type: ignore[arg-type]


class SlowToRecommend(Wrapping):
    """A queue that says what is recommended only while `go` is set. The main thread never waits."""

    def __init__(self, inner: Queue) -> None:
        super().__init__(inner)
        self.go = threading.Event()
        self.go.set()
        self.readers: list[threading.Thread] = []

    def recommended(self) -> Recommended | None:
        self.readers.append(reader := threading.current_thread())
        if reader is not threading.main_thread():
            assert self.go.wait(20)
        return super().recommended()


def publish(client: EmbeddedClient, name: str, **plan: Any) -> None:
    """What the pipeline does through the admin port, by the adapter's own shell."""
    queue = client.account.queue(name)
    queue._one(SuggestPlan(queue=queue._key, origin=queue._origin, plan=LeasePlan(**plan)))
