"""What the pipeline found of each type beside what is true.

Strategy: the best timeout for the truth is computed by the job's own prices (pipeline/estimates), but on the
law's exact curve and the true rate of deaths; `dearer` says how many times the best one's cost the found one has there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
import numpy as np
from laws import Kind

from veilmq.estimate.schedule import Costs
from veilmq.pipeline.estimates.buckets import BOUNDS
from veilmq.pipeline.estimates.prices import timeout_price
from veilmq.pipeline.jobs.timeouts import LEASE_LONGEST_S, best_timeout

COSTS: Final = Costs(crashes_per_second=1 / 1_000)
"""The usual weights (a second of recovery 1, a duplicate start 120); the rate is what is believed before any death."""


@dataclass(frozen=True)
class Found:
    """One type. Seconds; a quantile that the history does not reach is None."""

    name: str
    told: str
    length_of: str | None
    """`message` or `attempt`, as the pipeline found; None: too few were received again."""
    p50_s: float | None
    p50_true_s: float
    p99_s: float | None
    p99_true_s: float
    deaths_per_hour: float
    deaths_per_hour_true: float
    timeout_s: float
    """In force; of the pipeline."""
    at_least: bool
    best_s: float
    """For the truth."""
    dearer: float

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def found_of(
    kinds: Sequence[Kind],
    timeouts: Sequence[Mapping[str, Any]],
    quantiles: Sequence[Mapping[str, Any]],
    applied: Mapping[str, int],
    today_s: float,
) -> list[Found]:
    """In the order of `kinds`; from the rows of the jobs and the leases in force (microseconds).

    A type that has none keeps today's.
    """
    planned = {row["type"]: row for row in timeouts}
    seen = {row["type"]: row for row in quantiles}
    leases_s = {kind.name: applied.get(kind.name, today_s * 1e6) / 1e6 for kind in kinds}
    return [_found(kind, planned[kind.name], seen[kind.name], leases_s[kind.name]) for kind in kinds]


def _found(kind: Kind, planned: Mapping[str, Any], seen: Mapping[str, Any], timeout_s: float) -> Found:
    alive = np.array([kind.longer(float(bound)) for bound in BOUNDS])
    costs = msgspec.structs.replace(COSTS, crashes_per_second=kind.deaths_per_second)
    best_s, _ = best_timeout(alive, costs, LEASE_LONGEST_S)
    here, best = timeout_price(alive, kind.deaths_per_second, np.array([timeout_s, best_s])).cost(costs)
    return Found(
        name=kind.name,
        told=kind.told,
        length_of=seen["length_of"],
        p50_s=_known(seen["p50_s"]),
        p50_true_s=kind.quantile(0.5),
        p99_s=_known(seen["p99_s"]),
        p99_true_s=kind.quantile(0.99),
        deaths_per_hour=3_600 * float(planned["crashes_per_second"]),
        deaths_per_hour_true=3_600 * kind.deaths_per_second,
        timeout_s=timeout_s,
        at_least=planned["timeout_s"] is None,
        best_s=best_s,
        dearer=float(here / best) if best > 0 else 1.0,
    )


def _known(value: Any) -> float | None:
    return None if value is None else float(value)
