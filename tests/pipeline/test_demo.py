"""`make pipeline-demo`, small: the recommendations are near the truth, and the plan in force does what it should."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.xdist_group("spark-processes")
def test_the_demo_reaches_its_goal(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "pipeline_demo"), "--messages", "100", "--out", str(tmp_path)]
    said = tmp_path / "said"
    # Spark's Java keeps a pipe open beyond the end of the program that made it; a file has no such end.
    with said.open("w") as log:
        demo = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = demo.wait(TIMEOUT_S)
        finally:
            if demo.poll() is None:
                # Its server and its Java too.
                os.killpg(demo.pid, signal.SIGKILL)
                demo.wait()
    assert code == 0, said.read_text()

    numbers = json.loads((tmp_path / "numbers.json").read_text())
    before, after = numbers["before"]["all"], numbers["after"]["all"]
    assert min(before["crashed"], after["crashed"]) >= 10
    assert before["redelivered_alive"] >= 50
    assert after["redelivered_alive"] * 10 <= before["redelivered_alive"]
    assert after["recovery_s"] <= before["recovery_s"]

    types = {each["name"]: each for each in numbers["types"]}
    assert len(types) == 6
    for name, each in types.items():
        # So many messages tell a median to about an eighth, and a best timeout by what it costs, not by its length.
        assert each["p50_s"] == pytest.approx(each["p50_true_s"], rel=0.25), name
        assert each["timeout_s"] < 180 or each["p99_true_s"] > 180, name
        # The timeout that is in force, on the true law and the true rate of deaths, against the best one there.
        assert each["dearer"] <= 1.3 or each["at_least"], name
    assert [name for name, each in types.items() if each["at_least"]] == ["import"]
    # Of a hundred films most outlive their lease, up to four times each: of sixty too few to be sure.
    assert types["film"]["length_of"] == "message"
    assert "<svg" in (tmp_path / "report.html").read_text()
