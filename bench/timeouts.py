"""AdaptiveTimeout against fixed timeouts and heartbeats, simulated: cost and duplicate starts over seven workloads.

    python bench/timeouts.py [--seeds 30] [--messages 2000] [--sensitivity] [--write]
    python bench/timeouts.py --learnt [--seeds 4] [--messages 1000] [--write]

Strategy: every policy meets the same messages, the same crashes and the same late calls (one seeded stream per seed).
The cost of an attempt is its expected value for the given processing time (a crash at any second, each extension late
with its probability), so that rare, expensive events do not add noise to the comparison; what a policy *learns* is
drawn at random. Costs: 1 a second of recovery delay, 120 a duplicate start, 0.01 an extend call; crashes 1/7200 s; 0.2
% of extensions late by Exp(8 s). A crashed attempt is followed by another one of the same message, with the same
duration.

`--learnt` compares what AdaptiveTimeout believes of processing times and crashes with the truth, where a message takes
as long each time and where each attempt takes anew: the median of the seeds' ratios. It sees what a surviving worker
sees: of a crash, only that the message is received again.

Without extensions, a lease that ends under a living worker is a duplicate start, and so is each further one until the
first worker is done (the rival policies are spared the endless loop that fencing would give them).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import exp, log, sqrt
from pathlib import Path
from random import Random
from typing import Any

from veilmq.client.messages import Received
from veilmq.client.timeouts import AdaptiveTimeout, Costs, ThresholdTimeout

REACH = 12 * 3_600.0
RESULTS = Path(__file__).resolve().parent / "results"
LEARNT = ("p50", "p95", "p99", "crashes_per_second")
MESSAGE = Received(id="0", body="", handle="0", lease_end=0.0)
Draw = Callable[[Random, float], float]
"""A processing time, in seconds, from a stream and the share of the run that is over."""


def pareto(shape: float) -> Draw:
    return lambda random, done: min(5 * random.paretovariate(shape), REACH)


WORKLOADS: dict[str, Draw] = {
    "constant 10 s": lambda random, done: 10.0,
    "bimodal 2 / 120 s": lambda random, done: 2.0 if random.random() < 0.8 else 120.0,
    "lognormal, median 20 s": lambda random, done: min(random.lognormvariate(log(20), 1), REACH),
    "Pareto 1.5": pareto(1.5),
    "Pareto 1.1": pareto(1.1),
    "drift 5 to 300 s": lambda random, done: 5 * 60**done * random.lognormvariate(0, 0.25),
    "median 10 min": lambda random, done: min(random.lognormvariate(log(600), 0.5), REACH),
}


@dataclass
class Tally:
    """The cost of a policy's attempts."""

    recovery: float = 0.0
    duplicates: float = 0.0
    extensions: float = 0.0
    messages: int = 0

    def cost(self, costs: Costs) -> float:
        total = costs.recovery * self.recovery + costs.duplicate * self.duplicates + costs.extend * self.extensions
        return total / self.messages


class Fixed:
    """One timeout, never extended."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def attempt(self, took: float, costs: Costs, tally: Tally) -> None:
        lease, rate = self.timeout, costs.crashes_per_second
        tally.recovery += _recovery(0.0, min(took, lease), lease, rate)
        # A worker that outlives its lease: its message is started again at each further end.
        ends = int(took / lease - 1e-9)
        tally.duplicates += sum(exp(-rate * lease * each) for each in range(1, min(ends, 2_000) + 1))

    def finished(self, took: float, costs: Costs, random: Random, tally: Tally) -> None: ...
    def crashed(self, at: float, costs: Costs, random: Random) -> None: ...


class Threshold(Fixed):
    """Document 003's rule."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rule = ThresholdTimeout(30, clock=self)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def attempt(self, took: float, costs: Costs, tally: Tally) -> None:
        self.timeout = self.rule.timeout
        super().attempt(took, costs, tally)

    def finished(self, took: float, costs: Costs, random: Random, tally: Tally) -> None:
        self.now += 1.0
        if took > self.timeout:
            self.rule.lost(MESSAGE, took)


class Heartbeat:
    """A lease of `extend` seconds, renewed when `margin` seconds are left."""

    def __init__(self, extend: float, margin: float) -> None:
        self.extend, self.margin = extend, margin

    def lease_at(self, age: float) -> float:
        return self.extend

    def attempt(self, took: float, costs: Costs, tally: Tally) -> None:
        rate, margin = costs.crashes_per_second, self.margin
        too_late = costs.late_share * exp(-margin / costs.late_mean)
        age = 0.0
        while True:
            lease = self.lease_at(age)
            look = age + max(lease - margin, 0.5)
            tally.recovery += _recovery(age, min(took, look), age + lease, rate)
            if look >= took:
                return
            alive = exp(-rate * look)
            tally.extensions += alive
            tally.duplicates += alive * too_late
            age = look

    def finished(self, took: float, costs: Costs, random: Random, tally: Tally) -> None: ...
    def crashed(self, at: float, costs: Costs, random: Random) -> None: ...


