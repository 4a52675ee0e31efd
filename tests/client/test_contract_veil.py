"""The veil adapter passes the client contract, against a real server whose clock moves."""

from collections.abc import Iterator
from itertools import count
from urllib.parse import urlsplit

import pytest

from veilmq.client.adapters.veil import VeilAccount
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer


class VeilClient:
    """An account on the server, with its clock."""

    _numbers = count()
    brief = 60

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.clock = MovableClock()
        address = urlsplit(server.sqs_url)
        self.account = VeilAccount(address.hostname or "", address.port, clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self._server.advance(seconds=seconds)
        self.clock.advance(seconds)

    def name(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer(tmp_path_factory.mktemp("veil"), "--no-cooldowns")
    yield server
    server.stop()


@pytest.fixture
def client_account(server: LocalServer) -> Iterator[VeilClient]:
    client = VeilClient(server)
    yield client
    client.account.close()


for cases in client_contract.SUITE:
    globals()[cases.__name__] = cases
