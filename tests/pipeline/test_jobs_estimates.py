"""Estimates and recommendations over many draws of one law, small samples too: without Spark, so there can be many."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.pipeline.histories_stage import frame
from tests.support.histories import Law, Workload, bimodal, history, lognormal, pareto

from veilmq.client.timeouts import Costs
from veilmq.estimate.schedule import RATE_PRIOR
from veilmq.pipeline.estimates import Curve, Sample, sample_of
from veilmq.pipeline.estimates.buckets import (
    BOUNDS,
    CRASHED,
    DONE,
    SCHEMA,
    STEP,
    WATCHED,
    arrow_of,
    bucket_of,
    histogram,
)
from veilmq.pipeline.estimates.prices import schedule_price, steady, timeout_price
from veilmq.pipeline.estimates.tails import tail_of
from veilmq.pipeline.jobs.attempts import attempts
from veilmq.pipeline.jobs.split import _split
from veilmq.pipeline.jobs.survival import _quantiles, quantiles
from veilmq.pipeline.jobs.timeouts import (
    _curve,
    best_timeout,
    crash_rate,
    other_timeouts,
    plan,
    possible_rates,
    rated,
    recommend,
)
from veilmq.testing.for_each import for_each

BELIEVED = Costs(crashes_per_second=1 / 1_000)
DRAWS = 12


def uniform(low: float, high: float) -> Law:
    return Law(
        f"uniform, {low:g} to {high:g} s",
        lambda random, done: random.uniform(low, high, len(done)),
        lambda t: np.clip((high - np.asarray(t)) / (high - low), 0, 1),
    )


def cells(law: Law, rate: float, number: int, lease: float, extend: float | None, random: Any) -> Any:
    """The histogram of so many attempts under such leases; late deletes are told."""
    takes = law.draw(random, np.zeros(number))
    crash = random.exponential(1 / rate, number)
    dead = crash < takes
    step = extend or 1e12
    extensions = np.floor(np.minimum(takes, crash) / step)
    held = np.where(dead, extensions * step, takes)
    values = {
        "ended": np.where(dead, CRASHED, DONE),
        "bucket": bucket_of(held),
        "until": np.where(dead, bucket_of(extensions * step + lease), 0),
        "lease": bucket_of(lease),
        "leases": 1.0,
        "held_s": held,
        "lease_s": lease,
        "renewals": (extensions > 0) * 1.0,
        "renewed_share": (extensions > 0) * (extend or 0) / lease,
        "redeliveries": 0.0,
        "redone": 0.0,
        "squares": 0.0,
    }
    named = dict(zip(("account", "region", "queue", "type"), ("0", "r", "q", "t"), strict=True))
    frame = pd.DataFrame(named | values)
    assert list(frame.columns) == [part.split()[0] for part in SCHEMA.split(", ")]
    return frame


def dearer(law: Law, rate: float, number: int, lease: float, extend: float | None) -> Any:
    """Over many draws, how many times dearer than the best the found timeout is."""
    random = np.random.default_rng(17)
    true = Costs(crashes_per_second=rate)
    alive = np.asarray(law.survival(BOUNDS), float)
    best, _ = best_timeout(alive, true, 43_200)
    found = []
    for _ in range(DRAWS):
        row = recommend(cells(law, rate, number, lease, extend, random), BELIEVED)
        cost = timeout_price(alive, rate, np.array([best, row["timeout_s"]])).cost(true)
        found.append(cost[1] / cost[0])
    return np.array(found)


LAWS = {
    "short": (lognormal(1.5, 0.4), 0.04),
    "middling": (lognormal(4, 0.5), 0.015),
    "long": (lognormal(45, 0.3), 0.0015),
    "wide": (lognormal(60, 1.2), 1 / 2_000),
    "uniform": (uniform(150, 250), 1 / 3_000),
    "two humps": (bimodal(20, 240, 0.15, 0.3), 1 / 1_000),
    "Pareto": (pareto(5, 1.5), 1 / 500),
}


@pytest.mark.slow
@pytest.mark.parametrize(("lease", "extend"), [(180.0, None), (30.0, 10.0)], ids=["held", "extended"])
@for_each("law", ["short", "middling", "long", "wide"])
def test_sixty_attempts_tell_a_lognormal_laws_timeout(law: str, lease: float, extend: float | None) -> None:
    """Short work above all: what is believed of crashes before any was seen must not drown those that were."""
    found = dearer(*LAWS[law], 60, lease, extend)
    assert np.median(found) <= 1.1
    assert np.quantile(found, 0.9) <= 1.4


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_a_thousand_attempts_tell_any_laws_timeout(law: str) -> None:
    # Of a thousand, ten of a Pareto law's take longer than its best timeout: too few to say more than "at least".
    assert np.median(dearer(*LAWS[law], 5_000 if law == "Pareto" else 1_000, 400.0, None)) <= 1.1


@pytest.mark.parametrize(("lease", "extend"), [(900.0, None), (30.0, 10.0)], ids=["held", "extended"])
@for_each("law", LAWS)
def test_crash_rates_are_not_biased(law: str, lease: float, extend: float | None) -> None:
    """Crashes are placed where they happened, and so is the work before them."""
    random = np.random.default_rng(17)
    found = [sample_of(cells(*LAWS[law], 400, lease, extend, random)).crashes_per_second for _ in range(20)]
    assert np.mean(found) == pytest.approx(LAWS[law][1], rel=0.2)


def test_the_end_of_a_small_sample_does_not_refute_its_law() -> None:
    """All sixty are done: the curve is 0 there, with no error by its own reckoning."""
    random = np.random.default_rng(3)
    fits = [
        Curve(sample_of(cells(lognormal(20, 0.8), 1e-9, 60, 600.0, None, random))).law is not None for _ in range(DRAWS)
    ]
    assert sum(fits) >= DRAWS - 1
    refuted = Curve(sample_of(cells(bimodal(2, 60, 0.2), 1e-9, 1_000, 600.0, None, random)))
    assert refuted.law is None
    finished = np.zeros(len(BOUNDS))
    finished[[250, 280, 300]] = 400, 10, 9
    ended = Curve(Sample(finished, np.zeros(len(BOUNDS)), 0.0, 1e4))
    assert ended.law is None
    assert list(ended.continued()) == list(ended.alive), "all was done, and a Pareto law is contradicted"


def weibull(scale: float, power: float) -> Law:
    """Exponential for a power of 1."""
    return Law(
        f"Weibull, {scale:g} s, power {power:g}",
        lambda random, done: scale * random.weibull(power, len(done)),
        lambda t: np.exp(-((np.asarray(t) / scale) ** power)),
    )


def erlang(mean: float) -> Law:
    """The gamma law of shape 3."""
    return Law(
        f"gamma, {mean:g} s",
        lambda random, done: random.gamma(3.0, mean / 3, len(done)),
        lambda t: (
            (1 + 3 * np.asarray(t) / mean + 4.5 * (np.asarray(t) / mean) ** 2) * np.exp(-3 * np.asarray(t) / mean)
        ),
    )


TAILS: dict[str, tuple[Law, set[str]]] = {
    "exponential": (weibull(20, 1), {"weibull", "gamma"}),
    "Weibull": (weibull(20, 0.6), {"weibull"}),
    "gamma": (erlang(20), {"gamma", "weibull"}),
    "lognormal": (lognormal(12, 0.8), {"lognormal"}),
    "Pareto": (pareto(5, 1.5), {"curve", "at least"}),
    "two humps": (bimodal(5, 60, 0.2), {"curve", "at least"}),
}
"""A law, and on what its p99 may rest."""


@for_each("tail", TAILS)
def test_the_tail_chooses_the_law(tail: str) -> None:
    """400 messages of exponential work of 20 s have a p99 of 92 s, and of 199 s by the lognormal law that fits best."""
    law, bases = TAILS[tail]
    random = np.random.default_rng(11)
    found = [Curve(sample_of(cells(law, 1e-9, 400, 600.0, None, random))).quantile(0.99) for _ in range(DRAWS)]
    assert sum(each.basis in bases for each in found) >= DRAWS - 1, [each.basis for each in found]
    if bases != {"curve", "at least"}:
        ratio = np.median([each.seconds for each in found if each.seconds is not None]) / law.quantile(0.99)
        assert ratio == pytest.approx(1, rel=0.1)


def test_a_law_that_only_fits_the_body_is_contradicted_by_its_tail() -> None:
    """A hundred messages of a heavy tail agree with a lognormal law as well as such a sample can tell."""
    random = np.random.default_rng(3)
    curves = [Curve(sample_of(cells(pareto(5, 1.5), 1 / 1_000, 100, 600.0, None, random))) for _ in range(DRAWS)]
    assert sum(curve.law is not None for curve in curves) <= 1


@for_each(
    ("law", "number", "agrees"),
    [
        (pareto(5, 1.5), 5_000, True),
        (pareto(5, 1.5), 1_000_000, True),
        (uniform(10, 60), 5_000, False),
        (uniform(10, 40), 5_000, False),
        (bimodal(2, 60, 0.2), 5_000, False),
    ],
)
def test_a_tail_cut_off_at_one_age_needs_messages_that_are_spread_out(law: Law, number: int, agrees: bool) -> None:
    """The last hundred before 30 s all took about 30 s, and tell no law from another."""
    random = np.random.default_rng(37)
    for _ in range(DRAWS // 2):
        takes = law.draw(random, np.zeros(number))
        finished = np.bincount(bucket_of(takes[takes <= 30]), minlength=len(BOUNDS)).astype(float)
        censored = np.zeros(len(BOUNDS))
        censored[bucket_of(30.0)] = np.sum(takes > 30)
        tail = tail_of(finished, censored)
        assert tail.agrees is agrees
        if agrees:
            assert tail.fall(finished, censored) == pytest.approx(1.5 * STEP, rel=0.15)
            # Crashes are placed up to the lease's end; that nothing finishes among them says nothing.
            censored[bucket_of(40.0)] = number / 2_000
            curve = Curve(Sample(finished, censored, 0.0, 1e4))
            assert curve.continued()[bucket_of(60.0)] == pytest.approx(law.survival(60.0), rel=0.2)


PRICED: dict[str, tuple[Law, int, float, float]] = {
    "Pareto": (pareto(5, 1.5), 5_000, 1 / 2_000, 0.1),
    "Pareto, crashes are rare": (pareto(5, 1.2), 2_000, 1 / 20_000, 0.3),
    "two humps": (bimodal(2, 60, 0.2), 400, 1 / 500, 0.15),
    "few long messages, few crashes": (bimodal(2, 60, 0.0175), 400, 1 / 2_000, 1.0),
    "lognormal": (lognormal(20, 1), 2_000, 1 / 2_000, 0.1),
}
"""A law, how many messages, crashes a second, and by what share the median cost of a lease may be wrong."""


@pytest.mark.slow
@for_each("work", PRICED)
def test_the_cost_of_a_lease_is_what_it_costs(work: str) -> None:
    """If all work that went on at the reach were endless, a heavy tail's extensions would cost a third too much."""
    law, number, rate, error = PRICED[work]
    alive, true = np.asarray(law.survival(BOUNDS), float), Costs(crashes_per_second=rate)
    random = np.random.default_rng(29)
    today = float(schedule_price(alive, rate, steady(30.0, 10.0), true).cost(true))
    ratios, todays, plains, shown, inside = [], [], [], [], 0
    for _ in range(2 * DRAWS):
        rows = cells(law, rate, number, 30.0, 20.0, random)
        row, curve = recommend(rows, None), Curve(sample_of(rows))
        schedule = plan(curve.extended(), rated(curve.sample, None))
        cost = float(schedule_price(alive, rate, schedule, true).cost(true))
        ratios.append(row["cost"] / cost)
        inside += row["cost_low"] <= cost <= row["cost_high"]
        todays.append(row["today_cost"] / today)
        assert row["today_recovery_s"] <= row["today_lease_s"]
        if row["timeout_s"] is not None:
            plain = timeout_price(alive, rate, np.array([row["timeout_s"]])).cost(true)[0]
            plains.append(row["timeout_cost"] / plain)
            points = _curve(rows, None)
            points = points[points["timeout_s"] >= 0.8 * row["timeout_s"]]
            true_costs = timeout_price(alive, rate, points["timeout_s"]).cost(true)
            shown.append(np.median(points["cost"] / true_costs))
    for found in (ratios, todays, plains, shown):
        assert np.median(found) == pytest.approx(1, rel=error)
    assert inside >= 21, "of 24, by an interval for 95 of 100"


