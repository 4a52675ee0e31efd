"""The estimate by message: against laws of which the truth is known, and what it makes of each way a lease ends."""

from collections.abc import Callable
from math import exp, log
from statistics import NormalDist
from typing import Any

import pytest

from veilmq.estimate import SHARES, Ended, Estimate, Lease, by_message, log_rank
from veilmq.estimate.survival import Curve, Sample
from veilmq.testing import chance
from veilmq.testing.for_each import for_each

SEEDS = 100
MEDIAN_S, DEVIATION = 12.0, 0.8
CRASHES_PER_SECOND = 1 / 1_000


def truth(share: float) -> float:
    return exp(log(MEDIAN_S) + DEVIATION * NormalDist().inv_cdf(share))


def lived(
    random: Any, law: str, messages: int, lease_s: float, *, speak: bool = True, crashes: float = 0.0
) -> list[Lease]:
    """Leases of messages whose work has lognormal length, until each is done. speak: whether late workers say so."""
    found = []
    for message in range(messages):
        own = random.lognormvariate(log(MEDIAN_S), DEVIATION)
        for attempt in range(1, 9):
            work = own if law == "message" else random.lognormvariate(log(MEDIAN_S), DEVIATION)
            crash = random.expovariate(CRASHES_PER_SECOND)
            late = work > lease_s
            if work <= crash:
                found.append(Lease(message, attempt, Ended.DONE, work, work, 1e6, late, False))
            else:
                found.append(Lease(message, attempt, Ended.SILENT, 0.0, lease_s, 1e6, False, False))
            if work <= crash and not late:
                break
    return found


def lease(message: int, ended: Ended, alive_s: float, attempt: int = 1, until_s: float = 30.0, **more: Any) -> Lease:
    given: dict[str, Any] = {"age_s": 1e6, "late": False, "extended": False} | more
    return Lease(message, attempt, ended, alive_s, until_s, **given)


def done(count: int, seconds: Callable[[int], float] = lambda number: 1 + number / 10) -> list[Lease]:
    """So many messages that were done at once."""
    return [lease(number, Ended.DONE, seconds(number)) for number in range(count)]


@for_each("law", ["message", "attempt"])
def test_intervals_cover_the_truth_whoever_owns_the_length(law: str) -> None:
    """A lease of 15 s runs out under two fifths of the messages, some workers crash, and late ones say so."""
    covered = dict.fromkeys(SHARES, 0)
    biased = 0
    for seed in range(SEEDS):
        found = Estimate(lived(chance(seed), law, 250, 15.0))
        for name, between in found.quantiles.items():
            true = truth(SHARES[name])
            assert between.low is not None
            covered[name] += between.low <= true and (between.high is None or true <= between.high)
        low = found.law.by_attempt.low
        biased += low is not None and low > MEDIAN_S
        assert found.law.longer is (law == "message"), f"seed {seed}"
    assert all(0.9 * SEEDS <= count <= 0.99 * SEEDS for count in covered.values()), covered
    assert biased == (SEEDS if law == "message" else pytest.approx(0, abs=5)), "what counting each lease would say"


def test_each_message_counts_once() -> None:
    leases = [
        lease(1, Ended.SILENT, 0), lease(1, Ended.DONE, 9, attempt=2),
        lease(2, Ended.UNWORKED, 0), lease(2, Ended.DONE, 8, attempt=2),
        lease(3, Ended.DONE, 7, attempt=2),  # nobody knows what became of its first lease
        lease(4, Ended.DONE, 40, late=True), lease(4, Ended.OPEN, 5, attempt=2), lease(4, Ended.UNWORKED, 0, attempt=3),
    ]  # fmt: skip
    firsts, again = by_message(reversed(leases))
    assert {(each.message, each.attempt) for each in firsts} == {(1, 1), (2, 2), (4, 1)}
    assert {(each.message, each.attempt) for each in again} == {(1, 2), (4, 2)}


def silent(count: int, **more: Any) -> list[Lease]:
    return [lease(1_000 + number, Ended.SILENT, 0, **more) for number in range(count)]


def silent_again(count: int) -> list[Lease]:
    return [lease(1_000 + number, Ended.SILENT, 0, attempt=2) for number in range(count)]


READINGS = {
    "all heard of": (done(100), "none"),
    "late ones say so": ([*done(100), *silent(10), lease(999, Ended.DONE, 33, late=True)], "crashes"),
    "hardly any work is so long": ([*done(100), *silent(5)], "crashes"),
    "work may be so long": ([*done(100, lambda number: 1 + number / 4), *silent(5)], "unknown"),
    "the same ones run out again": ([*done(100), *silent(5), *silent_again(5)], "slow"),
    "too many to be crashes": ([*done(100), *silent(50)], "unknown"),
}


@for_each("case", READINGS)
def test_what_a_lease_without_a_sign_of_its_worker_was(case: str) -> None:
    leases, reading = READINGS[case]
    found = Estimate(leases)
    assert found.reading == reading
    recommended = found.recommended_s()
    if reading in ("slow", "unknown"):
        assert recommended is None, "nobody saw how long the work takes"
        above = found.effect(60)
        assert not above.seen
        assert above.duplicates.high is not None
        assert above.duplicates.high >= len([each for each in leases if each.ended is Ended.SILENT]) / 160
    else:
        assert recommended is not None
        assert 10 <= recommended <= 45
    if reading == "unknown":
        assert (found.effect(29).duplicates.low or 0) < 0.1, "all of them may have crashed"


