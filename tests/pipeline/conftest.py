"""One Spark session for all tests of a run: it takes ten seconds to start. Tests that use it stay on one worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from veilmq.pipeline.session import session

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two threads, with our sources."""
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    started = session("local[2]", settings=settings)
    yield started
    started.stop()
