"""The azure adapter passes the client contract, against a real server whose clock moves; plain, and in base64."""

from collections.abc import Iterator
from itertools import count

import pytest
from azure.storage.queue import QueueServiceClient

from veilmq.client.adapters.azure import AzureAccount
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

((ACCOUNT, KEY),) = DEVELOPMENT_KEYS.items()


class AzureClient:
    """An account on the server, with its clock."""

    _numbers = count()
    brief = 60

    def __init__(self, server: LocalServer, base64: bool) -> None:
        self._server = server
        self.clock = MovableClock()
        client = QueueServiceClient(
            f"{server.process.azure}/{ACCOUNT}",
            credential={"account_name": ACCOUNT, "account_key": KEY},
            retry_total=0,
        )
        self.account = AzureAccount(client, base64=base64, owns_client=True, clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self._server.advance(seconds=seconds)
        self.clock.advance(seconds)

    def name(self, prefix: str) -> str:
        return f"{prefix}-azure-{next(self._numbers)}"


@pytest.fixture
def client_account(server: LocalServer, request: pytest.FixtureRequest) -> Iterator[AzureClient]:
    client = AzureClient(server, base64=request.param == "base64")
    yield client
    client.account.close()


globals().update(
    client_contract.in_forms(
        {"plain": client_contract.SUITE_WITHOUT_FIFO, "base64": client_contract.SUITE_OF_ENCODINGS}
    )
)
