"""The CPU of a request, by stage and in total, of this tree and of another: shows whether a change costs anything.

    make yardstick ARGS="--against ../before"
    python bench/yardstick.py [--against DIR | --accelerator] [--turns 8] [--rounds 200]

Strategy: bench/yardstick_lane.py drives a whole server in its own process, with signed requests as bytes and with the
real store and its sync. Each tree has a lane, this tree has two: the difference between its lanes is the noise. The
processes of a turn run side by side and alternate in short rounds of some 20 ms, so that whatever slows the machine
affects all of them. The result is the median of the ratios of two lanes' rounds. In a turn all processes have the same
hash seed, and none has random addresses: otherwise two processes with the same code differ by 4 to 8 % for as long as
they live. For the same reason each lane runs a copy of its tree, all in directories whose names are equally long. Each
turn has new processes and another seed, so that no single memory layout decides.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import measure
import yardstick_lane

ROOT = Path(__file__).resolve().parent.parent
NAMES = yardstick_lane.NAMES
SHOWN = {name: name.removesuffix(" 1").replace(" 10", ", batch of ten") for name in NAMES}
STAGES = (*yardstick_lane.STAGES, "rest")
WARM_ROUNDS = 2
STOP_S = 30

Rounds = list[yardstick_lane.Numbers]


class Lane:
    """A process that measures one tree."""

    def __init__(self, tree: Path, seed: int, home: Path, accelerator: str = "auto") -> None:
        self.tree = tree
        self._directory = tempfile.TemporaryDirectory(dir=home)
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree / "src"),
            "PYTHONHASHSEED": str(seed),
            "PYTHONPYCACHEPREFIX": str(tree / "pycache"),
            "VEILMQ_ACCELERATOR": accelerator,
        }
        command = [sys.executable, str(ROOT / "bench" / "yardstick_lane.py"), "--tree", str(tree)]
        self._errors = (home / "errors").open("a+")
        self._process = subprocess.Popen(
            [*command, "--data", f"{self._directory.name}/data"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, env=environment, cwd=self._directory.name, text=True,
        )  # fmt: skip

    def round(self, kind: str, waves: int) -> yardstick_lane.Numbers:
        """One round. Raises MeasureFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{kind} {waves}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            raise measure.MeasureFailed(f"{self.tree}: {self._errors.read()[-2_000:]}")
        return json.loads(line)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the process and delete its data."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._directory.cleanup()


class Turn:
    """What one set of processes measured."""

    def __init__(self, names: list[str]) -> None:
        self.totals: dict[str, Rounds] = {name: [] for name in names}
        self.stages: dict[str, Rounds] = {name: [] for name in names}


