"""What if: the pipeline's replay of a history under other settings, beside the real server under those settings.

    python bench/whatif.py [--messages 1500] [--seeds 1] [--write]

Strategy: workers do five kinds of work at the store itself, under a manual clock (tests/pipeline/work_stage.py), once
under today's settings and once under others. The jobs see the first history alone, and what they say of the others is
compared with what truly happened. With `--seeds N` as many further histories are compared with what happens to other
work of the same kind under the other settings: how often is that within the interval, which should be in 90 to 98 of
100? Those histories are sketched, without server or Spark; the first of each case is done at the server, too, and must
say the same to the last digit.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import load_1min

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.pipeline.histories_stage import frame  # noqa: E402
from tests.pipeline.work_stage import Happened, Under, Work, sketched, worked  # noqa: E402

from veilmq.pipeline.jobs.attempts import attempts  # noqa: E402
from veilmq.pipeline.session import session  # noqa: E402
from veilmq.pipeline.whatif import KINDS, METRICS, Wanted, whatif  # noqa: E402
from veilmq.pipeline.whatif import compared as whatif_of  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "whatif.json"
WITHIN = 0.10
COUNTED_MIN = 20
"""Duplicates or crashes: of fewer, a share of a tenth is one or two."""


class Case(NamedTuple):
    """One comparison."""

    name: str
    works: Callable[[int, np.random.Generator], Sequence[Work]]
    today: Under
    tried: Under
    wanted: Wanted


def lognormal(median: float, sigma: float) -> Callable[[np.random.Generator, int], Any]:
    return lambda random, count: random.lognormal(np.log(median), sigma, count)


def steadily(random: np.random.Generator, count: int, every: float) -> Any:
    return np.cumsum(random.exponential(every, count))


def in_bursts(random: np.random.Generator, count: int, size: int, every: float) -> Any:
    return np.sort(np.floor(np.arange(count) / size) * every + random.uniform(0, 5, count))


CASES = (
    Case(
        "short timeout, longer tried",
        lambda n, random: [Work(None, steadily(random, n, 4.0), lognormal(12, 0.8), 1 / 500)],
        Under(15, receives_max=6),
        Under(45, receives_max=6),
        Wanted(timeout_s=45),
    ),
    Case(
        "long timeout, many crashes, shorter tried",
        lambda n, random: [Work(None, steadily(random, n, 3.0), lognormal(8, 0.6), 1 / 60, keeps=False)],
        Under(300, receives_max=20),
        Under(20, receives_max=20),
        Wanted(timeout_s=20),
    ),
    Case(
        "two types in one queue",
        lambda n, random: [
            Work("icon", steadily(random, n // 2, 6.0), lognormal(2, 0.4), 1 / 200),
            Work("video", steadily(random, n // 2, 6.0), lognormal(45, 0.3), 1 / 900),
        ],
        Under(40, receives_max=8),
        Under(90, receives_max=8),
        Wanted(timeout_s=90),
    ),
    Case(
        "bursts, more workers and a longer timeout tried",
        lambda n, random: [Work(None, in_bursts(random, n, 100, 600.0), lognormal(10, 0.6), 1 / 300, keeps=False)],
        Under(20, workers=8, receives_max=10),
        Under(30, workers=14, receives_max=10),
        Wanted(timeout_s=30, workers=14),
    ),
    Case(
        "few workers, one less and a shorter timeout tried",
        lambda n, random: [Work(None, steadily(random, n, 4.0), lognormal(8, 0.5), 1 / 250)],
        Under(60, workers=4, receives_max=10),
        Under(25, workers=3, receives_max=10),
        Wanted(timeout_s=25, workers=3),
    ),
)


def compared(spark: Any, case: Case, messages: int) -> dict[str, Any]:
    """What is said and what is true of the other settings, by metric."""
    works = case.works(messages, np.random.default_rng(1))
    table, _ = worked(works, case.today, 1)
    _, happened = worked(works, case.tried, 1)
    began = time.perf_counter()
    rows = said_of(spark, table, case).where("queue = 'jobs'").toPandas()
    took = time.perf_counter() - began
    said = rows[rows.under == "what if"].iloc[0]
    workers = rows[rows.under == "today"].iloc[0].workers
    return {"seconds": round(took, 2), "workers_seen": workers} | beside(said, happened)


def said_of(spark: Any, table: Any, case: Case) -> Any:
    events = frame(spark, table)
    return whatif(attempts(events), events.where(events.kind.isin(*KINDS)), case.wanted)


def beside(said: Any, happened: Happened) -> dict[str, Any]:
    """By metric, what was said and what is true, where it happened often enough."""
    true, found = happened.figures(), {}
    counted = {"duplicates": happened.duplicates, "recovery_s": len(happened.recovery), "cost": COUNTED_MIN}
    for name in METRICS:
        if counted.get(name, COUNTED_MIN) >= COUNTED_MIN and true[name] > 0.001:
            found[name] = {
                "true": round(float(true[name]), 4), "said": round(float(said[name]), 4),
                "low": round(float(said[f"{name}_low"]), 4), "high": round(float(said[f"{name}_high"]), 4),
            }  # fmt: skip
    return found


def covered(case: Case, messages: int, seeds: int, processes: int) -> dict[str, list[tuple[bool, bool]]]:
    """Of each metric and seed, whether what happens to other work is within the interval, and whether it happens often.

    All count: an interval that holds in 95 of 100 periods holds less often in those in which more happens than usual.
    """
    number = CASES.index(case)
    agrees(case, messages)
    found: dict[str, list[tuple[bool, bool]]] = {}
    with ProcessPoolExecutor(processes) as pool:
        asked = [(number, messages, seed) for seed in range(seeds)]
        for said, happened in pool.map(_one, asked, chunksize=2):
            often = beside(said, happened)
            for name, true in happened.figures().items():
                low, high = said.get(f"{name}_low"), said.get(f"{name}_high")
                if (
                    low is not None
                    and high is not None
                    and np.isfinite([low, high, true]).all()
                    and (true > 0.001 or "wait" not in name)
                ):
                    found.setdefault(name, []).append((low <= true <= high, name in often))
    return found


def _one(asked: tuple[int, int, int]) -> tuple[dict[str, Any], Happened]:
    """What is said after one sketched history, and what happens to other work of the kind."""
    number, messages, seed = asked
    case, other = CASES[number], 10_000 + seed
    rows, _ = sketched(case.works(messages, np.random.default_rng(100 + seed)), case.today, 100 + seed)
    _, happened = sketched(case.works(messages, np.random.default_rng(other)), case.tried, other)
    return whatif_of(rows, case.wanted)[1], happened


def agrees(case: Case, messages: int) -> None:
    """Raises AssertionError if the server does other than what is sketched."""
    works = case.works(messages, np.random.default_rng(100))
    for under in (case.today, case.tried):
        (_, sketch), (_, true) = sketched(works, under, 100), worked(works, under, 100)
        np.testing.assert_allclose(list(sketch.figures().values()), list(true.figures().values()), rtol=1e-5)


def figures(cases: Sequence[Case], messages: int, kept: dict[str, Any]) -> list[tuple[str, str]]:
    """Print and keep them; gives those further away from the truth than a tenth."""
    spark = session("local[2]", name="whatif", settings={"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("ERROR")
    wrong: list[tuple[str, str]] = []
    kept["messages"] = messages
    for case in cases:
        found = kept.setdefault("cases", {})[case.name] = compared(spark, case, messages)
        print(f"{case.name} ({found['seconds']} s; workers seen: {found['workers_seen']:.0f})", flush=True)
        for name in METRICS:
            if name in found:
                one = found[name]
                apart = one["said"] / one["true"] - 1
                print(f"    {name:11} true {one['true']:9.3f}  said {one['said']:9.3f}  {apart:+.1%}"
                      f"  ({one['low']:.3f} to {one['high']:.3f})", flush=True)  # fmt: skip
                wrong += [(case.name, name)] if abs(apart) > WITHIN else []
    spark.stop()
    return wrong


def main() -> int:
    """1 if a figure is further from the truth than a tenth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_500, help="of each history (1500)")
    parser.add_argument("--seeds", type=int, default=0, help="further histories, for the intervals (0)")
    parser.add_argument("--processes", type=int, default=2, help="for --seeds (2)")
    parser.add_argument("--case", type=int, help="only this one, from 0")
    parser.add_argument(
        "--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}: of --seeds, how many intervals covered"
    )
    asked = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cases = CASES if asked.case is None else CASES[asked.case : asked.case + 1]
    wrong = [] if asked.seeds else figures(cases, asked.messages, kept)
    for case in cases if asked.seeds else ():
        print(f"{case.name}, {asked.messages} messages", flush=True)
        intervals = kept.setdefault("intervals", {}).setdefault(case.name, {}).setdefault(str(asked.messages), {})
        for name, each in covered(case, asked.messages, asked.seeds, asked.processes).items():
            often = [inside for inside, is_often in each if is_often]
            intervals[name] = {
                "covered": int(sum(inside for inside, _ in each)), "of": len(each),
                "covered_where_many": int(sum(often)), "where_many": len(often), "load": round(load_1min(), 1),
            }  # fmt: skip
            print(f"    {name:11} other work of the kind within the interval: {intervals[name]}", flush=True)
    if asked.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    if not asked.seeds:
        print("all within a tenth" if not wrong else f"further away than a tenth: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
