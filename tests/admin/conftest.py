"""A server for the tests of this room (server.py), and an HTTP client that bears its token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin import server as server_module


@pytest.fixture(scope="session")
def running() -> Any:
    """`running(directory, keyring, settings, options)`: a server as a context manager."""
    return server_module.running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """A server in development mode."""
    with server_module.running(tmp_path / "data") as started:
        yield started


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    """A client that may do everything."""
    with client(server) as one:
        yield one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The same for the tests of a file that leave nothing behind."""
    with server_module.running(tmp_path_factory.mktemp("shared") / "data") as started, client(started) as one:
        yield one


def client(server: Any, **values: Any) -> httpx.Client:
    headers = {"Authorization": f"Bearer {server_module.TOKEN}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, **values)
