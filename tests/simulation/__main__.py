"""The command line of `make simulate`: many seeds, until one fails or the time is over.

    python -m tests.simulation [--minutes N] [--seed N] [--seeds COUNT] [--calls N] [--processes N]

A seed that fails ends the run with its story; `--seed N --seeds 1` tells it again.
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from tests.simulation.disk import in_memory
from tests.simulation.world import Verdict, World

_REPORT_S = 60.0
_SEEDS_A_TASK = 20

Lived = tuple[Counter[str], Verdict | None]
"""What happened in some lives, and the first of them that broke a promise."""


def lived(seed: int, directory: Path, trace: deque[str] | None = None, *, calls: int = 1) -> Verdict:
    """Live one life."""
    return World(seed, directory, None if trace is None else trace.append, calls=calls).run()


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(prog="make simulate", description="many simulated lives")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (by the date)")
    parser.add_argument("--seeds", type=int, default=None, help="how many (as many as the time allows)")
    parser.add_argument("--calls", type=int, default=1, help="this many times as many calls in a life (1)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once (one a core)")
    parser.add_argument("--story", action="store_true", help="tell each life")
    given = parser.parse_args()
    if given.calls < 1:
        parser.error("--calls must be 1 or more")
    first = int(time.time()) if given.seed is None else given.seed
    prepare()
    print(f"seeds from {first} on", flush=True)
    with in_memory() as directory:
        if given.story:
            for seed in range(first, first + (given.seeds or 1)):
                story: deque[str] = deque()
                verdict = lived(seed, directory, story, calls=given.calls)
                if verdict.violations:
                    return fail(verdict, directory, given.calls)
                print(*story, sep="\n")
            return 0
        return live(first, given.seeds, given.minutes * 60, directory, given.processes, given.calls)


def prepare() -> None:
    """Silence the servers, and let the garbage collector look at what a life made only."""
    logging.getLogger("veilmq").addHandler(logging.NullHandler())
    logging.getLogger("veilmq").propagate = False
    gc.freeze()
    gc.set_threshold(100_000)


def live(first: int, count: int | None, seconds: float, directory: Path, processes: int, calls: int) -> int:
    """Live one life after the other, in several processes; returns the exit code."""
    happened: Counter[str] = Counter()
    begun = reported = time.monotonic()
    until = sys.maxsize if count is None else first + count
    submitted, done = first, 0
    running: set[Future[Lived]] = set()
    with ProcessPoolExecutor(processes, initializer=prepare) as pool:
        while running or (submitted < until and time.monotonic() - begun < seconds):
            while len(running) < 2 * processes and submitted < until and time.monotonic() - begun < seconds:
                seeds = range(submitted, min(submitted + _SEEDS_A_TASK, until))
                running.add(pool.submit(live_all, seeds, directory, calls))
                submitted = seeds.stop
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for task in ended:
                more, broken = task.result()
                if broken is not None:
                    pool.shutdown(cancel_futures=True)
                    return fail(broken, directory, calls)
                happened += more
                done = happened["lives"]
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                print(f"{done} lives, {done / (reported - begun):.1f} a second", flush=True)
    took_s = time.monotonic() - begun
    print(f"{done} seeds from {first} on without a violation, in {took_s:.0f} s ({done / took_s:.1f} a second):")
    print(", ".join(f"{count} {what}" for what, count in happened.most_common()))
    return 0


def live_all(seeds: range, directory: Path, calls: int) -> Lived:
    """Live these lives, until one breaks a promise, in a directory of this process."""
    happened: Counter[str] = Counter()
    own = directory.with_name(f"{directory.name}-{os.getpid()}")
    for seed in seeds:
        verdict = lived(seed, own, calls=calls)
        happened += verdict.happened
        happened["lives"] += 1
        if verdict.violations:
            return happened, verdict
    return happened, None


def fail(verdict: Verdict, directory: Path, calls: int) -> int:
    """Tell the story of a seed that failed."""
    story: deque[str] = deque()
    again = lived(verdict.seed, directory, story, calls=calls)
    print(*story, sep="\n")
    print(f"\nseed {verdict.seed} failed:", *verdict.violations, sep="\n")
    if again.violations != verdict.violations:
        print("\nand ended otherwise when it was told:", *again.violations, sep="\n")
    print(f'\nagain: make simulate ARGS="--seed {verdict.seed} --seeds 1{f" --calls {calls}" * (calls > 1)}"')
    return 1


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