class Adaptive(Heartbeat):
    """Ours: learns from every attempt."""

    def __init__(self, costs: Costs) -> None:
        # It gets the prices, and only the defaults about the world's behaviour.
        weights = Costs(recovery=costs.recovery, duplicate=costs.duplicate, extend=costs.extend)
        self.plan = AdaptiveTimeout(weights)

    def attempt(self, took: float, costs: Costs, tally: Tally) -> None:
        self.schedule = self.plan.schedule_of(None)
        self.margin = self.schedule.margin
        super().attempt(took, costs, tally)

    def lease_at(self, age: float) -> float:
        return self.schedule.lease_at(age)

    def finished(self, took: float, costs: Costs, random: Random, tally: Tally) -> None:
        age = 0.0
        while (age := age + max(self.lease_at(age) - self.margin, 0.5)) < took:
            late = random.expovariate(1 / costs.late_mean) if random.random() < costs.late_share else 0.0
            self.plan.late(late)
            if late > self.margin:
                self.plan.lost(MESSAGE, age)
                self.plan.redelivered(MESSAGE)
                return
        self.plan.finished(MESSAGE, took)

    def crashed(self, at: float, costs: Costs, random: Random) -> None:
        age = last = 0.0
        while (age := age + max(self.lease_at(age) - self.margin, 0.5)) < at:
            late = random.expovariate(1 / costs.late_mean) if random.random() < costs.late_share else 0.0
            self.plan.late(late)
            if late > self.margin:
                self.plan.lost(MESSAGE, age)
                self.plan.redelivered(MESSAGE)
                return
            last = age
        self.plan.vanished(MESSAGE, last)


class Clairvoyant:
    """Knows how long each message takes and sets that lease; it cannot know crashes."""

    def attempt(self, took: float, costs: Costs, tally: Tally) -> None:
        # One lease to the end, or the best number of renewals: whichever is cheaper.
        rate = costs.crashes_per_second
        cheapest = (_recovery(0.0, took, took, rate) * costs.recovery, 0.0)
        best = (cheapest[0], _recovery(0.0, took, took, rate), 0.0, 0.0)
        margin = 20.0
        late = costs.extend + costs.duplicate * costs.late_share * exp(-margin / costs.late_mean)
        for count in range(1, 200):
            step = took / (count + 1)
            if step < 1:
                break
            recovery = 0.0
            for number in range(count + 1):
                end = (number + 1) * step + (margin if number < count else 0.0)
                recovery += _recovery(number * step, (number + 1) * step, end, rate)
            total = costs.recovery * recovery + count * late
            if total < best[0]:
                best = (total, recovery, count * costs.late_share * exp(-margin / costs.late_mean), float(count))
            elif total > 2 * best[0]:
                break
        tally.recovery += best[1]
        tally.duplicates += best[2]
        tally.extensions += best[3]

    def finished(self, took: float, costs: Costs, random: Random, tally: Tally) -> None: ...
    def crashed(self, at: float, costs: Costs, random: Random) -> None: ...


def _recovery(start: float, stop: float, end: float, rate: float) -> float:
    """Expected wait from a crash between `start` and `stop` to the lease's end; alive at 0."""
    if stop <= start or rate == 0:
        return 0.0
    low, high = exp(-rate * start), exp(-rate * stop)
    # The integral of rate * exp(-rate t) * (end - t) over [start, stop].
    return (end - start - 1 / rate) * low - (end - stop - 1 / rate) * high


@dataclass
class Run:
    """One policy on one workload with one seed."""

    tally: Tally = field(default_factory=Tally)


def run(policy: Any, draw: Draw, costs: Costs, seed: int, messages: int) -> Tally:
    """All messages in sequence, each until an attempt does not crash."""
    tally, times, luck = Tally(), Random(seed), Random(seed + 1_000_003)
    for number in range(messages):
        took = max(draw(times, number / messages), 0.01)
        tally.messages += 1
        for _ in range(20):
            policy.attempt(took, costs, tally)
            crash = luck.expovariate(costs.crashes_per_second) if costs.crashes_per_second else REACH * 10
            if crash >= took:
                policy.finished(took, costs, luck, tally)
                break
            policy.crashed(crash, costs, luck)
    return tally