def test_extensions_of_work_that_goes_on_for_hours_are_paid_once() -> None:
    """A price looks at 300 ages; what follows was charged until the worker crashes, which it hardly ever does here."""
    law, rate, costs = pareto(5, 1.2), 1 / 200_000, Costs(crashes_per_second=1 / 200_000)
    alive = np.asarray(law.survival(BOUNDS), float)
    price = schedule_price(alive, rate, steady(30.0, 10.0), costs)
    at = np.arange(0.0, BOUNDS[-1], 0.5) + 0.25
    there = np.asarray(law.survival(at), float) * np.exp(-rate * at)
    looks = np.arange(20.0, BOUNDS[-1], 20.0)
    assert price.extensions == pytest.approx(np.sum(law.survival(looks) * np.exp(-rate * looks)), rel=0.03)
    assert price.recovery_s == pytest.approx(rate * 0.5 * np.sum(there * (30.0 - at % 20.0)), rel=0.03)


def test_a_crash_waits_no_longer_than_its_lease() -> None:
    """Work that goes on beyond the reach may end in a crash as other work does."""
    rows = cells(pareto(5, 1.5), 1 / 2_000, 400, 43_200.0, None, np.random.default_rng(3))
    assert recommend(rows, None)["today_recovery_s"] <= 43_200
    points = _curve(rows, None)
    assert (points["recovery_s"] <= points["timeout_s"]).all()