def test_a_crash_is_no_long_work() -> None:
    """Workers crash during a fifth of the leases; where they did, other work had ended before and after."""
    work = [5.0 + number // 5 % 10 for number in range(500)]
    leases = [lease(number, Ended.DONE, each) for number, each in enumerate(work) if number % 5]
    leases += [lease(number, Ended.SILENT, 0, until_s=300) for number in range(0, 500, 5)]
    leases.append(lease(501, Ended.DONE, 301, until_s=300, late=True))
    found = Estimate(leases)
    assert found.reading == "crashes"
    low, high = found.quantiles["p50"].low, found.quantiles["p50"].high
    assert low is not None
    assert high is not None
    assert low <= 10 <= high
    assert 1 / 90 < found.costs.crashes_per_second < 1 / 30, "a hundred in some 5,000 s of work"


def test_a_worker_that_has_just_gone_silent_is_no_crash_yet() -> None:
    """It may still be at work, as long as other work has taken."""
    found = Estimate([*done(20, lambda number: 100.0), lease(99, Ended.SILENT, 0.0, age_s=31.0)])
    assert found.costs.crashes_per_second <= Estimate(done(20, lambda number: 100.0)).costs.crashes_per_second


def test_leases_that_run_on_count() -> None:
    """Half of the messages take an hour, and none of those is done."""
    leases = [*done(100), *(lease(500 + number, Ended.OPEN, 600) for number in range(100))]
    found = Estimate(leases)
    assert found.curve.rest == pytest.approx(0.5)
    assert found.quantiles["p95"].value is None
    assert found.quantiles["p95"].low == 600, "at least"
    assert found.recommended_s() is None
    assert Estimate(leases[:102]).recommended_s() is None, "nobody knows how long two in a hundred take"


def test_the_effect_of_a_timeout() -> None:
    found = Estimate(done(100, lambda number: 10.0 if number < 90 else 50.0))
    short, long = found.effect(20), found.effect(50)
    assert short.duplicates.value == pytest.approx(0.1)
    assert short.duplicates.low is not None
    assert short.duplicates.high is not None
    assert short.duplicates.low < 0.1 < short.duplicates.high
    assert long.duplicates.value == 0
    assert long.duplicates.high is not None
    assert 0 < long.duplicates.high < 0.3
    # By hand: work of 10 s for all and 10 s more for a tenth; a crash at age s waits 20 - s.
    assert short.recovery_s == pytest.approx((10 * 15 + 0.1 * 10 * 5) / 11)
    assert long.recovery_s > short.recovery_s
    assert found.recommended_s() == 90.0
    assert found.is_good(90)
    assert not found.is_good(20)
    assert not found.is_good(3_600)
    schedule = found.schedule()
    assert schedule.first < 50, "who extends needs no lease for the longest work"
    assert schedule.first > schedule.margin


def test_work_of_hours_needs_a_timeout_of_hours() -> None:
    """To start each message again costs 120, to wait for the longest work after a crash costs more."""
    hours = Estimate(done(40, lambda number: 10_800.0))
    assert hours.recommended_s() == 14_400.0
    assert not hours.is_good(5)
    assert not hours.is_good(7_200)
    assert hours.is_good(14_400)
    few = Estimate(done(40, lambda number: 36_000.0 if number < 1 else 10_800.0))
    assert few.recommended_s() == 14_400.0, "one in forty may be started again"
    many = Estimate(done(40, lambda number: 36_000.0 if number < 3 else 10_800.0))
    assert many.recommended_s() is None, "10 h are too long for a timeout of 12 h and its margin"


def test_too_few_are_no_ground_for_advice() -> None:
    few = Estimate(done(29))
    assert not few.enough
    assert few.recommended_s() is None
    nothing = Estimate([])
    assert nothing.quantiles["p50"].value is None
    assert nothing.effect(30).duplicates.value == 1
    assert Estimate(done(30)).recommended_s() is not None


def test_an_interval_by_hand() -> None:
    """Ten runs; after the fifth: 0.5, of Greenwood's variance 0.05, on the scale of log(-log)."""
    curve = Curve([Sample(float(second), True) for second in range(1, 11)])
    share = curve.share_above(5.5)
    assert share.value == pytest.approx(0.5)
    width = 1.96 * (5 / (10 * 5)) ** 0.5 / log(2)
    assert share.low == pytest.approx(0.5 ** exp(width))
    assert share.high == pytest.approx(0.5 ** exp(-width))
    assert curve.quantile(0.5).value == 5
    assert curve.share_above(11).low == 0
    alike = Curve([Sample(1.0, True)] * 40).share_above(2)
    assert alike == (0, 0, pytest.approx(1 - 0.025 ** (1 / 40))), "none of forty was longer"


def test_longer_work_is_noticed() -> None:
    short = [Sample(1 + number / 50, True) for number in range(50)]
    longer = [Sample(each.seconds * 2, True) for each in short]
    assert log_rank(short, longer) > 3
    assert abs(log_rank(short, short)) < 0.5
    assert log_rank(longer, short) < -3
