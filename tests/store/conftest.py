"""A small store to play on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory

FLIPS: Final = 25


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flips", metavar="N", type=int, default=FLIPS, help="Flip so many bits of each file.")


@pytest.fixture
def flips_count(request: pytest.FixtureRequest) -> int:
    """How many bits of each file are flipped. The option is unknown where pytest did not load this file first."""
    return int(request.config.getoption("--flips", FLIPS))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A fresh stage."""
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()
