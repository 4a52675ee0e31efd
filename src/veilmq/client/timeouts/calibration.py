"""What a load test says about timeouts: the percentiles of its runs, and two recommendations.

Strategy: a handler that finished is an exact sample; one that failed is censored. Percentiles are None beyond the range
of the samples. There are two recommendations: leases for a keeper that extends them, and one timeout for a consumer
that never extends. Source: document 004 ("perform a series of load tests on the consumer"); document 003, 1.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from veilmq.estimate.schedule import Costs, plan_of
from veilmq.estimate.survival import Curve, Sample, Survival, rounded_up

SHARES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
SAFETY: Final = 1.5
"""A timeout that is never extended is the longest time seen, multiplied by this."""
SAMPLES_FEW: Final = 100
LEASE_MIN: Final = 5.0
_STEPS: Final = (1.0, 2.0, 5.0)


class Bucket(msgspec.Struct, frozen=True):
    """Runs of more than `over` and up to `upto` seconds."""

    over: float
    upto: float
    finished: int
    failed: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The results. Seconds."""

    finished: int
    failed: int
    percentiles: dict[str, float | None]
    """`p50`, `p90`, `p95`, `p99`, `p99.9`; None beyond the range of the samples."""
    longest: float
    """Longest run, finished or not."""
    mean: float | None
    """Of the runs that finished."""
    histogram: tuple[Bucket, ...]
    """Bounds 1, 2, 5, 10, ..., without empty ends."""
    first_lease: float
    """With a keeper: the lease to ask for at receive."""
    renewal_margin: float
    """With a keeper: how long before its end to extend a lease."""
    timeout: float | None
    """Without a keeper; None: the longest runs failed, so nobody knows how long they take."""
    notes: tuple[str, ...]
    """Caveats to read before relying on the numbers."""


def calibrate(samples: Sequence[Sample], costs: Costs | None = None) -> Calibration:
    """Evaluate the samples. Raises ValueError if there are none, or if one is below 0."""
    if not samples:
        raise ValueError("there are no samples")
    if min(each.seconds for each in samples) < 0:
        raise ValueError("a processing time cannot be below 0")
    curve, learnt = Curve(samples), Survival(half_life=None)
    learnt.add(samples)
    finished = sorted(each.seconds for each in samples if each.finished)
    failed = [each.seconds for each in samples if not each.finished]
    plan = plan_of(learnt.curve(), costs, shortest=LEASE_MIN)
    known = bool(finished) and (not failed or max(failed) <= finished[-1])
    timeout = rounded_up(max(finished[-1] * SAFETY, 1.0)) if known else None
    return Calibration(
        finished=len(finished),
        failed=len(failed),
        percentiles={f"p{share * 100:g}": curve.quantile(share).value for share in SHARES},
        longest=max(each.seconds for each in samples),
        mean=sum(finished) / len(finished) if finished else None,
        histogram=histogram(samples),
        first_lease=rounded_up(plan.first),
        renewal_margin=plan.margin,
        timeout=timeout,
        notes=_notes(len(finished), len(failed), known),
    )


def histogram(samples: Sequence[Sample]) -> tuple[Bucket, ...]:
    """Counts in buckets bounded by 1, 2 and 5 times powers of ten, from 1 ms on."""
    bounds = [0.0, 0.001]
    longest = max(each.seconds for each in samples)
    while bounds[-1] < longest:
        step, power = divmod(len(bounds) - 1, 3)[::-1]
        bounds.append(_STEPS[step] * 10.0 ** (power - 3))
    found = [
        Bucket(
            over,
            upto,
            sum(1 for each in samples if each.finished and _within(each.seconds, over, upto)),
            sum(1 for each in samples if not each.finished and _within(each.seconds, over, upto)),
        )
        for over, upto in pairwise(bounds)
    ]
    filled = [place for place, bucket in enumerate(found) if bucket.finished + bucket.failed]
    return tuple(found[filled[0] : filled[-1] + 1])


def _within(seconds: float, over: float, upto: float) -> bool:
    return over < seconds <= upto or (over == 0 and seconds == 0)


def _notes(finished: int, failed: int, known: bool) -> tuple[str, ...]:
    notes = []
    if finished < SAMPLES_FEW:
        notes.append(f"{finished} finished runs say little about the longest ones: measure {SAMPLES_FEW} or more")
    if failed:
        notes.append(f"{failed} failed runs count as longer than they took")
    if not known:
        notes.append("the longest runs failed: no timeout without extensions can be recommended")
    return tuple(notes)
