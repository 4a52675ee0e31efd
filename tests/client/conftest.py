"""What the tests of the client share: an account in a data directory of their own, with a clock that they move; and for
workers a queue with the real clock."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.worker_stage import Stage
from tests.support.embedded import EmbeddedClient


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedClient]:
    """`embedded.account` has the queues, `embedded.pass_time(seconds)` moves its clock."""
    client = EmbeddedClient(tmp_path / "embedded")
    yield client
    client.account.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A worker's. The contract suites have stages of their own."""
    stage = Stage(tmp_path / "data")
    yield stage
    stage.account.close()