def copied(trees: dict[str, Path], home: Path) -> dict[str, Path]:
    """A copy of each tree, as far as a lane needs it."""
    copies = {name: home / str(number) for number, name in enumerate(trees)}
    for name, tree in trees.items():
        shutil.copytree(tree / "src", copies[name] / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(tree / "pyproject.toml", copies[name])
    return copies


def measured(trees: dict[str, Path], seed: int, home: Path, options: argparse.Namespace) -> Turn:
    """One turn. Raises MeasureFailed."""
    turn = Turn(list(trees))
    lanes: dict[str, Lane] = {}
    try:
        for name, tree in trees.items():
            lanes[name] = Lane(tree, seed, home, "auto" if options.accelerator is None else options.accelerator[name])
        for kind, count, into in (
            ("round", WARM_ROUNDS, None),
            ("round", options.rounds, turn.totals),
            ("stages", max(1, options.rounds // 4), turn.stages),
        ):
            for number in range(count):
                first = (seed + number) % len(lanes)
                for name in [*list(lanes)[first:], *list(lanes)[:first]]:
                    found = lanes[name].round(kind, options.waves)
                    if into is not None:
                        into[name].append(found)
    finally:
        for lane in lanes.values():
            lane.stop()
    return turn


def of_rounds(rounds: Rounds, name: str, what: str = "cpu") -> list[float]:
    """One value per round: the median of its waves."""
    return [statistics.median(each[name][what]) for each in rounds]


def ratio(turn: Turn, one: str, other: str, name: str, what: str = "cpu") -> float:
    """The ratio of `other` to `one` in a turn: the median of their rounds' ratios."""
    pairs = zip(of_rounds(turn.totals[one], name, what), of_rounds(turn.totals[other], name, what), strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def total_table(turns: list[Turn], what: str, title: str) -> list[str]:
    """A request in total: the least wave and the median round of each lane, and the ratios of the lanes."""
    names = list(turns[0].totals)
    pairs = [("this", "this again")] if len(names) == 2 else [("against", "this"), ("this", "this again")]
    lines = [f"{title:36}" + "".join(f"{name:>19}" for name in names)]
    lines[0] += "".join(f"{f'{other} : {one}':>26}" for one, other in pairs)
    for name in NAMES:
        row = f"{SHOWN[name]:36}"
        for lane in names:
            least = min(value for turn in turns for each in turn.totals[lane] for value in each[name][what])
            middle = statistics.median(value for turn in turns for value in of_rounds(turn.totals[lane], name, what))
            row += f"{f'{least:.2f} ({middle:.2f})':>19}"
        row += "".join(f"{spread([ratio(turn, *pair, name, what) for turn in turns]):>26}" for pair in pairs)
        lines.append(row)
    means = [[statistics.mean(ratio(turn, *pair, name, what) for name in NAMES) for turn in turns] for pair in pairs]
    lines.append(f"{'all':36}" + " " * 19 * len(names) + "".join(f"{spread(values):>26}" for values in means))
    return lines


def stage_table(turns: list[Turn]) -> list[str]:
    """The stages, which the stopwatch makes slightly more expensive: the median of their rounds."""
    lines = [f"{'by stage, us a request':36}" + "".join(f"{stage:>11}" for stage in STAGES)]
    for name in NAMES:
        for lane in turns[0].stages:
            found = [
                statistics.median(value for turn in turns for value in of_rounds(turn.stages[lane], name, stage))
                for stage in STAGES
            ]
            lines.append(f"{f'{SHOWN[name]}: {lane}':36}" + "".join(f"{value:11.2f}" for value in found))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--against", type=Path, help="the checkout to compare this one with; none: the noise alone")
    which = "compare this checkout with itself without the accelerator (`make accelerator` builds it)"
    parser.add_argument("--accelerator", action="store_true", help=which)
    parser.add_argument("--turns", type=int, default=8, help="fresh processes of each lane")
    parser.add_argument("--rounds", type=int, default=200, help="of a turn")
    parser.add_argument("--waves", type=int, default=1, help="of a round: one request over each of 32 connections")
    parser.add_argument("--home", type=Path, default=ROOT / "bench" / ".data", help="where the data directories lie")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    trees = {"this": ROOT, "this again": ROOT}
    if options.accelerator:
        options.against = ROOT
        options.accelerator = {"against": "off", "this": "on", "this again": "on"}
    else:
        options.accelerator = None
    if options.against is not None:
        trees = {"against": options.against.resolve(), **trees}
    options.home.mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp(dir=options.home.resolve()))
    turns: list[Turn] = []
    try:
        measure.refuse_memory(home)
        trees = copied(trees, home)
        for number in range(options.turns):
            turns.append(measured(trees, number, home, options))
            print(f"turn {number + 1} of {options.turns}, load {measure.load_1min():.1f}", file=sys.stderr, flush=True)
    except measure.MeasureFailed as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(home)
    if options.json is not None:
        options.json.write_text(json.dumps([vars(turn) for turn in turns]))
    tables = [total_table(turns, "cpu", "us of CPU a request: least (median)"), stage_table(turns)]
    if all("instructions" in each["send 1"] for turn in turns for rounds in turn.totals.values() for each in rounds):
        tables.insert(0, total_table(turns, "instructions", "instructions a request: least (median)"))
    for lines in tables:
        print("\n".join(lines), end="\n\n")
    apart = sum(rounds[-1]["commits"]["apart"][0] for turn in turns for rounds in turn.stages.values())
    load = measure.load_1min()
    print(f"{options.turns} turns of {options.rounds} rounds; load {load:.1f}; {apart:.0f} commits off the loop")


if __name__ == "__main__":
    main()