@pytest.mark.slow
def test_the_gain_of_a_split_is_what_it_gains() -> None:
    """Of two types with a heavy tail."""
    rate, random = 1 / 2_000, np.random.default_rng(31)
    laws, true = {"short": pareto(2, 1.5), "long": pareto(40, 1.5)}, Costs(crashes_per_second=1 / 2_000)
    alive = {name: np.asarray(law.survival(BOUNDS), float) for name, law in laws.items()}
    ratios, inside = [], 0
    for _ in range(DRAWS):
        every = [cells(law, rate, 2_500, 20_000.0, None, random).assign(type=name) for name, law in laws.items()]
        rows = _split(pd.concat(every), None)
        assert [row["types"] for row in rows] == [["short"], ["long"]]
        at = [np.array([row["timeout_s"], row["together_timeout_s"]]) for row in rows]
        own, together = sum(
            timeout_price(curve, rate, each).cost(true) for curve, each in zip(alive.values(), at, strict=True)
        )
        ratios.append((rows[0]["split_cost"] / (own / 2), rows[0]["together_cost"] / (together / 2)))
        inside += rows[0]["gain_low"] <= 1 - own / together <= rows[0]["gain_high"]
        for row in rows:
            assert row["recovery_s"] <= row["timeout_s"]
            assert row["together_recovery_s"] <= row["together_timeout_s"]
    assert np.median(ratios, axis=0) == pytest.approx(1, rel=0.1)
    assert inside >= DRAWS - 2, "by an interval for 95 of 100"


