"""A test marked `alone` runs while no other does, on any number of workers.

A small test set of its own is run on two workers with our conftest: each of its tests says that it is there, and the
ones marked `alone` look who else is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SET = """
import os, pathlib, time
import pytest

HERE = pathlib.Path(__file__).parent / "running"

def run(number, alone):
    mine = HERE / f"{os.getpid()}-{number}"
    mine.touch()
    try:
        # Long enough for the other worker to be caught in the act.
        for _ in range(4):
            if alone:
                assert [path.name for path in HERE.iterdir()] == [mine.name]
            time.sleep(0.01)
    finally:
        mine.unlink()

@pytest.mark.parametrize("number", range(20))
def test_with_others(number):
    run(number, alone=False)

@pytest.mark.alone
@pytest.mark.parametrize("number", range(6))
def test_alone(number):
    run(number, alone=True)
"""


def run(directory: Path, *options: str) -> str:
    """What pytest says of the test set there on two workers, as of nobody's run but its own; all of it passes."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_no_test_runs_beside_one_that_is_alone(tmp_path: Path) -> None:
    (tmp_path / "running").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_set.py").write_text(SET)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = alone: alone\npythonpath = {CONFTEST.parents[1]}\n")
    assert "26 passed" in run(tmp_path, "-q", ".")
