"""The command line of `make simulate`: many seeds, until one fails or the time is over.

    python -m tests.simulation [--minutes N] [--seed N] [--seeds COUNT]

A seed that fails ends the run with its story; `--seed N --seeds 1` tells it again.
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter, deque
from pathlib import Path

from tests.simulation.disk import in_memory
from tests.simulation.world import Verdict, World

_REPORT_S = 60.0


def lived(seed: int, directory: Path, trace: deque[str] | None = None) -> Verdict:
    """Live one life."""
    return World(seed, directory, None if trace is None else trace.append).run()


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(prog="make simulate", description="many simulated lives")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (by the date)")
    parser.add_argument("--seeds", type=int, default=None, help="how many (as many as the time allows)")
    parser.add_argument("--story", action="store_true", help="tell each life")
    given = parser.parse_args()
    first = int(time.time()) if given.seed is None else given.seed
    logging.getLogger("veilmq").addHandler(logging.NullHandler())
    logging.getLogger("veilmq").propagate = False
    print(f"seeds from {first} on", flush=True)
    gc.freeze()
    gc.set_threshold(20_000)
    with in_memory() as directory:
        return live(first, given.seeds, given.minutes * 60, directory, tells=given.story)


def live(first: int, count: int | None, seconds: float, directory: Path, *, tells: bool) -> int:
    """Live one life after the other; returns the exit code."""
    happened: Counter[str] = Counter()
    begun = reported = time.monotonic()
    seed = first
    while (count is None or seed < first + count) and time.monotonic() - begun < seconds:
        story: deque[str] | None = deque() if tells else None
        verdict = lived(seed, directory, story)
        if story is not None:
            print(*story, sep="\n")
        happened += verdict.happened
        if verdict.violations:
            return fail(verdict, directory)
        seed += 1
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            print(f"seed {seed}: {(seed - first) / (reported - begun):.1f} lives a second", flush=True)
    print(f"{seed - first} seeds from {first} on without a violation, in {time.monotonic() - begun:.0f} s:")
    print(", ".join(f"{count} {what}" for what, count in happened.most_common()))
    return 0


def fail(verdict: Verdict, directory: Path) -> int:
    """Tell the story of a seed that failed."""
    story: deque[str] = deque()
    again = lived(verdict.seed, directory, story)
    print(*story, sep="\n")
    print(f"\nseed {verdict.seed} failed:", *verdict.violations, sep="\n")
    if again.violations != verdict.violations:
        print("\nand ended otherwise when it was told:", *again.violations, sep="\n")
    print(f'\nagain: make simulate ARGS="--seed {verdict.seed} --seeds 1"')
    return 1


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