def learnt(draw: Draw, costs: Costs, seed: int, messages: int, *, keeps: bool) -> list[float]:
    """What is believed over what is true: p50, p95, p99, crashes a second. keeps: a message keeps its length."""
    plan, times, luck = AdaptiveTimeout(Costs(), half_life=1e9), Random(seed), Random(seed + 1_000_003)
    firsts = []
    for number in range(messages):
        took = max(draw(times, number / messages), 0.01)
        firsts.append(took)
        for attempt in range(20):
            if attempt:
                plan.redelivered(MESSAGE)
                took = took if keeps else max(draw(times, number / messages), 0.01)
            crash = luck.expovariate(costs.crashes_per_second)
            lost_at = _lost_at(plan, min(took, crash), costs, luck)
            if lost_at is not None:
                plan.lost(MESSAGE, lost_at)
            elif crash >= took:
                plan.finished(MESSAGE, took)
                break
    firsts.sort()
    survival = plan._everything.survival
    shares = (0.5, 0.95, 0.99)
    ratios = [(survival.quantile(share) or 0.0) / firsts[int(share * len(firsts))] for share in shares]
    return [*ratios, plan.costs.crashes_per_second / costs.crashes_per_second]


def _lost_at(plan: AdaptiveTimeout, lives: float, costs: Costs, luck: Random) -> float | None:
    """The age at which an extension came too late, if one did while the worker lived."""
    schedule, age = plan.schedule_of(None), 0.0
    while (age := age + max(schedule.lease_at(age) - schedule.margin, 0.5)) < lives:
        late = luck.expovariate(1 / costs.late_mean) if luck.random() < costs.late_share else 0.0
        plan.late(late)
        if late > schedule.margin:
            return age
    return None


def tell_learnt(seeds: int, messages: int) -> list[dict[str, Any]]:
    """A row for each kind of work, of crashes and of late calls: what is learnt over what is true, and its range."""
    names = ("lognormal, median 20 s", "bimodal 2 / 120 s", "median 10 min", "Pareto 1.5")
    rows = []
    for costs in (Costs(), Costs(crashes_per_second=1 / 1_000), Costs(late_share=0.05)):
        said = f"a crash in {1 / costs.crashes_per_second:.0f} s, {100 * costs.late_share:g} % late"
        for name in names:
            for keeps in (True, False):
                runs = [learnt(WORKLOADS[name], costs, seed, messages, keeps=keeps) for seed in range(seeds)]
                row: dict[str, Any] = {
                    "work": name,
                    "crash_in_s": round(1 / costs.crashes_per_second),
                    "late_share": costs.late_share,
                    "length_of": "message" if keeps else "attempt",
                }
                for member, found in zip(LEARNT, zip(*runs, strict=True), strict=True):
                    ratios = {"median": statistics.median(found), "low": min(found), "high": max(found)}
                    row[member] = {end: round(value, 3) for end, value in ratios.items()}
                rows.append(row)
                medians = [row[member]["median"] for member in LEARNT]
                print(f"{said:28} {name:24} {row['length_of']} {medians}", flush=True)
    return rows


HEARTBEATS = [
    (step + margin, margin)
    for step in (3, 5, 7, 10, 14, 20, 28, 40, 55, 75, 105, 150, 210, 300, 450)
    for margin in (2, 5, 8, 11, 15, 20, 25, 30, 40)
]


def policies(costs: Costs) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "adaptive", lambda: Adaptive(costs)
    yield "fixed 30 s", lambda: Fixed(30)
    yield "fixed 6 h", lambda: Fixed(6 * 3_600)
    yield "documents' manager, 300 s", lambda: Heartbeat(300, 60)
    yield "threshold rule", Threshold
    yield "heartbeat 30/15 s", lambda: Heartbeat(30, 15)
    yield "clairvoyant", Clairvoyant