def covered(law: Law, share: float, found: list[tuple[float, float | None]]) -> int:
    true = law.quantile(share)
    return sum(low <= true and (high is None or true <= high) for low, high in found)


@pytest.mark.slow
def test_intervals_cover_the_truth_whoever_owns_the_length(spark: Any) -> None:
    """100 histories each; a lease of 15 s runs out under two fifths of 250 messages, some workers crash, late ones say
    so. Counted by lease, the median of those whose length is their own comes out too long in all of them. 20 more where
    late workers say nothing: their silence is slow work. And 20 where most leases end in crashes."""
    law = lognormal(12, 0.8)
    how: dict[str, Any] = {"type": "t", "messages": 250, "lease": 15.0, "crashes_per_second": 1 / 1_000}
    owners = {"message": True, "attempt": False}
    workloads = [
        Workload(f"{owner}-{seed}", law, keeps=keeps, receives_max=9, **how)
        for owner, keeps in owners.items()
        for seed in range(100)
    ]
    silent: dict[str, Any] = how | {"keeps": True, "deletes_late": False, "receives_max": 9}
    often: dict[str, Any] = silent | {"lease": 60.0, "crashes_per_second": 1 / 8}
    workloads += [Workload(f"slow-{seed}", law, **silent) for seed in range(20)]
    workloads += [Workload(f"crashes-{seed}", law, **often) for seed in range(20)]
    rows = quantiles(histogram(attempts(frame(spark, history(workloads, seed=23))))).toPandas()
    for reading in ("slow", "crashes"):
        mine = rows[rows.queue.str.startswith(reading)]
        assert (mine.silent_were == reading).all()
        pairs = [
            (low, None if high != high else high) for low, high in zip(mine.p50_low_s, mine.p50_high_s, strict=True)
        ]
        assert covered(law, 0.5, pairs) >= 17, (reading, covered(law, 0.5, pairs))
    for owner in owners:
        mine = rows[rows.queue.str.startswith(owner)]
        assert len(mine) == 100
        for share in (0.5, 0.9, 0.99):
            ends = mine[[f"p{round(100 * share)}_low_s", f"p{round(100 * share)}_high_s"]]
            pairs = [(low, None if high != high else high) for low, high in ends.itertuples(index=False, name=None)]
            assert 90 <= covered(law, share, pairs) <= 98, (owner, share, covered(law, share, pairs))
        assert (mine.length_of == owner).sum() >= 98
        assert not (mine.silent_were == "slow").any()
        longer = float((mine.by_attempt_p50_s / law.quantile(0.5)).median())
        assert longer > 1.2 if owner == "message" else 0.95 < longer < 1.05


