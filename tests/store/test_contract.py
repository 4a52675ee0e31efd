"""SQLite passes the store contract, and takes no step that the table of states does not have."""

from pathlib import Path

import pytest
from tests.support import contract
from tests.support.contract import stage  # noqa: F401 - a fixture
from tests.support.transitions import SteppingFactory


@pytest.fixture
def store_factory(tmp_path: Path) -> SteppingFactory:
    return SteppingFactory(tmp_path / "data")


for cases in contract.SUITE:
    globals()[cases.__name__] = cases
