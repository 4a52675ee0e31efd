"""The simulation: it repeats itself, it finds what is broken, and its seeds find nothing."""

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.simulation.disk import in_memory
from tests.simulation.world import Verdict, World
from tests.support.faults import Image

ROOT = Path(__file__).parents[2]
FEW = range(290, 304)
MORE = range(10_000, 10_250)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A server's errors are what a simulation makes."""
    caplog.set_level(logging.CRITICAL + 1, "veilmq")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A data directory in memory."""
    with in_memory() as path:
        yield path


def lives(seeds: range, directory: Path) -> tuple[list[Verdict], Counter[str]]:
    """The lives that broke a promise, and what happened in all."""
    happened: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        verdict = World(seed, directory).run()
        happened += verdict.happened
        if verdict.violations:
            broken.append(verdict)
    return broken, happened


def test_a_few_seeds_meet_every_fault_and_break_no_promise(directory: Path) -> None:
    broken, happened = lives(FEW, directory)
    assert broken == []
    faults = (
        "kills at a step", "kills between steps", "kills in a start", "power cuts", "stops", "failures", "full disks",
        "steps of the clock", "flipped bits", "ends as told", "repeated receives", "dead letters of groups",
    )  # fmt: skip
    assert [fault for fault in faults if not happened[fault]] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_seeds_break_no_promise(directory: Path) -> None:
    broken, _ = lives(MORE, directory)
    assert broken == []


def test_a_disk_that_does_not_sync_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "sync", lambda image: None)
    assert any(World(seed, directory).run().violations for seed in FEW)


@pytest.mark.slow
def test_a_seed_repeats_itself_to_the_step(directory: Path) -> None:
    """In processes that hash otherwise, too."""

    def story(seed: int, hashing: str) -> str:
        command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--seeds", "1", "--story"]
        told = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": hashing}, capture_output=True, text=True, check=True
        )
        return told.stdout.partition(" without a violation, in ")[0]

    for seed in (100, 101, 102):
        assert story(seed, "1") == story(seed, "2")
