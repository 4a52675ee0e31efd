"""The yardstick measures: a whole server driven in its process, on real data, in two lanes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_yardstick_measures_this_tree_twice(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "bench" / "yardstick.py", "--turns", "1", "--rounds", "1", "--waves", "1"]
    # Not below tmp_path, which may be in memory: there the yardstick refuses to measure.
    numbers, home = tmp_path / "numbers.json", ROOT / "bench" / ".data" / tmp_path.name
    home.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, "--against", ROOT, "--home", home, "--json", numbers],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (turn,) = json.loads(numbers.read_text())
    lanes = ["against", "this", "this again"]
    assert list(turn["totals"]) == list(turn["stages"]) == lanes
    for lane in lanes:
        (total,), (split,) = turn["totals"][lane], turn["stages"][lane]
        for operation in ("send", "receive", "delete"):
            for batch in (1, 10):
                (cpu_us,) = total[f"{operation} {batch}"]["cpu"]
                assert 5 < cpu_us < 50_000
                stages = split[f"{operation} {batch}"]
                # A method that was renamed is a stage that nobody enters. What a stage took may be less than the
                # stopwatch's own cost, which is subtracted: no figure of one wave is asserted.
                assert stages["entered"] == [9], stages
    home.rmdir()  # which is empty again
    rows = [line for line in done.stdout.splitlines() if line.startswith("send, batch of ten")]
    assert len(rows) >= 1 + len(lanes)