def best_heartbeat(draw: Draw, costs: Costs, seeds: int, messages: int) -> tuple[str, list[float]]:
    """The fixed heartbeat that is cheapest over all seeds, found after the fact, and its cost for each seed."""
    few = {
        pair: statistics.fmean(
            run(Heartbeat(*pair), draw, costs, seed, max(messages // 4, 100)).cost(costs) for seed in range(3)
        )
        for pair in HEARTBEATS
    }
    finalists = sorted(few, key=few.__getitem__)[:4]
    found = {
        pair: [run(Heartbeat(*pair), draw, costs, seed, messages).cost(costs) for seed in range(seeds)]
        for pair in finalists
    }
    pair = min(found, key=lambda each: statistics.fmean(found[each]))
    return f"{pair[0]:g}/{pair[0] - pair[1]:g} s", found[pair]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval."""
    mean = statistics.fmean(values)
    return mean, 1.96 * statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def compare(costs: Costs, seeds: int, messages: int, names: set[str] | None = None) -> dict[str, Any]:
    """Every policy's cost as a ratio to the best fixed heartbeat, by workload, with confidence intervals."""
    table: dict[str, Any] = {}
    for workload, draw in WORKLOADS.items():
        label, base = best_heartbeat(draw, costs, seeds, messages)
        row: dict[str, Any] = {"best fixed heartbeat": {"label": label, "cost": interval(base)}}
        for name, make in policies(costs):
            if names is not None and name not in names:
                continue
            tallies = [run(make(), draw, costs, seed, messages) for seed in range(seeds)]
            ratios = [tally.cost(costs) / other for tally, other in zip(tallies, base, strict=True)]
            per_hundred = [100 * tally.duplicates / tally.messages for tally in tallies]
            row[name] = {"ratio": interval(ratios), "duplicates per 100": interval(per_hundred)}
        table[workload] = row
        print(workload, label, {n: round(r["ratio"][0], 3) for n, r in row.items() if "ratio" in r}, file=sys.stderr)
    return table


def geometric(table: dict[str, Any], name: str) -> float:
    return exp(statistics.fmean(log(row[name]["ratio"][0]) for row in table.values()))


def draw(found: dict[str, Any]) -> None:
    """The table as a picture: cost of each policy, workload by workload, with its confidence interval."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    shown = {
        "adaptive": ("o", "#1f6feb"),
        "heartbeat 30/15 s": ("s", "#8250df"),
        "documents' manager, 300 s": ("^", "#bf8700"),
        "threshold rule": ("v", "#cf222e"),
        "clairvoyant": ("d", "#57606a"),
    }
    figure, axes = pyplot.subplots(figsize=(8, 3.8))
    workloads = list(found["table"])
    for place, (name, (marker, color)) in enumerate(shown.items()):
        values = [found["table"][workload][name]["ratio"] for workload in workloads]
        axes.errorbar(
            [mean for mean, _ in values],
            [row + (place - 2) * 0.12 for row in range(len(workloads))],
            xerr=[half for _, half in values],
            fmt=marker, color=color, label=name, markersize=5, linewidth=1,
        )  # fmt: skip
    axes.axvline(1, color="#8c959f", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 50], ["0.5", "1", "2", "5", "10", "50"])
    axes.set_yticks(range(len(workloads)), workloads)
    axes.invert_yaxis()
    axes.set_xlabel("cost, as a ratio to the best fixed heartbeat chosen in hindsight (log scale)")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    images = RESULTS.parents[1] / "docs" / "images"
    images.mkdir(exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "veilmq"
    figure.savefig(images / "timeouts.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--sensitivity", action="store_true", help="also with each rate and weight halved and doubled")
    parser.add_argument(
        "--write", action="store_true", help="write what was asked for into bench/results/timeouts.json"
    )
    parser.add_argument("--draw", action="store_true", help="only draw docs/images/timeouts.svg from that file")
    parser.add_argument("--learnt", action="store_true", help="only compare what is learnt with the truth")
    options = parser.parse_args()
    if options.learnt:
        given = {"seeds": options.seeds, "messages": options.messages}
        record(options, {"learnt": given | {"ratios_to_the_truth": tell_learnt(options.seeds, options.messages)}})
        return
    if options.draw:
        draw(json.loads((RESULTS / "timeouts.json").read_text()))
        return
    table = compare(Costs(), options.seeds, options.messages)
    names = [name for name, _ in policies(Costs())]
    found: dict[str, Any] = {"table": table, "geometric": {name: geometric(table, name) for name in names}}
    if options.sensitivity:
        found["sensitivity"] = {}
        for member in ("recovery", "duplicate", "extend", "crashes_per_second", "late_share", "late_mean"):
            for factor in (0.25, 4.0):
                costs = Costs(**{member: getattr(Costs(), member) * factor})
                some = compare(costs, max(options.seeds // 5, 2), options.messages, {"adaptive"})
                found["sensitivity"][f"{member} x {factor:g}"] = {
                    "geometric": geometric(some, "adaptive"),
                    "duplicates per 100, worst": max(row["adaptive"]["duplicates per 100"][0] for row in some.values()),
                }
    for name, value in found["geometric"].items():
        print(f"{name:28}{value:8.3f}")
    for name, value in found.get("sensitivity", {}).items():
        print(f"{name:28}{value}")
    record(options, found)


def record(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """With `--write`, put these figures beside those that are there."""
    if options.write:
        file = RESULTS / "timeouts.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
