"""`make faults`: the suite of faults for so many minutes, and what it found as JSON and as a row for the page."""

import argparse
import secrets
import sys
from pathlib import Path

from tests.faults.suite.conductor import conduct, kept, temporary
from tests.faults.suite.kinds import KINDS


def main() -> int:
    """The exit code: 1 if a promise was broken."""
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=float, default=30, help="seconds of load in a round")
    parser.add_argument("--only", action="append", choices=names, help="this kind alone; may be repeated")
    parser.add_argument("--record", type=Path, default=Path(".tools/faults.json"))
    given = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    kinds = [kind for kind in KINDS if not given.only or kind.name in given.only]
    print(f"seed {seed}")
    with temporary() as directory:
        record = conduct(Path(directory), seed, given.minutes, given.round, kinds)
    return kept(record, given.record)


if __name__ == "__main__":
    sys.exit(main())
