"""SQLite passes the store contract."""

from pathlib import Path

import pytest
from tests.support import contract
from tests.support.contract import stage  # noqa: F401 - a fixture
from tests.support.sqlite import SqliteFactory


@pytest.fixture
def store_factory(tmp_path: Path) -> SqliteFactory:
    return SqliteFactory(tmp_path / "data")


for cases in contract.SUITE:
    globals()[cases.__name__] = cases
