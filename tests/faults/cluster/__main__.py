"""Faults of a cluster, so many or for so long, and what they found as JSON and as a row for docs/reliability.md."""

import argparse
import os
import secrets
import signal
import sys
from pathlib import Path

from tests.faults.cluster import clocks, network
from tests.faults.cluster.conductor import conduct
from tests.faults.cluster.kinds import KINDS
from tests.faults.suite.conductor import kept, temporary

_INSIDE = "VEILMQ_FAULTS_INSIDE"


def main() -> int:
    """The exit code: 1 if a promise was broken."""
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cluster", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=int, default=6, help="faults between two drains")
    parser.add_argument("--only", action="append", choices=names, help="this kind alone; may be repeated")
    parser.add_argument("--record", type=Path, default=Path(".tools/cluster-faults.json"))
    given = parser.parse_args()
    whole = not (network.missing() or clocks.missing())
    if whole and _INSIDE not in os.environ:
        command = [sys.executable, "-m", "tests.faults.cluster", *sys.argv[1:]]
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", *command])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"signal {number}"))
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    kinds = [kind for kind in KINDS if not given.only or kind.name in given.only]
    print(f"seed {seed}")
    with temporary() as directory:
        record = conduct(
            Path(directory), seed, minutes=given.minutes, faults=given.faults, in_a_round=given.round, kinds=kinds,
            whole=whole,
        )  # fmt: skip
    return kept(record, given.record)


if __name__ == "__main__":
    sys.exit(main())