@for_each("rate", [1 / 400, 1 / 2_000])
def test_at_least_holds_where_a_crash_cannot_be_told_from_long_work(rate: float) -> None:
    """Work of 20 s on leases of 12 h, in a history of one hour: no lease of a crashed worker has expired."""
    law, span, number = lognormal(20, 0.5), 3_600.0, 3_000
    random = np.random.default_rng(5)
    left = random.uniform(0, span, number)
    takes, crash = law.draw(random, np.zeros(number)), random.exponential(1 / rate, number)
    done = takes <= np.minimum(crash, left)
    values = {
        "ended": np.where(done, DONE, WATCHED),
        "bucket": bucket_of(np.where(done, takes, 0.0)),
        "until": np.where(done, 0, bucket_of(left)),
        "lease": bucket_of(43_200.0),
        "leases": 1.0,
        "held_s": np.where(done, takes, 0.0),
        "lease_s": 43_200.0,
    }
    named = dict(zip(("account", "region", "queue", "type"), ("0", "r", "q", "t"), strict=True))
    sums = dict.fromkeys(("renewals", "renewed_share", "redeliveries", "redone", "squares"), 0.0)
    rows = pd.DataFrame(named | values | sums)
    found = _quantiles(rows).iloc[0]
    assert found.p50_s == pytest.approx(law.quantile(0.5), rel=0.1)
    assert found.p99_basis == "at least"
    assert 0.5 * law.quantile(0.99) < found.at_least_s < 1.1 * law.quantile(0.99)
    planned = recommend(rows, None)
    best, _ = best_timeout(np.asarray(law.survival(BOUNDS), float), Costs(crashes_per_second=rate), 43_200)
    assert 0.3 * best < planned["timeout_at_least_s"] < 1.1 * best


class TestCrashRate:
    def test_before_anything_was_seen_it_is_as_believed(self) -> None:
        assert crash_rate(0, 0.0, 1 / 7_200) == pytest.approx(1 / 7_200)

    @for_each("crashes", [5, 50])
    def test_what_was_seen_counts_however_short_the_work(self, crashes: int) -> None:
        """5 crashes in 120 s of work, where one in two hours was believed."""
        assert crash_rate(crashes, 120.0, 1 / 7_200) == pytest.approx(crashes / 120, rel=0.3)

    def test_long_work_without_a_crash_lowers_it(self) -> None:
        rates = [float(crash_rate(0, exposure_s, 1 / 1_000)) for exposure_s in (0, 1e3, 1e5, 1e7)]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] < 1e-6

    def test_many_are_told_at_once(self) -> None:
        assert np.all(np.diff(crash_rate(np.arange(20), 1e4, 1e-3)) > 0)


