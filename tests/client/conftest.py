"""What the tests of the client share: an account in a data directory of their own, with a clock that they move; for
workers a queue with the real clock; for adapters a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.worker_stage import Stage
from tests.support.embedded import EmbeddedClient

from veilmq.testing.local import LocalServer


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Of all tests of a module, unless that has a server with options of its own."""
    server = LocalServer(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()
