"""The patches of tools/mutants: each applies to the tree as it is, and the tests that it names exist."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
PATCHES_MIN = 60
ROOMS = {"model", "store", "engine", "sqs", "azure", "mns", "server", "push", "admin", "client", "pipeline"}

SOURCE = """def half(number):
    return number / 2


def twice(number):
    return number * 2
"""
TESTS = """import pytest
from numbers_of_ours import half, twice


def test_half():
    assert half(4) == 2


def test_elsewhere():
    pytest.skip("it needs what is not here")


class TestTwice:
    def test_two(self):
        assert twice(2) == 4
"""


@pytest.fixture
def run() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tools" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks its annotations up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def small(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one module and its tests, which the runner takes for the whole."""
    for path, text in {"src/numbers_of_ours.py": SOURCE, "tests/test_numbers.py": TESTS}.items():
        file = tmp_path / path
        file.parent.mkdir()
        file.write_text(text)
    (tmp_path / "mutants").mkdir()
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "HERE", tmp_path / "mutants")
    return tmp_path


def patch(*lines: str, test: str = "tests/test_numbers.py::test_half", path: str = "src/numbers_of_ours.py") -> str:
    head = f"Half of it is wrong.\n\nKilled by: {test}\n"
    return head + "\n".join([f"--- a/{path}", f"+++ b/{path}", "@@ -1,2 +1,2 @@", *lines, ""])


HALF = (" def half(number):", "-    return number / 2", "+    return number / 3")


def test_every_patch_applies_and_its_tests_exist(run: ModuleType) -> None:
    good, wrong = run.mutants()
    assert wrong == []
    assert len(good) >= PATCHES_MIN
    assert {mutant.name.partition("/")[0] for mutant in good} >= ROOMS


@for_each(
    ("text", "wrong"),
    [
        (patch(*HALF), []),
        (patch(*HALF, test="tests/test_numbers.py::TestTwice::test_two"), []),
        (patch(*HALF, test="tests/test_numbers.py::test_two"), ["a: there is no tests/test_numbers.py::test_two"]),
        (patch(*HALF, test="tests/test_half.py::test_half"), ["a: there is no tests/test_half.py::test_half"]),
        (patch(*HALF, test="tests/test_numbers.py"), ["a: there is no tests/test_numbers.py"]),
        (patch(*HALF, path="src/gone.py"), ["a: does not apply: there is no src/gone.py"]),
        (
            patch(" def half(number):", "-    return number // 2", "+    return number"),
            ["a: does not apply: src/numbers_of_ours.py has no place for the lines at 1"],
        ),
        (
            patch("-", "+pass").replace("@@ -1,2", "@@ -9,2"),
            ["a: does not apply: src/numbers_of_ours.py has 2 places for the lines at 9"],
        ),
        (patch("-", "+pass").replace("@@ -1,2", "@@ -4,2"), []),
        (
            patch(*HALF).replace("Killed by: ", "Perhaps "),
            ["a: a patch is one line that says what the bug does, the tests, and a diff of one file"],
        ),
    ],
)
def test_what_is_wrong_with_a_patch_is_told(run: ModuleType, small: Path, text: str, wrong: list[str]) -> None:
    (small / "mutants" / "a.patch").write_text(text)
    assert run.mutants()[1] == wrong


@pytest.mark.slow
def test_survivors_and_tests_that_fail_anyway_are_failures(
    run: ModuleType, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = "tests/test_numbers.py::TestTwice::test_two"
    for name, text in {
        "killed": patch(*HALF),
        "lives": patch(*HALF, test=twice),
        "skipped": patch(*HALF, test="tests/test_numbers.py::test_elsewhere"),
        "broken": patch(" def half(number):", "-    return number / 2", "+    return ("),
    }.items():
        (small / "mutants" / f"{name}.patch").write_text(text)
    chosen, _ = run.mutants()
    broken, survivor, skipped = sorted(run.run(chosen, False, 2))
    assert skipped == "skipped: not judged, as its tests are skipped here"
    assert survivor == "no test kills lives: Half of it is wrong."
    assert broken.startswith("broken: the tests cannot run with it")
    told = capsys.readouterr().out
    assert "killed: killed by tests/test_numbers.py::test_half" in told
    assert "lives: SURVIVED" in told
    assert run.run(run.mutants(["lives"])[0], True, 1) == []
    assert "lives: killed by tests/test_numbers.py::test_half" in capsys.readouterr().out
    assert (small / "src" / "numbers_of_ours.py").read_text() == SOURCE
    (small / "tests" / "test_numbers.py").write_text(TESTS.replace("== 2", "== 3"))
    assert run.run(run.mutants(["killed", "lives"])[0], False, 1) == [
        "fails without any patch: tests/test_numbers.py::test_half",
        "killed: not judged, as one of its tests fails",
        survivor,
    ]
