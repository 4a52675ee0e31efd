"""How often the pipeline's intervals cover the truth: quantiles and recommended leases, over laws and sample sizes.

    python bench/intervals.py [--seeds 100] [--messages 100,400,2500] [--write]

Strategy: a sample is the first leases of so many messages whose work follows a law, with a crash in 1,000 s of work;
the workers extend leases of 30 s every 10 s, or hold one lease of ten minutes. The jobs' own functions estimate each,
without Spark. An interval should cover the truth in 90 to 98 of 100 samples; in more where its upper end is unknown
("at least"), which is counted beside. tests/pipeline/test_jobs_estimates.py does it on whole histories, with messages
that are received again and whose length is their own or is not.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.pipeline.test_jobs_estimates import cells, erlang, uniform, weibull  # noqa: E402
from tests.support.histories import Law, bimodal, lognormal, pareto  # noqa: E402

from veilmq.client.timeouts import Costs  # noqa: E402
from veilmq.pipeline.estimates import Curve, sample_of  # noqa: E402
from veilmq.pipeline.estimates.buckets import BOUNDS  # noqa: E402
from veilmq.pipeline.jobs.timeouts import best_timeout, plan, recommend  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "intervals.json"
COSTS = Costs(crashes_per_second=1 / 1_000)
SHARES = (0.5, 0.9, 0.99)
LAWS = {
    "lognormal": lognormal(12, 0.8),
    "exponential": weibull(20, 1),
    "Weibull 0.6": weibull(20, 0.6),
    "gamma 3": erlang(20),
    "Pareto 1.5": pareto(5, 1.5),
    "two humps": bimodal(5, 60, 0.2),
    "uniform": uniform(10, 30),
}
HOW = {"held": (600.0, None), "extended": (30.0, 10.0)}


def quantiles(law: Law, how: tuple[float, float | None], messages: int, seeds: int) -> dict[str, Any]:
    """In how many of 100 samples each interval covers the truth, and has no upper end; the p99's median ratio to the
    truth."""
    covered, endless = dict.fromkeys(SHARES, 0), dict.fromkeys(SHARES, 0)
    ratios = []
    for seed in range(seeds):
        rows = cells(law, COSTS.crashes_per_second, messages, *how, np.random.default_rng([seed, messages]))
        curve = Curve(sample_of(rows))
        for share in SHARES:
            true, found = law.quantile(share), curve.quantile(share)
            covered[share] += found.low <= true and (found.high is None or true <= found.high)
            endless[share] += found.high is None
        if found.seconds is not None:
            ratios.append(found.seconds / true)
    return {
        "covered": {f"p{round(100 * share)}": round(100 * covered[share] / seeds) for share in SHARES},
        "no upper end": {f"p{round(100 * share)}": round(100 * endless[share] / seeds) for share in SHARES},
        "p99 / true": round(float(np.median(ratios)), 2) if ratios else None,
    }


def leases(law: Law, how: tuple[float, float | None], messages: int, seeds: int) -> dict[str, Any]:
    """In how many of 100 samples the interval of a recommended lease covers the best for the truth."""
    alive = np.asarray(law.survival(BOUNDS), float)
    best, _ = best_timeout(alive, COSTS, 43_200)
    first = plan(alive, COSTS).first
    timeouts = firsts = endless = 0
    for seed in range(seeds):
        row = recommend(
            cells(law, COSTS.crashes_per_second, messages, *how, np.random.default_rng([seed, messages])), COSTS
        )
        low, high = row["timeout_low_s"], row["timeout_high_s"]
        low = row["timeout_at_least_s"] if low is None else low
        timeouts += low <= best and (high is None or best <= high)
        endless += high is None
        firsts += row["first_lease_low_s"] <= first <= row["first_lease_high_s"]
    return {
        "timeout": round(100 * timeouts / seeds),
        "no upper end": round(100 * endless / seeds),
        "first lease": round(100 * firsts / seeds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--messages", default="100,400,2500")
    parser.add_argument("--laws", default=",".join(LAWS), help="of them some")
    parser.add_argument("--write", action="store_true", help="write bench/results/intervals.json")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.laws.split(","):
        law = LAWS[name]
        for how, held in HOW.items():
            for messages in map(int, options.messages.split(",")):
                began = time.process_time()
                row = quantiles(law, held, messages, options.seeds) | {
                    "leases": leases(law, held, messages, options.seeds)
                }
                row["ms a sample"] = round(1_000 * (time.process_time() - began) / options.seeds)
                found[f"{law.name}, {how}, {messages}"] = row
                print(f"{law.name:28} {how:9} {messages:5} {row}", flush=True)
    if options.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
