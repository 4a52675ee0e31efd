"""attempts, survival, timeouts and split, against histories whose laws are known."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.pipeline.histories_stage import S, event, extended, frame, received, resumed, retried, sent, table_of
from tests.support.histories import (
    Law,
    Workload,
    bimodal,
    drifting,
    history,
    lognormal,
    pareto,
)

from veilmq.client.timeouts import Costs
from veilmq.pipeline.estimates import Curve, Sample, sample_of
from veilmq.pipeline.estimates.buckets import BOUNDS, bucket_of, histogram
from veilmq.pipeline.estimates.prices import at_bounds, schedule_price, steady, timeout_price
from veilmq.pipeline.jobs.attempts import attempts, judged, merged, partials
from veilmq.pipeline.jobs.split import split
from veilmq.pipeline.jobs.survival import curve, quantiles
from veilmq.pipeline.jobs.timeouts import best_timeout, plan, rated, recommended, redelivery_curve
from veilmq.testing.for_each import for_each

STORIES = {
    "deleted under its lease": ([received(100), event("deleted", 112)], ("deleted", True, 12.0)),
    "deleted late, and nobody else had it": (
        [received(100), event("lease_expired", 130), event("deleted", 131)],
        ("deleted", True, 31.0),
    ),
    "a retried delete is no duplicate work": (
        [received(100), event("deleted", 112), event("delete_refused", 113, type=None, detail={"reason": "gone"})],
        ("deleted", True, 12.0),
    ),
    "a stale delete makes a censored sample exact": (
        [
            received(100),
            event("lease_expired", 130),
            received(131, attempt=2),
            event("delete_refused", 171, detail={"reason": "stale"}),
        ],
        ("redone", True, 71.0),
    ),
    "a crash is censored at its last extension": (
        [received(100), extended(120), extended(140), event("lease_expired", 170)],
        ("crashed", False, 40.0),
    ),
    "a crash before any extension says nothing": (
        [received(100), event("lease_expired", 130)],
        ("crashed", False, 0.0),
    ),
    "a refused extension is a sign of life": (
        [received(100), event("lease_expired", 130), event("extend_refused", 135, detail={"reason": "expired"})],
        ("lost", False, 35.0),
    ),
    "a handler that failed took exactly that long": (
        [received(100), retried(109, 60, "raised"), event("retry_due", 169)],
        ("failed", True, 9.0),
    ),
    "a retry whose reason nobody gave is a failure too": (
        [received(100), extended(120), retried(125, 0, None)],
        ("failed", True, 25.0),
    ),
    "what another worker had was not worked": ([received(100), retried(101, 60, "busy")], ("released", False, 1.0)),
    "a worker that went on after all": (
        [received(100), retried(109, 60, "raised"), extended(110), event("deleted", 115)],
        ("deleted", True, 15.0),
    ),
    "a worker that went on after all, and crashed": (
        [received(100), retried(109, 60, "raised"), extended(112), event("lease_expired", 142)],
        ("crashed", False, 12.0),
    ),
    "a lease that was shortened and ran out is no crash": (
        [received(100), extended(110, lease=5), event("expired_after_change", 115)],
        ("changed", False, 10.0),
    ),
    "a late extension takes the lease up again": (
        [received(100), event("lease_expired", 130), resumed(140), event("deleted", 150)],
        ("deleted", True, 50.0),
    ),
    "a lease that was taken up again may still end in a crash": (
        [received(100), event("lease_expired", 130), resumed(140), event("lease_expired", 170)],
        ("crashed", False, 40.0),
    ),
    "a lease that was taken up again runs on": (
        [received(100), event("lease_expired", 130), resumed(140)],
        ("open", False, 40.0),
    ),
    "given back": ([received(100), event("released", 109, lease_us=0)], ("released", False, 9.0)),
    "reached nobody": ([received(100), event("undelivered", 101)], ("undelivered", False, 0.0)),
    "dead under its lease": ([received(100), extended(110), event("expired", 115)], ("dropped", False, 10.0)),
    "ran out, and later its retention was over": (
        [received(100), event("lease_expired", 130), event("expired", 200)],
        ("crashed", False, 0.0),
    ),
    "ran out, and an operator's job deleted it": (
        [received(100), event("lease_expired", 130), event("deleted", 200, detail={"job": "x"})],
        ("crashed", False, 0.0),
    ),
    "failed, and an operator's job deleted it": (
        [received(100), retried(109, 60, "raised"), event("deleted", 200, detail={"job": "x"})],
        ("failed", True, 9.0),
    ),
    "an operator's job gave it back": (
        [received(100), extended(110), event("released", 120, lease_us=0, detail={"job": "x"})],
        ("dropped", False, 10.0),
    ),
    "still at it": ([received(100), extended(120)], ("open", False, 20.0)),
    "who only looks is no worker": (
        [received(100, lease=0), event("lease_expired", 100)],
        ("undelivered", False, 0.0),
    ),
    "who looked and was late is alive": (
        [received(100, lease=0), event("lease_expired", 100), event("extend_refused", 105, detail={"reason": "stale"})],
        ("lost", False, 5.0),
    ),
    "a lease of 0 s": ([received(100, lease=0), extended(101), event("deleted", 105)], ("deleted", True, 5.0)),
}


@pytest.fixture(scope="module")
def stories(spark: Any) -> dict[int, Any]:
    """The first lease of each story, by its place; all stories are one history."""
    events = [each | {"sequence": number} for number, (told, _) in enumerate(STORIES.values()) for each in told]
    return {row.sequence: row for row in attempts(frame(spark, table_of(events))).where("attempt = 1").collect()}


@for_each("story", STORIES)
def test_attempts_tells_how_a_lease_ended(stories: dict[int, Any], story: str) -> None:
    row = stories[list(STORIES).index(story)]
    assert (row.outcome, row.exact, row.held_us / 1e6) == STORIES[story][1]


def test_attempts_names_each_lease_once(spark: Any) -> None:
    events = [
        sent(90),
        received(100, principal="AK", client="boto3", message="ab", source="receive"),
        extended(115, lease=60),
        event("lease_expired", 175),
        received(176, attempt=2),
        event("deleted", 180, attempt=2),
        {**received(100), "sequence": 2},
    ]
    rows = attempts(frame(spark, table_of(events))).orderBy("sequence", "attempt").collect()
    assert [(row.sequence, row.attempt) for row in rows] == [(1, 1), (1, 2), (2, 1)]
    first = rows[0]
    assert (first.principal, first.client, first.message, first.source, first.type) == (
        "AK",
        "boto3",
        "ab",
        "receive",
        "t",
    )
    assert (first.granted, first.lease_us, first.extensions) == (100 * S, 30 * S, 1)
    assert first.lease_end_us == 75 * S
    assert first.renewed_share == pytest.approx(0.5)


def test_attempts_tells_how_long_a_lease_that_runs_on_was_watched(spark: Any) -> None:
    events = [
        received(100, lease=600),
        received(110, lease=20, sequence=2),  # its message was purged: nobody tells of its end
        received(200, lease=600, sequence=3),
        extended(300, lease=600, sequence=3),
        event("deleted", 400, sequence=4),
    ]
    rows = attempts(frame(spark, table_of(events))).orderBy("sequence").collect()
    assert [row.outcome for row in rows] == ["open"] * 3
    assert [row.watched_us for row in rows] == [300 * S, None, 200 * S]
    assert [row.held_us for row in rows] == [0, 0, 100 * S]


@pytest.mark.slow
def test_attempts_can_be_taken_in_two_halves(spark: Any) -> None:
    table = history([Workload("q", lognormal(20, 1), "t", 400, crashes_per_second=1 / 300, extend=20.0)], seed=1)
    whole = attempts(frame(spark, table))
    half = table.num_rows // 2
    parts = partials(frame(spark, table.slice(0, half))).unionByName(partials(frame(spark, table.slice(half))))
    assert whole.exceptAll(judged(merged(parts))).count() == 0
    assert whole.count() == judged(merged(parts)).count()


def test_buckets_agree_with_spark(spark: Any) -> None:
    from pyspark.sql import functions as F

    from veilmq.pipeline.estimates.buckets import bucket_column

    seconds = [1e-9, 0.05, 0.0500001, 0.06, 1.0, 30.0, 3_600.0, 1e9]
    found = spark.createDataFrame([(each,) for each in seconds], "s double").select(bucket_column(F.col("s"))).collect()
    assert [row[0] for row in found] == bucket_of(np.array(seconds)).tolist()
    inside = np.array(seconds[:-1])
    assert np.all(BOUNDS[bucket_of(inside)] >= inside * (1 - 1e-9))


MESSAGES = {"messages": 5_000}
NEVER = {"lease": 60.0, "crashes_per_second": 0.0}
SHORT = {"lease": 10.0, "receives_max": 8, "crashes_per_second": 1 / 2_000}
CASES: dict[str, tuple[Law, dict[str, Any]]] = {
    "70 %: crashes, extended": (lognormal(20, 0.8), {"extend": 10.0, "crashes_per_second": 1 / 14}),
    "70 %: crashes, never extended": (lognormal(20, 0.8), {"lease": 300.0, "crashes_per_second": 1 / 14}),
    "70 %: given back at 14 s": (lognormal(20, 0.8), NEVER | {"gives_up": 14.0, "messages": 6_000}),
    "stale deletes": (lognormal(20, 0.8), {"messages": 4_000}),
    "own length": (lognormal(12, 0.8), SHORT | {"keeps": True}),
    "new length each time": (lognormal(12, 0.8), SHORT),
    "bimodal": (bimodal(2, 60, 0.2), {"messages": 20_000, "extend": 20.0, "crashes_per_second": 1 / 3_000}),
    "Pareto": (pareto(5, 1.5), {"messages": 20_000, "extend": 20.0, "crashes_per_second": 1 / 3_000}),
    "drifting": (drifting(5, 50, 0.5), {"messages": 20_000, "extend": 20.0, "crashes_per_second": 1 / 3_000}),
    "cut: Pareto": (pareto(5, 1.5), NEVER | {"gives_up": 30.0}),
    "cut: bimodal": (bimodal(2, 60, 0.2), NEVER | {"gives_up": 30.0}),
    "plan: lognormal": (lognormal(60, 0.8), {"extend": 20.0, "crashes_per_second": 1 / 2_000}),
    "plan: Pareto": (pareto(5, 1.5), {"extend": 20.0, "crashes_per_second": 1 / 2_000}),
    "plan: bimodal": (bimodal(2, 60, 0.2), {"extend": 20.0, "crashes_per_second": 1 / 1_000}),
    "plan: never extended": (lognormal(20, 1.0), {"crashes_per_second": 1 / 500}),
    "plan: 70 % censored": (lognormal(300, 0.8), {"lease": 120.0, "extend": 60.0, "crashes_per_second": 1 / 210}),
    "few": (lognormal(20, 1.0), {"messages": 20, "lease": 600.0}),
}
"""Law and workload; each is a queue of a history, that of the fast ones or that of the others."""
FAST = ("own length", "new length each time", "stale deletes", "cut: bimodal", "plan: lognormal", "few")


def named(start: str) -> list[Any]:
    """The cases whose name begins so, as parameters; most are slow."""
    names = [name for name in CASES if name.startswith(start)]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


class Analysed(NamedTuple):
    """What the jobs say of one case."""

    curve: Curve
    quantiles: Any
    recommended: Any
    points: list[Any]


@pytest.fixture(scope="module")
def cases(spark: Any) -> Callable[[str], Analysed]:
    """By name. A case is analysed together with all that are as fast or as slow."""
    groups: dict[bool, dict[str, Analysed]] = {}

    def case(name: str) -> Analysed:
        is_fast = name in FAST
        if is_fast not in groups:
            groups[is_fast] = analysed(spark, [each for each in CASES if (each in FAST) == is_fast])
        return groups[is_fast][name]

    return case


def analysed(spark: Any, names: list[str]) -> dict[str, Analysed]:
    cells = cells_of(spark, *(Workload(name, CASES[name][0], "t", **MESSAGES | CASES[name][1]) for name in names))
    rows = cells.toPandas()
    points: dict[str, list[Any]] = {name: [] for name in names}
    for row in redelivery_curve(cells).orderBy("timeout_s").collect():
        points[row.queue].append(row)
    told = {row.queue: row for row in quantiles(cells).collect()}
    leases = {row.queue: row for row in recommended(cells).collect()}
    return {
        name: Analysed(Curve(sample_of(rows[rows.queue == name])), told[name], leases[name], points[name])
        for name in names
    }


def cells_of(spark: Any, *workloads: Workload, seed: int = 7) -> Any:
    """The histogram of a made-up history, in memory."""
    found = histogram(attempts(frame(spark, history(workloads, seed=seed)))).toPandas()
    return spark.createDataFrame(found)


@pytest.mark.parametrize("name", named("70 %"))
def test_a_lognormal_law_shows_through_70_percent_of_censoring(cases: Callable[[str], Analysed], name: str) -> None:
    law, how = CASES[name]
    row = cases(name).quantiles
    assert 0.6 < row.censored_share < 0.78
    assert row.p50_s == pytest.approx(law.quantile(0.5), rel=0.1)
    assert row.p99_s == pytest.approx(law.quantile(0.99), rel=0.1)
    assert row.p99_basis == "lognormal"
    assert row.crashes_per_second == pytest.approx(how["crashes_per_second"], rel=0.2)
    # Beyond the longest attempt that was seen, the law is a guess: nothing says that any work takes that long.
    beyond = [point for point in cases(name).points if not point.within_reach]
    assert beyond
    assert all(point.low == 0 < point.redelivered < point.high for point in beyond)


def test_the_p99_is_not_capped_by_the_lease(cases: Callable[[str], Analysed]) -> None:
    """Without the stale deletes that tell of long work, 30 s of lease would be the longest time there is."""
    row = cases("stale deletes").quantiles
    assert row.p99_s == pytest.approx(lognormal(20, 0.8).quantile(0.99), rel=0.1)
    assert row.redone_share > 0.2


@for_each("name", ["own length", "new length each time"])
def test_each_message_counts_once(cases: Callable[[str], Analysed], name: str) -> None:
    """Under a timeout shorter than most work a long message is received many times, and is long each time or not."""
    law, row = CASES[name][0], cases(name).quantiles
    assert row.redelivered_share > 0.3
    assert row.p50_s == pytest.approx(law.quantile(0.5), rel=0.1)
    assert row.p99_s == pytest.approx(law.quantile(0.99), rel=0.1)
    assert row.attempts == MESSAGES["messages"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bimodal", "Pareto", "drifting"])
def test_other_laws_show_as_far_as_the_curve_reaches(cases: Callable[[str], Analysed], name: str) -> None:
    law, row = CASES[name][0], cases(name).quantiles
    for share, found in ((0.5, row.p50_s), (0.9, row.p90_s), (0.99, row.p99_s)):
        assert found == pytest.approx(law.quantile(share), rel=0.1), share
    assert row.p99_basis == "curve"
    assert row.crashes_per_second == pytest.approx(1 / 3_000, rel=0.2)


@pytest.mark.parametrize("name", named("cut"))
def test_beyond_its_reach_it_says_at_least(cases: Callable[[str], Analysed], name: str) -> None:
    row = cases(name).quantiles
    assert (row.p99_s, row.p99_basis) == (None, "at least")
    assert row.at_least_s == pytest.approx(30, rel=0.03)
    plain = cases(name).recommended
    assert plain.timeout_s is None
    assert plain.timeout_at_least_s == pytest.approx(30, rel=0.03)
    assert plain.basis == "level"
    # Where the work that was cut off ends may be guessed from the last that was done, or not at all.
    alive = np.asarray(CASES[name][0].survival(BOUNDS), float)
    true = Costs(crashes_per_second=rated(cases(name).curve.sample, None).crashes_per_second)
    schedule = plan(cases(name).curve.extended(), true)
    cost = float(schedule_price(alive, true.crashes_per_second, schedule, true).cost(true))
    assert plain.cost_low <= cost <= plain.cost_high


@pytest.mark.slow
def test_a_curve_by_window_functions_is_the_curve_by_hand(spark: Any) -> None:
    workload = Workload("q", lognormal(20, 0.8), "t", 2_000, lease=30.0, extend=10.0, crashes_per_second=1 / 60)
    cells = cells_of(spark, workload)
    expected = Curve(sample_of(cells.toPandas()))
    rows = curve(cells).orderBy("bucket").collect()
    for row in rows:
        assert row.alive == pytest.approx(expected.alive[row.bucket], abs=1e-9)
        assert row.low <= row.alive <= row.high
        assert row.high > 1 / expected.attempts
    assert sum(row.finished for row in rows) == pytest.approx(expected.finished)
    assert {row.within_reach for row in rows if row.seconds < expected.reach_s} == {True}


@pytest.mark.parametrize("name", named("plan"))
def test_recommended_leases_cost_what_the_best_would(cases: Callable[[str], Analysed], name: str) -> None:
    law, how = CASES[name]
    found, rate = cases(name), how["crashes_per_second"]
    row = found.recommended
    true = Costs(crashes_per_second=rate)
    alive = np.asarray(law.survival(BOUNDS), float)
    best = plan(alive, true)
    mine = plan(found.curve.extended(), rated(found.curve.sample, None))
    assert row.first_lease_s == pytest.approx(mine.first)
    assert row.renew_after_s == pytest.approx(mine.first - mine.margin)
    assert row.renew_after_high_s == pytest.approx(row.first_lease_high_s - mine.margin)
    assert 1 <= row.renew_after_low_s < row.renew_after_s < row.renew_after_high_s
    cheapest = float(schedule_price(alive, rate, best, true).cost(true))
    assert float(schedule_price(alive, rate, mine, true).cost(true)) <= 1.1 * cheapest
    assert row.cost_low <= row.cost <= row.cost_high
    assert row.extensions == pytest.approx(float(schedule_price(alive, rate, mine, true).extensions), rel=0.1)
    assert row.cost_low <= 1.1 * cheapest
    assert cheapest <= 1.1 * row.cost_high
    timeout, _ = best_timeout(alive, true, 43_200)
    if row.timeout_s is None:
        assert 0.2 * timeout < row.timeout_at_least_s < 1.1 * timeout
        return
    cost = timeout_price(alive, rate, np.array([timeout, row.timeout_s])).cost(true)
    assert cost[1] <= 1.1 * cost[0]


CUT: dict[str, dict[str, Any]] = {
    "never extended": {"lease": 43_200.0},
    "extended": {"lease": 600.0, "extend": 300.0},
    "extended, crashes": {"lease": 600.0, "extend": 300.0, "crashes_per_second": 1 / 7_200},
}
"""How leases are held whose history ends while a quarter of them runs on."""


@pytest.mark.slow
def test_work_that_goes_on_when_the_history_ends_does_not_look_short(spark: Any) -> None:
    law = lognormal(1_200, 1)
    workloads = [Workload(name, law, "t", 4_000, **how) for name, how in CUT.items()]
    table = history(workloads, seed=3, span=7_200.0, until=7_200.0)
    cells = histogram(attempts(frame(spark, table)))
    assert cells.where("ended = 'watched'").count() > 0
    found = {row.queue: row for row in quantiles(cells).collect()}
    for name, how in CUT.items():
        row = found[name]
        assert row.finished < 3_100
        assert (row.p50_s, row.p99_s) == pytest.approx((law.quantile(0.5), law.quantile(0.99)), rel=0.1)
        assert row.crashes_per_second == pytest.approx(how.get("crashes_per_second", 0.0), rel=0.2)


def test_too_few_attempts_are_said_to_be_too_few(cases: Callable[[str], Analysed]) -> None:
    row = cases("few").recommended
    assert (row.basis, row.timeout_s, row.first_lease_s) == ("too few", None, None)
    assert "30 are needed" in row.note
    assert cases("few").points == []


def test_today_is_what_leases_were_granted(cases: Callable[[str], Analysed]) -> None:
    found, law = cases("stale deletes"), lognormal(20, 0.8)
    row = found.recommended
    assert row.today_lease_s == pytest.approx(30)
    assert row.today_renewed is False
    lives = sum(float(law.survival(30.0 * number)) for number in range(1, 20))
    assert row.today_redelivered == pytest.approx(lives, rel=0.1)
    assert row.today_cost > 3 * row.timeout_cost
    points = found.points
    near = min(points, key=lambda point: abs(point.timeout_s - 30))
    assert near.redelivered == pytest.approx(float(law.survival(near.timeout_s)), abs=0.03)
    assert [point.redelivered for point in points] == sorted((point.redelivered for point in points), reverse=True)
    assert [point.recovery_s for point in points] == sorted(point.recovery_s for point in points)
    # Also beyond the longest message: that none was seen there does not make the law's share sure.
    assert points[-1].redelivered < 1e-4
    assert all(point.low <= point.redelivered and point.high > 1 / row.attempts for point in points)
    extended = cases("plan: lognormal").recommended
    assert extended.today_renewed is True
    assert extended.today_lease_s == pytest.approx(30)


@pytest.mark.slow
def test_types_that_take_differently_get_queues_of_their_own(spark: Any) -> None:
    how: dict[str, Any] = {"messages": 1_500, "lease": 900.0, "crashes_per_second": 1 / 2_000}
    cells = cells_of(
        spark,
        Workload("mixed", lognormal(2, 0.4), "thumbnail", **how),
        Workload("mixed", lognormal(2.4, 0.4), "icon", **how),
        Workload("mixed", lognormal(200, 0.4), "video", **how),
        Workload("alike", lognormal(20, 0.4), "a", **how),
        Workload("alike", lognormal(22, 0.4), "b", **how),
    )
    rows = split(cells).orderBy("queue", "part").collect()
    assert [(row.queue, sorted(row.types)) for row in rows] == [
        ("alike", ["a", "b"]),
        ("mixed", ["icon", "thumbnail"]),
        ("mixed", ["video"]),
    ]
    alike, short, long = rows
    assert alike.gain == 0
    assert alike.timeout_s == alike.together_timeout_s
    assert short.timeout_s < 30 < 200 < long.timeout_s
    assert short.recovery_s < 0.1 * short.together_recovery_s
    assert 0 < short.gain < 1
    assert short.split_cost < short.together_cost
    assert alike.gain_low == alike.gain_high == 0
    assert short.gain_low < short.gain < short.gain_high < short.gain_low + 0.2
    for row in rows:
        assert row.timeout_low_s <= row.timeout_s <= row.timeout_high_s < 3 * row.timeout_low_s


class TestCurves:
    def test_nothing_has_no_law(self) -> None:
        nothing = np.zeros(len(BOUNDS))
        empty = Curve(Sample(nothing, nothing, 0.0, 0.0))
        assert empty.quantile(0.5) == (None, 0.0, None, "at least")
        assert empty.law is None
        assert empty.reach_s == 0

    def test_a_curve_is_straight_between_its_bounds(self) -> None:
        alive = np.linspace(1, 0, len(BOUNDS))
        middle = np.sqrt(BOUNDS[100] * BOUNDS[101])
        assert at_bounds(alive, np.array([middle]))[0] == pytest.approx((alive[100] + alive[101]) / 2)

    def test_a_schedule_costs_what_its_planner_says(self) -> None:
        costs = Costs(crashes_per_second=1 / 1_000)
        alive = np.asarray(lognormal(60, 1).survival(BOUNDS), float)
        schedule = plan(alive, costs)
        assert float(schedule_price(alive, 1 / 1_000, schedule, costs).cost(costs)) == pytest.approx(
            schedule.cost, rel=0.03
        )

    def test_where_crashes_are_frequent_nobody_extends(self) -> None:
        alive = np.where(BOUNDS < 50, 1.0, 0.5)
        price = schedule_price(alive, 1.0, steady(3_600.0, 60.0), Costs())
        assert price.extensions == pytest.approx(0)

    def test_a_timeout_costs_what_chance_says(self) -> None:
        """Constant work of 50 s under leases of 30 s: a duplicate at 30 s, and crashes wait for what is left."""
        alive = np.where(BOUNDS < 50, 1.0, 0.0)
        price = timeout_price(alive, 1e-4, np.array([30.0, 100.0]))
        assert price.duplicates == pytest.approx([1.0, 0.0], abs=0.01)
        # A crash within the first 30 s waits 15 s on the average; under the longer lease, 75 s of 50.
        assert price.recovery_s == pytest.approx([1e-4 * 30 * 15, 1e-4 * 50 * 75], rel=0.05)
