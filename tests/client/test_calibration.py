"""The processing-time curve: percentiles with censored runs, the histogram, and what is recommended."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.client.timeouts import calibrate, histogram
from veilmq.estimate.survival import Curve, Sample, rounded_up
from veilmq.testing.for_each import for_each

TIMES = st.floats(0, 10**5, allow_nan=False)


def finished(*seconds: float) -> list[Sample]:
    return [Sample(each, True) for each in seconds]


@given(st.lists(TIMES, min_size=1, max_size=60), st.sampled_from([0.1, 0.5, 0.9, 0.99]))
def test_without_failures_it_is_the_order_statistic(seconds: list[float], share: float) -> None:
    found = Curve(finished(*seconds)).quantile(share).value
    assert found is not None
    within = sum(each <= found for each in seconds)
    assert within >= share * len(seconds) - 1e-9
    assert sum(each < found for each in seconds) < share * len(seconds) + 1e-9


def test_a_failure_counts_as_longer() -> None:
    # By hand: at 1 s five are at risk, at 2 s four (one of them fails then), at 3 s two.
    samples = [*finished(1, 2, 3, 4), Sample(2, False)]
    assert Curve(samples).quantile(0.2).value == 1
    assert Curve(samples).quantile(0.4).value == 2
    assert Curve(samples).quantile(0.5).value == 3
    assert Curve(samples).quantile(0.7).value == 3
    assert Curve(samples).quantile(0.71).value == 4


def test_what_nobody_saw_is_not_told() -> None:
    samples = [*finished(1, 2), Sample(5, False)]
    assert Curve(samples).quantile(0.6).value == 2
    assert Curve(samples).quantile(0.9).value is None
    found = calibrate(samples)
    assert found.percentiles["p99"] is None
    assert found.timeout is None
    assert any("longest runs failed" in note for note in found.notes)


def test_a_failure_that_was_quick_spoils_nothing() -> None:
    found = calibrate([*finished(*[10.0] * 200), Sample(0.1, False)])
    assert found.percentiles["p99.9"] == 10.0
    assert found.timeout == 15.0
    assert found.notes == ("1 failed run counted as longer than measured",)


@given(st.lists(st.tuples(TIMES, st.booleans()), min_size=1, max_size=60))
def test_every_run_is_in_one_bucket(runs: list[tuple[float, bool]]) -> None:
    samples = [Sample(*run) for run in runs]
    buckets = histogram(samples)
    assert sum(bucket.finished for bucket in buckets) == sum(each.finished for each in samples)
    assert sum(bucket.failed for bucket in buckets) == sum(not each.finished for each in samples)
    for before, after in pairwise(buckets):
        assert before.upto == after.over
    for bucket in (buckets[0], buckets[-1]):
        assert bucket.finished + bucket.failed > 0


def test_bounds_are_round() -> None:
    bounds = [bucket.upto for bucket in histogram(finished(0.0005, 0.5, 700))]
    assert bounds[:4] == pytest.approx([0.001, 0.002, 0.005, 0.01])
    assert bounds[-2:] == pytest.approx([500, 1_000])


def test_longer_work_gets_a_longer_lease() -> None:
    short, long = (calibrate(finished(*[seconds] * 300)) for seconds in (1.0, 600.0))
    assert short.first_lease < long.first_lease
    assert (short.timeout, long.timeout) == (2.0, 900.0)
    assert short.percentiles == dict.fromkeys(short.percentiles, 1.0)
    assert short.mean == pytest.approx(1.0)


def test_a_length_is_what_people_set() -> None:
    assert [rounded_up(seconds) for seconds in (0.2, 31, 60, 61, 10**6)] == [1, 45, 60, 90, 43_200]


@for_each("samples", [[], [Sample(-1, True)]])
def test_what_cannot_be_judged_is_refused(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match=r"samples|below 0"):
        calibrate(samples)