def test_the_crashes_that_were_seen_leave_a_range_of_rates() -> None:
    """Costs and gains have intervals over it: also where none was seen, for the next one may come at any time. Where
    the believed rate is right within a factor of ten, as the prior says, 95 of 100 intervals cover the true one."""
    random, believed = np.random.default_rng(37), 1 / 7_200
    likely = believed * np.exp(random.normal(0, RATE_PRIOR, 400))
    for true in (likely, *(np.full(400, 1 / seconds) for seconds in (2_000, 50_000, 200_000))):
        for exposure_s in (20_000.0, 300_000.0, 1e7):
            inside = 0
            for rate in true:
                seen = Sample(np.zeros(1), np.zeros(1), float(random.poisson(rate * exposure_s)), exposure_s)
                rates = possible_rates(seen, believed, 500)
                low, high = np.quantile(rates, [0.025, 0.975])
                inside += low <= rate <= high
                assert 0 < rates.min() < low < crash_rate(seen.crashes, exposure_s, believed) < high
            assert inside >= 0.92 * len(true), (rate, exposure_s, inside)
            assert true is not likely or inside <= 0.98 * len(true), "too wide"
    none = Sample(np.zeros(1), np.zeros(1), 0.0, 100_000.0)
    few, many = (np.quantile(possible_rates(none, believed, count), [0.025, 0.975]) for count in (120, 100_000))
    assert few == pytest.approx(many, rel=0.05)


def test_work_of_hours_needs_a_timeout_of_hours() -> None:
    """With a crash in 20 hours of work, the cheapest timeout starts each message three times."""
    costs = Costs(crashes_per_second=1 / 72_000)
    same = np.where(BOUNDS < 10_800, 1.0, 0.0)
    assert best_timeout(same, costs, 43_200) == (pytest.approx(10_800, rel=0.02), False)
    wide = np.asarray(lognormal(3_600, 0.8).survival(BOUNDS), float)
    best, _ = best_timeout(wide, costs, 43_200)
    assert np.interp(best, BOUNDS, wide) == pytest.approx(0.05, abs=0.002)
    curves, rates = np.array([same, wide]), np.full(2, costs.crashes_per_second)
    assert other_timeouts(curves, rates, costs, best, 43_200)[0] > 10_000
    assert best_timeout(np.ones(len(BOUNDS)), costs, 7_200) == (pytest.approx(7_200, rel=0.02), True), "or longer"


@for_each("law", [lognormal(54_000, 0.3), uniform(53_000, 55_000), bimodal(3_600, 72_000, 0.1, 0.125)])
def test_where_no_timeout_is_long_enough_there_is_a_note(law: Law) -> None:
    """By a law, by what was seen, and for a part of the messages."""
    row = recommend(cells(law, 1e-6, 200, 172_800.0, None, np.random.default_rng(5)), None)
    assert [row[name] for name in ("timeout_s", "timeout_at_least_s", "timeout_low_s")] == [None] * 3
    assert row["note"] == "over 5 % take longer than any timeout: let workers extend"
    assert row["first_lease_s"] < 1_000


def test_no_timeout_is_longer_than_a_queue_takes() -> None:
    """SQS takes 12 hours at most; the buckets' bounds do not fall there. Nor do they go beyond two days: of longer work
    that is all that is known, by the curve and by a law."""
    random, hour = np.random.default_rng(5), 3_600.0
    for median, known in ((80, ""), (40, "p50_s"), (2, "p50_s p90_s p99_s")):
        law = lognormal(median * hour, 0.5)
        found = _quantiles(cells(law, 1e-12, 400, 90 * 86_400.0, None, random)).iloc[0]
        for share in (0.5, 0.9, 0.99):
            name = f"p{round(100 * share)}"
            if f"{name}_s" in known:
                assert found[f"{name}_low_s"] <= law.quantile(share) <= found[f"{name}_high_s"]
            else:
                assert (found[f"{name}_s"], found[f"{name}_basis"]) == (None, "at least")
                assert 46 * hour < found[f"{name}_low_s"] < 48 * hour
        assert found.at_least_s is None if median == 2 else 46 * hour < found.at_least_s < 48 * hour
    best, is_longest = best_timeout(np.ones(len(BOUNDS)), Costs(crashes_per_second=1e-9), 43_200)
    assert (best <= 43_200, bool(is_longest)) == (True, True)


def test_what_spark_connect_adds_to_a_frame_is_not_written() -> None:
    """pyarrow writes it, and warns of what is no JSON."""
    rows = pd.DataFrame({"queue": ["q"]})
    rows.attrs = {"metrics": [object()]}
    assert arrow_of(rows, "queue string").to_pylist() == [{"queue": "q"}]
    assert list(rows.attrs) == ["metrics"]
