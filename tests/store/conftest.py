"""A small store to play on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A fresh stage."""
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()
